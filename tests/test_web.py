"""HTTP as clients see it: a real app and a real socket, with a worker on a fake model behind it."""

import io
import json
import socket
import threading
import time

import pytest
from fakes.model import EOS, FakeModel, greedy
from fakes.tokenizer import VOCABULARY, byte_tokenizer

import web
from config import Config
from protocol import Facts, WorkerEnd
from worker import Worker

WAIT_S = 20
WINDOW = 60
LIMITS = {"max_concurrent_requests": 6, "payload_limit": 5000}


class Served:
    """An app, the worker behind it, and the model behind that."""

    def __init__(self, folder):
        self.tokenizer = byte_tokenizer(folder)
        self.model = FakeModel(batch_size=2, max_total_tokens=WINDOW, vocab_size=VOCABULARY)
        address = f"ipc://{folder}/worker.sock"
        self.end = WorkerEnd(address)
        self.worker = Worker(self.model, self.end, frozenset([EOS]), LIMITS["max_concurrent_requests"])
        self.seen = web.Worker(address)
        self.client = web.create_app(Config(**LIMITS), self.seen).test_client()
        self.facts = Facts("m", None, str(folder), VOCABULARY, [EOS], 2, WINDOW - 1, WINDOW, "fake", "float32")
        self.thread = threading.Thread(target=self.worker.run, daemon=True)

    def get_ready(self):
        self.end.announce(self.facts)
        self.thread.start()
        wait_until(lambda: self.seen.phase == "ready")
        return self

    def post(self, route, body, **options):
        options.setdefault("content_type", "application/json")
        return self.client.post(route, data=body if isinstance(body, bytes) else json.dumps(body), **options)

    def expected(self, text, most):
        return greedy(self.tokenizer.encode(text).ids, most, VOCABULARY)

    def assert_idle(self):
        wait_until(lambda: not self.worker._known and not self.seen._inboxes)
        assert self.worker.slots.busy == 0

    def close(self):
        self.model.may_decode.set()
        self.worker.stop()
        if self.thread.is_alive():
            self.thread.join(WAIT_S)
        self.end.close()
        self.seen._end.close()


def wait_until(holds):
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def booting(tmp_path):
    served = Served(tmp_path)
    yield served
    served.close()


@pytest.fixture
def served(booting):
    booting.get_ready()
    yield booting
    booting.model.may_decode.set()
    booting.assert_idle()


def events(response):
    text = response.get_data(as_text=True)
    assert text.endswith("\n\n")
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_before_the_model_is_ready_everything_says_what_is_going_on(booting):
    wait_until(lambda: booting.seen.phase == "starting")
    assert booting.client.get("/live").status_code == 200
    health = booting.client.get("/health")
    assert health.status_code == 503
    assert health.json == {"error": "unhealthy", "error_type": "healthcheck", "phase": "starting"}
    refused = booting.post("/generate", {"inputs": "a"})
    assert refused.status_code == 503
    assert refused.json["phase"] == "starting"
    assert int(refused.headers["Retry-After"]) > 0


def test_health_is_200_and_empty_when_ready(served):
    response = served.client.get("/health")
    assert (response.status_code, response.data) == (200, b"")


def test_info_tells_the_limits_in_force(served):
    info = served.client.get("/info").json
    assert info["max_total_tokens"] == WINDOW
    assert info["max_concurrent_requests"] == LIMITS["max_concurrent_requests"]
    assert list(info)[:3] == ["model_id", "model_sha", "model_pipeline_tag"]


def test_generate_returns_the_text_of_the_models_tokens(served):
    response = served.post("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 8, "details": True}})
    assert response.status_code == 200
    expected = served.expected("Hello", 8)
    assert response.json["generated_text"] == served.tokenizer.decode(expected)
    assert [token["id"] for token in response.json["details"]["tokens"]] == expected
    assert response.json["details"]["generated_tokens"] == len(expected)


def test_without_details_there_is_only_the_text(served):
    response = served.post("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}})
    assert list(response.json) == ["generated_text"]


def test_a_stream_says_the_same_as_a_whole_response(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 12, "details": True, "seed": 5, "temperature": 0.8}}
    whole = served.post("/generate", body).json
    response = served.post("/generate_stream", body)
    assert response.content_type == "text/event-stream"
    assert response.headers["Cache-Control"] == "no-cache"
    stream = events(response)
    assert [event["index"] for event in stream] == list(range(1, len(stream) + 1))
    assert [event["token"] for event in stream] == whole["details"]["tokens"]
    assert all(event["generated_text"] is None and event["details"] is None for event in stream[:-1])
    assert stream[-1]["generated_text"] == whole["generated_text"]
    assert "".join(event["token"]["text"] for event in stream if not event["token"]["special"]) == whole["generated_text"]
    assert stream[-1]["details"] == {
        "finish_reason": whole["details"]["finish_reason"],
        "generated_tokens": len(stream),
        "seed": 5,
        "input_length": 5,
    }


def test_return_full_text_puts_the_prompt_first(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3, "return_full_text": True}}
    whole = served.post("/generate", body).json["generated_text"]
    assert whole.startswith("Hello")
    assert events(served.post("/generate_stream", body))[-1]["generated_text"] == whole


def test_top_tokens_come_when_asked_for(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 3}}
    top = served.post("/generate", body).json["details"]["top_tokens"]
    assert [len(tokens) for tokens in top] == [3, 3]
    assert [event["top_tokens"] for event in events(served.post("/generate_stream", body))] == top
    del body["parameters"]["top_n_tokens"]
    assert "top_tokens" not in served.post("/generate", body).json["details"]
    assert "top_tokens" not in events(served.post("/generate_stream", body))[0]


def test_a_stop_string_ends_the_text_and_frees_the_slot(served):
    full = served.post("/generate", {"inputs": "stop", "parameters": {"max_new_tokens": 30}}).json["generated_text"]
    stop = full[4:7]
    body = {"inputs": "stop", "parameters": {"max_new_tokens": 30, "stop": [stop], "details": True}}
    response = served.post("/generate", body).json
    assert response["generated_text"] == full[: full.index(stop) + len(stop)]
    assert response["details"]["finish_reason"] == "stop_sequence"
    last = events(served.post("/generate_stream", body))[-1]
    assert last["generated_text"] == response["generated_text"]
    assert last["details"]["finish_reason"] == "stop_sequence"


def test_truncate_runs_the_end_of_the_prompt(served):
    truncated = {"inputs": "abcdefgh", "parameters": {"max_new_tokens": 5, "truncate": 3}}
    short = {"inputs": "fgh", "parameters": {"max_new_tokens": 5}}
    assert served.post("/generate", truncated).json == served.post("/generate", short).json


BAD = [
    ({"parameters": {}}, 422, "Failed to deserialize the JSON body into the target type: "),
    ({"inputs": ""}, 422, "Input validation error: `inputs` cannot be empty"),
    ({"inputs": ["a"]}, 422, "Failed to deserialize the JSON body into the target type: inputs: "),
    (b"{", 400, "Failed to parse the request body as JSON: "),
    (b"\xff", 400, "Failed to parse the request body as JSON: "),
    (b"", 400, "Failed to parse the request body as JSON: "),
    ({"inputs": "a", "parameters": {"temperature": 0}}, 422, "Input validation error: `temperature` must be strictly positive"),
    (
        {"inputs": "a", "parameters": {"top_k": "x"}},
        422,
        "Failed to deserialize the JSON body into the target type: parameters.top_k: ",
    ),
    ({"inputs": "a", "parameters": {"watermark": True}}, 422, "Input validation error: `watermark` is not supported"),
    (
        {"inputs": "a" * WINDOW},
        422,
        f"Input validation error: `inputs` must have less than {WINDOW - 1} tokens. Given: {WINDOW}",
    ),
    (
        {"inputs": "abc", "parameters": {"max_new_tokens": WINDOW}},
        422,
        f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {WINDOW}. "
        f"Given: 3 `inputs` tokens and {WINDOW} `max_new_tokens`",
    ),
]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_a_bad_body_gets_its_status_and_words_before_the_first_byte(served, route, body, status, words):
    response = served.post(route, body)
    assert response.status_code == status
    assert response.content_type == "application/json"
    assert list(response.json) == ["error", "error_type"]
    assert response.json["error_type"] == "validation"
    assert response.json["error"].startswith(words)


def test_other_content_types_are_refused(served):
    response = served.post("/generate", {"inputs": "a"}, content_type="application/x-www-form-urlencoded")
    assert response.status_code == 415
    assert response.json["error"] == "Expected request with `Content-Type: application/json`"
    assert served.post("/generate", {"inputs": "a"}, content_type="application/vnd.api+json; charset=utf-8").status_code == 200


def test_what_http_refuses_is_json_too(served):
    assert served.client.get("/nowhere").status_code == 404
    assert served.client.get("/nowhere").json["error_type"] == "not_found"
    wrong_method = served.client.get("/generate")
    assert wrong_method.status_code == 405
    assert "POST" in wrong_method.headers["Allow"]
    assert wrong_method.json["error_type"] == "method_not_allowed"
    too_large = served.post("/generate", {"inputs": "a" * LIMITS["payload_limit"]})
    assert too_large.status_code == 413
    assert str(LIMITS["payload_limit"]) in too_large.json["error"]


@pytest.mark.parametrize("excess", [1, 1000])
def test_a_chunked_body_that_is_too_large_is_refused_whole(served, excess):
    fits = json.dumps({"inputs": "Hi", "parameters": {"max_new_tokens": 1}}).encode()
    body = io.BytesIO(fits.ljust(LIMITS["payload_limit"] + excess))
    chunked = {"wsgi.input_terminated": True, "CONTENT_LENGTH": None, "wsgi.input": body}
    assert served.post("/generate", b"", environ_overrides=chunked).status_code == 413
    body = io.BytesIO(fits.ljust(LIMITS["payload_limit"]))
    assert served.post("/generate", b"", environ_overrides=chunked | {"wsgi.input": body}).status_code == 200


def test_two_requests_too_many_are_429_and_the_others_do_not_notice(served):
    served.model.may_decode.clear()
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 6}}
    most = LIMITS["max_concurrent_requests"]
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(served.post("/generate", body))) for _ in range(most + 2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(served.seen._inboxes) == most + 2)
    served.model.may_decode.set()
    for thread in threads:
        thread.join(WAIT_S)
    refused = [response for response in answers if response.status_code == 429]
    assert len(refused) == 2
    for response in refused:
        assert response.json == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert int(response.headers["Retry-After"]) > 0
    text = served.tokenizer.decode(served.expected("Hello", 6))
    assert [response.json["generated_text"] for response in answers if response not in refused] == [text] * most


def test_a_stream_too_many_is_429_before_its_first_byte(served):
    served.worker.max_concurrent_requests = 0
    response = served.post("/generate_stream", {"inputs": "Hello"})
    assert response.status_code == 429
    assert response.content_type == "application/json"


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_a_failure_before_the_first_token_has_its_own_status(served, route):
    served.model.fail_next_prefill = True
    response = served.post(route, {"inputs": "a"})
    assert response.status_code == 424
    assert response.json == {
        "error": "Request failed during generation: the prompt could not be run on the device",
        "error_type": "generation",
    }


def test_a_failure_in_the_middle_of_a_stream_is_an_event(served):
    served.model.may_decode.clear()
    with served.post("/generate_stream", {"inputs": "Hello"}) as response:
        assert response.status_code == 200
        served.model.fail_next_decode = True
        served.model.may_decode.set()
        stream = events(response)
    assert stream[0]["index"] == 1
    assert stream[-1] == {
        "error": "Request failed during generation: a step on the device failed",
        "error_type": "generation",
    }


def test_a_silent_stream_is_kept_open_with_comments(served, monkeypatch):
    monkeypatch.setattr(web, "KEEP_ALIVE_S", 0.05)
    served.model.may_decode.clear()
    with served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}, buffered=False) as response:
        chunks = iter(response.response)
        assert next(chunks).startswith(b"data: ")
        assert next(chunks) == b":\n\n"
        served.model.may_decode.set()
        rest = b"".join(chunks)
    assert rest.count(b"data: ") == len(served.expected("Hello", 3)) - 1


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_client_that_hangs_up_frees_its_place(served, route, place):
    served.model.may_decode.clear()
    if place == "waiting":
        busy = [threading.Thread(target=served.post, args=("/generate", {"inputs": text})) for text in "ab"]
        for thread in busy:
            thread.start()
        wait_until(lambda: len(served.seen._inboxes) == 2)
    ours, theirs = socket.socketpair()
    before = len(served.seen._inboxes)

    def ask():
        response = served.post(route, {"inputs": "Hello"}, environ_overrides={"gunicorn.socket": ours}, buffered=False)
        for _ in response.response:
            pass
        response.close()

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: len(served.seen._inboxes) == before + 1)
    theirs.close()
    asking.join(WAIT_S)
    assert not asking.is_alive(), "it still waits for a token, though nobody reads"
    assert list(served.seen._inboxes.values()).count(None) == 1, "the id is kept until the worker has ended it"
    served.model.may_decode.set()
    served.assert_idle()
    ours.close()


def test_what_a_client_sent_ahead_does_not_hide_that_it_hung_up(served):
    ours, theirs = socket.socketpair()
    is_gone = web._hang_up_detector(ours)
    theirs.sendall(b"GET /health HTTP/1.1\r\n")
    assert not is_gone()
    theirs.close()
    assert is_gone()
    ours.close()


def test_a_response_that_is_closed_before_it_is_read_frees_its_slot(served):
    served.model.may_decode.clear()
    response = served.post("/generate_stream", {"inputs": "Hello"}, buffered=False)
    response.close()
    served.model.may_decode.set()
    served.assert_idle()


def test_when_the_worker_dies_everyone_is_told(booting):
    booting.get_ready()
    booting.model.may_decode.clear()
    stream = booting.post("/generate_stream", {"inputs": "Hello"}, buffered=False)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(booting.post("/generate", {"inputs": "Hello"})))
    waiting.start()
    wait_until(lambda: len(booting.seen._inboxes) == 2)
    booting.end.close()
    waiting.join(WAIT_S)
    assert answers[0].status_code == 503
    assert events(stream)[-1]["error_type"] == "unavailable"
    assert booting.client.get("/health").json["phase"] == "dead"
    assert booting.post("/generate", {"inputs": "Hello"}).status_code == 503
    assert booting.client.get("/live").status_code == 200


def test_a_bug_of_ours_is_an_answer_too(served, monkeypatch, caplog):
    monkeypatch.setattr(served.seen.tokenizer.__class__, "encode", lambda *_: 1 // 0)
    response = served.post("/generate", {"inputs": "a"})
    assert response.status_code == 422
    monkeypatch.setattr(web.schema, "parse", lambda *_: 1 // 0)
    response = served.post("/generate", {"inputs": "a"})
    assert response.status_code == 500
    assert response.json == {"error": "Internal server error", "error_type": "internal"}
    assert "ZeroDivisionError" in caplog.text
