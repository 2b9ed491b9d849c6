"""A load generator for servers with TGI's HTTP API or OpenAI's: streams, and when each of their tokens arrived.

A stream notes the time of every read and keeps its bytes; they are parsed when the load is over, so that a server on the same
cores is disturbed little. figures.py, peers.py and long_prompt.py use its `Answer`s and `Window`s. Does not start servers.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 300.0
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1}


class LoadError(RuntimeError):
    """A server that cannot be measured; the message says why in one line."""


@dataclass(frozen=True)
class Target:
    """A server and its API. `model` is set for OpenAI's API and None for TGI's."""

    url: SplitResult
    model: str | None = None
    api_key: str | None = None
    ignores_eos: bool = True  # accepts `ignore_eos`, which OpenAI's own API lacks

    def request(self, prompt: str, tokens: int, sampling: dict | None = None) -> bytes:
        """The bytes of a request for a stream of at most `tokens` tokens; greedy without `sampling`."""
        if self.model is None:
            path, body = "/generate_stream", {"inputs": prompt}
            body["parameters"] = {"max_new_tokens": tokens, "do_sample": bool(sampling)} | (sampling or {})
        else:
            path, body = ("/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True})
            body |= {"stream_options": {"include_usage": True}} | (sampling or {"temperature": 0})
            body |= {"ignore_eos": True} if self.ignores_eos else {}
        return self._post(path, body)

    def chat(self, prompt: str, tokens: int, tools: Sequence[dict] = ()) -> bytes:
        """The bytes of a request for a greedy stream of OpenAI's Chat API, in which the model may call `tools`."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True, "temperature": 0}
        return self._post("/v1/chat/completions", body | ({"tools": tools} if tools else {}))

    def _post(self, path: str, body: dict) -> bytes:
        written = json.dumps(body).encode()
        head = [f"POST {self.url.path.rstrip('/')}{path} HTTP/1.1", f"Host: {self.url.netloc}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(written)}", "Accept: text/event-stream"]
        head += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join(head).encode() + b"\r\n\r\n" + written


class Stream(asyncio.Protocol):
    """One request on a connection of its own. Times are perf_counter's, in seconds."""

    def __init__(self, request: bytes, started_at: float):
        loop = asyncio.get_running_loop()
        self._request = request
        self.started_at = started_at  # before connecting
        self.reads: list[tuple[float, bytes]] = []
        self.begun, self.done = loop.create_future(), loop.create_future()  # the first event; the end

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))
        if not self.begun.done() and b"data:" in data:
            self.begun.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.begun, self.done):
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        self.transport.abort()


@dataclass
class Answer:
    """When each token of a stream arrived; tokens that came in one read have the same time."""

    started_at: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0  # as the server counts them, or the number of events
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.started_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @classmethod
    def of(cls, stream: Stream) -> Answer:
        answer = cls(stream.started_at)
        whole = b"".join(data for _at, data in stream.reads)
        if b" 200 " not in whole[:15]:
            answer.error = whole[:2000].decode(errors="replace").replace("\r\n", " ") or "closed without a response"
            return answer
        for at, event in events(stream.reads):
            if b'"error"' in event and "error" in (body := json.loads(event)):
                answer.error = str(body["error"])
            elif has_token(event):
                answer.times.append(at)
            elif b'"usage":' in event and (usage := json.loads(event).get("usage")):
                answer.tokens = usage["completion_tokens"]
        answer.tokens = answer.tokens or len(answer.times)
        if not answer.times:
            answer.error = answer.error or "the stream had no token"
        return answer


def events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """What follows `data:` in each event, and when its last byte arrived."""
    raw = body = b""
    in_body, left = False, 0
    for at, data in reads:
        raw += data
        if not in_body:
            head, found, raw_body = raw.partition(b"\r\n\r\n")
            if not found:
                continue
            in_body, raw = True, raw_body
            is_chunked = b"transfer-encoding: chunked" in head.lower()
        while raw:
            if not is_chunked:
                body, raw = body + raw, b""
            elif left:
                body, raw, left = body + raw[:left], raw[left:], max(0, left - len(raw))
            else:
                size, found, rest = raw.removeprefix(b"\r\n").partition(b"\r\n")
                if not found:
                    break
                raw, left = rest, int(size.split(b";")[0], 16)
        *whole, body = body.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if event.startswith(b"data:"):
                yield at, event[5:].strip()


def has_token(event: bytes) -> bool:
    if b'"token":' in event:
        return True
    if not event.startswith(b"{"):
        return False  # [DONE]
    choices = json.loads(event).get("choices") or [{}]
    return bool(choices[0].get("text") or (choices[0].get("delta") or {}).get("content"))


async def open_stream(target: Target, request: bytes) -> Stream:
    secure, started_at = target.url.scheme == "https" or None, time.perf_counter()
    port = target.url.port or (443 if secure else 80)
    connect = asyncio.get_running_loop().create_connection
    _transport, stream = await connect(lambda: Stream(request, started_at), target.url.hostname, port, ssl=secure)
    return stream


async def ask(target: Target, request: bytes) -> Answer:
    """One whole stream; what went wrong is in the `error` of what it returns."""
    started_at = time.perf_counter()
    try:
        stream = await open_stream(target, request)
    except OSError as error:
        return Answer(started_at, error=str(error))
    try:
        await asyncio.wait_for(stream.done, TIMEOUT_S)
    except asyncio.TimeoutError:
        stream.close()
        return Answer(started_at, error=f"no end within {TIMEOUT_S:.0f} s")
    return Answer.of(stream)


async def closed_loop(target: Target, requests: Sequence[bytes], concurrency: int) -> list[Answer]:
    """`concurrency` requests at a time: the next begins when one has ended. Raises LoadError when one fails."""
    waiting, answers = iter(requests), []

    async def client() -> None:
        for request in waiting:
            answers.append(await ask(target, request))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    if failed := [answer.error for answer in answers if answer.error]:
        raise LoadError(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
    return answers


@dataclass
class Window:
    """Streams that were all running between `opened_at` and `closed_at`; `spent` is what the caller's clocks counted then."""

    opened_at: float
    closed_at: float
    answers: list[Answer]
    spent: list[float]

    @property
    def seconds(self) -> float:
        return self.closed_at - self.opened_at

    @property
    def tokens_per_s(self) -> float:
        """From the first to the last token of each stream in the window, so that no part of a step is counted or left out."""
        return sum((len(times) - 1) / (times[-1] - times[0]) for times in self._times())

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for times in self._times() for before, after in pairwise(times)]

    def _times(self) -> list[list[float]]:
        found = [[at for at in answer.times if self.opened_at <= at < self.closed_at] for answer in self.answers]
        if not any(len(times) > 1 for times in found):
            raise LoadError(f"no stream had two tokens within {self.seconds:.1f} s")
        return [times for times in found if len(times) > 1]


async def saturate(
    target: Target, requests: Sequence[bytes], rounds: int, seconds: float, clocks: Callable[[], list[float]]
) -> list[Window]:
    """Opens a stream for each request, waits until all have a token, and measures `rounds` windows of `seconds` each. The
    streams are closed then. `clocks` is read at the borders of the windows. Raises LoadError."""
    streams = await asyncio.gather(*(open_stream(target, request) for request in requests))
    try:
        await asyncio.wait_for(asyncio.gather(*(stream.begun for stream in streams)), TIMEOUT_S)
        await asyncio.sleep(min(0.5, seconds))
        marks = []
        for number in range(rounds + 1):
            marks.append((time.perf_counter(), clocks()))
            if number < rounds:
                await asyncio.sleep(seconds)
        if ended := [stream for stream in streams if stream.done.done()]:
            reason = Answer.of(ended[0]).error or "it was too short"
            raise LoadError(f"{len(ended)} of {len(streams)} streams ended while they were measured: {reason}")
    except asyncio.TimeoutError:
        raise LoadError(f"not every stream began within {TIMEOUT_S:.0f} s: are there as many slots as streams?") from None
    finally:
        for stream in streams:
            stream.close()
    answers = [Answer.of(stream) for stream in streams]
    return [
        Window(opened_at, closed_at, answers, [later - earlier for earlier, later in zip(before, after)])
        for (opened_at, before), (closed_at, after) in pairwise(marks)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def find(url: str, api_key: str | None = None, model: str | None = None) -> Target:
    """The API of a server; with a model's name, the form of OpenAI's. Raises LoadError where it has neither."""
    target = Target(urlsplit(url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"), api_key=api_key)
    if model is None:
        if _get(target, "/info").get("model_id"):
            return target
        models = _get(target, "/v1/models").get("data")
        if not models:
            raise LoadError(f"{url}: neither GET /info nor GET /v1/models names a model; is it ready, and is API_KEY its key?")
        model = models[0]["id"]
    for ignores_eos in (True, False):
        target = Target(target.url, model, api_key, ignores_eos)
        answer = asyncio.run(ask(target, target.request("Hello", 2)))
        if answer.error is None:
            return target
    raise LoadError(f"{url} responds to a completion request with: {answer.error}")


def _get(target: Target, path: str) -> dict:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    request = urllib.request.Request(target.url.geturl() + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except urllib.error.HTTPError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{target.url.geturl()}{path}: {error}") from None


def prompt_of(words: int, number: int = 0) -> str:
    """Another text for each number, so that no server has its prefix in a cache."""
    return f"Text number {number}: " + "What is deep learning, and what is it not? " * (words // 9 + 1)
