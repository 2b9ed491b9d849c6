"""The benchmarks measure a server of either API and write a report, for people and for programs. No test depends on speed."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import wait_until

from run import HERE

sys.path.insert(0, str(HERE / "bench"))

from launch import Server, free_port
from load import events

pytestmark = pytest.mark.processes

EVENTS = [
    {"choices": [{"text": "One"}]},
    {"choices": [{"text": " zwei \u2026"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
REFUSED = {"error": {"message": "what is ignore_eos?"}}


def bench(*arguments, out):
    """Runs it, and returns its JSON and its HTML."""
    command = [sys.executable, "bench/bench.py", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".html").read_text()


def test_the_server_on_a_simulated_device_is_measured(tmp_path):
    report, page = bench("--smoke", out=tmp_path / "report")
    figures = {figure["name"]: figure for figure in report["figures"]}
    efficiencies = [figure for name, figure in figures.items() if name.startswith("serving efficiency")]
    assert len(efficiencies) == 2 and all(figure["target"] for figure in efficiencies)
    assert all(0 < figure["max"] < 1.001 for figure in efficiencies), "more tokens than the device makes: measured wrongly"
    assert {name.partition(":")[0] for name in figures} >= {"added latency", "inter-token latency p99", "CPU of the worker"}
    for figure in figures.values():
        assert figure["min"] <= figure["value"] <= figure["max"]
        assert (figure["met"] is None) == (figure["target"] is None)
    assert report["machine"]["cores"] >= 1 and report["machine"]["processor"]
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", page), "the page needs nothing else"
    assert page.count("<tr") == 1 + len(figures)


class OpenAI(http.server.BaseHTTPRequestHandler):
    """A server that knows no parameters but OpenAI's own, ends lines as Windows does, and cuts events in two."""

    protocol_version = "HTTP/1.1"
    asked: list[dict]

    def do_GET(self):
        self.answer(200, {"data": [{"id": "some-model"}]} if self.path == "/v1/models" else {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "ignore_eos" in body:
            return self.answer(400, REFUSED)
        self.asked.append(body)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        written = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in EVENTS).encode()
        for part in (written[:20], written[20:], b"data: [DONE]\r\n\r\n", b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()

    def answer(self, status, body):
        written = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *_):
        pass


@pytest.fixture
def openai_server():
    OpenAI.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OpenAI)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_that_speaks_openais_api_is_measured(openai_server, tmp_path):
    report, _page = bench("--url", openai_server, "--concurrency", "1", "2", "--rounds", "2", out=tmp_path / "report")
    names = {figure["name"] for figure in report["figures"]}
    assert {"throughput: 1 at a time", "ttft p99: 2 at a time", "itl p50: 2 at a time"} <= names
    assert all(body["model"] == "some-model" and body["max_tokens"] <= 64 for body in OpenAI.asked)
    assert len({body["prompt"] for body in OpenAI.asked}) == len(OpenAI.asked), "a server could cache a text's beginning"


def test_a_server_that_cannot_be_measured_is_named_in_one_line(tmp_path):
    command = [sys.executable, "bench/bench.py", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "report")]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: http://127.0.0.1:9/info: ") and done.stderr.count("\n") == 1


def test_a_server_is_ready_when_its_log_says_so_and_is_ended_with_its_children(tmp_path):
    script = "sleep 60 & echo Connected; wait"
    with Server(["sh", "-c", script], free_port(), tmp_path / "log", dict(os.environ)) as server:
        server.wait_ready()
        wait_until(lambda: len(server.pids("sleep")) == 2, "the shell and its child")  # which may just be starting its program
    assert server.pids() == []


def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_log(tmp_path):
    server = Server(["sh", "-c", "echo no such model; exit 2"], free_port(), tmp_path / "log", dict(os.environ))
    with server, pytest.raises(RuntimeError, match="no such model"):
        server.wait_ready()


WRITTEN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\r\n" % (len(part), part)
    for part in (b'data: {"a": "x\\n\\ndata:"}\n', b"\n:\n\ndata:{}\r\n\r\nda", b"ta: [DONE]\n\n", b"")
)


@given(st.lists(st.integers(0, len(WRITTEN)), max_size=20))
def test_events_are_the_same_however_their_bytes_come(cuts):
    borders = [0, *sorted(cuts), len(WRITTEN)]
    reads = [(float(end), WRITTEN[begin:end]) for begin, end in pairwise(borders)]
    found = list(events(reads))
    assert [event for _at, event in found] == [b'{"a": "x\\n\\ndata:"}', b"{}", b"[DONE]"]
    ends = [WRITTEN.index(event) + len(event) for _at, event in found]
    assert all(at >= end for (at, _event), end in zip(found, ends)), "no event is there before its last byte"
