"""The attacks: some of them against a real server, and against one that falls for them."""

import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from processes import MODEL_CACHE

from run import HERE

sys.path.insert(0, str(HERE / "bench"))

import attack

pytestmark = pytest.mark.processes


def test_attacks_leave_a_server_as_it_was():
    command = [sys.executable, "bench/attack.py", "framing", "worker_socket", "settings"]
    environment = os.environ | {"MODEL_CACHE": str(MODEL_CACHE)}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("Nothing went wrong.\n")


class Gullible(http.server.BaseHTTPRequestHandler):
    """Takes any key and any body, reads as much of it as Content-Length says, and shows its files."""

    protocol_version, timeout = "HTTP/1.1", 0.5

    def do_GET(self):
        length = self.headers.get("Content-Length", "0")
        self.rfile.read(int(length) if length.isascii() and length.isdigit() and len(length) < 9 else 0)
        body = (
            b"root:x:0:0" if "passwd" in self.path else json.dumps({"generated_text": "a", "paths": {"/generate": {}}}).encode()
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("what", [attack.framing, attack.lines, attack.keys])
def test_attacks_find_a_server_that_falls_for_them(what, capsys):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gullible) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = attack.Target(*server.server_address)
        assert attack.run(what, target, target.text()) > 0
        server.shutdown()
    assert what.__name__ in capsys.readouterr().out


def test_a_start_that_succeeds_is_found(monkeypatch):
    monkeypatch.setattr(attack, "START_S", 3)
    with tempfile.TemporaryDirectory(prefix="textgen-") as name:
        assert "still runs" in attack.refused(Path(name), MODEL_CACHE=str(MODEL_CACHE))
