"""Bodies of requests: what is refused before it is read, and what does not come to its end."""

import gzip
import io
import json
import tracemalloc
import zlib

import pytest
from gunicorn.http.errors import InvalidChunkSize
from served import LIMITS
from werkzeug.exceptions import ClientDisconnected

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
