"""Nothing is lost: crowds, clients that disconnect or dawdle, processes that die or stop, and a device that hangs.

Real processes, real signals, real connections; the device is a simulated one whose steps take 20 ms and fail when they are told
to. Where no step matters it is the CPU, whose server starts in half of the CPU time.
"""

import concurrent.futures
import contextlib
import fcntl
import http.client
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
from fakes.tokenizer import byte_tokenizer
from processes import Server, memory_mb, wait_until

from config import DEMO_MODEL
from run import HERE

pytestmark = pytest.mark.processes

DEVICE = f"{HERE / 'tests' / 'fakes' / 'neuron'}:{HERE / 'bench' / 'simulated'}"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
MOST = 64  # requests at a time
CLIENT_TIMEOUT_S = 4
SOON_S = 10  # bounds for what takes milliseconds on an idle machine; these tests run beside others


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a server on a simulated device of its own. `server.fault.write_text("hang")` makes its next step do so."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").touch()
    byte_tokenizer(folder)
    cache = tmp_path_factory.mktemp("cache")

    def start(*flags, **environment):
        fault = tmp_path_factory.mktemp("machine") / "fault"
        environment = {
            "PYTHONPATH": DEVICE,
            "FAULT": str(fault),
            "NEURON_COMPILE_CACHE_URL": str(cache),
            "SIMULATED_STEP_MS": "20",
            "SIMULATED_PREFILL_MS": "0",
            "MAX_BATCH_SIZE": "4",
            "MAX_CONCURRENT_REQUESTS": str(MOST),
            "CLIENT_TIMEOUT": str(CLIENT_TIMEOUT_S),
        } | environment
        always = ("--model-id", str(folder), "--device", "neuron", "--max-total-tokens", "4000")
        server = Server(*always, *flags, **environment)
        server.fault = fault
        return server

    return start


def descriptors(pid):
    """What a process has open, connections apart from listeners told by their count."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return Counter(link.split(":")[0] for link in links)


def held(server):
    """What the processes of a server hold that a request could leave behind."""
    return {
        "processes": {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.survivors()},
        "descriptors": {pid: descriptors(pid) for pid in server.survivors()},
        "files": sorted(path.name for path in server.run_dir.iterdir()),
        "shared memory": sorted(path.name for path in Path("/dev/shm").glob("*textgen*")),
    }


def threads(server):
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in server.pids("web.py"))


@pytest.fixture(scope="module")
def shared(start):
    with start(WEB_CONCURRENCY="2") as server:
        server.wait_ready()
        crowd(server, 2 * MOST, "/generate", {"inputs": "warm", "parameters": {"max_new_tokens": 1}})
        server.wait_idle()
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def on_cpu():
    """The server of tests in which no step matters, with one web process."""
    with Server("--stuck-timeout", "1", CLIENT_TIMEOUT=str(CLIENT_TIMEOUT_S)) as server:
        yield server.wait_ready()
        assert server.stop() == 0


@pytest.fixture
def server(shared):
    """The server that most tests share, with the leak check around each."""
    wait_until(lambda: not connections(shared), "no connection is left")
    before = held(shared)
    yield shared
    client_closed()
    shared.wait_idle()

    def now():
        found, known = held(shared), before["descriptors"]  # fewer than before is no leak
        return found | {"descriptors": {pid: links | known.get(pid, Counter()) for pid, links in found["descriptors"].items()}}

    try:
        wait_until(lambda: now() == before, "everything given back", 30)
    except AssertionError:
        left = now()
        more = {pid: links - before["descriptors"].get(pid, Counter()) for pid, links in left["descriptors"].items()}
        assert left == before, {pid: links for pid, links in more.items() if links}
    assert threads(shared) < 40, "a request costs a greenlet; only long texts have threads, a few of them"


def head_of(path, body, *more):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *more]
    return "".join(line + "\r\n" for line in [*lines, ""]).encode()


opened = []


def client_closed():
    while opened:
        opened.pop().close()


@pytest.fixture(autouse=True)
def nobody_stays():
    yield
    client_closed()


def connect(server, receive_bytes=None):
    client = socket.socket()
    opened.append(client)
    client.settimeout(60)
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.connect(("127.0.0.1", server.port))
    return client


def send(server, path, body):
    """A connection with a request sent off, nothing read."""
    client = connect(server)
    body = json.dumps(body).encode()
    client.sendall(head_of(path, body) + body)
    return client


def answer(client):
    with client:
        response = http.client.HTTPResponse(client)
        response.begin()
        return response.status, response.headers, response.read()


def last_word(body):
    """The answer, or the last event of a stream before the line that ends it."""
    return [line for line in body.splitlines() if line and line != b"data: [DONE]"][-1]


def endless(stream=True):
    """A completion of 3,900 tokens: more than a minute."""
    return {"prompt": "ab", "max_tokens": 3900, "temperature": 0, "ignore_eos": True, "stream": stream}


def some(tokens, stream=True):
    return endless(stream) | {"max_tokens": tokens}


COMPLETIONS = "/v1/completions"


def crowd(server, clients, path, body):
    """The answers to as many clients at once."""
    connections = [send(server, path, body) for _ in range(clients)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        return list(pool.map(answer, connections))


def well(server):
    """Seconds until /health says yes, and until a new request is answered."""
    started_at = time.monotonic()
    assert server.get("/health")[0] == 200
    healthy_at = time.monotonic()
    assert server.generate("ab", max_new_tokens=2)[0] == 200
    return healthy_at - started_at, time.monotonic() - healthy_at


def counts(server):
    """What /metrics says, by name without "tgi_"."""
    text = wait_until(lambda: (answer := server.get("/metrics"))[0] == 200 and answer[1], "the metrics")
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tgi_")]
    return {name.removeprefix("tgi_"): float(value) for name, value in lines}


def take_every_slot(server):
    """The clients whose completions run; they end by disconnecting."""
    clients = [send(server, COMPLETIONS, endless()) for _ in range(4)]
    wait_until(lambda: server.status().running == len(clients), "every slot is taken")
    return clients


def test_of_500_clients_at_once_exactly_the_surplus_is_rejected(server):
    first = take_every_slot(server)
    clients = [send(server, COMPLETIONS, some(5)) for _ in range(500 - len(first))]
    for path in ("/health", "/metrics", "/info", "/live"):
        wait_until(lambda path=path: server.get(path)[0] == 200, path, SOON_S)  # 503: busy with the crowd for the moment
    surplus = 500 - MOST
    wait_until(lambda: len(select.select(clients, [], [], 0)[0]) == surplus, "they are rejected while the others wait")
    for client in first:
        client.close()
    with concurrent.futures.ThreadPoolExecutor(500) as pool:
        answers = list(pool.map(answer, clients))
    refused = [(headers, body) for status, headers, body in answers if status == 429]
    served = [body for status, _, body in answers if status == 200]
    assert (len(served), len(refused)) == (MOST - len(first), surplus)
    (headers,) = {
        tuple((name, value) for name, value in headers.items() if name not in ("Date", "x-request-id"))
        for headers, _ in refused
    }
    (body,) = {body for _, body in refused}  # from the worker, or from an API server process
    assert int(dict(headers)["Retry-After"]) > 0 and dict(headers)["Access-Control-Allow-Origin"] == "*"
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    assert all(body.endswith(b"data: [DONE]\n\n") for body in served)


def test_what_is_rejected_is_counted_whichever_process_rejects_it(server):
    raw = {
        400: b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        408: head_of("/tokenize", b"xx") + b"x",
        413: head_of("/tokenize", b"x" * 3_000_000),
    }
    names = ["request_success", 'request_failure{err="overloaded"}']
    names += [f'http_errors{{status="{status}"}}' for status in (*raw, 429)]

    def found():
        return [counts(server).get(name, 0) for name in names]

    before = found()
    first = take_every_slot(server)
    waiting = [send(server, COMPLETIONS, some(1)) for _ in range(MOST - len(first))]
    wait_until(lambda: server.status().full, "a full house")
    assert [status for status, _, _ in crowd(server, 100, COMPLETIONS, some(5))] == [429] * 100
    for client in first:
        client.close()
    assert [answer(client)[0] for client in waiting] == [200] * len(waiting)
    for status, sent in raw.items():
        with connect(server) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
            assert end_of(client) == status
    expected = [count + more for count, more in zip(before, (len(waiting), 100, *[1] * len(raw), 100))]
    wait_until(lambda: found() == expected, "every request and every status is counted")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("queued", [True, False], ids=["queued", "decoding"])
def test_a_client_disconnect_frees_what_the_request_had(server, stream, queued):
    others = [send(server, COMPLETIONS, endless()) for _ in range(4 if queued else 0)]
    wait_until(lambda: server.status().running == len(others), "the others run")
    client = send(server, COMPLETIONS, endless(stream))
    known = len(others) + 1
    wait_until(lambda: server.status().running + server.status().queued == known, "the request is there")
    client.close()
    wait_until(lambda: server.status().running + server.status().queued == len(others), "it is gone", SOON_S)
    for other in others:
        other.close()


def test_a_client_that_announced_its_last_request_does_not_keep_its_slot_after_a_disconnect(server):
    """As Python's urllib and nginx announce it. The end of the input may mean that the client still reads; its kernel knows."""
    body = json.dumps(endless(stream=False)).encode()
    client = connect(server)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)  # the seconds after which its kernel says so; usually 60
    client.sendall(head_of(COMPLETIONS, body, "Connection: close") + body)
    wait_until(lambda: server.status().running == 1, "the request runs")
    client.close()
    wait_until(lambda: server.status().running == 0, "it is gone", SOON_S)


def test_a_storm_of_1000_disconnects_leaves_nothing_behind(server):
    steady = send(server, COMPLETIONS, some(200))
    for _ in range(20):
        clients = [send(server, COMPLETIONS, endless(stream=bool(n % 2))) for n in range(50)]
        for client in clients:
            client.close()
    status, _, body = answer(steady)
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
    wait_until(lambda: (server.status().running, server.status().queued) == (0, 0), "nobody is left", SOON_S)


CHUNKS = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
SLOW = {  # what comes first, what comes then, and the status that ends it; None: the connection is closed without an answer
    "nothing": (b"", b"", None),
    "a byte of a header at a time": (b"POST /generate HTTP/1.1\r\nX: ", b"a", None),
    "a byte of a body at a time": (head_of("/generate", b"x" * 1000), b"x", 408),
    "a chunk at a time": (CHUNKS, b"1\r\nx\r\n", 408),
}


@pytest.mark.parametrize("kind", SLOW)
def test_300_clients_that_send_slowly_keep_nobody_waiting(server, kind):
    first, then, status = SLOW[kind]
    clients = [connect(server) for _ in range(300)]
    for client in clients:
        client.sendall(first)
    for _ in range(3):
        for client in clients:
            with contextlib.suppress(ConnectionError):  # on a slow machine its time is over before the last byte
                client.sendall(then)
        assert sum(well(server)) < SOON_S
    assert {end_of(client) for client in clients} == {status}


def end_of(client):
    """The status with which the server ends a connection; None: it just closes."""
    with client:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(4096):
                data += piece
        return int(data.split()[1]) if data else None


def test_readers_that_do_not_read_delay_nobody_and_are_given_up(server):
    body = {"inputs": "ab " * 30_000}
    clients = []
    for _ in range(20):
        client = connect(server, receive_bytes=1024)
        raw = json.dumps(body).encode()
        client.sendall(head_of("/tokenize", raw) + raw)
        clients.append(client)
    assert sum(well(server)) < 4 * SOON_S
    web = server.pids("web.py")[1:]
    wait_until(lambda: not any(sockets_to(pid, server.port) for pid in web), "they are given up", pause_s=0.2)
    for client in clients:
        client.close()


def sockets_to(pid, port, peer=None):
    """How many connections to `port` a process holds; with `peer`, how many from that port."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            mine.add(os.readlink(fd))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] != "0A" and f"socket:[{row[9]}]" in mine]
    return sum(peer is None or row[2].endswith(f":{peer:04X}") for row in rows)


def connections(server):
    """How many clients' connections the web processes hold."""
    return sum(sockets_to(pid, server.port) for pid in server.pids("web.py"))


def test_2500_silent_connections_keep_nobody_waiting(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))  # of this process; the server sets its own
    clients = [connect(server) for _ in range(2500)]
    assert sum(well(server)) < 4 * SOON_S
    for client in clients:
        client.close()


def test_a_body_that_is_too_large_is_answered_while_it_is_still_being_sent(server):
    body = b'{"inputs": "' + b"a" * 20_000_000 + b'"}'
    client = connect(server)
    client.sendall(head_of("/generate", body))
    with contextlib.suppress(ConnectionError):
        client.sendall(body)
    status, _, told = answer(client)
    assert status == 413
    assert json.loads(told)["error_type"] == "validation"


def test_bodies_that_never_end_are_held_up_to_a_bound(on_cpu):
    head, part = head_of("/generate", b"a" * 2_000_000), b"a" * 1_900_000

    def send_most(client):
        with contextlib.suppress(OSError):
            client.sendall(head + part)

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        clients = [connect(on_cpu) for _ in range(60)]  # twice what a web process holds
        list(pool.map(send_most, clients))
        assert sum(well(on_cpu)) < 4 * SOON_S
        assert all(memory_mb(pid) < 300 for pid in on_cpu.pids("web.py"))
        endings = Counter(pool.map(end_of, clients))
        assert endings[503] > 0 and endings[503] + endings[408] + endings[None] == 60
        wait_until(lambda: counts(on_cpu)['http_errors{status="503"}'] == endings[503] + endings[None], "they are counted")


def test_long_bodies_that_are_rejected_delay_no_other_request(server):
    """gunicorn takes a second to skip two megabytes, and serves nobody meanwhile."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(20)]
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            body = b"a" * 2_000_000
            list(pool.map(lambda client: client.sendall(head_of("/nothing", body) + body), clients))
        assert sum(well(server)) < SOON_S
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 404"}


def test_a_client_that_asks_first_is_told_to_send_or_not_to(server):
    body = json.dumps({"inputs": "ab", "parameters": {"max_new_tokens": 2}}).encode()
    with connect(server) as client:
        client.sendall(head_of("/generate", body, "Expect: 100-continue"))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 200
        response.read()
    with connect(server) as client:
        client.sendall(head_of("/generate", b"a" * 3_000_000, "Expect: 100-continue"))
        response = http.client.HTTPResponse(client)  # which skips the 100 that gunicorn always sends
        response.begin()
        assert response.status == 413


def test_requests_sent_ahead_on_one_connection_are_all_answered_in_order(server):
    lengths = [3, 1, 2]
    given = [{"inputs": "ab", "parameters": {"max_new_tokens": length, "details": True}} for length in lengths]
    *others, last = [json.dumps(body).encode() for body in given]
    ahead = b"".join(head_of("/generate", body) + body for body in others)
    with connect(server) as client:
        client.sendall(ahead + head_of("/generate", last, "Connection: close") + last)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == len(lengths)
    assert [int(count) for count in re.findall(rb'"generated_tokens":(\d+)', received)] == lengths


LONG = 600_000  # characters
BAD = {
    "not UTF-8": (b'{"inputs":"\xff\xfe"}', 400),
    "half a character": (b'{"inputs":"\\ud800","parameters":{"seed":-1}}', 422),
    "deep": (b'{"inputs":"a","x":' + b"[" * LONG + b"]" * LONG + b"}", 400),
    "deep where a text belongs": (b'{"inputs":' + b"[" * LONG + b"]" * LONG + b"}", 400),
    "a number without end": (b'{"inputs":"a","parameters":{"seed":' + b"9" * LONG + b"}}", 422),
    "not a number": (b'{"inputs":"a","parameters":{"temperature":NaN}}', 400),
    "infinity": (b'{"inputs":"a","parameters":{"temperature":Infinity}}', 400),
    "more than any float": (b'{"inputs":"a","parameters":{"temperature":1e999}}', 422),
    "one word": (json.dumps({"inputs": "a" * LONG}).encode(), 422),
    "nothing but spaces": (json.dumps({"inputs": " " * LONG}).encode(), 422),
    "accents without letters": (json.dumps({"inputs": "\u0301" * LONG}, ensure_ascii=False).encode(), 422),
    "stop sequences": (json.dumps({"inputs": "a", "parameters": {"stop": ["x"] * 100_000}}).encode(), 422),
}


def test_bad_bodies_are_rejected_and_harm_no_other_request(server):
    steady = send(server, COMPLETIONS, some(100))
    clients = [(connect(server), *BAD[kind]) for kind in BAD for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:

        def refused(client, body, status):
            client.sendall(head_of("/generate", body) + body)
            found, headers, told = answer(client)
            assert (found, headers["Content-Type"]) == (status, "application/json")
            assert len(told) < 2000 and json.loads(told)["error"]

        refusals = [pool.submit(refused, *client) for client in clients]
        assert sum(well(server)) < 4 * SOON_S
        for refusal in refusals:
            refusal.result()
    assert answer(steady)[0] == 200
    # a prompt of a token a byte takes a hundred bytes of memory a byte, for a moment
    assert all(memory_mb(pid) < 400 for pid in server.pids("web.py"))


def test_neither_an_answer_nor_the_log_tells_a_secret():
    key, secret = "the-key-of-the-house", "hf_a_token_of_the_hub"
    with Server(API_KEY=key, HF_TOKEN=secret) as server:
        server.wait_ready()
        said = []
        for authorization in ("", "Bearer no", key, f"Bearer {key}"):
            for path in ("/health", "/metrics", "/info", "/nothing", "/v1/models"):
                said.append(server.request("GET", path, Authorization=authorization).read())
            for body in (b"{", {"inputs": 1}, {"inputs": "a", "parameters": {"top_p": 9}}):
                said.append(server.request("POST", "/generate", body, Authorization=authorization).read())
        folder = server.run_dir
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.stop() == 0
        everything = b"".join(said).decode() + server.log
    for what in (key, secret, str(folder), "Traceback"):
        assert what not in everything


def is_free(lock):
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_killed_supervisor_takes_everything_with_it_and_the_next_start_removes_what_is_left_of_that_run_alone(shared):
    with Server() as killed:
        killed.wait_ready()
        for _ in range(8):
            send(killed, COMPLETIONS, some(1000))
        wait_until(lambda: killed.status().running == 4, "they run")
        left = killed.run_dir
        killed.process.kill()
        wait_until(lambda: not killed.survivors(), "the end of every process", SOON_S)
        assert (left / "worker.sock").exists()
        wait_until(lambda: is_free(left / "lock"), "the lock of its run")  # a process that ends lets go of its files last
        other = shared.run_dir.rename(left.parent / shared.run_dir.name)  # as if both had used the same folder
        try:
            with Server("--startup-timeout", "0.1", TMPDIR=str(left.parent)) as following:
                assert following.process.wait(60) == 1
                assert [path.name for path in left.parent.glob("neuron-textgen.*")] == [other.name]
                assert (other / "config.json").exists()
        finally:
            other.rename(shared.tmp / other.name)
        assert well(shared)


def test_sigterm_under_load_lets_every_stream_end_and_waits_for_no_idle_connection(start):
    with start("--graceful-termination-timeout", "1000") as server:
        server.wait_ready()
        idle = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(20)]
        for connection in idle:
            connection.request("GET", "/health")
            connection.getresponse().read()
        silent = [connect(server) for _ in range(20)]
        streams = [send(server, COMPLETIONS, some(150)) for _ in range(20)]
        wait_until(lambda: server.status().queued > 8, "all are there")  # which the metrics say once a second
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health")[0] == 503, "health says so")
        status, refusal = server.generate("ab")
        assert (status, refusal["phase"]) == (503, "draining")
        idle[0].request("POST", "/generate", b'{"inputs": "ab"}', {"Content-Type": "application/json"})
        refused = idle[0].getresponse()
        assert (refused.status, refused.getheader("Connection")) == (503, "close")
        answers = [answer(stream) for stream in streams]
        assert all(status == 200 and body.endswith(b"data: [DONE]\n\n") for status, _, body in answers)
        ended_at = time.monotonic()
        assert server.wait_exit() == 0
        assert time.monotonic() - ended_at < SOON_S
        for connection in [*idle, *silent]:
            connection.close()


def kill_worker(server):
    os.kill(server.pids("worker.py")[0], signal.SIGKILL)


def stop_worker(server):
    os.kill(server.pids("worker.py")[0], signal.SIGSTOP)


def hang_step(server):
    server.fault.write_text("hang")


def fail_step(server):
    server.fault.write_text("step")


def wait_until_four_stream(server, streams):
    """Of requests without an end: as many as there are slots; the others wait."""
    wait_until(lambda: server.status().queued == len(streams) - 4, "the others wait")
    wait_until(lambda: len(select.select(streams, [], [], 0)[0]) == 4, "four answers have begun")


@pytest.mark.parametrize("hangs", [False, True], ids=["", "a device that hangs"])
def test_streams_that_do_not_end_after_sigterm_end_with_an_error(start, hangs):
    """A device that hangs until the end of the grace, and one that works until a second signal."""
    with start("--graceful-termination-timeout", "1" if hangs else "60") as server:
        server.wait_ready()
        streams = [send(server, COMPLETIONS, endless()) for _ in range(6)]
        wait_until_four_stream(server, streams)
        if hangs:
            hang_step(server)
        server.process.send_signal(signal.SIGTERM)
        if not hangs:
            wait_until(lambda: server.get("/health")[0] == 503, "the first signal has its effect")
            server.process.send_signal(signal.SIGTERM)
        answers = [answer(stream) for stream in streams]
        assert sorted(status for status, _, _ in answers) == [200] * 4 + [503] * 2
        assert all(b'"error"' in last_word(body) for _, _, body in answers)
        assert server.wait_exit() == 0


@pytest.mark.parametrize("fault", [kill_worker, fail_step])
def test_when_the_worker_dies_everyone_is_told_and_the_server_ends(start, fault):
    with start() as server:
        server.wait_ready()
        streams = [send(server, COMPLETIONS, endless()) for _ in range(8)]
        wait_until_four_stream(server, streams)
        fault(server)
        started_at = time.monotonic()
        answers = [answer(stream) for stream in streams]
        assert time.monotonic() - started_at < SOON_S
        assert sorted(status for status, _, _ in answers) == [200] * 4 + [503] * 4
        assert all(b'"error"' in last_word(body) for _, _, body in answers)
        assert server.wait_exit() == 1


def test_a_killed_web_process_takes_nobody_elses_requests_with_it(shared):
    wait_until(lambda: not connections(shared), "no connection is left")
    web = shared.pids("web.py")[1:]
    streams = []
    while {owner for owner, _ in streams} != set(web):  # one at least on each
        client = send(shared, COMPLETIONS, some(100))
        peer = client.getsockname()[1]
        taken = wait_until(lambda peer=peer: [pid for pid in web if sockets_to(pid, shared.port, peer)], "it is taken")
        streams.append((taken[0], client))
    os.kill(web[0], signal.SIGKILL)
    for owner, client in streams:
        if owner == web[0]:
            assert end_of(client) in (200, None)
        else:
            status, _, body = answer(client)
            assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
    shared.wait_idle()
    wait_until(lambda: len(shared.pids("web.py")) == 3, "a new web process")
    assert well(shared)


def test_a_process_that_checks_grammars_is_there_before_the_first_one_of_them(shared):
    def parents_of_checks():
        return sorted(parent_of(pid) for pid in shared.pids("text.grammar:dry_run"))

    # with hybrid sampling, the default on Neuron devices; a web process that has just been replaced starts its own
    wait_until(lambda: parents_of_checks() == shared.pids("web.py")[1:], "each web process has one")


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
    except OSError:  # it has ended
        return 0


def test_a_web_process_that_cannot_load_the_tokenizer_says_why_and_ends_the_server(tmp_path):
    named = tmp_path / "mine.json"
    named.write_text("{}")
    with Server("--tokenizer-config-path", str(named)) as server:
        server.wait_ready()
        named.unlink()
        os.kill(server.pids("web.py")[1], signal.SIGKILL)
        assert server.wait_exit(SOON_S * 6) == 1
        (line,) = [line for line in server.log.splitlines() if "the tokenizer in" in line]
        assert f"{named}: there is no such file" in line
        assert "Traceback" not in server.log


def test_a_panic_of_the_tokenizer_ends_one_request_also_where_backtraces_are_asked_for(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    endless = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [endless, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer))
    with Server("--model-id", str(path.parent), RUST_BACKTRACE="1") as server:
        server.wait_ready()
        for _ in range(2):
            status, answer = server.generate("a" * 40 + "b", max_new_tokens=2)
            assert status == 422 and answer["error"].endswith("the tokenizer cannot process this text")
            assert server.generate("hello", max_new_tokens=2)[0] == 200
        assert server.stop() == 0 and "SIGSEGV" not in server.log and "stack backtrace" not in server.log


@pytest.mark.parametrize("fault", [hang_step, stop_worker])
def test_a_stuck_device_is_told_and_then_ended(start, fault):
    with start("--stuck-timeout", "2") as server:
        server.wait_ready()
        streams = [send(server, COMPLETIONS, endless()) for _ in range(6)]
        wait_until_four_stream(server, streams)
        wait_until(lambda: server.status().steps > 20, "a pace to judge by")
        fault(server)
        told = wait_until(
            lambda: (said := server.request("GET", "/health")).status == 503 and json.loads(said.read()), "health"
        )
        assert told["phase"] == "stuck"
        answers = [answer(stream) for stream in streams]
        assert sorted(status for status, _, _ in answers) == [200] * 4 + [503] * 2
        assert all(b"stuck" in last_word(body) for _, _, body in answers)
        assert server.wait_exit() == 1
        assert "--stuck-timeout (STUCK_TIMEOUT)" in server.log


def test_a_worker_that_goes_on_after_a_while_is_well_again(server):
    steps = server.status().steps
    stream = send(server, COMPLETIONS, some(150))
    wait_until(lambda: server.status().steps > steps + 20, "it runs")
    stop_worker(server)
    try:
        wait_until(lambda: server.get("/health")[0] == 503, "health says stuck")
    finally:
        os.kill(server.pids("worker.py")[0], signal.SIGCONT)
    status, _, body = answer(stream)
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert server.get("/health")[0] == 200


def test_web_processes_that_were_stopped_for_long_do_not_take_the_worker_for_stuck(on_cpu):
    web = on_cpu.pids("web.py")
    for pid in web:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)  # the length of the silence is what is tried
    for pid in web:
        os.kill(pid, signal.SIGCONT)
    assert on_cpu.get("/health")[0] == 200
    assert well(on_cpu)
