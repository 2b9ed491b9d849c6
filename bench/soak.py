"""Keeps a server busy with everything that clients do, kills its API server processes, and accounts for every request.

    python bench/soak.py [--minutes 10] [--url http://HOST:PORT] [--json FILE] [--seed N]        (or: make soak MINUTES=10)

Without --url it starts the server itself: entrypoint.sh with the demonstration model, a few slots and three API server
processes, of which it kills one now and then; the first is spared, to be watched from beginning to end. Streams, whole
completions and chats are mixed with clients that disconnect at any moment, write or read slowly, send invalid requests, or
arrive in crowds.

At the end each request that was sent has been completed with the output that the same request got at first, alone; or was
rejected as it should be, was cancelled by its client, or was open on a process when that was killed. Nothing is left behind: no
request, no descriptor, no memory. Exit code 1 when that does not hold. Does not measure speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import urlsplit

import launch
from load import Stream

SLOTS, CONCURRENT, WEB_PROCESSES = 4, 16, 3
CLIENTS = 12  # at a time, crowds apart
CROWD = 3 * CONCURRENT
CROWD_EVERY_S, KILL_EVERY_S, SAMPLE_EVERY_S = 6.0, 12.0, 1.0
TIMEOUT_S = 60  # no request takes that long here
IDLE_S = 20  # for everything to be released after the last request
WARM_UP = 1 / 2  # of a process' life, which does not count for its growth
JUDGED_S = 120  # growth is judged when it was watched for that long after it
GROWTH_MB = 10
LEAVING = ("disconnects", "does not read")  # clients that cancel
PROBES = ("/health", "/metrics", "/live", "/info", "/v1/models", "/ping")
PROMPTS = ["What is Deep Learning?", "What is continuous batching?", "Who are you?"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
}
SETTINGS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 60},
    {"max_new_tokens": 40, "do_sample": True, "temperature": 1.2, "seed": 7},
    {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11},
    {"max_new_tokens": 40, "repetition_penalty": 1.3, "stop": [" the "]},
    {"max_new_tokens": 60, "do_sample": True, "temperature": 1.2, "seed": 5, "grammar": {"type": "json", "value": SCHEMA}},
]


class Ask(NamedTuple):
    """A request whose output is known: `family` names those that get the same, `read` finds the outputs in a body."""

    kind: str
    family: str
    path: str
    body: dict
    read: Callable[[bytes], tuple[str, ...]]


class Wrong(Exception):
    """A response that is not what it should be."""


def events(body: bytes, ends_with_done: bool) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: ")]
    if ends_with_done and (not lines or lines.pop() != "[DONE]"):
        raise Wrong("the stream does not end with [DONE]")
    found = [json.loads(line) for line in lines]
    if errors := [event for event in found if "error" in event]:
        raise Wrong(f"the stream ends with {errors[0]}")
    return found


def native_stream(body: bytes) -> tuple[str, ...]:
    found = events(body, ends_with_done=False)
    if not found or found[-1]["generated_text"] is None:
        raise Wrong("the stream has no last event")
    if [event["index"] for event in found] != list(range(1, len(found) + 1)):
        raise Wrong("events are missing from the stream")
    text = "".join(event["token"]["text"] for event in found if not event["token"]["special"])
    if text != found[-1]["generated_text"]:
        raise Wrong("the texts of the stream do not add up to its last")
    return (text,)


def openai_whole(body: bytes) -> tuple[str, ...]:
    return tuple(one["message"]["content"] if "message" in one else one["text"] for one in json.loads(body)["choices"])


def openai_stream(body: bytes) -> tuple[str, ...]:
    texts: dict[int, str] = defaultdict(str)
    finished = set()
    for choice in (choice for event in events(body, ends_with_done=True) for choice in event["choices"]):
        texts[choice["index"]] += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        finished |= {choice["index"]} if choice["finish_reason"] else set()
    if finished != set(texts):
        raise Wrong("a choice of the stream has no end")
    return tuple(texts[index] for index in sorted(texts))


def asks() -> list[Ask]:
    made = []
    for p, prompt in enumerate(PROMPTS):
        for s, parameters in enumerate(SETTINGS):
            body = {"inputs": prompt, "parameters": parameters | {"return_full_text": False}}
            detailed = {"inputs": prompt, "parameters": body["parameters"] | {"details": True, "top_n_tokens": 5}}
            openai = {"temperature": parameters.get("temperature", 0), "seed": parameters.get("seed")}
            openai |= {"max_tokens": parameters["max_new_tokens"], "n": 1 + (s == 2)}
            if "grammar" in parameters:
                openai["response_format"] = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
            chat, text = (openai | {"messages": [{"role": "user", "content": prompt}]}, openai | {"prompt": prompt})
            for kind, family, path, sent, read in (
                ("whole", "native", "/generate", body, lambda raw: (json.loads(raw)["generated_text"],)),
                ("stream", "native", "/generate_stream", body, native_stream),
                ("stream", "native", "/generate_stream", detailed, native_stream),
                ("stream", "native", "/", body | {"stream": True}, native_stream),
                ("whole", "native", "/invocations", body, lambda raw: (json.loads(raw)[0]["generated_text"],)),
                ("whole", "native", "/vertex", {"instances": [body]}, lambda raw: tuple(json.loads(raw)["predictions"])),
                ("chat", "chat", "/v1/chat/completions", chat, openai_whole),
                ("/v1 stream", "chat", "/v1/chat/completions", chat | {"stream": True}, openai_stream),
                ("whole", "text", "/v1/completions", text, openai_whole),
                ("/v1 stream", "text", "/v1/completions", text | {"stream": True}, openai_stream),
            ):
                made.append(Ask(kind, f"{family} {p}.{s}", path, sent, read))
    return made


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: soak", "Connection: close", f"Content-Type: {content_type}"]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode()


def bad_requests() -> list[tuple[bytes, int]]:
    """Invalid requests, as bytes, and the status that each must get."""
    deep = b"[" * 140_000 + b"]" * 140_000
    of_status = {
        400: [b"", b"{inputs: 1", b'{"inputs":"\xff\xfe"}', b'{"inputs":"a","x":' + deep + b"}"],
        413: [b'{"inputs":"' + b"a" * 2_500_000 + b'"}'],
        422: [b'{"inputs":["a"]}', b'{"inputs":"a","parameters":{"top_p":7}}', b'{"inputs":"' + b"word " * 20_000 + b'"}'],
    }
    return [(post("/generate", body), status) for status in of_status for body in of_status[status]] + [
        (post("/generate", b'{"inputs":"a"}', content_type="text/plain"), 415),
        (post("/v1/chat/completions", b'{"messages":[]}'), 400),
        (post("/nothing", b"{}"), 404),
        (get("/generate", "PUT"), 405),
        (b"HELLO\r\n\r\n", 400),
        (get("/health")[:-2] + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (post("/generate", b"xyz\r\n").replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
    ]


@dataclass
class Ledger:
    """Every request is recorded when it is sent, and when it has ended."""

    sent: Counter = field(default_factory=Counter)  # by kind
    right: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)  # by status
    cancelled: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)
    right_texts: int = 0

    @property
    def open(self) -> int:
        return self.sent.total() - self.right.total() - self.refused.total() - self.cancelled - self.cut - len(self.wrong)

    def problems(self) -> list[str]:
        found = [f"{len(self.wrong)} requests went wrong; the first: {self.wrong[0]}"] if self.wrong else []
        return found + ([f"{self.open} requests never ended"] if self.open else [])


class Connection(Stream):
    """A client's connection. `was_killed`: the process at its other end was killed meanwhile."""

    def __init__(self):
        super().__init__(b"", 0.0)
        self.was_killed, self.pause_s = False, 0.0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.pause_s and not self.transport.is_closing():
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(self.pause_s, self.transport.resume_reading)

    async def exchange(self, raw: bytes) -> tuple[int, bytes]:
        """Sends a request; returns the response's status and body when the server has closed the connection."""
        self.transport.write(raw)
        await asyncio.shield(self.done)
        received = io.BytesIO(b"".join(data for _at, data in self.reads))
        response = http.client.HTTPResponse(SimpleNamespace(makefile=lambda _mode: received))
        response.begin()
        return response.status, response.read()


class Traffic:
    """Everything that is sent to one server, and the ledger of it."""

    def __init__(self, host: str, port: int, is_ours: bool, seed: int):
        self.host, self.port = host, port
        self.random = random.Random(seed)
        self.ledger, self.until = Ledger(), 0.0
        self.connections: set[Connection] = set()
        self._texts: dict[str, tuple[str, ...]] = {}
        self._asks, self._bad = asks(), bad_requests()
        self._acts = {"plain": 10.0, "disconnects": 4.0, "no request": 3.0, "slow to write": 1.0, "slow to read": 1.0}
        # Other servers' timeouts for a request that never ends are unknown.
        self._acts |= {"dry_run": 4.0, "does not read": 1.0, "never done writing": 0.5 if is_ours else 0.0}

    async def count(self, kind: str, wanted: set[int], ask: Ask | None, exchange) -> None:
        """Enters one request. `exchange` is called with a new connection and returns (status, body)."""
        self.ledger.sent[kind] += 1
        connection = None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
            self.connections.add(connection)
            status, body = await asyncio.wait_for(exchange(connection), TIMEOUT_S)
            if status not in wanted | {429, 503}:
                raise Wrong(f"status {status}, not {sorted(wanted)}: {body[:200]!r}")
            if status in wanted and ask:
                self._check(ask, body)
            elif status not in wanted:
                json.loads(body)
            counter, key = (self.ledger.right, kind) if status == 200 else (self.ledger.refused, status)
            counter[key] += 1
        except asyncio.TimeoutError:
            if kind in LEAVING:
                self.ledger.cancelled += 1
            else:
                self.ledger.wrong.append(f"{kind}: no response in {TIMEOUT_S} s")
        except (OSError, http.client.HTTPException, Wrong, ValueError, KeyError, IndexError, TypeError) as error:
            if isinstance(error, (OSError, http.client.HTTPException)) and connection and connection.was_killed:
                self.ledger.cut += 1
            else:
                self.ledger.wrong.append(f"{kind}: {error!r}")
        finally:
            if connection is not None:
                connection.close()
                await connection.done
                self.connections.discard(connection)

    def _check(self, ask: Ask, body: bytes) -> None:
        text = ask.read(body)
        if text != self._texts.setdefault(ask.family, text):
            raise Wrong(f"{ask.path} {ask.body}: {text!r} instead of {self._texts[ask.family]!r}")
        self.ledger.right_texts += 1

    async def ask(self, ask: Ask) -> None:
        raw = post(ask.path, json.dumps(ask.body).encode())
        await self.count(ask.kind, {200}, ask, lambda connection: connection.exchange(raw))

    async def act(self, kind: str = "") -> None:
        """One request, as a client of that kind sends it; of a random kind without one."""
        kind = kind or self.random.choices(list(self._acts), list(self._acts.values()))[0]
        ask = self.random.choice(self._asks)
        raw, wanted, check = post(ask.path, json.dumps(ask.body).encode()), {200}, ask
        seconds = self.random.choice([0.0, 0.02, 0.2, 0.6, 1.5]) * self.random.random()
        if kind == "no request":
            raw, status = self.random.choice(self._bad)
            wanted, check = {status}, None
        elif kind == "dry_run":
            raw, check = get(self.random.choice(PROBES)), None
        elif kind == "never done writing":
            raw, wanted, check = raw[: -self.random.randint(1, 20)], {408}, None
        elif kind == "does not read":  # half a megabyte of response stays in the server
            raw = post("/tokenize", json.dumps({"inputs": "ab " * 10_000}).encode())
        elif kind == "disconnects" and self.random.random() < 0.5:  # before the request is whole
            raw = raw[: self.random.randint(0, len(raw))]

        async def exchange(connection: Connection) -> tuple[int, bytes]:
            at = 0
            if kind == "slow to write":
                for end in sorted(self.random.randrange(len(raw)) for _ in range(6)):
                    connection.transport.write(raw[at:end])
                    at = end
                    await asyncio.sleep(0.3 * self.random.random())
            connection.pause_s = {"slow to read": 0.02, "does not read": TIMEOUT_S}.get(kind, 0.0)
            return await asyncio.wait_for(connection.exchange(raw[at:]), seconds if kind in LEAVING else None)

        await self.count(ask.kind if kind == "plain" else kind, wanted, check, exchange)

    async def learn_the_texts(self) -> None:
        """Each output, requested alone."""
        for ask in {ask.family: ask for ask in reversed(self._asks)}.values():
            while ask.family not in self._texts and not self.ledger.wrong:
                await self.ask(ask)

    async def client(self) -> None:
        while time.monotonic() < self.until:
            await self.act()
            await asyncio.sleep(self.random.expovariate(20))

    async def crowds(self) -> None:
        while time.monotonic() < self.until:
            await asyncio.gather(*(self.act("plain" if number % 5 else "disconnects") for number in range(CROWD)))
            await asyncio.sleep(CROWD_EVERY_S * self.random.uniform(0.3, 1.7))

    async def gauges(self) -> dict[str, float]:
        """Requests that wait, and slots that are in use."""
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
        _status, body = await connection.exchange(get("/metrics"))
        found = dict(line.rsplit(" ", 1) for line in body.decode().splitlines())
        return {name: float(found[name]) for name in ("tgi_queue_size", "tgi_slots_busy")}


class Server:
    """The server that is started here, its processes and their memory."""

    def __init__(self, folder: Path):
        port = launch.free_port()
        settings = {"MAX_BATCH_SIZE": SLOTS, "MAX_CONCURRENT_REQUESTS": CONCURRENT, "WEB_CONCURRENCY": WEB_PROCESSES}
        settings |= {"CLIENT_TIMEOUT": 5, "PAYLOAD_LIMIT": 300_000, "THREADS": 1}  # the clients are on the same machine
        environment = launch.clean_environment(folder, port, **{name: str(value) for name, value in settings.items()})
        self.process = launch.Server([launch.HERE / "entrypoint.sh", "serve"], port, folder / "log", environment)
        self.rss: dict[int, list[tuple[float, float]]] = defaultdict(list)  # (minutes, MB) by process
        self.names: dict[int, str] = {}
        self.kills = 0

    def wait_ready(self) -> None:
        self.process.wait_ready()
        self.master, self.spared, *_ = self.process.pids("web.py")
        (self.worker,) = self.process.pids("worker.py")
        self.names = {self.worker: "worker", self.master: "gunicorn", self.spared: "spared web"}

    @property
    def web(self) -> list[int]:
        return [pid for pid in self.process.pids("web.py") if pid != self.master]

    def sample(self, now: float) -> None:
        for pid in (self.worker, self.master, *self.web):
            with contextlib.suppress(OSError, IndexError):
                self.rss[pid].append((now / 60, launch.rss_mb(pid)))

    async def kill_one(self, traffic: Traffic) -> None:
        """Stops an API server process, marks the connections that it holds, and kills it."""
        others = [pid for pid in self.web if pid != self.spared]
        if not others:
            return
        pid = traffic.random.choice(others)
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "TZ":
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # for connections that it has accepted and that are not known here yet
        links = (os.path.realpath(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
        inodes = {link.rpartition("[")[2].rstrip("]") for link in links if "socket:[" in link}
        for _ in range(5):  # the table is read in pieces; rows are left out where it changes meanwhile
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            ports = {int(row[2].split(":")[1], 16) for row in rows if row[9] in inodes}
            for connection in traffic.connections:
                connection.was_killed |= connection.transport.get_extra_info("sockname")[1] in ports
        os.kill(pid, signal.SIGKILL)
        self.kills += 1

    def descriptors(self) -> dict[int, int]:
        """How many each process has open, except pipes: API server processes start others for chat templates on demand.
        Raises OSError when one ends meanwhile."""
        found = {}
        for pid in (self.worker, self.master, *self.web):
            links = (os.path.realpath(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
            found[pid] = sum("pipe:[" not in link for link in links)
        return found

    def leftovers(self, before: dict[int, int]) -> list[str]:
        """What the processes hold beyond `before`, when no request is open."""
        try:
            now = self.descriptors()
        except OSError as error:
            return [repr(error)]
        found = [] if len(now) == len(before) else [f"{len(now)} processes instead of {len(before)}"]
        for pid, held in now.items():
            if held != (held_before := before.get(pid, before[self.spared])):
                found.append(f"{self.names.get(pid, 'web')} {pid} has {held} descriptors, {held_before} before")
        return found

    def growth(self) -> list[dict]:
        """For each process its memory in MB, and the slope of it after the warm-up."""
        found = []
        for pid, points in self.rss.items():
            begins = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
            watched = [point for point in points if point[0] >= begins]
            slope = statistics.linear_regression(*zip(*watched)).slope if len(watched) > 1 else 0.0
            sizes = {"first_mb": points[0][1], "last_mb": points[-1][1], "most_mb": max(mb for _, mb in points)}
            minutes = watched[-1][0] - watched[0][0]
            found.append({"process": f"{self.names.get(pid, 'web')} {pid}", "minutes": minutes, "mb_per_minute": slope} | sizes)
        return found


async def leftovers(traffic: Traffic, server: Server | None, before: dict) -> list[str]:
    """What the server still holds IDLE_S after the last request."""
    give_up_at = time.monotonic() + IDLE_S
    while True:
        found = [f"not idle: {name} {value}" for name, value in (await traffic.gauges()).items() if value]
        found += server.leftovers(before) if server else []
        if not found or time.monotonic() > give_up_at:
            return found
        await asyncio.sleep(0.2)


async def run(traffic: Traffic, server: Server | None, minutes: float) -> dict:
    await traffic.learn_the_texts()
    if server:
        await asyncio.sleep(2.5)  # for the last connections to be closed
    before = server.descriptors() if server else {}
    started_at = time.monotonic()
    traffic.until = started_at + 60 * minutes

    async def watch() -> None:
        kill_at = started_at + min(KILL_EVERY_S, 60 * minutes * 0.4)
        while (now := time.monotonic()) < traffic.until:
            if server:
                server.sample(now - started_at)
                if now >= kill_at:
                    await server.kill_one(traffic)
                    kill_at = now + KILL_EVERY_S * traffic.random.uniform(0.5, 2)
            print(f"\r{now - started_at:.0f} of {60 * minutes:.0f} s, {traffic.ledger.sent.total():,} requests", end="")
            await asyncio.sleep(SAMPLE_EVERY_S)
        print()

    await asyncio.gather(watch(), traffic.crowds(), *(traffic.client() for _ in range(CLIENTS)))
    problems = await leftovers(traffic, server, before)
    ledger = traffic.ledger
    report = vars(ledger) | {"texts_compared": ledger.right_texts, "health_probes": ledger.right["dry_run"]}
    report |= {"kills": server.kills, "processes": server.growth()} if server else {"kills": 0, "processes": []}
    for process in report["processes"]:
        grown = process["mb_per_minute"] * process["minutes"]
        if 60 * process["minutes"] >= JUDGED_S and grown > GROWTH_MB:
            problems.append(f"{process['process']} grew by {grown:.1f} MB, more than {GROWTH_MB}")
    if server:
        if (tracebacks := server.process.log.count("Traceback")) > 0:
            problems.append(f"{tracebacks} tracebacks in the log; it ends with:\n{server.process.log[-2000:]}")
        if (code := await asyncio.to_thread(server.process.stop, 60)) != 0:
            problems.append(f"the server ended with {code}")
    report["problems"] = ledger.problems() + problems
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--url", help="a running server; its processes are left alone")
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    parser.add_argument("--seed", type=int, help="of what the clients do; what time it takes is chance")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    with contextlib.ExitStack() as stack:
        server = None
        if not arguments.url:
            server = Server(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="textgen-soak-"))))
            stack.enter_context(server.process)
            server.wait_ready()
        at = urlsplit(arguments.url or server.process.url)
        print(f"soak of {at.geturl()} for {arguments.minutes:g} minutes, seed {seed}", flush=True)
        traffic = Traffic(at.hostname, at.port or 80, server is not None, seed)
        report = asyncio.run(run(traffic, server, arguments.minutes)) | {"seed": seed}
    print(json.dumps(report, indent=1))
    print("FAILED" if report["problems"] else "Every request is accounted for, every output is right, nothing is left behind.")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
