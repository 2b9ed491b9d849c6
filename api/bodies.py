"""Request bodies, read within limits of size, time and memory; the rest of a body is read and dropped.

Hands bodies to server.py, and raises ApiErrors. Uses Flask's current request and gunicorn's socket; does not
parse bodies.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import zlib
from collections.abc import Iterator

import gevent
from flask import request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected

from api import errors
from api.errors import ApiError
from config import Config

BODY_PIECE = 16_384  # bytes; in chunks of a byte they take 0.1 s
YIELD_S = 1e-6  # sleep(0) lets other greenlets run, but does not look for input each time
HELD_LIMIT = 32_000_000  # bytes of bodies that arrive or are being prepared, in an API server process
DISCARD_S = 1.0
# By `Content-Encoding`, the window bits of zlib that read it; servers disagree whether deflate has a header.
ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
WITHOUT_HEADER = -15
CHARSETS = ("utf-8", "us-ascii", "iso-8859-1")  # of plain text
TRAILER_LIMIT = 8190  # bytes after a chunked body; gunicorn scans all of them whenever some arrive
# Tokenizing the text of a body of more bytes leaves up to 100 MB of free memory in small pieces, which go
# back to the system after TRIM_S.
LONG_BODY = 20_000
TRIM_S = 1.0


class Bodies:
    """Reads request bodies."""

    def __init__(self, config: Config):
        self._config = config
        self._held_bytes = 0
        self._trim = gevent.spawn(_return_free_memory)  # the last one

    @contextlib.contextmanager
    def read(self) -> Iterator[bytearray]:
        """The body of the current request, which counts as held until the block is left. Raises ApiError."""
        body = bytearray()
        try:
            encoding = _content_encoding()
            self._receive(body)
            if encoding != "identity":
                self._inflate(body, encoding)
            yield body
        finally:
            self._held_bytes -= len(body)
            if len(body) > LONG_BODY and self._trim.ready():
                self._trim = gevent.spawn_later(TRIM_S, _return_free_memory)

    def _receive(self, body: bytearray) -> None:
        reader = getattr(request.environ["wsgi.input"], "reader", None)
        if hasattr(reader, "limit_trailer_section"):
            reader.limit_trailer_section = TRAILER_LIMIT
        timeout_s = self._config.client_timeout
        try:
            with gevent.Timeout(timeout_s):
                while piece := request.stream.read(BODY_PIECE):
                    body += piece
                    self._held_bytes += len(piece)
                    if self._held_bytes > max(HELD_LIMIT, self._config.payload_limit):
                        what = "Too many long requests at a time"
                        raise ApiError(503, "unavailable", what, retry_after_s=1)
                    gevent.sleep(YIELD_S)  # a body that arrives fast must not keep the event loop to itself
        except gevent.Timeout:
            _end_input()
            limit = f"the request did not arrive within --client-timeout (CLIENT_TIMEOUT) {timeout_s:g} s"
            raise ApiError(408, "timeout", limit) from None
        except ParseException as error:  # malformed chunks
            raise ApiError(400, "validation", f"Failed to read the request body: {error}") from None
        except OSError:
            raise ClientDisconnected from None
        if len(body) > self._config.payload_limit:
            raise errors.too_large(self._config.payload_limit)

    def _inflate(self, body: bytearray, encoding: str) -> None:
        """Replaces a compressed body, of any size when inflated, by the text in it. Raises ApiError."""
        limit = self._config.payload_limit
        window_bits = ENCODINGS[encoding]
        if encoding == "deflate" and not _has_zlib_header(body):
            window_bits = WITHOUT_HEADER
        inflater = zlib.decompressobj(window_bits)
        try:
            text = inflater.decompress(body, limit + 1)
        except zlib.error as error:
            raise ApiError(400, "validation", f"Failed to decompress the request body: {error}") from None
        if len(text) > limit:
            raise errors.too_large(limit)
        if not inflater.eof or inflater.unused_data:
            what = "data follows its end" if inflater.eof else "it is truncated"
            raise ApiError(400, "validation", f"Failed to decompress the request body: {what}")
        self._held_bytes += len(text) - len(body)
        body[:] = text


def _content_encoding() -> str:
    """How the body of the current request is compressed. Raises ApiError."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in (*ENCODINGS, "identity"):
        what = "The only `Content-Encoding`s that are supported are gzip and deflate"
        raise ApiError(415, "validation", what, quoted=f". Given: {encoding[:40]!r}")
    if request.headers.get("Transfer-Encoding", "chunked").lower() not in ("chunked", "identity"):
        raise ApiError(501, "validation", "The only `Transfer-Encoding` that is supported is chunked")
    return encoding


def _has_zlib_header(body: bytes) -> bool:
    """RFC 1950, 2.2: the method deflate, and a checksum over two bytes."""
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def check_is_json() -> None:
    """Raises ApiError (415) for a request whose body is of another type."""
    if not (request.mimetype == "application/json" or request.mimetype.endswith("+json")):
        raise wrong_content_type("application/json")


def charset_of_text() -> str:
    """The charset of a plain-text request; a body without a type counts as one. Raises ApiError (415)."""
    if request.mimetype not in ("", "text/plain"):
        raise wrong_content_type("text/plain")
    charset = request.mimetype_params.get("charset", CHARSETS[0]).lower()
    if charset not in CHARSETS:
        known = " or ".join(f"`{name}`" for name in CHARSETS)
        what = f"The `charset` of a text must be {known}"
        raise ApiError(415, "validation", what, quoted=f". Given: {charset[:40]!r}")
    return charset


def wrong_content_type(expected: str) -> ApiError:
    given = request.headers.get("Content-Type")
    quoted = f". Given: {given[:80]!r}" if given else ". Given: none"
    return ApiError(415, "validation", f"Expected request with `Content-Type: {expected}`", quoted=quoted)


def drain_body() -> None:
    """Reads the rest of a request's body, for DISCARD_S at most: of a rejected one, or of `GET /live` with a
    body.

    gunicorn would read it in pieces of a kilobyte, each of which copies all that has arrived: a second for 2
    MB, during which the process serves no other request.
    """
    with contextlib.suppress(OSError, ParseException, ClientDisconnected), gevent.Timeout(DISCARD_S, False):
        while request.environ["wsgi.input"].read(BODY_PIECE):
            gevent.sleep(YIELD_S)
        return
    _end_input()


def _return_free_memory() -> None:
    """Takes about 10 ms."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def _end_input() -> None:
    """Makes gunicorn close the connection after the response, instead of waiting for the rest of the body."""
    if client := request.environ.get("gunicorn.socket"):
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RD)
