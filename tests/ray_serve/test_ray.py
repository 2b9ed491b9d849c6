"""The application on real Ray, with the demonstration model: what a client sees, what survives, what is left."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import time

import pytest
from cluster import HAPROXY, PORT, Cluster, Load, busy, generation, request, wait_until

SLOTS = 4
LIMIT = 6  # requests that a replica's server admits
ERROR_S = 2  # within which the requests of a killed replica end


@pytest.fixture(scope="module", params=[HAPROXY, {}], ids=["haproxy", "python-proxy"])
def cluster(request):
    arguments = ("deploy.ray.app:app", "cpus=0.5", "min-replicas=2", f"max-concurrent-requests={LIMIT}")
    with Cluster(*arguments, **request.param) as cluster:
        cluster.wait_replicas(2)
        yield cluster
        cluster.stop()


@pytest.fixture
def replicas(cluster):
    """Two idle ones."""
    replicas = cluster.wait_replicas(2)
    wait_until(lambda: busy(replicas) == [0, 0], "idle replicas")
    return replicas


def queued(replicas):
    return [replica.metric("tgi_queue_size") for replica in replicas]


CHAT = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 8, "temperature": 0}
INPUTS = {"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 8, "details": True}}
ROUTES = [
    *[("GET", path, None) for path in ("/", "/health", "/ping", "/live", "/info", "/docs/", "/docs", "/api-doc/openapi.json")],
    *[("GET", path, None) for path in ("/v1/models", "/v1/models/nope", "/nope", "/generate", "/metrics")],
    ("GET", "/infer?sentence=What%20is%20deep%20learning%3F", None),
    ("GET", "/infer?sentence=%C3%A9t%C3%A9+%26+%25", None),
    ("HEAD", "/health", None),
    ("OPTIONS", "/generate", None),
    *[("POST", path, INPUTS) for path in ("/generate", "/generate_stream", "/", "/v1", "/invocations", "/tokenize")],
    *[("POST", path, CHAT) for path in ("/v1/chat/completions", "/invocations", "/chat_tokenize")],
    ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    ("POST", "/v1/completions", generation(8)),
    ("POST", "/v1/completions", generation(8, stream=True)),
    ("POST", "/v1/responses", {"input": "What is Deep Learning?", "max_output_tokens": 16, "temperature": 0}),
    ("POST", "/vertex", {"instances": [INPUTS]}),
    ("POST", "/generate", b"{not json"),
    ("POST", "/generate", {"inputs": "x", "parameters": {"max_new_tokens": -1}}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/generate", {"inputs": "x" * 2_100_000}),
]
# Differ between any two requests, or belong to a connection.
VOLATILE_HEADERS = {"date", "server", "connection", "keep-alive", "transfer-encoding", "x-request-id", "x-compute-time"}
VOLATILE_HEADERS |= {f"x-{name}-time" for name in ("total", "validation", "queue", "inference")} | {"x-time-per-token"}
VOLATILE = re.compile(
    r'"(id|response_id|item_id|created\w*|completed_at|\w*tokens_details)": ?("[^"]*"|\d+|\{[^}]*\})|\b(msg|resp)_\w+'
)


def answer(method, path, body, **where):
    response = request(method, path, body, Host="example.com", Origin="http://example.com", **where)
    headers = {name.lower(): value for name, value in response.getheaders() if name.lower() not in VOLATILE_HEADERS}
    text = response.read().decode()
    assert response.getheader("x-request-id")
    if path == "/metrics":
        return response.status, sorted(re.findall(r"^# TYPE .*", text, re.MULTILINE))
    if VOLATILE.search(text):
        headers.pop("content-length", None)
    if "allow" in headers:
        headers["allow"] = sorted(headers["allow"].split(", "))
    return response.status, headers, VOLATILE.sub("", text)


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=[f"{m} {p} {i}" for i, (m, p, _) in enumerate(ROUTES)])
def test_every_route_answers_as_without_ray(replicas, method, path, body):
    assert answer(method, path, body) == answer(method, path, body, port=replicas[0].port)


def test_request_id_of_the_client_comes_back_once(replicas):
    response = request("GET", "/health", X_Request_Id="mine")
    assert response.headers.get_all("x-request-id") == ["mine"]


def test_seeds_path_prefix_works(replicas):
    assert answer("GET", "/serve/infer?sentence=Hello", None) == answer("GET", "/infer?sentence=Hello", None)


def test_stream_arrives_while_it_is_generated(replicas):
    response = request("POST", "/v1/completions", generation(900, stream=True))
    assert response.readline().startswith(b"data: ")
    assert sum(busy(replicas)) == 1
    assert response.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_frees_the_slot(replicas, stream):
    with sent(PORT, stream):
        wait_until(lambda: sum(busy(replicas)) == 1, "a running request")
    wait_until(lambda: sum(busy(replicas)) == 0, "a free slot", 2)


def test_overload_is_answered_by_the_server_with_429(replicas):
    with contextlib.ExitStack() as held:
        for replica in replicas * LIMIT:
            held.enter_context(sent(replica.port, stream=True))
        wait_until(lambda: queued(replicas) == [LIMIT - SLOTS] * 2, "full queues")
        refused = answer("POST", "/generate", INPUTS)
        assert refused == answer("POST", "/generate", INPUTS, port=replicas[0].port)
        assert refused[0] == 429
        assert json.loads(refused[2])["error_type"] == "overloaded"
        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            assert {status for status, *_ in pool.map(lambda _: answer("POST", "/generate", INPUTS), range(40))} == {429}


@contextlib.contextmanager
def sent(port, stream):
    """A long request whose client is there until the block is left, and does not read."""
    body = json.dumps(generation(1000, stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + body)
        yield


def counted(replicas, send):
    """How many requests each replica got while `send` ran."""
    before = [replica.metric("tgi_request_count") for replica in replicas]
    send()
    return [int(replica.metric("tgi_request_count") - count) for replica, count in zip(replicas, before)]


def test_turns_of_a_conversation_go_to_one_replica(replicas):
    def turns(number, **headers):
        chat = {"messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 2}
        for turn in range(4):
            assert request("POST", "/v1/chat/completions", chat, **headers).status == 200
            chat["messages"] += [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": f"And {turn}?"}]

    by_message = [counted(replicas, lambda n=n: turns(n)) for n in range(6)]
    by_header = [counted(replicas, lambda n=n: turns(n, X_Session_Id=f"s{n}")) for n in range(6)]
    assert all(sorted(counts) == [0, 4] for counts in by_message + by_header)
    assert all(sum(counts) for counts in zip(*by_message, *by_header)), "all conversations went to one replica"


def test_other_requests_spread_over_the_replicas(replicas):
    def send():
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert {r[0] for r in pool.map(lambda _: answer("POST", "/generate", INPUTS), range(24))} == {200}

    assert min(counted(replicas, send)) >= 4


@pytest.mark.parametrize("what", ["supervisor", "worker", "replica"])
def test_killed_replica_fails_its_own_requests_only_and_is_replaced(cluster, replicas, what):
    victim = replicas[0]
    pid = {"supervisor": victim.supervisor, "replica": victim.pid}.get(what) or worker_of(cluster, victim)
    with Load() as load:
        load.wait_for(8)
        running = sum(busy([victim]))
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: {r.port for r in cluster.replicas()} - {r.port for r in replicas}, "a replacement", 60)
        back_s = time.monotonic() - killed_at
        load.wait_for(8)
    print(f"{what}: {running:g} running, back after {back_s:.1f} s, of {len(load.results)} failed:")
    for began_at, ended_at, error in load.failed:
        print(f"  began {began_at - killed_at:+.2f} s, ended {ended_at - killed_at:+.2f} s: {error[:200]}")
    assert all(ended_at <= killed_at + ERROR_S for _, ended_at, _ in load.failed)


def worker_of(cluster, replica):
    children = f"/proc/{replica.supervisor}/task/{replica.supervisor}/children"
    with open(children) as file:
        pids = file.read().split()
    return next(int(pid) for pid in pids if int(pid) in cluster.pids("worker.py"))
