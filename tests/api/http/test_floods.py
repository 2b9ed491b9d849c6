"""Floods against the real server: what they cost a web process in memory and in processor time."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import Server, memory_mb, wait_until

pytestmark = pytest.mark.processes
CONNECTIONS, SECONDS = 12, 2.5
HEAD = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIBBLED = {  # what comes at once, what follows byte by byte, and whether the server takes it to the end
    "chunks of a byte": (b"", b"1\r\na\r\n", True),
    "the size of a chunk": (b"", b"0", True),
    "the extension of a chunk": (b"1;" + b"a" * 7000, b"a", True),
    "trailers": (b"0\r\n" + b"a: b\r\n" * 30_000, b"a: b\r\n", False),
}


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server.wait_ready()


def test_long_texts_leave_a_web_process_small(server):
    web = server.pids("web.py")[1]
    bodies = [
        ("/tokenize", {"inputs": "word " * 300_000}),
        ("/tokenize", {"inputs": "\u5b57" * 33_000}),
        ("/v1/completions", {"prompt": "word " * 300_000, "max_tokens": 1}),
        ("/generate", {"inputs": "word " * 300_000, "parameters": {"max_new_tokens": 1, "truncate": 10}}),
    ]

    def post(route, body):
        with server.request("POST", route, body) as response:
            response.read()
            return response.status

    with ThreadPoolExecutor(12) as clients:
        statuses = list(clients.map(lambda n: post(*bodies[n % len(bodies)]), range(24)))
    assert {200, 422, 400} <= set(statuses) <= {200, 422, 400, 503}
    wait_until(lambda: memory_mb(web) < 180, f"memory comes back: {memory_mb(web):.0f} MB")


@pytest.mark.parametrize("begin, dribbled, is_taken", DRIBBLED.values(), ids=DRIBBLED)
def test_bodies_that_come_byte_by_byte_cost_little(server, begin, dribbled, is_taken):
    web = server.pids("web.py")[1]
    taken = []
    stop_at = time.monotonic() + SECONDS

    def dribble():
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                client.sendall(HEAD + begin)
                at = 0
                while not is_taken or time.monotonic() < stop_at:
                    client.sendall(dribbled[at % len(dribbled) :][:1])
                    at += 1
                    time.sleep(0.01)
                taken.append(True)
            except OSError:  # it was refused
                taken.append(False)

    before_s = _processor_s(web)
    clients = [threading.Thread(target=dribble) for _ in range(CONNECTIONS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert taken == [is_taken] * CONNECTIONS
    assert _processor_s(web) - before_s < 0.3 * SECONDS


@pytest.mark.parametrize("line", [b"GET /live", b"OPTIONS /generate", b"POST /generate"])
def test_a_body_that_is_not_read_costs_little(server, line):
    web, body = server.pids("web.py")[1], bytes(4_000_000)
    before_s = _processor_s(web)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(line + b" HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        client.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.count(b"HTTP/1.1 ") == 2 and _processor_s(web) - before_s < 1


def test_others_are_served_between_the_chunks_of_a_long_body(server):
    chunks, answers = b"1\r\na\r\n" * 300_000 + b"0\r\n\r\n", []

    def send():
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(HEAD + chunks)
            answers.append(client.recv(12))

    sends, begins_at, slowest_s = threading.Thread(target=send), time.monotonic(), 0.0
    sends.start()
    while sends.is_alive():
        asked_at = time.monotonic()
        assert server.get("/live")[0] == 200
        slowest_s = max(slowest_s, time.monotonic() - asked_at)
    assert answers == [b"HTTP/1.1 400"], "all of it was read: it is no JSON"
    assert slowest_s < (time.monotonic() - begins_at) / 2


def _processor_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
