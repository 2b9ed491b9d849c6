"""The benchmarks work: they measure a server of either API, and their report can be read by people and by programs. How fast
anything is, no test says."""

import fcntl
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import HERE

sys.path.insert(0, str(HERE / "bench"))

from load import events

EVENTS = [
    {"choices": [{"text": "One"}]},
    {"choices": [{"text": " zwei \u2026"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
REFUSED = {"error": {"message": "what is ignore_eos?"}}


def bench(*arguments, out):
    """Runs it, and returns its JSON and its HTML."""
    command = [sys.executable, "bench/run.py", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return written(out)


def written(out):
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".html").read_text()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """It takes most of a minute: once for all processes that run tests."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    out = folder / "smoke"
    with (folder / "smoke.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return written(out) if out.with_suffix(".html").exists() else bench("--smoke", out=out)


def test_every_row_of_the_table_has_its_figures(smoke):
    figures = smoke[0]["figures"]
    rows = {figure["name"].partition(":")[0] for figure in figures if figure["reach"] is not None}
    assert rows == {
        "serving efficiency",
        "added latency",
        "added jitter",
        "sampler",
        "web process",
        "growth",
        "throughput past saturation",
    }
    for figure in figures:
        assert figure.keys() == {"name", "value", "min", "max", "unit", "reach", "met"}
        assert figure["min"] <= figure["value"] <= figure["max"]
        assert (figure["met"] is None) == (figure["reach"] is None)


def test_the_simulated_device_is_not_outrun(smoke):
    """What makes more tokens than the device does is measured wrongly."""
    efficiencies = [figure["max"] for figure in smoke[0]["figures"] if figure["name"].startswith("serving efficiency")]
    assert len(efficiencies) == 3 and 0 < max(efficiencies) < 1.001


def test_the_gap_between_two_steps_is_the_sum_of_its_parts(smoke):
    medians = {figure["name"]: figure["value"] for figure in smoke[0]["figures"] if figure["name"].startswith("between")}
    names = ("model", "choose", "bookkeeping", "receive", "admit", "tell", "prepare", "all that the device waits")
    assert {name.split(": ")[1] for name in medians} == set(names)
    assert all(value > 0 for value in medians.values())


def test_the_machine_is_told(smoke):
    machine = smoke[0]["machine"]
    assert machine["cores"] >= 1 and machine["processor"] and machine["torch"]


def test_the_page_needs_nothing_else(smoke):
    page = smoke[1]
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", page)
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall("<svg.*?</svg>", page, re.DOTALL)]
    assert len(drawings) == 5  # throughput, two latencies, two steps
    for drawing in drawings:
        assert "NaN" not in ElementTree.tostring(drawing, "unicode") and list(drawing)


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
    told, page = bench("--url", openai_server, "--concurrency", "1", "2", "--rounds", "2", out=tmp_path / "report")
    names = {figure["name"] for figure in told["figures"]}
    assert {"throughput: 1 at a time", "ttft p99: 2 at a time", "itl p50: 2 at a time"} <= names
    assert page.count("<svg") == 3
    assert all(body["model"] == "some-model" and body["max_tokens"] <= 64 for body in OpenAI.asked)
    assert len({body["prompt"] for body in OpenAI.asked}) == len(OpenAI.asked), "a server could remember a text's beginning"


def test_a_server_that_cannot_be_measured_is_told_in_one_line(tmp_path):
    command = [sys.executable, "bench/run.py", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "report")]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: http://127.0.0.1:9/info: ") and done.stderr.count("\n") <= 2


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
