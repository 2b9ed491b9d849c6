"""What a replica does with a request whose session belongs to another replica, and with its server's log, without Ray."""

import asyncio
import contextlib
import http.server
import json
import socket
import threading

import aiohttp
import pytest

from deploy.ray import server as server_module
from deploy.ray.affinity import candidates, session_of
from deploy.ray.proxy import Proxy, error_json
from deploy.ray.server import Server, ServerError


@contextlib.contextmanager
def own_server():
    """The address of a server that answers every request with 200."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{running.server_port}"
        running.shutdown()


@contextlib.contextmanager
def lost_server():
    """An address that answers no packet, as that of a node that is gone: the kernel drops what a full queue cannot take."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def status(own, addresses, session):
    """The status of the response to a request of a session."""
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request"}

    headers = [(b"host", b"x"), (b"x-session-id", session.encode())]
    scope = {"type": "http", "method": "GET", "path": "/info", "query_string": b"", "headers": headers}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=0.3)) as client:
        await Proxy(client, own, lambda: addresses, 1000, 10)(scope, receive, send)
    return messages[0]["status"]


def test_a_session_whose_node_is_gone_is_answered_by_another_replica():
    with own_server() as own, lost_server() as lost:
        session = next(name for name in map(str, range(100)) if candidates(name, own, [own, lost])[0] == lost)
        assert asyncio.run(status(own, [own, lost], session)) == 200


def test_the_turns_of_a_conversation_in_anthropics_messages_have_one_session():
    def session(system, *texts):
        messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant", "user"], texts)]
        return session_of("/v1/messages", None, json.dumps({"system": system, "messages": messages}).encode())

    assert session("Be brief.", "Hi") == session("Be brief.", "Hi", "Hello", "Why?")
    assert len({session("Be brief.", "Hi"), session("Be long.", "Hi"), session("Be brief.", "Ho")}) == 3


def test_an_error_has_the_shape_of_the_routes_api():
    written = {
        path: json.loads(error_json(path, "unavailable", "Gone"))
        for path in ("/generate", "/v1/chat/completions", "/v1/messages")
    }
    assert [error["error"] if isinstance(error["error"], str) else error["error"]["message"] for error in written.values()] == [
        "Gone"
    ] * 3
    assert written["/generate"]["error_type"] == written["/v1/chat/completions"]["error"]["code"] == "unavailable"
    assert written["/v1/messages"]["type"] == "error"


@pytest.mark.parametrize("body", [b"[" * 200_000, b"{", b"\xff", b"1", json.dumps({"messages": [{"role": {}}]}).encode()])
def test_a_body_that_is_no_chat_has_no_session(body):
    assert session_of("/v1/chat/completions", None, body) is None


def test_a_log_line_that_is_no_text_does_not_end_the_log(tmp_path, monkeypatch, capfd):
    script = tmp_path / "entrypoint.sh"
    script.write_text("#!/bin/sh\nprintf '\\377\\n' >&2\necho 'error: the reason' >&2\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(server_module, "ENTRYPOINT", script)

    async def start():
        async with aiohttp.ClientSession() as client:
            await Server("127.0.0.1", [], 1).wait_ready(client)

    with pytest.raises(ServerError, match="ended with code 2: error: the reason"):
        asyncio.run(start())
