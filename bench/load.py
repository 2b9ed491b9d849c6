"""A load generator for servers that speak TGI's HTTP API or OpenAI's: streams, and what a client sees of them.

    .venv/bin/python bench/load.py http://127.0.0.1:8080 [--concurrency 1 4 16] [--requests 32] [--tokens 64]

A stream notes the time of every read and keeps its bytes; what they say is looked at when the load is over, so that a server
on the same cores is disturbed as little as can be. Nothing grows without a bound: so many streams at a time, so many tokens
each, so many seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 120.0
RETRY_S = 1.0  # as the server's Retry-After says
LAST_CHUNK = b"\r\n0\r\n\r\n"
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1}


class LoadError(Exception):
    """A server that cannot be measured; the message says why in one line."""


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked. `model` is set for OpenAI's API and None for TGI's."""

    url: SplitResult
    model: str | None = None
    api_key: str | None = None
    ignores_eos: bool = True  # takes `ignore_eos`, which is none of OpenAI's own parameters

    @property
    def name(self) -> str:
        return f"{self.url.geturl()} ({'TGI' if self.model is None else 'OpenAI'}'s API)"

    def request(self, prompt: str, tokens: int, sampling: dict | None = None) -> bytes:
        """The bytes of a request for a stream of so many tokens; greedy without `sampling`."""
        if self.model is None:
            path, body = "/generate_stream", {"inputs": prompt}
            body["parameters"] = {"max_new_tokens": tokens, "do_sample": bool(sampling)} | (sampling or {})
        else:
            path, body = "/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True}
            body |= {"stream_options": {"include_usage": True}} | (sampling or {"temperature": 0})
            body |= {"ignore_eos": True} if self.ignores_eos else {}
        written = json.dumps(body).encode()
        head = [f"POST {self.url.path.rstrip('/')}{path} HTTP/1.1", f"Host: {self.url.netloc}"]
        head += ["Content-Type: application/json", f"Content-Length: {len(written)}", "Accept: text/event-stream"]
        head += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join(head).encode() + b"\r\n\r\n" + written


class Stream(asyncio.Protocol):
    """One request on a connection of its own. Times are perf_counter's, in seconds."""

    def __init__(self, request: bytes):
        loop = asyncio.get_running_loop()
        self._request = request
        self._tail = b""
        self.reads: list[tuple[float, bytes]] = []
        self.started_at = time.perf_counter()  # connecting is a part of it
        self.begun, self.done = loop.create_future(), loop.create_future()  # the first event; the end

    def connection_made(self, transport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))
        self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        if not self.begun.done() and b"data:" in data:
            self.begun.set_result(None)
        if self._tail == LAST_CHUNK or self._is_whole_error():
            self._transport.close()

    def _is_whole_error(self) -> bool:
        """An answer that is no stream comes in one piece, with a length, and is small."""
        if b" 200 " in self.reads[0][1][:15]:
            return False
        head, _, body = b"".join(data for _at, data in self.reads).partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        return len(body) >= int(length.split(b":")[1])

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.begun, self.done):
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        self._transport.abort()

    @property
    def is_refused(self) -> bool:
        return bool(self.reads) and b" 429 " in self.reads[0][1][:15]


@dataclass
class Answer:
    """What a client sees of a stream: when each token came. Those that came in one read have the same time."""

    started_at: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0  # as the server counts them, where it does; else as many as there were events
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
        if not stream.reads:
            answer.error = "the connection was closed without an answer"
            return answer
        if b" 200 " not in stream.reads[0][1][:15]:
            answer.error = b"".join(data for _at, data in stream.reads)[:2000].decode(errors="replace").replace("\r\n", " ")
            return answer
        for at, event in events(stream.reads):
            if b'"error"' in event and "error" in (told := json.loads(event)):
                answer.error = str(told["error"])
            elif brings_token(event):
                answer.times.append(at)
            elif b'"usage":' in event and (usage := json.loads(event).get("usage")):
                answer.tokens = usage["completion_tokens"]
        answer.tokens = answer.tokens or len(answer.times)
        if not answer.times:
            answer.error = answer.error or "the stream brought no token"
        return answer


def events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """What follows `data:` in each event, and when its last byte came."""
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


def brings_token(event: bytes) -> bool:
    if b'"token":' in event:
        return True
    if not event.startswith(b"{"):
        return False  # [DONE]
    choices = json.loads(event).get("choices") or [{}]
    return bool(choices[0].get("text") or (choices[0].get("delta") or {}).get("content"))


async def open_stream(target: Target, request: bytes) -> Stream:
    secure = ssl.create_default_context() if target.url.scheme == "https" else None
    port = target.url.port or (443 if secure else 80)
    _transport, stream = await asyncio.get_running_loop().create_connection(
        lambda: Stream(request), target.url.hostname, port, ssl=secure
    )
    return stream


async def ask(target: Target, request: bytes) -> Answer:
    """One stream from its beginning to its end."""
    started_at = time.perf_counter()
    try:
        stream = await open_stream(target, request)
    except OSError as error:
        return Answer(started_at, error=str(error))
    stream.started_at = started_at
    try:
        await asyncio.wait_for(stream.done, TIMEOUT_S)
    except asyncio.TimeoutError:
        stream.close()
        return Answer(started_at, error=f"no end within {TIMEOUT_S:.0f} s")
    return Answer.of(stream)


async def closed_loop(target: Target, requests: Sequence[bytes], concurrency: int) -> list[Answer]:
    """So many at a time: the next begins when one has ended."""
    waiting, answers = iter(requests), []

    async def client() -> None:
        for request in waiting:
            answers.append(await ask(target, request))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers


@dataclass
class Window:
    """Streams that were all running for a while: what each brought between `opened_at` and `closed_at`."""

    opened_at: float
    closed_at: float
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        return sum(self.opened_at <= at < self.closed_at for answer in self.answers for at in answer.times)

    @property
    def tokens_per_s(self) -> float:
        """From the first to the last token of each stream in the window: no part of a step is counted or left out."""
        return sum((len(times) - 1) / (times[-1] - times[0]) for times in self._times())

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for times in self._times() for before, after in pairwise(times)]

    def _times(self) -> list[list[float]]:
        """Of the streams that brought two tokens or more: one that stood still adds nothing."""
        found = [[at for at in answer.times if self.opened_at <= at < self.closed_at] for answer in self.answers]
        if not any(len(times) > 1 for times in found):
            raise LoadError(f"no stream brought two tokens within {self.closed_at - self.opened_at:.1f} s")
        return [times for times in found if len(times) > 1]


async def saturate(
    target: Target, requests: Sequence[bytes], rounds: int, seconds: float, settle_s: float, on_round
) -> list[Window]:
    """Opens a stream for each request, waits until all have a token, and looks at `rounds` windows of `seconds` each. The
    streams are cut off then. `on_round` is called before the first window and after each."""
    streams = await asyncio.gather(*(open_stream(target, request) for request in requests))
    try:
        await asyncio.wait_for(asyncio.gather(*(stream.begun for stream in streams)), TIMEOUT_S)
        await asyncio.sleep(settle_s)
        marks = []
        for number in range(rounds + 1):
            marks.append(time.perf_counter())
            on_round()
            if number < rounds:
                await asyncio.sleep(seconds)
        if ended := [stream for stream in streams if stream.done.done()]:
            told = Answer.of(ended[0]).error or "it was too short"
            raise LoadError(f"{len(ended)} of {len(streams)} streams ended while they were measured: {told}")
    except asyncio.TimeoutError:
        raise LoadError(f"not every stream began within {TIMEOUT_S:.0f} s: are there as many slots as streams?") from None
    finally:
        for stream in streams:
            stream.close()
    answers = [Answer.of(stream) for stream in streams]
    return [Window(opened_at, closed_at, answers) for opened_at, closed_at in pairwise(marks)]


async def besiege(target: Target, requests: Sequence[bytes], clients: int, settle_s: float, seconds: float) -> Window:
    """So many clients for a while: each asks again when it has had its answer, or RETRY_S after it was refused."""
    streams: list[Stream] = []
    waiting = cycle(requests)

    async def client() -> None:
        while True:
            streams.append(stream := await open_stream(target, next(waiting)))
            try:
                await stream.done
            finally:
                stream.close()
            if stream.is_refused:
                await asyncio.sleep(RETRY_S)

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    await asyncio.sleep(settle_s)
    opened_at = time.perf_counter()
    await asyncio.sleep(seconds)
    closed_at = time.perf_counter()
    ended = [Answer.of(stream) for stream in streams if stream.done.done() and not stream.is_refused]
    for task in tasks:
        task.cancel()
    if broken := [end for end in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(end, Exception)]:
        raise LoadError(f"{len(broken)} of {clients} clients failed, the first with: {broken[0]!r}")
    if failed := [answer.error for answer in ended if answer.error]:
        raise LoadError(f"{len(failed)} of {len(ended)} requests failed, the first with: {failed[0]}")
    answers = [Answer.of(stream) for stream in streams if stream.reads and not stream.is_refused]
    return Window(opened_at, closed_at, answers)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def find(url: str, api_key: str | None = None, model: str | None = None) -> Target:
    """Which API a server speaks; with the name of a model, how it speaks OpenAI's. Raises LoadError where it speaks neither."""
    target = Target(urlsplit(url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"), api_key=api_key)
    if model is None:
        if _get(target, "/info").get("model_id"):
            return target
        models = _get(target, "/v1/models").get("data")
        if not models:
            raise LoadError(f"{url}: neither GET /info (TGI) nor GET /v1/models (OpenAI) tells a model; is it ready?")
        model = models[0]["id"]
    for ignores_eos in (True, False):
        target = Target(target.url, model, api_key, ignores_eos)
        answer = asyncio.run(ask(target, target.request("Hello", 2)))
        if answer.error is None:
            return target
    raise LoadError(f"{url} answers a request for a completion with: {answer.error}")


def _get(target: Target, path: str) -> dict:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    request = urllib.request.Request(target.url.geturl() + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            told = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise LoadError(f"{target.url.geturl()} wants an API key ({error.code}): give it in API_KEY") from None
        return {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{target.url.geturl()}{path}: {error}") from None
    return told if isinstance(told, dict) else {}


def prompt_of(words: int, number: int = 0) -> str:
    """Another text for each number, so that no server can know its beginning."""
    return f"Text number {number}: " + "What is deep learning, and what is it not? " * (words // 9 + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=32, help="of each concurrency")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--words", type=int, default=90, help="of each prompt")
    parser.add_argument("--sample", action="store_true", help=f"with {SAMPLED}; greedy without it")
    args = parser.parse_args()
    try:
        target = find(args.url, os.environ.get("API_KEY"))
    except LoadError as error:
        sys.exit(f"error: {error}")
    print(f"{target.name}\n{'':12} {'tokens/s':>9} {'ttft p50':>9} {'p99 ms':>9} {'itl p50':>9} {'p99 ms':>9} {'errors':>7}")
    for concurrency in args.concurrency:
        prompts = [prompt_of(args.words, number) for number in range(max(args.requests, concurrency))]
        requests = [target.request(prompt, args.tokens, SAMPLED if args.sample else None) for prompt in prompts]
        started_at = time.perf_counter()
        answers = asyncio.run(closed_loop(target, requests, concurrency))
        wall_s = time.perf_counter() - started_at
        good = [answer for answer in answers if answer.error is None]
        if not good:
            sys.exit(f"error: {answers[0].error}")
        ttft, gaps = [answer.ttft_s * 1e3 for answer in good], [gap * 1e3 for answer in good for gap in answer.gaps_s]
        told = [sum(answer.tokens for answer in good) / wall_s, statistics.median(ttft), percentile(ttft, 0.99)]
        told += [statistics.median(gaps or [0.0]), percentile(gaps or [0.0], 0.99)]
        print(f"{concurrency:12} " + " ".join(f"{value:9.1f}" for value in told) + f" {len(answers) - len(good):7}")


if __name__ == "__main__":
    main()
