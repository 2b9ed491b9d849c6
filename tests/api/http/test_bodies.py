"""Bodies of requests: what is refused before it is read, and what does not come to its end."""

import gzip
import io
import json
import tracemalloc
import zlib

import gevent.event
import msgspec
import pytest
from flask import Flask
from gunicorn.http.errors import InvalidChunkSize
from served import LIMITS, wait_until
from werkzeug.exceptions import ClientDisconnected

from api.http import bodies

SMALL = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}


def test_other_content_types_and_encodings_are_refused_by_name(served):
    refused = [
        (
            {"content_type": "application/x-www-form-urlencoded"},
            415,
            "Expected request with `Content-Type: application/json`. Given: 'application/x-www-form-urlencoded'",
        ),
        ({"content_type": None}, 415, "Expected request with `Content-Type: application/json`. Given: none"),
        ({"content_type": "text/plain"}, 415, "Expected request with `Content-Type: application/json`. Given: 'text/plain'"),
        (
            {"headers": {"Content-Encoding": "br"}},
            415,
            "The only `Content-Encoding`s that are supported are gzip and deflate. Given: 'br'",
        ),
        ({"headers": {"Transfer-Encoding": "gzip, chunked"}}, 501, "The only `Transfer-Encoding` that is supported is chunked"),
    ]
    for options, status, words in refused:
        response = served.post("/generate", SMALL, **options)
        assert (response.status_code, response.json["error"]) == (status, words)
    for options in ({"content_type": "application/vnd.api+json; charset=utf-8"}, {"headers": {"Content-Encoding": "identity"}}):
        assert served.post("/generate", SMALL, **options).status_code == 200


def raw_deflate(data):
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


COMPRESSED = {"gzip": gzip.compress, "x-gzip": gzip.compress, "Deflate": zlib.compress, "deflate": raw_deflate}


def compressed(served, encoding, body):
    return served.post("/generate", body, headers={"Content-Encoding": encoding})


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_compressed_body_is_read(served, encoding):
    plain = served.post("/generate", SMALL)
    response = compressed(served, encoding, COMPRESSED[encoding](json.dumps(SMALL).encode()))
    assert (response.status_code, response.json) == (200, plain.json)


SMALL_BODY = json.dumps(SMALL).encode()


BROKEN = {
    "not gzip": ("gzip", SMALL_BODY, 400, "incorrect header check"),
    "not deflate": ("deflate", SMALL_BODY, 400, "Failed to decompress the request body"),
    "deflate for gzip": ("gzip", zlib.compress(SMALL_BODY), 400, "incorrect header check"),
    "truncated": ("gzip", gzip.compress(SMALL_BODY)[:-5], 400, "it is truncated"),
    "empty": ("gzip", b"", 400, "it is truncated"),
    "two in a row": ("gzip", gzip.compress(SMALL_BODY) * 2, 400, "data follows its end"),
    "compressed twice": ("gzip", gzip.compress(gzip.compress(SMALL_BODY)), 400, "Failed to parse the request body as JSON"),
    "too large": ("gzip", gzip.compress(SMALL_BODY.ljust(LIMITS["payload_limit"] + 1)), 413, str(LIMITS["payload_limit"])),
    "two encodings": ("gzip, gzip", gzip.compress(SMALL_BODY), 415, "gzip and deflate"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_decompress_is_refused(served, name):
    encoding, body, status, words = BROKEN[name]
    response = compressed(served, encoding, body)
    assert response.status_code == status and words in response.json["error"]


def test_a_body_that_inflates_without_bound_takes_no_memory(served):
    bomb = gzip.compress(b" " * 4 * 2**20)
    assert len(bomb) < LIMITS["payload_limit"]
    tracemalloc.start()
    try:
        assert compressed(served, "gzip", bomb).status_code == 413
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**20


def reading_images(served):
    served.seen.info = msgspec.structs.replace(served.seen.info, reads_images=True)
    return served


@pytest.mark.parametrize(("given", "text", "images"), [(None, 2_000_000, 32_000_000), (5000, 5000, 5000)])
def test_a_body_may_be_longer_where_the_model_reads_images_unless_the_limit_is_set(serve, monkeypatch, given, text, images):
    monkeypatch.setattr(bodies, "DISCARD_S", 0.01)
    served = serve(payload_limit=given).get_ready()
    body = json.dumps(SMALL).encode()
    for most in (text, images):
        assert served.post("/generate", body.ljust(most)).status_code == 200
        for excess in (1, 1000):
            refused = served.post("/generate", body.ljust(most + excess))
            assert refused.status_code == 413 and f"at most {most} bytes" in refused.json["error"]
            assert chunked(served, io.BytesIO(body.ljust(most + excess))).status_code == 413
        assert chunked(served, SlowBody(10**12, rest=None)).status_code == 413
        reading_images(served)


class SlowBody(io.RawIOBase):
    """A request body that has arrived up to `size` bytes, and whose rest, the end, comes once the event is set."""

    def __init__(self, size, rest):
        self._left = size
        self._rest = rest
        self.is_waiting = False

    def readable(self):
        return True

    def readinto(self, buffer):
        if not self._left:
            self.is_waiting = True
            self._rest.wait()
            return 0
        count = min(len(buffer), self._left)
        buffer[:count] = b" " * count
        self._left -= count
        return count


@pytest.fixture
def hold(served, monkeypatch):
    """Sends bodies of which only so many bytes come, until the end of the test. Short ones have at most 1000."""
    monkeypatch.setattr(bodies, "HELD_LIMIT", 8000)
    monkeypatch.setattr(bodies, "TEXT_PAYLOAD", 1000)
    monkeypatch.setattr(bodies, "DISCARD_S", 0.01)
    rest = gevent.event.Event()
    sent = []

    def send(size):
        body = SlowBody(size, rest)
        sent.append(gevent.spawn(chunked, served, body))
        wait_until(lambda: body.is_waiting or sent[-1].ready())
        return sent[-1]

    yield send
    rest.set()
    gevent.joinall(sent, raise_error=True)


def test_bodies_that_never_end_are_held_up_to_a_bound_which_leaves_room_for_short_ones(hold, served):
    """The limits here: 5000 bytes a body, four of which are held."""
    assert not any(hold(4900).ready() for _ in range(4))
    for _ in range(3):
        assert hold(4900).get().status_code == 503
    assert not any(hold(900).ready() for _ in range(9))
    assert served.post("/generate", SMALL).status_code == 200
    assert hold(900).get().status_code == 503
    refused = served.post("/generate", b" " * 2000)
    assert (refused.status_code, refused.json["error"]) == (503, "Too many long requests at a time")
    assert refused.headers["Retry-After"] == "1"


def test_an_inflated_body_counts_as_held(hold, served):
    assert not any(hold(4900).ready() for _ in range(4))
    assert len(BOMB) < 100 and compressed(served, "gzip", BOMB).status_code == 503


def test_what_a_request_held_is_given_back(hold, served):
    for _ in range(9):
        assert compressed(served, "gzip", BOMB).status_code == 400  # it is no JSON
        assert served.post("/generate", b" " * 4900).status_code == 400


BOMB = gzip.compress(b" " * 4900)


def test_a_long_body_inflates_while_other_greenlets_run():
    body = gzip.compress(b" " * 30_000_000)
    options = {"method": "POST", "data": body, "headers": {"Content-Encoding": "gzip"}}
    turns = []

    def tick():
        while True:
            turns.append(True)
            gevent.sleep(0)

    ticks = gevent.spawn(tick)
    try:
        with Flask("test").test_request_context(**options), bodies.Bodies(75.0).read(32_000_000) as inflated:
            assert len(inflated) == 30_000_000
    finally:
        ticks.kill()
    assert len(turns) > 10, "a piece of a tenth at most between two turns"


def chunked(served, body):
    environ = {"wsgi.input_terminated": True, "CONTENT_LENGTH": None, "wsgi.input": body}
    return served.post("/generate", b"", environ_overrides=environ)


def test_a_body_that_is_too_large_is_refused_whole(served):
    most = LIMITS["payload_limit"]
    refused = served.post("/generate", {"inputs": "a" * most})
    assert refused.status_code == 413 and str(most) in refused.json["error"]
    fits = json.dumps(SMALL).encode()
    assert served.post("/generate", fits.ljust(most + 1)).status_code == 413
    for excess in (1, 1000):
        assert chunked(served, io.BytesIO(fits.ljust(most + excess))).status_code == 413
    assert chunked(served, io.BytesIO(fits.ljust(most))).status_code == 200


class BrokenBody(io.BytesIO):
    """A request body that ends in an error, as gunicorn's do."""

    def __init__(self, error):
        self.error = error

    def read(self, *_):
        raise self.error

    readinto = readline = read


@pytest.mark.parametrize(
    ("error", "status", "counts"),
    [(InvalidChunkSize(b"zz"), 400, "tgi_http_errors_total,400"), (ClientDisconnected(), 499, "tgi_client_disconnects_total")],
)
def test_a_body_that_does_not_come_to_its_end_is_told_or_counted_as_what_it_is(served, error, status, counts):
    response = chunked(served, BrokenBody(error))
    assert response.status_code == status
    served.wait_for_count(counts, 1)
    assert served.counts()["tgi_request_count_total"] == 1
    assert "failed" not in (response.get_data(as_text=True) if status == 499 else "")
