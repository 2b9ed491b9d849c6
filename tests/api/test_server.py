"""What the routes of a web process share: a full server, requests that cannot be sent, long work beside the event loop."""

import threading
import time
from types import SimpleNamespace

import gevent
import pytest
from openai_api import CHAT, COMPLETION, MESSAGES
from served import WAIT_S, wait_until

from api.http.errors import ApiError
from api.server import TextThreads
from text.limited import SandboxedFunction
from text.stream import prompt_texts

SMALL = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}


def full(served):
    served.admission.limit = 0
    served.link.interrupt()
    wait_until(lambda: served.seen.is_full)


def test_a_full_house_is_told_before_anyone_asks_and_so_is_a_free_place(served):
    served.admission.limit = 1
    served.model.may_decode.clear()
    with served.post("/generate_stream", SMALL, buffered=False) as stream:
        wait_until(lambda: served.seen.is_full)
        served.model.may_decode.set()
        assert b"".join(stream.response).count(b"data: ") == 2
    wait_until(lambda: not served.seen.is_full)


def test_a_client_that_asks_before_the_report_of_a_free_place_arrives_is_served(served, monkeypatch):
    full(served)

    def wait_for_the_report(_seconds):
        """In the place of the moment that a request waits which has been found too much."""
        served.admission.limit = 1
        served.link.interrupt()
        wait_until(lambda: not served.seen.is_full)

    monkeypatch.setattr("api.server.gevent", SimpleNamespace(sleep=wait_for_the_report))
    assert served.post("/generate", SMALL).status_code == 200


@pytest.mark.parametrize("most", [0, 2])
def test_a_request_that_does_not_fit_is_429_before_its_first_byte_in_the_shape_of_its_route(served, most):
    served.admission.limit = most
    for _ in range(3):
        refused = served.post(COMPLETION, {"prompt": "a", "n": 3, "stream": True})
        assert (refused.status_code, refused.json["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["Retry-After"]) > 0
    if most == 0:
        refused = served.post("/generate_stream", SMALL)
        assert (refused.status_code, refused.json) == (429, {"error": "Model is overloaded", "error_type": "overloaded"})


def test_more_than_a_message_to_the_worker_holds_is_refused_and_not_sent(served, monkeypatch):
    monkeypatch.setattr("api.http.engine_client.MAX_MESSAGE_BYTES", 1000)
    response = served.post("/v1/completions", {"prompt": ["a" * 30, "b" * 30], "n": 2, "temperature": 1})
    assert response.status_code == 400
    message = "the request asks for 4 sequences whose prompts have 120 tokens altogether, too many to be sent at once"
    assert message in response.json["error"]["message"]
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_bug_of_ours_is_an_answer_too(served, monkeypatch, caplog):
    monkeypatch.setattr(served.seen.text.tokenizer.__class__, "encode", lambda *_: 1 // 0)
    response = served.post("/generate", {"inputs": "a"})
    assert response.status_code == 422
    monkeypatch.setattr("api.http.fields.parse_body", lambda *_: 1 // 0)
    response = served.post("/generate", {"inputs": "a"})
    assert response.status_code == 500
    assert response.json == {"error": "Internal server error", "error_type": "internal"}
    assert "ZeroDivisionError" in caplog.text


def test_a_bug_is_reported_in_the_error_format_of_the_body_where_a_route_has_several(served, monkeypatch):
    monkeypatch.setattr("api.server.ActiveRequest", lambda *_: 1 // 0)
    chat = served.post("/invocations", MESSAGES)
    native = served.post("/invocations", {"inputs": "a"})
    assert chat.status_code == native.status_code == 500
    assert chat.json["error"]["code"] == native.json["error_type"] == "internal"


def test_a_long_text_is_tokenized_while_others_are_answered(serve):
    served = serve(payload_limit=2_000_000).get_ready()
    text, gaps = "a" * 1_000_000, []

    def watch():
        while True:
            last = time.monotonic()
            gevent.sleep(0.001)
            gaps.append(time.monotonic() - last)

    watching = gevent.spawn(watch)
    started_at = time.monotonic()
    body = {"inputs": text, "parameters": {"truncate": 10, "max_new_tokens": 1}}  # else it is refused before
    assert served.post("/generate", body).status_code == 200
    taken = time.monotonic() - started_at
    watching.kill()
    assert max(gaps) < taken / 2, f"{max(gaps):.2f} of {taken:.2f} s nobody else could run"


@pytest.mark.parametrize("streams", [False, True])
def test_the_tokens_of_a_prompt_are_listed_in_a_thread(served, monkeypatch, streams):
    threads = []

    def listed(tokenizer, ids):
        threads.append(threading.get_native_id())
        return prompt_texts(tokenizer, ids)

    monkeypatch.setattr("api.generation.response_writer.prompt_texts", listed)
    body = {"prompt": "Hi", "max_tokens": 1, "echo": True, "logprobs": 1, "stream": streams}
    with served.post("/v1/completions", body) as response:
        assert response.status_code == 200 and '"tokens":["H"' in response.get_data(as_text=True)
    assert threads and threading.get_native_id() not in threads


@pytest.mark.parametrize("streams", [False, True])
def test_output_that_is_generated_is_not_refused_because_others_use_the_threads(serve, monkeypatch, streams):
    served = serve(max_concurrent_requests=1).get_ready()
    may_list = threading.Event()
    listing = []

    def listed(tokenizer, ids):
        listing.append(ids)
        may_list.wait(WAIT_S)
        return prompt_texts(tokenizer, ids)

    monkeypatch.setattr("api.generation.response_writer.prompt_texts", listed)
    body = {"prompt": "Hi", "max_tokens": 1, "echo": True, "logprobs": 1, "stream": streams}
    asked = [gevent.spawn(lambda: served.post(COMPLETION, body).get_data(as_text=True)) for _ in range(2)]
    try:
        wait_until(lambda: len(listing) == 2)
    finally:
        may_list.set()
    for each in asked:
        assert '"tokens":["H"' in each.get(timeout=WAIT_S)


def test_a_template_without_an_end_fails_its_chat_and_holds_up_nobody(serve, monkeypatch):
    limited = SandboxedFunction("text.template:renderer", [4_000_000], cpu_s=2, memory_bytes=2**28)
    monkeypatch.setattr("text.template.rendered", limited)
    served = serve()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'Hi' %}" + endless + "{% endif %}{{ messages[0].content }}"
    (served.folder / "chat_template.jinja").write_text(template)
    served.get_ready()
    chats = []
    chat = gevent.spawn(lambda: chats.append(served.post(CHAT, MESSAGES)))
    assert served.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}).status_code == 200
    assert served.client.get("/health").status_code == 200
    assert not chat.ready(), "it is still at it"
    chat.join(WAIT_S)
    (refused,) = chats
    assert refused.status_code == 400 and "longer than 2 s of processor time" in refused.json["error"]["message"]


def test_work_that_too_many_wait_for_is_refused_and_its_errors_are_raised():
    with pytest.raises(ApiError, match="overloaded"):
        TextThreads(max_pending=0).run(int)
    threads = TextThreads(max_pending=1)
    assert threads.run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: 1 // 0)
    assert threads.run(lambda: 6) == 6
