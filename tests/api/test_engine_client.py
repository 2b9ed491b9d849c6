"""The worker as a web process sees it, with the test in the place of the worker."""

import msgspec
import pytest
import zmq.green as zmq
from gevent.queue import SimpleQueue

from api.engine_client import EngineClient
from protocol import Cancel, End, FromWeb, Generate, SubmitRequests, Token, Tokens

WAIT_S = 20


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
    assert client.is_idle and "cannot be read" in caplog.text
    client.submit([Generate(2, [5], 9)], messages)
    assert isinstance(msgspec.msgpack.decode(router.recv_multipart()[1], type=FromWeb), SubmitRequests)
    router.send_multipart([peer, msgspec.msgpack.encode(Tokens([Token(2, 7, None)]))])
    assert messages.get(timeout=WAIT_S) == [Token(2, 7, None)]
