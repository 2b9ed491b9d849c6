"""When a request has arrived: told from its bytes, however they come in pieces, and gunicorn's parser agrees."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gunicorn import util
from gunicorn.config import Config
from gunicorn.http.parser import RequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

import connections
from config import HERE
from connections import Arrival

pytestmark = pytest.mark.processes

LIMIT = 300


def arrival_of(data, cuts=()):
    """All of `data`, in pieces, and how much had come when it was complete."""
    arrival = Arrival(LIMIT)
    at = 0
    for cut in [*sorted({c for c in cuts if 0 < c < len(data)}), len(data)]:
        arrival.feed(data[at:cut])
        at = cut
        if arrival.is_complete or arrival.refusal:
            break
    return arrival, at


def chunked(pieces, trailer=b""):
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


def sized(body):
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


REQUESTS = st.one_of(
    st.just(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
    st.binary(max_size=LIMIT).map(sized),
    st.lists(st.binary(min_size=1, max_size=40), max_size=6).map(chunked),
    st.lists(st.binary(min_size=1, max_size=40), max_size=6).map(lambda pieces: chunked(pieces, b"X: y\r\n")),
)


@given(REQUESTS, st.lists(st.integers(1, 500), max_size=12))
def test_a_request_is_complete_with_its_last_byte_and_not_before(request, cuts):
    arrival, _ = arrival_of(request, cuts)
    assert (arrival.is_complete, arrival.is_cut, arrival.refusal) == (True, False, None)
    arrival, _ = arrival_of(request[:-1], cuts)
    assert (arrival.is_complete, arrival.refusal) == (False, None)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.booleans(), st.binary(max_size=50))
def test_the_parser_finds_the_whole_body_in_it_and_leaves_what_was_sent_ahead(pieces, in_chunks, ahead):
    body = b"".join(pieces)
    arrival, _ = arrival_of((chunked(pieces) if in_chunks else sized(body)) + ahead)
    parser = RequestParser(Config(), iter((bytes(arrival.data),)), ("127.0.0.1", 1))
    assert next(parser).body.read() == body
    assert parser.finish_body()
    assert parser.unreader.take_buffered() == ahead


@given(st.binary(max_size=400) | REQUESTS.flatmap(lambda r: st.integers(0, len(r)).map(lambda n: r[:n] + b"\r\n\r\n" + r[n:])))
def test_what_is_no_http_neither_raises_nor_hides_a_request(data):
    arrival, _ = arrival_of(data)
    assert isinstance(arrival.is_complete, bool)


@pytest.mark.parametrize(
    "data",
    [
        sized(b"a" * (LIMIT + 2)),
        chunked([b"a" * 200, b"b" * 200]),
        b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabcd",
        b"GET / HTTP/1.1\nHost: x\n\n",
    ],
    ids=["too long", "too many chunks", "endless length", "no size", "no end of a chunk", "bare newlines"],
)
def test_a_request_that_will_not_be_taken_is_not_waited_for(data):
    arrival, _ = arrival_of(data)
    assert (arrival.is_complete, arrival.is_cut) == (True, True)


def test_one_byte_more_than_allowed_arrives_for_the_app_to_refuse():
    arrival, _ = arrival_of(sized(b"a" * (LIMIT + 1)))
    assert (arrival.is_complete, arrival.is_cut) == (True, False)


def test_endless_headers_and_crumbs_of_chunks_are_refused():
    assert arrival_of(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)[0].refusal[0] == 431
    crumbs = Arrival(10_000_000)
    crumbs.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    sent = 0
    while not crumbs.refusal:
        crumbs.feed(b"1\r\nx\r\n" * 1000)
        sent += 6000
        assert sent < 4 * connections.HEAD_LIMIT
    assert crumbs.refusal[0] == 400


@pytest.mark.parametrize("length", [5, LIMIT + 2])
def test_a_client_is_told_to_go_on_unless_its_body_will_not_be_taken(length):
    arrival, _ = arrival_of(b"POST / HTTP/1.1\r\nexpect: 100-Continue\r\nContent-Length: %d\r\n\r\n" % length)
    assert arrival.wants_continue == (length == 5)


APP = """
import os, socket, sys, threading
import gunicorn.app.base
import connections

class Server(gunicorn.app.base.BaseApplication):
    limits = connections.Limits(payload_bytes=100, client_timeout_s=20, probes=frozenset(["/go"]), most_begun=3)
    begun = connections.Begun(2)
    def load_config(self):
        settings = {"bind": [f"fd://{listener.fileno()}"], "worker_class": connections.ConnectionWorker, "threads": 4}
        settings["workers"] = int(sys.argv[1])
        settings["pre_fork"] = lambda _arbiter, process: self.begun.join(process)
        settings["child_exit"] = lambda _arbiter, process: self.begun.leave(process)
        for name, value in (settings | {"control_socket_disable": True, "accesslog": None}).items():
            self.cfg.set(name, value)
    def load(self):
        go = threading.Event()
        def app(environ, start_response):
            start_response("200 OK", [("Content-Type", "text/plain"), ("X-Process", str(os.getpid()))])
            yield b"begun"
            if environ["PATH_INFO"] == "/go":
                go.set()
            if environ["PATH_INFO"] == "/waits":
                go.wait()
            if environ["PATH_INFO"] == "/breaks":
                raise RuntimeError("on purpose")
            environ["wsgi.input"].read()
        def refusal(environ, start_response):
            start_response("503 Service Unavailable", [("Content-Length", "2")])
            if environ["PATH_INFO"] == "/breaks":
                raise RuntimeError("on purpose")
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [b"no"]
        refusal.takes_place = lambda method, path: method == "POST"
        refusal.is_full = False
        self.refusal = refusal
        return app

listener = socket.create_server(("127.0.0.1", 0))
connections.prepare(listener, Server.limits)
print(listener.getsockname()[1], flush=True)
Server().run()
"""


class Running:
    """A server of four threads a process, and its log when it has ended."""

    def __init__(self, processes=1):
        command, pipes = [sys.executable, "-c", APP, str(processes)], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=HERE, text=True, start_new_session=True, **pipes)
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def connect(self):
        return socket.create_connection(self.address, timeout=20)

    def end(self, how=signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        _, log = self.process.communicate(timeout=20)
        return log


@pytest.fixture(params=[1])
def running(request):
    running = Running(request.param)
    yield running
    if running.process.poll() is None:
        running.end(signal.SIGKILL)


def get(path, method=b"GET"):
    return b"%s %s HTTP/1.1\r\nHost: x\r\n\r\n" % (method, path)


def read_until(client, end):
    data = b""
    while not data.endswith(end) and (piece := client.recv(65536)):
        data += piece
    return data


def ask(client, path):
    client.sendall(get(path))
    return read_until(client, b"0\r\n\r\n")


def test_an_app_that_breaks_in_the_middle_of_an_answer_ends_that_connection_alone(running):
    with running.connect() as steady:
        assert b"200 OK" in ask(steady, b"/")
        for _ in range(3):
            with running.connect() as broken:
                data = ask(broken, b"/breaks")
                assert b"begun" in data and not data.endswith(b"0\r\n\r\n"), "it is cut off, and does not end"
        assert b"200 OK" in ask(steady, b"/")
    log = running.end()
    assert log.count("RuntimeError: on purpose") == 3
    assert log.count("Booting worker") == 1, "the process went on"


@pytest.fixture
def crowded(running):
    """The same with a request in each thread; `ask(client, b"/go")` ends them."""
    waiting = [running.connect() for _ in range(4)]
    for client in waiting:
        client.sendall(get(b"/waits"))
        assert b"begun" in read_until(client, b"begun\r\n")
    running.waiting = waiting
    yield running
    for client in waiting:
        client.close()


REFUSED = b"Content-Length: 2\r\n\r\nno"


def test_what_finds_every_thread_taken_is_refused_and_its_connection_lives_on(crowded):
    with crowded.connect() as client, crowded.connect() as probe:
        for path in (b"/", b"/waits", b"/else"):
            client.sendall(get(path))
            answer = read_until(client, b"no")
            assert answer.startswith(b"HTTP/1.1 503") and answer.endswith(REFUSED) and b"Connection: keep-alive" in answer
        client.sendall(get(b"/", b"HEAD"))
        assert read_until(client, b"\r\n\r\n").endswith(b"Content-Length: 2\r\n\r\n")
        assert b"200 OK" in ask(probe, b"/go")
        for waiting in crowded.waiting:
            assert read_until(waiting, b"0\r\n\r\n")
        assert b"200 OK" in ask(client, b"/")


@pytest.mark.parametrize("running", [2], indirect=True)
def test_what_takes_a_place_is_counted_over_all_processes_and_a_killed_one_counts_no_more(running):
    def begin(client):
        """Which process has begun with a request that takes a place; None if it was refused."""
        client.sendall(get(b"/waits", b"POST"))
        process = re.search(rb"X-Process: (\d+)", client.recv(65536))
        return process and int(process[1])

    with contextlib.ExitStack() as stack:
        clients = iter(stack.enter_context(running.connect()) for _ in range(200))
        begun = [process for process in map(begin, itertools.islice(clients, 20)) if process]
        assert len(begun) == 3, "fewer than one process has threads"
        os.kill(begun[0], signal.SIGKILL)
        left = 3 - begun.count(begun[0])
        for client in clients:
            left += begin(client) is not None
            if left == 3:
                break
            time.sleep(0.05)
        assert left == 3, "its places are free"
        assert all(begin(client) is None for client in itertools.islice(clients, 10))


def test_refusals_sent_ahead_by_the_thousand_are_all_made(crowded):
    most = 3000
    with crowded.connect() as client, crowded.connect() as other:
        client.sendall(get(b"/") * most)
        other.sendall(get(b"/"))
        assert read_until(other, b"no").endswith(REFUSED)
        data = b""
        while data.count(REFUSED) < most:
            piece = client.recv(65536)
            assert piece, f"closed after {data.count(REFUSED)}"
            data += piece


def test_a_refused_request_that_is_no_http_is_told_so(crowded):
    with crowded.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n")
        assert read_until(client, b"never").startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("length", [101, 70_000, 10_000_000])
def test_a_refused_request_with_too_long_a_body_is_answered_and_its_connection_ends(crowded, length):
    with crowded.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length + b"a" * min(length, 101))
        if length > 101:  # the rest is not waited for
            assert b"Connection: close" in (answer := read_until(client, b"never"))
        else:
            answer = read_until(client, b"no")
        assert answer.endswith(REFUSED)


def test_a_client_that_sends_on_and_never_reads_its_refusals_holds_up_nobody(crowded):
    with crowded.connect() as deaf, crowded.connect() as client:
        deaf.settimeout(0.2)
        with contextlib.suppress(OSError):
            while True:
                deaf.sendall(get(b"/") * 1000)
        client.sendall(get(b"/"))
        assert read_until(client, b"no").endswith(REFUSED)


def test_a_refusal_that_breaks_ends_its_connection_alone(crowded):
    with crowded.connect() as broken, crowded.connect() as client:
        broken.sendall(get(b"/breaks"))
        assert read_until(broken, b"never").startswith(b"HTTP/1.1 500")
        client.sendall(get(b"/"))
        assert read_until(client, b"no").endswith(REFUSED)
        assert b"200 OK" in ask(client, b"/go")
    assert crowded.end().count("Booting worker") == 1, "the process went on"


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
@settings(max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=40), st.lists(st.integers(1, 9000), min_size=1, max_size=5))
def test_what_goes_past_gunicorn_is_framed_as_gunicorn_frames_it_however_slowly_it_is_read(protocol, parts, reads):
    environ = {"SERVER_PROTOCOL": protocol}
    with socketpair() as (ours, theirs), socketpair(room=1_000_000) as (gunicorns, clients):
        outlet = connections.Outlet(environ | {"gunicorn.socket": ours})
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(everything, theirs, reads)
            for part in parts:
                util.write(gunicorns, part, chunked=protocol == "HTTP/1.1")
                outlet.write(part) or outlet.flush()
            ours.shutdown(socket.SHUT_WR)
        gunicorns.shutdown(socket.SHUT_WR)
        assert reading.result() == everything(clients)


def test_writing_past_gunicorn_never_waits_and_says_when_the_client_is_gone():
    with socketpair() as (ours, theirs):
        outlet = connections.Outlet({"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.1"})
        assert outlet.write(b"x") is True
        assert outlet.write(b"x" * 1_000_000) is False
        theirs.close()
        with pytest.raises(OSError):
            outlet.flush()
        with pytest.raises(OSError):
            outlet.write(b"x")


@contextlib.contextmanager
def socketpair(room=4096):
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    with ours, theirs:
        yield ours, theirs


def everything(sock, sizes=(65536,)):
    """What comes until the end, in reads of these sizes."""
    data, sizes = b"", itertools.cycle(sizes)
    while piece := sock.recv(next(sizes)):
        data += piece
    return data
