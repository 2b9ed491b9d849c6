"""The stored responses of `/v1/responses`: one bounded SQLite file in the run's folder, which all API server
processes share.

An entry is a response with the items of its request and its output. It can be read with the API key that
made it, until it is deleted, newer ones need its space, or the run ends. Independent of Flask.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.http.errors import ApiError, invalid
from api.http.fields import Json

logger = logging.getLogger("web")

FILE = "responses.sqlite"  # in the run's folder
BUSY_S = 1.0  # how long a call waits for another process; one takes about a millisecond
LOCKED = "database is locked"  # SQLite's words after BUSY_S
RETRY_S = 30  # a locked file is left alone for so long: to wait for it stops the event loop
CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses "
    "(id TEXT PRIMARY KEY, previous_id TEXT, input BLOB, output BLOB, response BLOB, owner BLOB)"
)
USED_BYTES = (
    "SELECT (page_count - freelist_count) * page_size "
    "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)
DELETE_OLDEST = "DELETE FROM responses WHERE rowid = (SELECT min(rowid) FROM responses)"
OFF = "this server stores no responses, because --response-store-size (RESPONSE_STORE_SIZE) is 0"
LOST = (
    "a replica knows only its own responses, and only until it restarts or newer ones fill its "
    "--response-store-size (RESPONSE_STORE_SIZE)"
)


class StoreError(Exception):
    """The file cannot be used: it is locked or damaged, or the disk is full. The message is SQLite's."""


def response_id(key: str) -> str:
    return f"resp_{key}"


def new_key() -> str:
    """Returns a new random key: the part that the id of a response and the ids of its items share."""
    return secrets.token_hex(16)


def item_id(prefix: str, key: str, number: int) -> str:
    """The id of output item `number` of a response with this key. The id of the response follows from it."""
    return f"{prefix}_{key}_{number}"


class StoredResponse(NamedTuple):
    """A response in the store. input, output: JSON lists of items; response: JSON, as the client got it."""

    id: str
    previous_id: str | None
    input: bytes
    output: bytes
    response: bytes


class ResponseStore:
    """The file, for one API server process. It is opened for each use, so a file that was removed is made
    again. file_bytes: its largest size; 0: nothing is stored."""

    def __init__(self, path: Path, file_bytes: int):
        self._path = path
        self.file_bytes = file_bytes
        self._locked_at = -RETRY_S

    @contextlib.contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A context manager with a connection, whose changes are written at the end of the block, and dropped
        if the block raises. Makes the file and its table if they are missing. Waits up to BUSY_S for another
        process, which blocks the thread, also that of the event loop.

        Raises StoreError if the file cannot be used, also for an error of SQLite in the block. A locked file
        is waited for once; calls in the next RETRY_S raise without a wait.
        """
        if time.monotonic() < self._locked_at + RETRY_S:
            raise StoreError(LOCKED)
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S)) as database, database:
                database.execute("PRAGMA synchronous = OFF")  # the file need not outlive the machine
                database.execute(CREATE_TABLE)
                yield database
        except sqlite3.Error as error:
            if str(error) == LOCKED:
                self._locked_at = time.monotonic()
            raise StoreError(str(error)) from None


class OwnedResponses:
    """The stored responses that one request may read: those of its API key.

    max_bytes: the most bytes of stored items that the request may add to its own, over all calls of
    `conversation` and `item`. All methods that read raise StoreError.
    """

    def __init__(self, store: ResponseStore, api_key: bytes, max_bytes: int):
        self._store = store
        self._owner = hashlib.sha256(api_key).digest()
        self._max_bytes = max_bytes
        self._read_bytes = 0
        self._items: dict[str, dict[str, Json]] = {}  # the output items of each response, by their ids
        self._references: set[str] = set()

    @property
    def is_on(self) -> bool:
        return self._store.file_bytes > 0

    def save(self, stored: StoredResponse) -> bool:
        """Stores a response with the request's API key, and returns whether that succeeded. A response that
        is larger than the file may be is not stored; a failure of the file is logged, and not raised. The
        oldest entries, of any API key, make room."""
        most = self._store.file_bytes
        size = len(stored.input) + len(stored.output) + len(stored.response)
        if size > most:
            return False
        try:
            with self._store.open() as database:
                database.execute("BEGIN IMMEDIATE")
                while database.execute(USED_BYTES).fetchone()[0] + size > most:
                    if not database.execute(DELETE_OLDEST).rowcount:
                        break
                database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", (*stored, self._owner))
        except StoreError as error:
            logger.warning("a response was not stored: %s", error)
            return False
        return True

    def get(self, id: str) -> bytes:
        """Returns the response as JSON. Raises ApiError (404) if this API key has stored no response with
        this id, StoreError if the file cannot be used."""
        stored = self._find(id)
        if stored is None:
            raise self._no_response(id)
        return stored.response

    def delete(self, id: str) -> None:
        """Deletes a response. Raises ApiError (404) if this API key has stored no response with this id,
        StoreError if the file cannot be used."""
        if not self._execute("DELETE FROM responses WHERE id = ? AND owner = ? RETURNING id", id):
            raise self._no_response(id)

    def conversation(self, id: str) -> list[Json]:
        """Returns the items of the response `id` and of all responses that it continues, the oldest response
        first. Of each response these are the items of its input, then those of its output.

        Raises ApiError (422) if one of the responses is not stored, or if stored items that the request has
        read have more than `max_bytes`; StoreError if the file cannot be used.
        """
        turns = []
        next_id: str | None = id
        while next_id:
            stored = self._find(next_id)
            if stored is None:
                detail = f"continues {next_id}, which {self._not_found()}" if turns else self._not_found()
                code = "previous_response_not_found"
                raise invalid("previous_response_id", detail, code=code, given=id[:80])
            turns.append(self._decode("previous_response_id", stored.input, stored.output))
            next_id = stored.previous_id
        return [item for turn in reversed(turns) for item in turn]

    def item(self, path: str, id: str) -> Json:
        """Returns the output item with this id, to which the item at `path` of the request refers.

        Raises ApiError (422) if the item is not stored, if the request refers to it twice, or if stored items
        that the request has read have more than `max_bytes`, where all output items of the response count;
        StoreError if the file cannot be used.
        """
        if id in self._references:  # so that a short request cannot ask for a long text many times
            raise invalid(path, "refers to an item for the second time", given=id)
        self._references.add(id)
        response = response_id(id.rpartition("_")[0].partition("_")[2])
        if response not in self._items:
            stored = self._find(response)
            items = self._decode(path, stored.output) if stored else []
            self._items[response] = {item["id"]: item for item in items}
        if id not in self._items[response]:
            raise invalid(path, self._not_found(), given=id[:80])
        return self._items[response][id]

    def _find(self, id: str) -> StoredResponse | None:
        rows = self._execute("SELECT * FROM responses WHERE id = ? AND owner = ?", id)
        return StoredResponse(*rows[0][:-1]) if rows else None

    def _execute(self, statement: str, id: str) -> list[tuple]:
        """The rows that a statement about a response of this owner returns; none if the store is off.
        Commits. Raises StoreError."""
        if not self.is_on:
            return []
        with self._store.open() as database:
            return database.execute(statement, (id, self._owner)).fetchall()

    def _decode(self, path: str, *lists: bytes) -> list[Json]:
        """Returns the items of JSON lists of the file, one after the other, and counts their bytes. Raises
        ApiError (422), for the field at `path`, if the request has read more than `max_bytes` of stored items
        in all."""
        self._read_bytes += sum(map(len, lists))
        if self._read_bytes > self._max_bytes:
            limit = f"as many as a request may have (--payload-limit {self._max_bytes} raises it)"
            raise invalid(path, f"adds stored items of more than {self._max_bytes} bytes, {limit}")
        return [item for each in lists for item in msgspec.json.decode(each)]

    def _not_found(self) -> str:
        return f"was not found: {LOST if self.is_on else OFF}; send the items themselves, with `store: false`"

    def _no_response(self, id: str) -> ApiError:
        return ApiError(404, "not_found", f"Response with id {id[:80]!r} {self._not_found()}")
