"""Streams that go past gunicorn: what a client reads is what it would have read otherwise, and whatever goes wrong on the way
harms nobody else."""

import json
import re
import socket
import threading
import time

import pytest
from gunicorn import util
from served import WAIT_S, wait_until

import schema
import web
from connections import Outlet
from protocol import End

# With this seed a text begins with a whole character and has 40 tokens.
LONG = {"max_new_tokens": 40, "details": True, "temperature": 2.0, "seed": 11}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "ignore_eos": True, "seed": 11, "temperature": 2}
COMPLETION = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "seed": 11, "temperature": 2}
USAGE = {"stream_options": {"include_usage": True}}
STREAMS = {
    "native": ("/generate_stream", {"inputs": "Hello", "parameters": LONG}),
    "native, top tokens": ("/generate_stream", {"inputs": "Hello", "parameters": LONG | {"top_n_tokens": 3}}),
    "native, stop string": ("/generate_stream", {"inputs": "Hello", "parameters": LONG | {"stop": ["%s", "never this"]}}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, two choices": ("/v1/chat/completions", CHAT | USAGE | {"n": 2}),
    "chat, log-probabilities": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}),
    "chat, stop string": ("/v1/chat/completions", CHAT | {"stop": ["%s", "never this"]}),
    "completion": ("/v1/completions", COMPLETION),
    "completion, two prompts": ("/v1/completions", COMPLETION | USAGE | {"prompt": ["ab", "c"], "echo": True, "logprobs": 2}),
}


class Client:
    """Reads a stream that is served as gunicorn would serve it, chunks and all, through a socket."""

    def __init__(self, served, monkeypatch, protocol="HTTP/1.1"):
        self.served, self.protocol = served, protocol
        self.ours, self.theirs = socket.socketpair()
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.calls, self.past = [], []  # what went past gunicorn
        self.past_before_head = None
        self.data = b""
        self.error = None
        self._asking = None
        self._ended = threading.Event()
        calls, past = self.calls, self.past

        class Call(web.Call):
            def __init__(self, *args):
                calls.append(self)
                super().__init__(*args)

        class Spy(Outlet):
            def write(self, part):
                past.append((threading.current_thread().name, part))
                return super().write(part)

        monkeypatch.setattr(web, "Call", Call)
        monkeypatch.setattr(web.connections, "Outlet", Spy)

    def begin(self, route, body):
        """Asks, with a device that stands still, until the first event has gone and the rest is waited for."""
        self.start(route, body)
        wait_until(lambda: self.calls and self.calls[0]._is_lent)

    def start(self, route, body):
        self.served.assert_idle()  # or the step that stands still is another's
        self.calls.clear()
        self.served.model.may_decode.clear()
        self._asking = threading.Thread(target=self._ask, args=(route, body | {"stream": True}))
        self._asking.start()

    def _ask(self, route, body):
        environ = {"gunicorn.socket": self.ours, "SERVER_PROTOCOL": self.protocol}
        response = self.served.post(route, body, environ_overrides=environ, buffered=False)
        try:
            for part in response.response:  # with the first of them goes the head
                if self.past_before_head is None:
                    self.past_before_head = list(self.past)
                util.write(self.ours, part, chunked=self.protocol == "HTTP/1.1")
            self.ours.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.error = error
        finally:
            response.close()
            self._ended.set()

    def read(self):
        """All of the stream, as a client sees it."""
        self.theirs.settimeout(WAIT_S)
        while piece := self.theirs.recv(65536):
            self.data += piece
        return dechunked(self.data) if self.protocol == "HTTP/1.1" else self.data

    def wait_ended(self):
        assert self._ended.wait(WAIT_S), "its thread still waits"

    def close(self):
        self.served.model.may_decode.set()
        self.theirs.close()
        if self._asking:
            self._asking.join(WAIT_S)
        self.ours.close()


@pytest.fixture
def client(served, monkeypatch):
    client = Client(served, monkeypatch)
    yield client
    client.close()


def dechunked(data):
    body = b""
    while data:
        size, data = data.split(b"\r\n", 1)
        length = int(size, 16)
        body, end, data = body + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n"
    return body


def plain(served, route, body):
    return served.post(route, body | {"stream": True}).get_data()


def without_ids(stream):
    return re.sub(rb'"(id":"[a-z]+-[0-9a-f]+|created":\d+)', b"", stream)


def with_a_stop(served, route, body):
    """`body` with a stop string from the middle of its own answer, if it is to have one."""
    if b"%s" not in json.dumps(body).encode():
        return body
    events = [json.loads(line[6:]) for line in plain(served, route, body).splitlines() if line.startswith(b"data: {")]
    texts = [e["token"]["text"] if "token" in e else e["choices"][0]["delta"].get("content") or "" for e in events]
    text = "".join(texts)
    firsts = (character for at, character in enumerate(text) if at > 5 and text.find(character) == at)
    stop = next(character for character in firsts if character != "\ufffd")
    return json.loads(json.dumps(body).replace('"%s"', json.dumps(stop)))


@pytest.mark.parametrize("kind", STREAMS)
def test_past_gunicorn_a_client_reads_the_same(served, client, kind):
    route, body = STREAMS[kind]
    body = with_a_stop(served, route, body)
    expected = plain(served, route, body)
    client.begin(route, body)
    served.model.may_decode.set()
    assert by_choice(client.read()) == by_choice(expected)
    assert client.past, "none of it went that way"
    assert {name for name, _ in client.past} == {"web-socket"}
    client.wait_ended()
    served.assert_idle()


def by_choice(stream):
    """Events in order, those of each choice for themselves: which of two sequences is a step ahead is nobody's promise."""
    choices = {}
    for line in without_ids(stream).split(b"\n\n"):
        found = re.search(rb'"choices":\[\{"index":(\d)', line)
        choices.setdefault(found and found[1], []).append(line)
    return choices


def test_a_client_of_http_1_0_reads_no_chunks(served, monkeypatch):
    route, body = STREAMS["native"]
    expected = plain(served, route, body)
    client = Client(served, monkeypatch, "HTTP/1.0")
    client.begin(route, body)
    served.model.may_decode.set()
    assert client.read() == expected
    assert client.past
    client.close()


def test_a_client_that_does_not_read_delays_nobody_and_misses_nothing(served, client):
    route, body = STREAMS["native, top tokens"]
    expected = plain(served, route, body)
    assert len(expected) > 10_000, "more than fits between the two"
    client.begin(route, body)
    served.model.may_decode.set()
    for _ in range(3):
        assert served.post("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 30}}).status_code == 200
    wait_until(lambda: served.worker.scheduler.busy == 0)
    assert not client._ended.is_set(), "its own thread waits for it"
    assert client.read() == expected
    client.wait_ended()


def test_a_client_that_never_reads_is_given_up(served, client):
    client.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, b"\0" * 8 + (100_000).to_bytes(8, "little"))
    client.begin(*STREAMS["native, top tokens"])
    served.model.may_decode.set()
    client.wait_ended()
    assert isinstance(client.error, BlockingIOError), "who serves the connection is told"
    assert client.calls[0].is_settled


def test_a_client_whose_connection_breaks_is_noticed_with_its_next_token(served, client, monkeypatch):
    monkeypatch.setattr(web, "HANG_UP_POLL_S", WAIT_S)
    client.begin(*STREAMS["native"])
    client.theirs.close()
    served.model.may_decode.set()
    client.wait_ended()
    served.assert_idle()


def test_a_failure_of_the_device_is_an_event(served, client):
    client.begin(*STREAMS["native"])
    served.model.fail_next_decode = True
    served.model.may_decode.set()
    *_, last = client.read().strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error_type"] == "generation"


def test_a_bug_of_ours_ends_that_stream_alone(served, client, monkeypatch, caplog):
    client.begin(*STREAMS["native"])
    monkeypatch.setattr(web.NativeAnswer, "_event", lambda *_, **__: 1 / 0)
    served.model.may_decode.set()
    *_, last = client.read().strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error_type"] == "internal"
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert served.post("/generate", {"inputs": "Hello"}).status_code == 200


def test_a_stream_whose_text_is_held_back_is_kept_open_with_comments(served, client, monkeypatch):
    route, body = STREAMS["chat"]
    text = served.post(route, body).json["choices"][0]["message"]["content"]
    body = body | {"stop": [text + "never this"]}
    expected = plain(served, route, body)
    client.begin(route, body)
    monkeypatch.setattr(web, "KEEP_ALIVE_S", 0.0)
    served.model.may_decode.set()
    stream = client.read()
    assert b":\n\n" in [part for _, part in client.past]
    assert without_ids(stream).replace(b":\n\n", b"") == without_ids(expected)


def test_nothing_goes_past_gunicorn_before_the_head_of_the_answer(served, client, monkeypatch):
    """An answer whose first tokens have no text yet has not begun."""
    real = web.NativeAnswer._event

    def silent_at_first(answer, *args, **options):
        event = real(answer, *args, **options)
        return event if answer._index > 3 else b""

    monkeypatch.setattr(web.NativeAnswer, "_event", silent_at_first)
    route, body = STREAMS["native"]
    expected = plain(served, route, body)
    client.start(route, body)
    wait_until(lambda: client.calls and client.calls[0].first_token_at)
    served.model.may_decode.set()
    assert client.read() == expected
    assert client.past_before_head == []


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions"])
def test_a_whole_answer_wakes_its_thread_when_it_ends_and_not_before(served, monkeypatch, route):
    wakes = []
    real = web.Call._receive
    monkeypatch.setattr(web.Call, "_receive", lambda call: wakes.append(1) or real(call))
    body = {"inputs": "Hello", "parameters": LONG} if route == "/generate" else CHAT
    served.post(route, body)
    served.model.may_decode.clear()
    whole = []
    asking = threading.Thread(target=lambda: whole.append(served.post(route, body).json))
    wakes.clear()
    asking.start()
    wait_until(lambda: served.worker.scheduler.busy == 1)
    served.model.may_decode.set()
    asking.join(WAIT_S)
    usage = whole[0].get("usage") or {"completion_tokens": whole[0]["details"]["generated_tokens"]}
    assert usage["completion_tokens"] == 40
    assert len(wakes) <= 3, "once for the prompt, once for the end"


def call_on(served, **options):
    request = schema.parse(json.dumps({"inputs": "Hello", "parameters": LONG}).encode(), schema.GenerateRequest)
    job = schema.check(request, served.config, served.info, streaming=True)
    return web.Call(served.seen, [job], time.monotonic(), **options)


def test_what_a_client_did_not_take_goes_before_what_comes_after(served):
    """The word that the relay is over is handed out alone, so that what it left is flushed before a failure is told."""
    call = call_on(served)
    call.close()
    while call._inbox.qsize():
        call._inbox.get()
    end = End(next(iter(call._by_id)), "failed", "on purpose")
    call._take_in([])
    call._take_in([end])
    assert [call._wait(), call._wait()] == [[], [end]]


def test_a_hang_up_is_noticed_though_messages_keep_coming(served, monkeypatch):
    monkeypatch.setattr(web, "HANG_UP_POLL_S", 0.0)
    call = call_on(served, client_is_gone=lambda: True)
    wait_until(call._inbox.qsize)
    with pytest.raises(web.ClientGone):
        next(iter(call))
    call.close()
