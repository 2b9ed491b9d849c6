"""Keeps a server busy with everything that clients do, kills its web processes meanwhile, and accounts for every request.

    python bench/soak.py [--minutes 10] [--url http://HOST:PORT] [--json FILE] [--seed N]        (or: make soak MINUTES=10)

Without --url it starts the server itself: entrypoint.sh with the demonstration model, a few slots and three web processes, of
which it kills one now and then; the first is spared, to be watched from beginning to end. Streams, whole answers and chats
are mixed with clients that hang up at any moment, dawdle over writing or reading, send what is no request, or come in crowds.

At the end each request that was sent has been answered right (its text is the one that the same request got at the start,
alone), was refused as it should be, was given up by its client, or was open on a process at the moment that it was killed.
Nothing else, and nothing is left behind: no request, no descriptor, no memory. Exit code 1 when that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

HERE = Path(__file__).resolve().parent.parent

SLOTS, CONCURRENT, WEB_PROCESSES = 4, 16, 3
CLIENT_TIMEOUT_S, PAYLOAD_LIMIT = 5, 300_000
CLIENTS = 12  # at a time, crowds apart
CROWD = 3 * CONCURRENT
CROWD_EVERY_S, KILL_EVERY_S, PROBE_EVERY_S, SAMPLE_EVERY_S, TELL_EVERY_S = 6.0, 12.0, 0.1, 1.0, 5.0
ANSWER_S = 60  # nothing takes that long here
IDLE_S = 20  # for everything to be given back after the last client
WEB_THREADS = CONCURRENT + 16 + 8 + 2  # what a web process may have besides those of the start
WARM_UP = 1 / 2  # of a process' life, which does not count for its growth
JUDGED_S = 120  # growth is judged when it was watched for that long after it
GROWTH_MB = 10  # along the line through the samples

PROMPTS = ["What is Deep Learning?", "What is continuous batching?", "Who are you?"]
SETTINGS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 60},
    {"max_new_tokens": 40, "do_sample": True, "temperature": 1.2, "seed": 7},
    {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11},
    {"max_new_tokens": 40, "repetition_penalty": 1.3, "stop": [" the "]},
]


# What is asked, and how its text is read.


@dataclass(frozen=True)
class Ask:
    """A request whose text is known: `family` names those that get the same."""

    kind: str
    family: str
    path: str
    body: dict
    read: Callable[[bytes], tuple[str, ...]]


class Wrong(Exception):
    """An answer that is not what it should be."""


def events(body: bytes, ends_with_done: bool) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: ")]
    if ends_with_done and (not lines or lines.pop() != "[DONE]"):
        raise Wrong("the stream does not end with [DONE]")
    told = [json.loads(line) for line in lines]
    for event in told:
        if "error" in event:
            raise Wrong(f"the stream ends with {event}")
    return told


def native(body: bytes) -> tuple[str, ...]:
    return (json.loads(body)["generated_text"],)


def native_in_list(body: bytes) -> tuple[str, ...]:
    return (json.loads(body)[0]["generated_text"],)


def native_stream(body: bytes) -> tuple[str, ...]:
    told = events(body, ends_with_done=False)
    if not told or told[-1]["generated_text"] is None:
        raise Wrong("the stream has no last event")
    if [event["index"] for event in told] != list(range(1, len(told) + 1)):
        raise Wrong("events are missing from the stream")
    text = "".join(event["token"]["text"] for event in told if not event["token"]["special"])
    if text != told[-1]["generated_text"]:
        raise Wrong("the texts of the stream do not add up to its last")
    return (text,)


def chat(body: bytes) -> tuple[str, ...]:
    return tuple(choice["message"]["content"] for choice in json.loads(body)["choices"])


def completion(body: bytes) -> tuple[str, ...]:
    return tuple(choice["text"] for choice in json.loads(body)["choices"])


def openai_stream(body: bytes) -> tuple[str, ...]:
    texts: dict[int, str] = defaultdict(str)
    finished = set()
    for event in events(body, ends_with_done=True):
        for choice in event["choices"]:
            texts[choice["index"]] += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            finished |= {choice["index"]} if choice["finish_reason"] else set()
    if finished != set(texts):
        raise Wrong("a choice of the stream has no end")
    return tuple(texts[index] for index in sorted(texts))


def predictions(body: bytes) -> tuple[str, ...]:
    return tuple(json.loads(body)["predictions"])


def asks() -> list[Ask]:
    made = []
    for p, prompt in enumerate(PROMPTS):
        for s, parameters in enumerate(SETTINGS):
            family, body = f"native {p}.{s}", {"inputs": prompt, "parameters": parameters | {"return_full_text": False}}
            more = {"inputs": prompt, "parameters": body["parameters"] | {"details": True, "top_n_tokens": 5}}
            made += [
                Ask("whole", family, "/generate", body, native),
                Ask("stream", family, "/generate_stream", body, native_stream),
                Ask("stream", family, "/generate_stream", more, native_stream),
                Ask("stream", family, "/", body | {"stream": True}, native_stream),
                Ask("whole", family, "/invocations", body, native_in_list),
                Ask("whole", family, "/vertex", {"instances": [body]}, predictions),
            ]
            seed = parameters.get("seed")
            temperature = {"temperature": parameters.get("temperature", 1.0), "seed": seed} if seed else {"temperature": 0}
            openai = temperature | {"max_tokens": parameters["max_new_tokens"], "n": 1 + (s == 2)}
            messages = openai | {"messages": [{"role": "user", "content": prompt}]}
            text = openai | {"prompt": prompt}
            made += [
                Ask("chat", f"chat {p}.{s}", "/v1/chat/completions", messages, chat),
                Ask("/v1 stream", f"chat {p}.{s}", "/v1/chat/completions", messages | {"stream": True}, openai_stream),
                Ask("whole", f"completion {p}.{s}", "/v1/completions", text, completion),
                Ask("/v1 stream", f"completion {p}.{s}", "/v1/completions", text | {"stream": True}, openai_stream),
            ]
    return made


def post(path: str, body: bytes, *more: str, content_type: str = "application/json") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: soak", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *more]
    return "".join(line + "\r\n" for line in [*lines, ""]).encode() + body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode()


def bad_requests() -> dict[str, tuple[bytes, int]]:
    """What is no request, as bytes, and the status that it must get."""

    def generate(body: bytes, **options) -> bytes:
        return post("/generate", body, "Connection: close", **options)

    def stream(body: bytes) -> bytes:
        return post("/generate_stream", body, "Connection: close")

    def chat(body: bytes) -> bytes:
        return post("/v1/chat/completions", body, "Connection: close")

    deep = 20_000
    return {
        "empty": (generate(b""), 400),
        "no JSON": (generate(b"{inputs: 1"), 400),
        "not UTF-8": (generate(b'{"inputs":"\xff\xfe"}'), 400),
        "half a character": (generate(b'{"inputs":"\\ud800"}'), 400),
        "NaN": (generate(b'{"inputs":"a","parameters":{"temperature":NaN}}'), 400),
        "1e999": (generate(b'{"inputs":"a","parameters":{"temperature":1e999}}'), 422),
        "deep": (generate(b'{"inputs":"a","x":' + b"[" * deep + b"]" * deep + b"}"), 400),
        "a number without end": (generate(b'{"inputs":"a","parameters":{"seed":' + b"9" * deep + b"}}"), 422),
        "wrong type": (generate(b'{"inputs":["a"]}'), 422),
        "wrong value": (generate(b'{"inputs":"a","parameters":{"top_p":7}}'), 422),
        "too long": (generate(json.dumps({"inputs": "word " * 20_000}).encode()), 422),
        "too large": (generate(b'{"inputs":"' + b"a" * 2_500_000 + b'"}'), 413),
        "grammar": (generate(b'{"inputs":"a","parameters":{"grammar":{"type":"json"}}}'), 422),
        "best_of in a stream": (stream(b'{"inputs":"a","parameters":{"best_of":2}}'), 422),
        "content type": (generate(b'{"inputs":"a"}', content_type="text/plain"), 415),
        "no messages": (chat(b'{"messages":[]}'), 422),
        "an image": (chat(b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}'), 422),
        "no such route": (post("/nothing", b"{}", "Connection: close"), 404),
        "no such method": (get("/generate", "PUT"), 405),
        "no such model": (get("/v1/models/nothing"), 404),
        "no HTTP": (b"HELLO\r\n\r\n", 400),
        "long headers": (get("/health")[:-2] + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        "no chunks": (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    }  # fmt: skip


# The ledger.


@dataclass
class Ledger:
    """Every request is entered when it is sent, and once more when it is over."""

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
        return found + ([f"{self.open} requests were never over"] if self.open else [])


@dataclass
class Connection:
    """A connection of ours, by its local port, so that it is known whose sockets a killed process held."""

    port: int
    was_killed: bool = False
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None


class ClientLeft(Exception):
    """The client gave the request up."""


class Traffic:
    """Everything that is sent to one server."""

    def __init__(self, host: str, port: int, is_ours: bool, seed: int):
        self.host, self.port, self.is_ours = host, port, is_ours
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.connections: dict[int, Connection] = {}
        self.texts: dict[str, tuple[str, ...]] = {}
        self.asks = asks()
        self.bad = bad_requests()
        self.until = 0.0

    async def connect(self, receive_bytes: int | None = None) -> Connection:
        sock = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.bind(("", 0))  # it is to be known by its port before a process can have it
        connection = self.connections[sock.getsockname()[1]] = Connection(sock.getsockname()[1])
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
            streams = await asyncio.open_connection(sock=sock, limit=receive_bytes or 2**20)
            connection.reader, connection.writer = streams
        except BaseException:
            del self.connections[connection.port]
            sock.close()
            raise
        return connection

    def close(self, connection: Connection, abruptly: bool = False) -> None:
        if abruptly:
            linger = struct.pack("ii", 1, 0)
            connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.writer.transport.abort()
        if self.connections.get(connection.port) is connection:  # the port may be another's already
            del self.connections[connection.port]
        connection.writer.close()

    async def count(self, kind: str, wanted: set[int], check: Callable[[bytes], None] | None, exchange, session=None) -> bool:
        """Enters one request. `exchange` sends it and returns (status, body); true when it was answered right."""
        self.ledger.sent[kind] += 1
        connection = session
        try:
            if connection is None:
                connection = await self.connect(receive_bytes=4096 if kind == "slow to read" else None)
            status, body = await asyncio.wait_for(exchange(connection), ANSWER_S)
            if status in wanted:
                if check:
                    check(body)
                if status == 200:
                    self.ledger.right[kind] += 1
                else:
                    self.ledger.refused[status] += 1
                return True
            if status in (429, 503):
                json.loads(body)
                self.ledger.refused[status] += 1
            else:
                raise Wrong(f"answered with {status}, not {sorted(wanted)}: {body[:200]!r}")
        except ClientLeft:
            self.ledger.cancelled += 1
        except asyncio.TimeoutError:
            self.ledger.wrong.append(f"{kind}: no answer in {ANSWER_S} s")
        except (OSError, asyncio.IncompleteReadError) as error:
            if connection is not None and connection.was_killed:
                self.ledger.cut += 1
            else:
                self.ledger.wrong.append(f"{kind}: the connection broke: {error!r}")
        except (Wrong, ValueError, KeyError, IndexError, TypeError) as error:
            self.ledger.wrong.append(f"{kind}: {error!r}")
        finally:
            if connection is not None and session is None:
                self.close(connection)
                with contextlib.suppress(OSError):
                    await connection.writer.wait_closed()
        return False

    def is_right(self, ask: Ask) -> Callable[[bytes], None]:
        def check(body: bytes) -> None:
            text = ask.read(body)
            if ask.family not in self.texts:
                self.texts[ask.family] = text
            if text != self.texts[ask.family]:
                raise Wrong(f"{ask.path} {ask.body}: {text!r} instead of {self.texts[ask.family]!r}")
            self.ledger.right_texts += 1

        return check

    def some(self, *kinds: str) -> Ask:
        return self.random.choice([ask for ask in self.asks if not kinds or ask.kind in kinds])

    # What clients do.

    async def ask(self, ask: Ask, session: Connection | None = None) -> bool:
        raw = post(ask.path, json.dumps(ask.body).encode(), *(() if session else ("Connection: close",)))
        return await self.count(ask.kind, {200}, self.is_right(ask), lambda c: exchange(c, raw), session)

    async def ask_once(self) -> None:
        await self.ask(self.some())

    async def stay(self) -> None:
        """Several requests on one connection."""
        try:
            session = await self.connect()
        except OSError as error:
            self.ledger.wrong.append(f"no connection: {error!r}")
            self.ledger.sent["whole"] += 1
            return
        try:
            for _ in range(self.random.randint(2, 5)):
                if not await self.ask(self.some(), session):
                    return
        finally:
            self.close(session)

    async def hang_up(self) -> None:
        ask = self.some()
        raw = post(ask.path, json.dumps(ask.body).encode())
        moment = self.random.choice(["in the headers", "in the body", "at once", "later", "later", "later"])
        seconds = self.random.choice([0.02, 0.2, 0.6, 1.5]) * self.random.random()
        abruptly = self.random.random() < 0.5

        async def exchange_and_leave(connection: Connection) -> tuple[int, bytes]:
            if moment == "later":
                with contextlib.suppress(asyncio.TimeoutError):
                    return await asyncio.wait_for(exchange(connection, raw), seconds)
            else:
                head = raw.index(b"\r\n\r\n") + 4
                most = {"in the headers": head - 1, "in the body": len(raw) - 1, "at once": len(raw)}[moment]
                least = {"in the headers": 0, "in the body": head, "at once": len(raw)}[moment]
                connection.writer.write(raw[: self.random.randint(least, most)])
                with contextlib.suppress(OSError):
                    await connection.writer.drain()
            self.close(connection, abruptly)
            raise ClientLeft

        await self.count("hangs up", {200}, self.is_right(ask), exchange_and_leave)

    async def send_nonsense(self) -> None:
        raw, status = self.bad[self.random.choice(list(self.bad))]
        await self.count("no request", {status}, None, lambda c: exchange(c, raw))

    async def write_slowly(self) -> None:
        ask = self.some()
        raw = post(ask.path, json.dumps(ask.body).encode(), "Connection: close")
        pauses = sorted(self.random.randrange(len(raw)) for _ in range(6))

        async def dawdle(connection: Connection) -> tuple[int, bytes]:
            for begin, end in zip([0, *pauses], [*pauses, len(raw)]):
                connection.writer.write(raw[begin:end])
                await connection.writer.drain()
                await asyncio.sleep(0.3 * self.random.random())
            return await answer(connection)

        await self.count("slow to write", {200}, self.is_right(ask), dawdle)

    async def never_finish_writing(self) -> None:
        ask = self.some()
        raw = post(ask.path, json.dumps(ask.body).encode())[: -self.random.randint(1, 20)]
        await self.count("never done writing", {408}, None, lambda c: exchange(c, raw))

    async def read_slowly(self) -> None:
        ask = self.some("stream", "/v1 stream")
        raw = post(ask.path, json.dumps(ask.body).encode(), "Connection: close")
        await self.count("slow to read", {200}, self.is_right(ask), lambda c: exchange(c, raw, pause_s=0.02))

    async def never_read(self) -> None:
        """An answer of half a megabyte, which nobody fetches."""
        raw = post("/tokenize", json.dumps({"inputs": "ab " * 10_000}).encode())
        seconds = 2 * self.random.random()

        async def wait_and_leave(connection: Connection) -> tuple[int, bytes]:
            connection.writer.transport.pause_reading()
            connection.writer.write(raw)
            await asyncio.sleep(seconds)
            self.close(connection, abruptly=True)
            raise ClientLeft

        await self.count("does not read", set(), None, wait_and_leave)

    async def infer(self, prompt: str | None = None) -> None:
        raw = get("/infer?sentence=" + quote(prompt or self.random.choice(PROMPTS)))
        ask = Ask("whole", "infer " + raw.decode(), "/infer", {}, lambda body: tuple(json.loads(body)))
        await self.count("whole", {200}, self.is_right(ask), lambda c: exchange(c, raw))

    # How it goes.

    async def learn_the_texts(self) -> None:
        """Each text, asked for alone."""
        for ask in {ask.family: ask for ask in reversed(self.asks)}.values():
            while ask.family not in self.texts and not self.ledger.wrong:
                await self.ask(ask)
        for prompt in PROMPTS:
            await self.infer(prompt)

    async def client(self) -> None:
        acts = {self.ask_once: 8, self.hang_up: 4, self.send_nonsense: 3, self.stay: 2, self.infer: 0.3}
        acts |= {self.write_slowly: 1, self.read_slowly: 1, self.never_read: 1}
        if self.is_ours:  # of others it is not known how long they wait
            acts[self.never_finish_writing] = 0.5
        while time.monotonic() < self.until:
            await self.random.choices(list(acts), list(acts.values()))[0]()
            await asyncio.sleep(self.random.expovariate(20))

    async def crowds(self) -> None:
        while time.monotonic() < self.until:
            await asyncio.sleep(CROWD_EVERY_S * self.random.uniform(0.3, 1.7))
            left = self.until - time.monotonic()
            if left > 0:
                crowd = [self.ask_once() for _ in range(CROWD)] + [self.hang_up() for _ in range(CROWD // 4)]
                await asyncio.gather(*crowd)


async def exchange(connection: Connection, raw: bytes, pause_s: float = 0.0) -> tuple[int, bytes]:
    """Sends a request and reads its answer. What is refused may be so before it has been taken whole."""
    try:
        connection.writer.write(raw)
        await connection.writer.drain()
    except ConnectionError:
        pass
    return await answer(connection, pause_s)


async def answer(connection: Connection, pause_s: float = 0.0) -> tuple[int, bytes]:
    reader = connection.reader
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split()[1])
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"]))
    body = b""
    while headers.get("transfer-encoding") == "chunked":
        size = int(await reader.readuntil(b"\r\n"), 16)
        body += (await reader.readexactly(size + 2))[:-2]
        if not size:
            break
        await asyncio.sleep(pause_s)
    return status, body


class Prober(threading.Thread):
    """Asks for health and metrics all the while, on a thread of its own so that no other client's work is measured."""

    PATHS = ("/health", "/health", "/health", "/metrics", "/live", "/health", "/info", "/v1/models", "/ping")

    def __init__(self, traffic: Traffic):
        super().__init__(name="probes", daemon=True)
        self.health_s: list[float] = []
        self._traffic = Traffic(traffic.host, traffic.port, traffic.is_ours, 0)
        self._traffic.connections = traffic.connections
        self.ledger = self._traffic.ledger
        self.until = traffic.until

    def run(self) -> None:
        asyncio.run(self._probe())

    async def _probe(self) -> None:
        turn = 0
        while time.monotonic() < self.until:
            path = self.PATHS[turn % len(self.PATHS)]
            turn += 1
            started_at = time.monotonic()
            await self._traffic.count("probe", {200}, None, lambda c, path=path: exchange(c, get(path)))
            if path == "/health":
                self.health_s.append(time.monotonic() - started_at)
            await asyncio.sleep(PROBE_EVERY_S)


# The server's processes.


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def script_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((Path(word).name for word in words if word.endswith(".py")), "")
    return ""


def rss_mb(pid: int) -> float | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return None


def descriptors(pid: int) -> Counter:
    found: Counter = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kind = os.readlink(fd).split(":")[0]
            found["/dev/shm" if kind.startswith("/dev/shm") else kind] += 1  # each has a name of its own there
    return found


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares through (x, y)."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points)).slope


class Server:
    """The server that we started, its processes, and what is known of them."""

    def __init__(self, traffic_seed: int):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory(prefix="textgen-soak-")
        self.log_path = Path(self.folder.name) / "log"
        environment = os.environ | {
            "PYTHON": sys.executable,
            "TMPDIR": self.folder.name,
            "HOSTNAME": "127.0.0.1",
            "PORT": str(self.port),
            "MAX_BATCH_SIZE": str(SLOTS),
            "MAX_CONCURRENT_REQUESTS": str(CONCURRENT),
            "WEB_CONCURRENCY": str(WEB_PROCESSES),
            "CLIENT_TIMEOUT": str(CLIENT_TIMEOUT_S),
            "PAYLOAD_LIMIT": str(PAYLOAD_LIMIT),
        }
        environment.setdefault("OMP_NUM_THREADS", "1")  # the clients are on the same machine
        with self.log_path.open("wb") as log:
            command = [HERE / "entrypoint.sh", "serve"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self._random = random.Random(traffic_seed)
        self.rss: dict[int, list[tuple[float, float]]] = defaultdict(list)  # (minutes, MB) by process
        self.names: dict[int, str] = {}
        self.kills = 0

    def wait_ready(self) -> None:
        while b"Connected" not in self.log_path.read_bytes():
            if self.process.poll() is not None:
                raise SystemExit("the server did not start:\n" + self.log)
            time.sleep(0.1)
        self.master = min(pid for pid in descendants(self.process.pid) if script_of(pid) == "web.py")
        (self.worker,) = [pid for pid in descendants(self.process.pid) if script_of(pid) == "worker.py"]
        self.spared = min(self.web)
        self.names = {self.worker: "worker", self.master: "gunicorn", self.spared: "spared web"}

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def web(self) -> list[int]:
        return [pid for pid in descendants(self.master) if script_of(pid) == "web.py"]

    def look(self) -> dict[int, tuple[Counter, int]]:
        """Descriptors and threads of every process."""
        return {pid: (descriptors(pid), threads(pid)) for pid in (self.worker, self.master, *self.web)}

    def sample(self, now: float) -> None:
        for pid in (self.worker, self.master, *self.web):
            self.names.setdefault(pid, "web")
            if (mb := rss_mb(pid)) is not None:
                self.rss[pid].append((now / 60, mb))

    async def kill_one(self, traffic: Traffic) -> None:
        """Ends a web process at a moment at which it is known what it has."""
        others = [pid for pid in self.web if pid != self.spared]
        if not others:
            return
        pid = self._random.choice(others)
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "TZ":
            await asyncio.sleep(0.001)
        inodes = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
        for _ in range(5):  # the table is read in pieces, and where it changes meanwhile rows are left out
            for row in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:]):
                connection = traffic.connections.get(int(row[2].split(":")[1], 16))
                if f"socket:[{row[9]}]" in inodes and row[1].endswith(f":{self.port:04X}") and connection:
                    connection.was_killed = True
        os.kill(pid, signal.SIGKILL)
        self.kills += 1

    def growth(self) -> list[dict]:
        told = []
        for pid, points in self.rss.items():
            begins = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
            watched = [point for point in points if point[0] >= begins]
            minutes = watched[-1][0] - watched[0][0]
            told.append(
                {
                    "process": f"{self.names[pid]} {pid}",
                    "minutes": minutes,
                    "first_mb": points[0][1],
                    "last_mb": points[-1][1],
                    "most_mb": max(mb for _, mb in points),
                    "mb_per_minute": slope(watched),
                }
            )
        return told

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its children go with it
            self.process.wait()
        self.folder.cleanup()


async def gauges(traffic: Traffic) -> dict[str, float]:
    connection = await traffic.connect()
    status, body = await exchange(connection, get("/metrics"))
    traffic.close(connection)
    if status != 200:
        return {}
    lines = [line.split() for line in body.decode().splitlines() if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in lines}


IDLE = ("tgi_queue_size", "tgi_slots_busy", "tgi_batch_current_size")


async def until_idle(holds) -> bool:
    """Whether it came true in time."""
    give_up_at = time.monotonic() + IDLE_S
    while not await holds():
        if time.monotonic() > give_up_at:
            return False
        await asyncio.sleep(0.2)
    return True


async def leftovers(traffic: Traffic, server: Server | None, before: dict) -> list[str]:
    """What the server still has when nobody asks for anything."""

    async def is_idle() -> bool:
        told = await gauges(traffic)
        return bool(told) and not any(told[name] for name in IDLE)

    found = []
    if not await until_idle(is_idle):
        told = await gauges(traffic)
        found.append("not idle: " + ", ".join(f"{name} {told.get(name)}" for name in IDLE))
    if server is None:
        return found
    web_before = before[server.spared]

    def left() -> list[str]:
        told = []
        if len(server.web) != WEB_PROCESSES:
            told.append(f"{len(server.web)} web processes instead of {WEB_PROCESSES}")
        for pid, (held, running) in server.look().items():
            fds, tasks = before.get(pid, web_before)
            if held != fds:
                told.append(f"descriptors of {server.names.get(pid, 'web')} {pid}: {dict(held)} instead of {dict(fds)}")
            most = tasks + (WEB_THREADS if pid not in (server.worker, server.master) else 0)
            if running > most:
                told.append(f"threads of {server.names.get(pid, 'web')} {pid}: {running}, more than {most}")
        return told

    async def is_given_back() -> bool:
        with contextlib.suppress(OSError):
            return not left()
        return False

    return found if await until_idle(is_given_back) else found + left()


# The run.


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def run(traffic: Traffic, server: Server | None, minutes: float) -> dict:
    await traffic.learn_the_texts()
    before = {}
    if server:
        await asyncio.sleep(2.5)  # for the last connections to be closed
        before = server.look()
    started_at = time.monotonic()
    traffic.until = started_at + 60 * minutes
    prober = Prober(traffic)
    prober.start()

    async def watch() -> None:
        tell_at = kill_at = started_at
        kill_at += min(KILL_EVERY_S, 60 * minutes * 0.4)
        while (now := time.monotonic()) < traffic.until:
            if server:
                server.sample(now - started_at)
                if now >= kill_at:
                    await server.kill_one(traffic)
                    kill_at = now + KILL_EVERY_S * traffic.random.uniform(0.5, 2)
            if now >= tell_at:
                tell_at = now + TELL_EVERY_S
                progress(now - started_at, 60 * minutes, traffic.ledger, prober.ledger, server)
            await asyncio.sleep(SAMPLE_EVERY_S)

    await asyncio.gather(watch(), traffic.crowds(), *(traffic.client() for _ in range(CLIENTS)))
    await asyncio.to_thread(prober.join)
    problems = await leftovers(traffic, server, before)
    ledger = merged(traffic.ledger, prober.ledger)
    report = {
        "minutes": minutes,
        "sent": dict(ledger.sent),
        "right": dict(ledger.right),
        "texts_compared": ledger.right_texts,
        "refused": dict(ledger.refused),
        "cancelled": ledger.cancelled,
        "cut": ledger.cut,
        "wrong": ledger.wrong,
        "kills": server.kills if server else 0,
        "health_probes": len(prober.health_s),
        "health_p50_ms": 1e3 * percentile(prober.health_s, 0.5),
        "health_p99_ms": 1e3 * percentile(prober.health_s, 0.99),
        "health_max_ms": 1e3 * max(prober.health_s, default=float("nan")),
        "processes": server.growth() if server else [],
    }
    for process in report["processes"]:
        grown = process["mb_per_minute"] * process["minutes"]
        if 60 * process["minutes"] >= JUDGED_S and grown > GROWTH_MB:
            problems.append(f"{process['process']} grew by {grown:.1f} MB, more than {GROWTH_MB}")
    if server:
        if (tracebacks := server.log.count("Traceback")) > 0:
            problems.append(f"{tracebacks} tracebacks in the log; it ends with:\n{server.log[-2000:]}")
        if (code := await asyncio.to_thread(server.stop)) != 0:
            problems.append(f"the server ended with {code}")
    report["problems"] = ledger.problems() + problems
    return report


def merged(*ledgers: Ledger) -> Ledger:
    total = Ledger()
    for ledger in ledgers:
        total.sent += ledger.sent
        total.right += ledger.right
        total.refused += ledger.refused
        total.cancelled += ledger.cancelled
        total.cut += ledger.cut
        total.wrong += ledger.wrong
        total.right_texts += ledger.right_texts
    return total


def progress(seconds: float, of_s: float, traffic: Ledger, probes: Ledger, server: Server | None) -> None:
    total = merged(traffic, probes)
    print(
        f"{int(seconds) // 60}:{int(seconds) % 60:02} of {int(of_s) // 60}:{int(of_s) % 60:02}  sent {total.sent.total():,}  "
        f"right {total.right.total():,}  refused {total.refused.total():,}  cancelled {total.cancelled:,}  cut {total.cut:,}  "
        f"wrong {len(total.wrong):,}  open {total.open}" + (f"  kills {server.kills}" if server else ""),
        flush=True,
    )


def table(report: dict) -> str:
    def row(what: str, count: int, note: str = "") -> str:
        return f"{what:34} {count:9,d}  {note}".rstrip()

    def told(counts: dict) -> str:
        return ", ".join(f"{what} {count:,}" for what, count in sorted(counts.items(), key=str))

    refused, right, sent = sum(report["refused"].values()), sum(report["right"].values()), sum(report["sent"].values())
    lines = [
        "",
        row("requests sent", sent, told(report["sent"])),
        row("  answered right", right, f"{report['texts_compared']:,} texts compared, the rest are probes"),
        row("  refused as they should be", refused, told(report["refused"])),
        row("  given up by the client", report["cancelled"]),
        row("  cut by a killed web process", report["cut"], f"{report['kills']} were killed"),
        row("  anything else", sent - right - refused - report["cancelled"] - report["cut"]),
        row("probes of /health", report["health_probes"])
        + "  p50 {health_p50_ms:.1f} ms, p99 {health_p99_ms:.1f} ms, longest {health_max_ms:.1f} ms".format(**report),
    ]
    watched = [process for process in report["processes"] if not process["process"].startswith("web ")]
    others = [process["most_mb"] for process in report["processes"] if process["process"].startswith("web ")]
    if watched:
        lines += ["", f"{'process':24} {'first MB':>9} {'last MB':>9} {'most MB':>9} {'MB a minute':>12}"]
    for process in watched:
        line = "{process:24} {first_mb:9.1f} {last_mb:9.1f} {most_mb:9.1f} {mb_per_minute:+12.2f} in the last {minutes:.1f} min"
        lines.append(line.format(**process))
    if others:
        lines.append(f"{len(others)} other web processes, killed or come after one: {max(others):.1f} MB at most")
    lines += ["", *(f"PROBLEM: {problem}" for problem in report["problems"])]
    verdict = "FAILED" if report["problems"] else "The ledger closes, every text is right, nothing is left behind."
    return "\n".join([*lines, verdict])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--url", help="a server that runs already; its processes are left alone")
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    parser.add_argument("--seed", type=int, default=None, help="of what the clients do; what time it takes is chance")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    server = None if arguments.url else Server(seed)
    try:
        if server:
            server.wait_ready()
        at = urlsplit(arguments.url or f"http://127.0.0.1:{server.port}")
        print(f"soak of {at.geturl()} for {arguments.minutes:g} minutes, seed {seed}", flush=True)
        traffic = Traffic(at.hostname, at.port or 80, server is not None, seed)
        report = asyncio.run(run(traffic, server, arguments.minutes)) | {"seed": seed}
    finally:
        if server:
            server.end()
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
