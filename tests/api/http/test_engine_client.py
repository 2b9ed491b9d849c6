"""The worker as a web process sees it, with the test in the place of the worker."""

import functools
import threading
import time
from types import SimpleNamespace

import gevent
import msgspec
import pytest
import zmq.green as zmq
from gevent.queue import SimpleQueue
from model_info import info_of
from served import WAIT_S, wait_until

import web
from api.generation.prepared_request import ModelText
from api.http import engine_client
from api.http.engine_client import EngineClient
from protocol import Cancel, End, FromWeb, Generate, Status, SubmitRequests, Token, Tokens


@pytest.fixture
def worker(tmp_path):
    """Its socket, and the client that is connected to it."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/worker.sock")
    client = EngineClient(f"ipc://{tmp_path}/worker.sock", lambda info: None)
    peer, _hello = router.recv_multipart()
    yield router, peer, client
    client.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "tokens", "tokens": [[1, "no id", None]]})])
def test_a_message_that_cannot_be_decoded_ends_the_open_requests_with_an_error(worker, caplog, body):
    router, peer, client = worker
    messages = SimpleQueue()
    client.submit([Generate(1, [5], 9)], messages)
    router.recv_multipart()
    router.send_multipart([peer, body])
    assert messages.get(timeout=WAIT_S) == [End(1, "failed", "the worker's message cannot be read")]
    assert msgspec.msgpack.decode(router.recv_multipart()[1], type=FromWeb) == Cancel(1, "unreadable")
    assert not client._queues and "cannot be read" in caplog.text
    client.submit([Generate(2, [5], 9)], messages)
    assert isinstance(msgspec.msgpack.decode(router.recv_multipart()[1], type=FromWeb), SubmitRequests)
    router.send_multipart([peer, msgspec.msgpack.encode(Tokens([Token(2, 7, None)]))])
    assert messages.get(timeout=WAIT_S) == [Token(2, 7, None)]


def test_a_web_process_that_did_not_run_for_a_while_does_not_take_the_worker_for_stuck(worker, monkeypatch, tmp_path):
    """The worker's messages of that time have arrived, and nobody has read them yet."""
    router, _peer, _client = worker
    offset_s = 0.0
    now = time.monotonic
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: now() + offset_s))
    client = EngineClient(f"ipc://{tmp_path}/worker.sock", lambda info: "text")
    try:
        peer, _hello = router.recv_multipart()

        def tell(message):
            router.send_multipart([peer, msgspec.msgpack.encode(message)])

        tell(Status("ready"))
        tell(info_of("m", None, "folder", 9, [0], 2, 9, 10, "cpu", "float32"))
        wait_until(lambda: client.phase == "ready")
        offset_s = 60
        assert client.phase == "ready"
        tell(Status("ready", late=True))
        wait_until(lambda: client.phase == "stuck")
        tell(Status("ready"))
        wait_until(lambda: client.phase == "ready")
    finally:
        client.close()


def test_a_new_web_process_accepts_nothing_before_it_can_serve_what_the_worker_accepts(served, monkeypatch):
    monkeypatch.setattr(engine_client, "FIRST_MESSAGE_S", WAIT_S)
    may_load = threading.Event()
    newcomer = EngineClient(served.address, lambda info: may_load.wait(WAIT_S) and ModelText.load(info, served.config))
    try:
        waiting = gevent.spawn(newcomer.wait_until_known)
        wait_until(lambda: newcomer.phase == "loading")
        assert not waiting.ready()
        may_load.set()
        waiting.join(WAIT_S)
        assert newcomer.phase == "ready" and waiting.ready()
    finally:
        may_load.set()
        newcomer.close()


@pytest.mark.parametrize("path", ["/generate", "/health", "/ping", "/"])
def test_a_request_to_a_web_process_that_still_loads_the_tokenizer_waits_for_it(served, path):
    """Another web process has said that the server is ready."""
    may_load = threading.Event()
    newcomer = EngineClient(served.address, lambda info: may_load.wait(WAIT_S) and ModelText.load(info, served.config))
    client = web.create_app(served.config, newcomer, served.store).test_client()
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}
    ask = functools.partial(client.post, json=body) if path == "/generate" else client.get
    try:
        wait_until(lambda: newcomer.phase == "loading")
        asking = gevent.spawn(ask, path)
        gevent.sleep(0.1)
        assert not asking.ready()
        may_load.set()
        assert asking.get(timeout=WAIT_S).status_code == 200
    finally:
        may_load.set()
        newcomer.close()


@pytest.mark.parametrize("path", ["/info", "/health"])
def test_a_request_waits_a_moment_for_the_news_that_the_worker_is_ready(booting, monkeypatch, path):
    """Another web process has had it, and has told the client."""
    monkeypatch.setattr(engine_client, "SPREAD_S", WAIT_S)
    wait_until(lambda: booting.seen.phase == "starting")
    asking = gevent.spawn(booting.client.get, path)
    gevent.sleep(0)
    booting.get_ready()
    assert asking.get(timeout=WAIT_S).status_code == 200


def test_a_text_that_cannot_be_loaded_ends_the_process_with_one_line(served, caplog):
    def load(info):
        raise OSError("the file is gone")

    newcomer = EngineClient(served.address, load)
    with pytest.raises(SystemExit):
        newcomer.has_text.wait()
    newcomer.close()
    assert f"the tokenizer in {served.folder} cannot be loaded: the file is gone" in caplog.text


def test_a_web_process_waits_neither_for_a_worker_that_boots_nor_for_one_that_is_not_there(serve, tmp_path, monkeypatch):
    served = serve()
    monkeypatch.setattr(engine_client, "FIRST_MESSAGE_S", WAIT_S)
    monkeypatch.setattr(engine_client, "LOADING_S", 10 * WAIT_S)
    with gevent.Timeout(2 * WAIT_S):
        served.seen.wait_until_known()
    assert served.seen.phase == "starting" and served.seen.text is None
    monkeypatch.setattr(engine_client, "FIRST_MESSAGE_S", 0.01)
    alone = EngineClient(f"ipc://{tmp_path}/nobody.sock", lambda info: None)
    alone.wait_until_known()
    assert alone.phase == "starting"
    alone.close()
