"""The ASGI application of a replica: passes each request on to a server, and its response back as it comes.

Owns the two HTTP connections of a request. Bytes pass unchanged: what a route means is the server's business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from urllib.parse import quote

import aiohttp
from yarl import URL

from deploy.ray.affinity import SESSION_HEADER, candidates, session_of

BLUEPRINT_PREFIX = "/serve"  # under which the Ray Serve blueprint for Inferentia is reached
# Belong to one connection, or are added by each HTTP server itself; Ray adds `x-request-id`, with the value
# that it passes on.
DROPPED = {
    b"connection",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"expect",
    b"content-length",
}
DROPPED_OF_RESPONSES = DROPPED - {b"content-length"} | {b"date", b"server", b"x-request-id"}
# The second one: its node is gone.
CANNOT_CONNECT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Proxy:
    """An ASGI application in front of the server `own`, which prefers others of `addresses()` for sessions
    (affinity.py)."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        own: str,
        addresses: Callable[[], Collection[str]],
        payload_limit: int,
        client_timeout_s: float,
    ):
        self._session = session
        self._own = own
        self._addresses = addresses
        self._payload_limit = payload_limit
        self._client_timeout_s = client_timeout_s
        # The own server; else it is the last resort, not the one that answers fastest, with errors.
        self.is_healthy = True

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
        elif scope["type"] == "http":
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: dict, receive: Callable, send: Callable) -> None:
        path = _path(scope)
        try:
            body = await asyncio.wait_for(self._body(receive), self._client_timeout_s)
        except asyncio.TimeoutError:
            limit = f"--client-timeout (CLIENT_TIMEOUT) {self._client_timeout_s:g} s"
            return await _send_error(send, path, 408, "timeout", f"the request did not arrive within {limit}")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in DROPPED
        ]
        query = scope["query_string"].decode("latin-1")
        target = path + ("?" + query if query else "")
        try:
            response = await self._request(scope["method"], path, target, headers, body)
        except CANNOT_CONNECT:
            return await _send_error(send, path, 503, "unavailable", "No replica can be reached")
        except aiohttp.ClientError:  # it may have been processed, so no other server gets it
            what = "The replica's server ended before it answered"
            return await _send_error(send, path, 503, "unavailable", what)
        try:
            await _send_response(send, path, response)
        finally:
            response.close()  # after a client disconnect, which cancels this: the server frees the slot

    async def _body(self, receive: Callable) -> bytes:
        """The request's body; of one above the server's limit just enough for the server to refuse it."""
        body = bytearray()
        while len(body) <= self._payload_limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        return bytes(body)

    async def _request(
        self, method: str, path: str, target: str, headers: list, body: bytes
    ) -> aiohttp.ClientResponse:
        """The beginning of the response of the first candidate that can be reached. Another replica's server
        that is full (429) is passed over; the answer of the own server, or of the last candidate, counts.
        Raises the error of the last candidate if it cannot be reached."""
        header = next((value for name, value in headers if name.lower() == SESSION_HEADER), None)
        servers = candidates(session_of(path, header, body), self._own, self._addresses())
        servers.sort(key=lambda server: server == self._own and not self.is_healthy)
        for server in servers:
            is_last = server == servers[-1]
            url = URL(f"http://{server}{target}", encoded=True)
            try:
                response = await self._session.request(
                    method,
                    url,
                    headers=headers,
                    data=body or None,
                    allow_redirects=False,
                    skip_auto_headers=SKIPPED,
                )
            except CANNOT_CONNECT:
                if is_last:
                    raise
                continue
            if server == self._own and response.status == 503:
                self.is_healthy = False
            if response.status != 429 or server == self._own or is_last:
                return response
            response.release()
        raise AssertionError("there is always a candidate")


SKIPPED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # which aiohttp would add


def _path(scope: dict) -> str:
    """The path as the server knows it, percent-encoded: without the prefix of the Serve application, and
    without the blueprint's."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    if path.startswith(BLUEPRINT_PREFIX + "/"):
        path = path.removeprefix(BLUEPRINT_PREFIX)
    return quote(path, safe="/:@!$&'()*+,;=~")


async def _send_response(send: Callable, path: str, response: aiohttp.ClientResponse) -> None:
    headers = [(name.lower(), value) for name, value in response.raw_headers]
    headers = [(name, value) for name, value in headers if name not in DROPPED_OF_RESPONSES]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    try:
        async for piece in response.content.iter_any():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except aiohttp.ClientError:
        if response.content_type == "text/event-stream":
            event = error_json(path, "unavailable", "The replica's server ended")
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
        raise  # which cuts the connection: the response is not whole
    await send({"type": "http.response.body", "body": b""})


async def _send_error(send: Callable, path: str, status: int, kind: str, message: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": error_json(path, kind, message)})


def error_json(path: str, kind: str, message: str) -> bytes:
    """The error in the shape of the route's API: Anthropic's, OpenAI's on /v1 routes, else TGI's."""
    if path.startswith("/v1/messages"):
        error = {"type": "error", "error": {"type": "api_error", "message": message}, "request_id": None}
    elif path.startswith("/v1/"):
        error = {"error": {"message": message, "type": "server_error", "param": None, "code": kind}}
    else:
        error = {"error": message, "error_type": kind}
    return json.dumps(error).encode()
