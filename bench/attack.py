"""Attacks a server in every known way, and prints a table of what was tried.

    python bench/attack.py [NAME ...] [--url http://HOST:PORT]        (or: make attack)

An attack is a generator: each item is one try, "" when it ended as it should, else what went wrong. Before and after each of
them a plain request must get the same output. Without --url the servers are started here: entrypoint.sh with the demonstration
model, an API key and few slots; with it, only the attacks on HTTP are tried. Exit code 1 when anything went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import hostile
import launch
from hostile import HIDDEN

DEMO = launch.HERE / "demo" / "model"
KEY = "correct-key"
CLIENT_TIMEOUT_S = 5
WEB_MB = 250  # of an API server process after floods
PATIENCE_S = 60
SETTINGS = {
    "API_KEY": KEY,
    "MAX_BATCH_SIZE": 4,
    "MAX_CONCURRENT_REQUESTS": 64,
    "CLIENT_TIMEOUT": CLIENT_TIMEOUT_S,
    "THREADS": 1,
}
GENERATING = ("/generate", "/generate_stream", "/", "/v1/chat/completions", "/v1/completions", "/v1/responses")
TAKING_JSON = (*GENERATING, "/invocations", "/vertex", "/tokenize", "/chat_tokenize")
PLAIN = {"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 12}}
Tries = Iterator[str]


class Target(NamedTuple):
    """A server under attack. `server` is None where it was not started here."""

    host: str
    port: int
    server: launch.Server | None = None

    def send(self, raw: bytes, wait_s: float = CLIENT_TIMEOUT_S + 5) -> bytes:
        """What comes back until the server closes the connection. Raises TimeoutError where it does not."""
        received = b""
        with socket.create_connection((self.host, self.port), timeout=wait_s) as client, contextlib.suppress(ConnectionError):
            client.sendall(raw)
            while piece := client.recv(65536):
                received += piece
        return received

    def ask(self, path: str, body: object = None, method: str = "", **headers: str) -> tuple[int, bytes]:
        """The status and body of one request with the right key."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"} | headers
        with contextlib.closing(connection):
            connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
            response = connection.getresponse()
            return response.status, response.read()

    def is_idle(self) -> bool:
        found = self.ask("/metrics")[1].decode()
        return "\ntgi_queue_size 0" in found and "\ntgi_slots_busy 0" in found

    def text(self) -> str:
        status, body = self.ask("/generate", PLAIN)
        return json.loads(body)["generated_text"] if status == 200 else f"status {status}: {body[:200]!r}"


def at_once(tries: Iterable[Callable[[], str]], workers: int = 16) -> Tries:
    """Runs the tries side by side. An error of the connection is a failure of the server."""

    def attempt(one: Callable[[], str]) -> str:
        try:
            return one()
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{error!r}"

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(attempt, tries)


def head(line: str = "POST /generate HTTP/1.1", *headers: str) -> bytes:
    own = ("Host: x", "Content-Type: application/json", f"Authorization: Bearer {KEY}")
    return "\r\n".join([line, *own, *headers, "", ""]).encode("latin-1")


def framing(target: Target) -> Tries:
    """Bodies whose end two readers may see at different places: never a second response."""
    body = json.dumps(PLAIN).encode()
    chunked = head("POST /generate HTTP/1.1", "Transfer-Encoding: chunked")
    raws = [head("POST /generate HTTP/1.1", *headers) + b"0\r\n\r\n" + HIDDEN for headers in hostile.AMBIGUOUS]
    raws += [chunked + size + b"\r\n" + body + b"\r\n0\r\n\r\n" + HIDDEN for size in hostile.CHUNK_SIZES]
    raws += [chunked + b"5\r\nhelloXX0\r\n\r\n" + HIDDEN]
    raws += [head("POST /generate HTTP/1.1", f"Content-Length: {len(body)}").replace(b"\r\n", b"\n") + body + HIDDEN]

    def one(raw: bytes) -> str:
        received = target.send(raw)
        statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
        refused = len(statuses) <= 1 and not received.startswith(b"HTTP/1.1 2")
        return "" if refused else f"{raw[:300]!r} got {statuses}"

    yield from at_once(partial(one, raw) for raw in raws)


def lines(target: Target) -> Tries:
    """Invalid request lines, headers and paths: an error or a page, never a file."""
    raws = [head(f"GET {path} HTTP/1.1", "Connection: close") for path in hostile.PATHS]
    raws += [head(line, "Connection: close") for line in hostile.REQUEST_LINES]
    raws += [head("GET /live HTTP/1.1", *(f"X-{n}: y" for n in range(10_000)))]
    raws += [head("GET /live HTTP/1.1", "X: " + "y" * 1_000_000), *hostile.NO_HTTP]

    def one(raw: bytes) -> str:
        received = target.send(raw)
        status = received.partition(b" ")[2][:3]
        leaked = b"root:" in received or b"import " in received
        failed = status.startswith(b"5") and status not in (b"501", b"505")
        return f"{raw[:100]!r} got {received[:200]!r}" if leaked or failed else ""

    yield from at_once(partial(one, raw) for raw in raws)


def keys(target: Target) -> Tries:
    """Every route and forms of its path, with every method, without the right key in its place."""
    if target.ask("/info", Authorization="none")[0] != 401:
        yield "the server asks for no key"
        return
    paths = [*json.loads(target.ask("/api-doc/openapi.json")[1])["paths"], *hostile.PATH_FORMS]
    open_paths = ("/", "/health", "/ping", "/live", "/metrics", "/api-doc/openapi.json", "/docs")

    def one(path: str, method: str) -> list[str]:
        is_open = method == "OPTIONS" or (method in ("GET", "HEAD") and (path in open_paths or path.startswith("/docs")))
        found = []
        connection = http.client.HTTPConnection(target.host, target.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            for asked, headers in [(f"{path}?api_key={KEY}", {}), *((path, headers) for headers in hostile.wrong_keys(KEY))]:
                connection.request(method, asked, "{}" if method in ("POST", "PUT", "PATCH") else None, headers)
                response = connection.getresponse()
                response.read()
                is_right = is_open or response.status in (401, 404, 405)
                found.append("" if is_right else f"{method} {asked} with {headers} got {response.status}")
        return found

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(one, path, method) for path in paths for method in hostile.METHODS]:
            yield from future.result()


def bodies(target: Target) -> Tries:
    """Bodies that are not JSON, or JSON of the wrong kind, to every route that takes one."""

    def one(path: str, raw: bytes) -> str:
        status, body = target.ask(path, raw)
        is_right = status == 200 or (400 <= status < 500 and "error" in json.loads(body))
        return "" if is_right else f"POST {path} {raw[:100]!r} got {status} {body[:100]!r}"

    raws = hostile.NO_JSON + hostile.PROMPTS + hostile.VALUES
    yield from at_once((partial(one, path, raw) for path in TAKING_JSON for raw in raws), 8)


def texts(target: Target) -> Tries:
    """Texts that are hard for tokenizers, templates and logs: a response or an error."""
    chat = '{"messages":[{"role":"user","content":%s}],"max_tokens":2}'
    forms = [("/generate", '{"inputs":%s,"parameters":{"max_new_tokens":2}}'), ("/tokenize", '{"inputs":%s}')]
    forms += [("/generate", '{"inputs":"a","parameters":{"max_new_tokens":2,"stop":[%s]}}'), ("/chat_tokenize", chat)]
    forms += [("/v1/completions", '{"prompt":%s,"max_tokens":2}'), ("/v1/chat/completions", chat)]
    forms += [("/v1/responses", '{"input":%s,"max_output_tokens":2}')]

    def one(path: str, form: str, text: str) -> str:
        status, body = target.ask(path, (form % text).encode())
        is_right = status in (200, 400, 413, 422) and json.loads(body) is not None
        return "" if is_right else f"POST {path} with {text[:50]} got {status} {body[:100]!r}"

    given = [json.dumps(text) for text in hostile.TEXTS] + hostile.SURROGATES
    yield from at_once((partial(one, *form, text) for form in forms for text in given), 4)


def grammars(target: Target) -> Tries:
    """Grammars that take long, or are invalid: a response or an error."""

    def one(kind: str, value: object) -> str:
        parameters = {"max_new_tokens": 4, "grammar": {"type": kind, "value": value}}
        status, body = target.ask("/generate", {"inputs": "a", "parameters": parameters})
        return "" if status in (200, 413, 422) else f"{json.dumps(value)[:100]} got {status} {body[:200]!r}"

    values = [("regex", pattern) for pattern in hostile.PATTERNS] + [("json", schema) for schema in hostile.SCHEMAS]
    yield from at_once((partial(one, *value) for value in values), 4)


def slow_clients(target: Target) -> Tries:
    """250 clients that dribble headers, bodies and chunk sizes or do not read, while others are served."""
    long = json.dumps({"inputs": "ab " * 10_000}).encode()
    kinds = {
        "headers": (head("GET /live HTTP/1.1")[:-2], b"X: y\r\n"),
        "body": (head("POST /generate HTTP/1.1", "Content-Length: 5000"), b" "),
        "chunk size": (head("POST /generate HTTP/1.1", "Transfer-Encoding: chunked"), b"0"),
        "silent": (head()[:-2], b""),
        "does not read": (head("POST /tokenize HTTP/1.1", f"Content-Length: {len(long)}") + long, b""),
    }
    clients = []
    for name, (first, piece) in list(kinds.items()) * 50:
        client = socket.create_connection((target.host, target.port), timeout=PATIENCE_S)
        client.sendall(first)
        clients.append((name, client, piece))
    until, slowest_s = time.monotonic() + CLIENT_TIMEOUT_S + 3, 0.0
    while time.monotonic() < until:
        for _name, client, piece in clients:
            with contextlib.suppress(OSError):
                client.sendall(piece)
        began_at = time.monotonic()
        yield "" if target.ask("/health")[0] == 200 else "/health does not respond"
        slowest_s = max(slowest_s, time.monotonic() - began_at)
        time.sleep(0.05)
    yield f"/health took {slowest_s:.1f} s" if slowest_s > 2 else ""
    for name, client, _piece in clients:
        with client, contextlib.suppress(ConnectionError):
            while name != "does not read" and client.recv(65536):
                pass
        yield ""


def floods(target: Target) -> Tries:
    """Bodies of nearly the largest size, 500 connections, 200 abandoned streams: memory and slots are released."""
    text = "ab " * 600_000
    large = [json.dumps({name: text}).encode() for name in ("inputs", "prompt", "input")]
    large += [json.dumps({"messages": [{"role": "user", "content": text}]}).encode()]

    def one(path: str, raw: bytes) -> str:
        status, _ = target.ask(path, raw)
        return "" if status in (400, 404, 413, 422, 429, 503) else f"POST {path} with {len(raw)} bytes got {status}"

    yield from at_once((partial(one, path, raw) for path in (*TAKING_JSON, "/nothing") for raw in large * 2), 24)
    connections = [socket.create_connection((target.host, target.port)) for _ in range(500)]
    for connection in connections:
        connection.close()
        yield ""
    stream = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 200}}).encode()
    for _ in range(200):
        with socket.create_connection((target.host, target.port)) as client:
            client.sendall(head("POST /generate_stream HTTP/1.1", f"Content-Length: {len(stream)}") + stream)
        yield ""
    yield from idle(target)


def idle(target: Target) -> Tries:
    """No slot is busy, and every API server process has released the memory of a flood."""
    until = time.monotonic() + PATIENCE_S
    while not target.is_idle():
        if time.monotonic() > until:
            yield "slots are still taken"
            return
        time.sleep(0.1)
    for pid in target.server.pids("web.py") if target.server else ():
        size = launch.rss_mb(pid)
        yield f"an API server process has {size:.0f} MB" if size > WEB_MB else ""


def templates(target: Target) -> Tries:
    """A chat template in which a client's text takes all time or memory: 400, and other chats get a response."""
    cases = "".join(f"{{% elif messages[0].content == '{name}' %}}{source}" for name, source in hostile.TEMPLATES.items())

    def status(content: str) -> int:
        return victim.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 2})[0]

    def one(case: str) -> str:
        statuses = status(case), status("plain")
        return "" if statuses == (400, 200) else f"{case} and a plain chat got {statuses}"

    with tempfile.TemporaryDirectory(prefix="textgen-attack-") as name:
        folder = shutil.copytree(DEMO, Path(name) / "model")
        template = f"{{% set n = messages | length %}}{{% if messages[0].content == 'plain' %}}User: Hello{cases}{{% endif %}}"
        (folder / "chat_template.jinja").write_text(template)
        with server(Path(name), MODEL_ID=str(folder)) as victim:
            yield from at_once((partial(one, case) for case in hostile.TEMPLATES), 4)
            for pid in victim.server.pids():
                yield f"process {pid} has a gigabyte" if launch.rss_mb(pid) > 1000 else ""


@contextlib.contextmanager
def server(folder: Path, **more: str) -> Iterator[Target]:
    port = launch.free_port()
    environment = launch.clean_environment(folder, port, **{name: str(value) for name, value in (SETTINGS | more).items()})
    with launch.Server([launch.HERE / "entrypoint.sh", "serve"], port, folder / "log", environment) as started:
        started.wait_ready()
        yield Target("127.0.0.1", port, started)


ON_HTTP = (framing, lines, keys, bodies, texts, grammars, slow_clients, floods)
ATTACKS = {attack.__name__: attack for attack in (*ON_HTTP, templates)}


def run(attack: Callable[[Target], Tries], target: Target, text: str) -> int:
    """Prints the attack's row of the table; returns how many tries went wrong."""
    began_at, tried, problems = time.monotonic(), 0, []
    processes = target.server.pids() if target.server else []
    try:
        for problem in attack(target):
            tried += 1
            problems += [problem] if problem else []
        if (now := target.text()) != text:
            problems.append(f"a plain request then gets {now!r}")
    except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
        problems.append(f"ended by {error!r}")
    if target.server and not set(processes) <= set(target.server.pids()):
        problems.append("a process of the server ended")
    seconds = time.monotonic() - began_at
    print(f"{attack.__name__:15} {tried:>7,} {len(problems):>7,} {seconds:>7.1f}  {attack.__doc__}", flush=True)
    print("".join(f"    {problem}\n" for problem in problems[:5]), end="", flush=True)
    return len(problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to try of {', '.join(ATTACKS)}; without one all")
    parser.add_argument("--url", help="a running server")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(ATTACKS):
        parser.error(f"there is no attack {', '.join(unknown)}")
    chosen = [ATTACKS[name] for name in arguments.names or ATTACKS]
    with contextlib.ExitStack() as stack:
        if arguments.url:
            at = urlsplit(arguments.url)
            target, chosen = (Target(at.hostname, at.port or 80), [attack for attack in chosen if attack in ON_HTTP])
        else:
            target = stack.enter_context(
                server(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="textgen-attack-"))))
            )
        text = target.text()
        print(f"{'attack':15} {'tried':>7} {'wrong':>7} {'seconds':>7}")
        wrong = sum([run(attack, target, text) for attack in chosen])
        if target.server and "Traceback" in target.server.log:
            wrong += 1
            print("the log holds a traceback:", target.server.log.partition("Traceback")[2][:3000])
    print("FAILED" if wrong else "Nothing went wrong.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
