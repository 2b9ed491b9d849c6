"""A request while it is generated: its events, failures, disconnects, deadlines, and what the headers tell."""

import contextlib
import json
import socket
import time
from types import SimpleNamespace

import gevent
import pytest
from asked import prepared
from openai_api import CHAT, COMPLETION, MESSAGES, PROMPT, RESPONSES
from served import WAIT_S, events, wait_until

from api.generation import stream as generation
from api.generation.prepared_request import TokenizedPrompt
from api.generation.response_writer import GeneratedSequence
from api.http.errors import CLIENT_CLOSED_REQUEST, ApiError
from api.tgi import NativeResponseWriter
from protocol import End, PromptDone, Token

NATIVE = {"inputs": "Hello", "parameters": {"max_new_tokens": 12}}
DEADLINE_S = 60  # tests that wait for it set the clock

# Failures


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_a_failure_before_the_first_token_has_its_own_status(served, route):
    served.model.fail_next_prefill = True
    response = served.post(route, {"inputs": "a"})
    message = "Request failed during generation: a step on the device failed"
    assert (response.status_code, response.json) == (424, {"error": message, "error_type": "generation"})


@pytest.mark.parametrize(
    ("route", "body"),
    [("/generate_stream", NATIVE), (COMPLETION, PROMPT), (CHAT, MESSAGES), (RESPONSES, {"input": "Hi", "temperature": 0})],
)
def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(served, route, body):
    served.model.may_decode.clear()
    with served.post(route, body | {"stream": True}) as response:
        assert response.status_code == 200
        served.model.fail_next_decode = True
        served.model.may_decode.set()
        *told, last = response.get_data(as_text=True).removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n")
    error = json.loads(last.partition("data: ")[2])
    error = error.get("response", error)
    message = "Request failed during generation: a step on the device failed"
    assert told and message in (error["error"], error["error"]["message"] if isinstance(error["error"], dict) else "")
    served.wait_for_count("tgi_request_failure_total,generation", 1)


def test_a_bug_in_the_middle_of_a_stream_is_an_event_and_ends_that_stream_alone(served, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(NativeResponseWriter, "events", lambda *_: 1 / 0)
        with served.post("/generate_stream", NATIVE) as response:
            *_, last = events(response)
    assert last["error_type"] == "internal"
    assert "ZeroDivisionError" in caplog.text
    served.wait_for_count("tgi_request_failure_total,generation", 1)
    assert served.post("/generate", {"inputs": "Hello"}).status_code == 200


@pytest.fixture
def started(served, monkeypatch):
    """A generation for the prompt "a", its id, and the queue for its messages, which the worker does not hear of."""
    sent = []
    monkeypatch.setattr(served.seen, "submit", lambda generates, queue, images: sent.append((generates[0].id, queue)))
    arrival = generation.Arrival("an-id", time.monotonic(), generation.Connection(None, input_may_end=False))
    prompt = TokenizedPrompt(prepared("stream"), [97], 5)
    monitor = generation.ConnectionMonitor()
    return generation.ActiveRequest(served.seen, [prompt], arrival, monitor, float("inf")), *sent[0]


def test_a_prompt_that_has_been_run_does_not_begin_an_answer_that_then_fails(started):
    generating, request_id, queue = started
    queue.put([PromptDone(request_id, 0.0)])
    gevent.spawn_later(0.01, queue.put, [End(request_id, "failed", "no number")])
    with pytest.raises(ApiError) as error:
        next(iter(generating))
    assert error.value.status == 424


def test_tokens_that_arrive_together_with_the_end_of_their_request_are_not_lost(started):
    generating, request_id, queue = started
    queue.put([PromptDone(request_id, 0.0), Token(request_id, 97, None), End(request_id, "failed", "no number")])
    batches = iter(generating)
    (pieces,) = next(batches).values()
    assert [piece.id for piece in pieces] == [97]
    with pytest.raises(ApiError, match="no number"):
        next(batches)


def test_a_silent_stream_is_kept_open_with_comments(served, monkeypatch):
    served.model.may_decode.clear()
    with served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}, buffered=False) as response:
        chunks = iter(response.response)
        assert next(chunks).startswith(b"data: ")
        monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.05)
        assert next(chunks) == b":\n\n"
        served.model.may_decode.set()
        rest = b"".join(chunks)
    assert rest.count(b"data: ") == len(served.expected("Hello", 3)) - 1


# Disconnects


@contextlib.contextmanager
def waiting_with_a_socket(served, route="/generate", **headers):
    """A request that waits for the device: its greenlet, and the client's end of its connection."""
    served.model.may_decode.clear()
    running = len(served.seen._queues)
    ours, theirs = socket.socketpair()
    options = {"environ_overrides": {"gunicorn.socket": ours}, "headers": headers}
    asking = gevent.spawn(lambda: served.post(route, {"inputs": "Hello"}, **options))
    wait_until(lambda: len(served.seen._queues) > running)
    with ours, theirs:
        yield asking, theirs
        served.model.may_decode.set()


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_what_a_client_sent_ahead_does_not_hide_that_it_hung_up(serve, route):
    served = serve(slots=1).get_ready()
    served.model.may_decode.clear()
    other = served.post("/generate_stream", NATIVE, buffered=False)  # has the slot
    with other, waiting_with_a_socket(served, route) as (asking, theirs):
        theirs.sendall(b"GET /health HTTP/1.1\r\n")
        asking.join(3 * generation.WATCH_S)
        assert not asking.ready()
        theirs.close()
        assert asking.get(timeout=WAIT_S).status_code == CLIENT_CLOSED_REQUEST


def test_a_client_that_announced_its_last_request_may_close_its_sending_side(served):
    with waiting_with_a_socket(served, Connection="close") as (asking, theirs):
        theirs.shutdown(socket.SHUT_WR)
        asking.join(3 * generation.WATCH_S)
        assert not asking.ready()
        served.model.may_decode.set()
        assert asking.get(timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize("first_event", [False, True])
def test_a_disconnect_is_counted_as_dropped_and_ends_the_request_also_before_the_first_event(served, first_event, caplog):
    caplog.set_level("INFO")
    served.model.may_decode.clear()
    response = served.post("/generate_stream", {"inputs": "Hello"}, buffered=False)
    if first_event:
        next(iter(response.response))
    response.close()
    served.wait_for_count("tgi_client_disconnects_total", 1)
    seen = served.counts()
    assert (seen["tgi_request_failure_total,dropped"], seen["tgi_request_count_total"]) == (1, 1)
    served.model.may_decode.set()
    served.assert_idle()

    def finished():
        return [record.fields for record in caplog.records if record.getMessage() == "request finished"]

    wait_until(finished)
    assert [fields["finish_reason"] for fields in finished()] == ["client_disconnected"]


# Headers


def test_the_headers_tell_what_a_request_took(served):
    response = served.post("/generate", {"inputs": "Héllo", "parameters": {"max_new_tokens": 4}})
    headers = {name: value for name, value in response.headers.items() if name.startswith("x-") and name != "x-request-id"}
    assert headers.pop("x-compute-type") == "fake"
    assert headers.pop("x-compute-characters") == "5"
    assert 0 < float(headers.pop("x-compute-time")) < WAIT_S
    assert headers.pop("x-prompt-tokens") == "6"
    assert headers.pop("x-generated-tokens") == str(len(served.expected("Héllo", 4)))
    milliseconds = {name: int(value) for name, value in headers.items()}
    assert set(milliseconds) == {"x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"}
    parts = sum(milliseconds[f"x-{part}-time"] for part in ("validation", "queue", "inference"))
    assert parts <= milliseconds["x-total-time"] <= parts + 3
    stream = served.post("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 2}})
    assert (stream.headers["x-compute-type"], stream.headers["x-compute-characters"]) == ("fake", "2")
    assert "x-total-time" not in stream.headers
    stream.get_data()


def test_the_time_in_the_queue_is_told_apart_from_the_rest(served):
    served.model.may_decode.clear()
    running = gevent.spawn(served.post, "/generate", {"inputs": "a"})
    wait_until(lambda: served.model.is_paused)  # sooner, the second one's prompt could run right behind the first one's
    answers = []
    body = {"inputs": "c", "parameters": {"max_new_tokens": 1}}
    waiting = gevent.spawn(lambda: answers.append(served.post("/generate", body)))
    wait_until(lambda: len(served.seen._queues) == 2)
    sent_at = time.monotonic()
    wait_until(lambda: time.monotonic() - sent_at > 0.1)
    served.model.may_decode.set()
    for thread in (running, waiting):
        thread.join(WAIT_S)
    assert int(answers[0].headers["x-queue-time"]) >= 50
    total, queue, inference = (int(answers[0].headers[f"x-{part}-time"]) for part in ("total", "queue", "inference"))
    assert queue + inference <= total + 1  # each is rounded


def test_a_request_of_several_sequences_tells_their_sums(served):
    body = {"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    headers = served.post("/v1/completions", body).headers
    assert (headers["x-compute-characters"], headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("4", "4", "12")


# Deadlines


@pytest.fixture
def late(monkeypatch):
    """Answers while the device stands still after the first token; then it is past the deadline."""
    ahead_s = 0
    tokens = []
    now, take = time.monotonic, GeneratedSequence.take
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now() + ahead_s))
    monkeypatch.setattr(GeneratedSequence, "take", lambda *token: [take(*token), tokens.append(token)][0])

    def answer(served, route, body):
        nonlocal ahead_s
        served.model.may_decode.clear()
        asking = gevent.spawn(served.post, route, body)
        wait_until(lambda: tokens)
        ahead_s = 2 * DEADLINE_S
        response = asking.get(timeout=WAIT_S)
        ahead_s = 0
        tokens.clear()
        served.model.may_decode.set()
        return response

    return answer


def test_an_answer_ends_at_its_deadline_with_the_text_so_far(serve, late):
    served = serve(response_deadline=DEADLINE_S).get_ready()
    first = served.tokenizer.decode(served.expected("Hello", 1))
    response = late(served, "/generate", {"inputs": "Hello", "parameters": {"details": True}})
    assert (response.status_code, response.json["generated_text"]) == (200, first)
    assert (response.json["details"]["finish_reason"], response.json["details"]["generated_tokens"]) == ("length", 1)
    served.assert_idle()
    response = late(served, "/v1/completions", {"prompt": "Hello", "temperature": 0})
    assert response.json["choices"][0]["finish_reason"] == "length"
    assert response.json["usage"]["completion_tokens"] == 1
    served.assert_idle()


@pytest.fixture
def narrow(serve):
    """One slot and a deadline: of several sequences only the first has begun when it comes."""
    served = serve(slots=1, response_deadline=DEADLINE_S).get_ready()
    yield served
    served.assert_idle()


def test_at_the_deadline_the_best_is_one_that_has_begun(narrow, late):
    parameters = {"best_of": 2, "temperature": 0.5, "details": True, "decoder_input_details": True}
    response = late(narrow, "/generate", {"inputs": "Hello", "parameters": parameters})
    assert response.status_code == 200
    assert response.json["details"]["generated_tokens"] == 1
    (other,) = response.json["details"]["best_of_sequences"]
    assert (other["generated_tokens"], other["generated_text"]) == (0, "")
    assert [token["logprob"] for token in other["prefill"]] == [None] * 5
    narrow.assert_idle()
    body = {"prompt": ["Hello", "Hi"], "echo": True, "logprobs": 1, "temperature": 0}
    response = late(narrow, "/v1/completions", body)
    assert response.status_code == 200
    assert [len(choice["logprobs"]["tokens"]) for choice in response.json["choices"]] == [6, 2]


def test_an_invocation_has_a_deadline_of_its_own(serve, late):
    served = serve().get_ready()
    body = {"inputs": "Hello", "parameters": {"return_full_text": False}}
    assert late(served, "/invocations", body).json[0]["generated_text"] == served.tokenizer.decode(served.expected("Hello", 1))
    served.assert_idle()


def test_a_stream_has_no_deadline(serve):
    served = serve(response_deadline=1e-9).get_ready()
    stream = events(served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 12}}))
    assert len(stream) == len(served.expected("Hello", 12))


def test_who_has_only_waited_until_the_deadline_is_told_to_come_again(serve):
    served = serve(slots=1, response_deadline=0.3).get_ready()
    served.model.may_decode.clear()
    busy = served.post("/generate_stream", {"inputs": "a"}, buffered=False)
    response = served.post("/generate", {"inputs": "c"})
    assert (response.status_code, response.json["error_type"]) == (429, "overloaded")
    assert "Retry-After" in response.headers
    served.model.may_decode.set()
    busy.close()
    served.assert_idle()
