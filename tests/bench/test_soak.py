"""The soak: a short one passes, and it tells what is wrong when something is."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys

import pytest
from processes import MODEL_CACHE

from run import HERE

sys.path.insert(0, str(HERE / "bench"))

import soak

pytestmark = pytest.mark.processes


def test_a_short_soak_passes_and_has_seen_everything(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "bench/soak.py", "--minutes", "0.07", "--seed", "1", "--json", str(path)]
    environment = os.environ | {"MODEL_CACHE": str(MODEL_CACHE)}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["problems"] == report["wrong"] == []
    assert report["kills"] >= 1
    assert report["texts_compared"] > 20
    assert report["cancelled"] > 0 and report["health_probes"] > 0
    assert {"429", "422", "400"} <= set(report["refused"])
    assert {"whole", "stream", "chat", "/v1 stream", "hangs up", "no request", "slow to write", "slow to read"} <= set(
        report["sent"]
    )


class Stub:
    """A server that says to each connection what `answers` tells next, and closes."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
            await reader.readexactly(int(length))
            writer.write(next(self.answers))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def asked(*answers, act=lambda traffic: traffic.ask(GREEDY)):
    """The ledger after one request for each answer that a server has."""

    async def run():
        server = await asyncio.start_server(Stub(*answers).serve, "127.0.0.1", 0)
        traffic = soak.Traffic("127.0.0.1", server.sockets[0].getsockname()[1], is_ours=False, seed=1)
        for _ in answers:
            await act(traffic)
        server.close()
        await server.wait_closed()
        return traffic.ledger

    return asyncio.run(run())


GREEDY = soak.asks()[0]
STREAM = next(ask for ask in soak.asks() if ask.path == "/generate_stream")


def whole(text, status=200):
    body = json.dumps({"generated_text": text}).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def stream(*events):
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def event(index, text, generated_text=None):
    return {"index": index, "token": {"text": text, "special": False}, "generated_text": generated_text}


def test_the_same_text_twice_is_right():
    ledger = asked(whole("a"), whole("a"))
    assert (ledger.right.total(), ledger.right_texts, ledger.problems()) == (2, 2, [])


def test_a_refusal_for_a_crowd_is_as_it_should_be():
    assert asked(whole("a"), whole("busy", 429)).problems() == []


@pytest.mark.parametrize(
    "bad",
    [
        whole("b"),
        whole("a", 500),
        whole("a", 422),
        whole("a")[:-1],
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno!",
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"gen\r\n',
    ],
    ids=["another text", "500", "422 for what is good", "cut short", "closed", "no JSON", "half a chunk"],
)
def test_any_other_answer_is_a_problem(bad):
    ledger = asked(whole("a"), bad)
    assert (ledger.right.total(), len(ledger.wrong), len(ledger.problems())) == (1, 1, 1)


@pytest.mark.parametrize(
    "bad",
    [
        stream(event(1, "a"), event(2, "b")),
        stream(event(1, "a"), event(3, "b", "ab")),
        stream(event(1, "a"), event(2, "b", "abc")),
        stream(event(1, "a"), {"error": "x", "error_type": "generation"}),
        stream(),
    ],
    ids=["no last event", "an event is missing", "pieces are missing", "an error", "nothing"],
)
def test_a_stream_that_is_not_whole_is_a_problem(bad):
    good = stream(event(1, "a"), event(2, "b", "ab"))
    ledger = asked(good, bad, act=lambda traffic: traffic.ask(STREAM))
    assert (ledger.right.total(), len(ledger.wrong)) == (1, 1)


def test_what_a_killed_process_had_is_cut_and_what_another_had_is_not():
    async def cut(connection):
        connection.was_killed = was_killed
        raise ConnectionResetError

    for was_killed in (True, False):
        ledger = asked(b"", act=lambda traffic: traffic.count("whole", {200}, None, cut))
        assert (ledger.cut, len(ledger.wrong)) == (int(was_killed), int(not was_killed))


def test_a_request_that_is_never_over_is_a_problem():
    ledger = soak.Ledger()
    ledger.sent["whole"] += 1
    assert ledger.problems() == ["1 requests were never over"]


def test_growth_is_the_slope_after_the_warm_up():
    server = soak.Server.__new__(soak.Server)
    server.names = {7: "worker"}
    server.rss = {7: [(minute, 100 + 50 * min(minute, 3) + 2 * max(0, minute - 3)) for minute in range(10)]}
    (told,) = server.growth()
    assert told["mb_per_minute"] == pytest.approx(2)
    assert (told["first_mb"], told["last_mb"], told["minutes"]) == (100, 262, 4)
