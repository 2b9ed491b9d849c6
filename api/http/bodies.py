"""Request bodies, read within limits of size, time and memory; the rest of a body is read and dropped.

Hands bodies to server.py, and raises ApiErrors. Uses Flask's current request and gunicorn's socket; does not
parse bodies.
"""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Iterator

import gevent
from flask import request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected

from api.http import errors
from api.http.errors import ApiError
from config import TEXT_PAYLOAD
from run import trim_memory

BODY_PIECE = 16_384  # bytes; in chunks of a byte they take 0.1 s
LONG_PIECE = 262_144  # bytes, if the length is known: such a body is read five times as fast
COMPRESSED_PIECE = 2048  # bytes; makes at most 2 MB
YIELD_S = 1e-6  # sleep(0) lets other greenlets run, but does not look for input each time
# Bytes of bodies that arrive or are being prepared, in an API server process. LONGEST_BODIES bodies of the
# largest size, such as those with images, fit in addition.
HELD_LIMIT = 32_000_000
LONGEST_BODIES = 4
DISCARD_S = 1.0
# The window bits of zlib for each `Content-Encoding`; servers disagree whether deflate has a header.
ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
WITHOUT_HEADER = -15
TRAILER_LIMIT = 8190  # bytes after a chunked body; gunicorn scans all of them whenever some arrive
# Tokenizing the text of a body of more bytes leaves up to 100 MB of free memory in small pieces, which go
# back to the system after TRIM_S.
LONG_BODY = 20_000
TRIM_S = 1.0


class Bodies:
    """Reads request bodies, and counts the bytes of those that are held."""

    def __init__(self, client_timeout_s: float):
        self._client_timeout_s = client_timeout_s
        self._held_bytes = 0
        self._trim = gevent.spawn(trim_memory)  # the last one that was started

    @contextlib.contextmanager
    def read(self, limit: int) -> Iterator[bytearray]:
        """A context manager with the body of the current request, decompressed, of at most `limit` bytes. The
        bytes count as held until the block is left; after a long body, free memory goes back to the system
        later.

        Raises ApiError: 400 for chunks or compressed data that are malformed, 408 if the whole body does not
        arrive within the client's timeout, 413 beyond `limit`, 415 for an unknown `Content-Encoding`, 501 for
        an unknown `Transfer-Encoding`, 503 if all held bodies take too much memory. A `Content-Length` beyond
        `limit` may raise werkzeug's RequestEntityTooLarge instead. Raises ClientDisconnected if the client
        disconnects before the end of the body.
        """
        body = bytearray()
        inflated = bytearray()
        try:
            encoding = _content_encoding()
            self._receive(body, limit)
            if encoding == "identity":
                yield body
            else:
                self._inflate(body, encoding, inflated, limit)
                yield inflated
        finally:
            size = len(body) + len(inflated)
            self._held_bytes -= size
            if size > LONG_BODY and self._trim.ready():
                self._trim = gevent.spawn_later(TRIM_S, trim_memory)

    def _receive(self, body: bytearray, limit: int) -> None:
        """Reads the body of the current request into `body`, as it was sent; after an error `body` has what
        arrived. Raises the errors of `read` but those of decompression and of headers. After a timeout
        gunicorn closes the connection with the response."""
        request.max_content_length = limit + 1  # werkzeug truncates a chunked body here without an error
        reader = getattr(request.environ["wsgi.input"], "reader", None)
        if hasattr(reader, "limit_trailer_section"):
            reader.limit_trailer_section = TRAILER_LIMIT
        timeout_s = self._client_timeout_s
        try:
            with gevent.Timeout(timeout_s):
                while piece := request.stream.read(_piece_size(body)):
                    self._add(piece, body, limit)
        except gevent.Timeout:
            _end_input()
            what = f"the request did not arrive within --client-timeout (CLIENT_TIMEOUT) {timeout_s:g} s"
            raise ApiError(408, "timeout", what) from None
        except ParseException as error:  # malformed chunks
            raise ApiError(400, "validation", f"Failed to read the request body: {error}") from None
        except OSError:
            raise ClientDisconnected from None
        if len(body) > limit:
            raise errors.too_large(limit)

    def _add(self, piece: bytes, body: bytearray, limit: int) -> None:
        """Adds a piece to `body`, and lets other greenlets run. Raises ApiError (503) if all held bodies
        together then have more than HELD_LIMIT bytes; the piece stays added.

        limit: the most bytes of one body, which callers check. If `limit` is above TEXT_PAYLOAD (the model
        reads images), all held bodies may have as many bytes as LONGEST_BODIES of that size, where these are
        more than HELD_LIMIT. While `body` is not above TEXT_PAYLOAD, HELD_LIMIT more bytes are allowed.
        """
        body += piece
        self._held_bytes += len(piece)
        most = HELD_LIMIT
        if limit > TEXT_PAYLOAD:  # of a model that reads images
            most = max(HELD_LIMIT, LONGEST_BODIES * limit)
            if len(body) <= TEXT_PAYLOAD:
                most += HELD_LIMIT
        if self._held_bytes > most:
            raise ApiError(503, "unavailable", "Too many long requests at a time", retry_after_s=1)
        gevent.sleep(YIELD_S)  # a body that arrives fast must not keep the event loop to itself

    def _inflate(self, body: bytearray, encoding: str, inflated: bytearray, limit: int) -> None:
        """Decompresses `body` into `inflated`, in small pieces. Raises ApiError: 400, 413, and 503 if all
        held bodies take too much memory.

        A short body may hold a text of any length: it is rejected (413) as soon as `inflated` has more than
        `limit` bytes. Data that is malformed, truncated, or followed by other data is rejected (400) too. The
        bytes of `inflated` count as held, also after an error: the caller takes them off.

        encoding: a key of ENCODINGS; a body in "deflate" may lack zlib's header, as some clients send it.
        """
        window_bits = ENCODINGS[encoding]
        if encoding == "deflate" and not _has_zlib_header(body):
            window_bits = WITHOUT_HEADER
        inflater = zlib.decompressobj(window_bits)
        for begin in range(0, len(body), COMPRESSED_PIECE):
            piece = body[begin : begin + COMPRESSED_PIECE]
            try:
                text = inflater.decompress(piece, limit + 1)
            except zlib.error as error:
                raise ApiError(400, "validation", f"Failed to decompress the request body: {error}") from None
            self._add(text, inflated, limit)
            if len(inflated) > limit:
                raise errors.too_large(limit)
        if not inflater.eof or inflater.unused_data:
            what = "data follows its end" if inflater.eof else "it is truncated"
            raise ApiError(400, "validation", f"Failed to decompress the request body: {what}")


def _content_encoding() -> str:
    """Returns the `Content-Encoding` of the current request, in lower case; "identity": not compressed.
    Raises ApiError: 415 for another encoding than those of ENCODINGS, 501 for another `Transfer-Encoding`
    than chunked or identity."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in (*ENCODINGS, "identity"):
        what = "The only `Content-Encoding`s that are supported are gzip and deflate"
        raise ApiError(415, "validation", what, quoted=f". Given: {encoding[:40]!r}")
    if request.headers.get("Transfer-Encoding", "chunked").lower() not in ("chunked", "identity"):
        raise ApiError(501, "validation", "The only `Transfer-Encoding` that is supported is chunked")
    return encoding


def _has_zlib_header(body: bytes) -> bool:
    """Whether a compressed body begins with zlib's header (RFC 1950, 2.2): the method deflate, and a checksum
    over two bytes."""
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def _piece_size(body: bytearray) -> int:
    """Returns how many bytes of the current request's body to read next. `body` is what has been read.

    If the length of the whole is unknown, these are BODY_PIECE bytes; else as many as have been read, but at
    least BODY_PIECE and at most LONG_PIECE.
    """
    if request.content_length is None:
        return BODY_PIECE
    return min(max(len(body), BODY_PIECE), LONG_PIECE)


def drain_body() -> None:
    """Reads and drops what no route has read of the current request's body, for DISCARD_S at most; raises
    nothing. If more is left then, or the connection fails, gunicorn closes the connection after the response.
    Examples: the body of a rejected request, or of `GET /live`.

    gunicorn itself would read the rest in pieces of a kilobyte, each of which copies all that has arrived: a
    second for 2 MB, during which the process serves no other request.
    """
    size = BODY_PIECE if request.content_length is None else LONG_PIECE
    with contextlib.suppress(OSError, ParseException, ClientDisconnected), gevent.Timeout(DISCARD_S, False):
        while request.environ["wsgi.input"].read(size):
            gevent.sleep(YIELD_S)
        return
    _end_input()


def _end_input() -> None:
    """Makes gunicorn close the connection after the response, instead of waiting for the rest of the body."""
    if client := request.environ.get("gunicorn.socket"):
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RD)
