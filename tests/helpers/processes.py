"""Starts the real server by its script and removes everything that it leaves."""

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from peer import Peer

from protocol import MetricsRequest, MetricsText, Status
from run import HERE

WAIT_S = 300  # for what may take long on a busy machine without caches; nothing waits that long when it works
MODEL_CACHE = HERE / ".pytest_cache" / "models"  # one for all servers and runs: a model is converted once


PORTS = 12000 // 8  # for each of pytest's workers: two of them must not choose one port before a server listens on it


def free_port():
    """A port without a listener, outside of the range that Linux takes ports for connections from: one of the many clients
    could take it before the server does."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20000 + worker % 8 * PORTS + secrets.randbelow(PORTS)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("0.0.0.0", port))
            return port


def wait_until(holds, what, seconds=WAIT_S, pause_s=0.02):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what}: did not happen"
        time.sleep(pause_s)
    return found


class Server:
    """`entrypoint.sh` (or another command) with a port and a temporary folder of its own."""

    def __init__(self, *arguments, command=("./entrypoint.sh", "serve"), cwd=HERE, **environment):
        self.port = int(environment.setdefault("PORT", str(free_port())))
        self.tmp = Path(tempfile.mkdtemp(prefix="textgen-test-", dir="/tmp"))
        self.log_path = self.tmp / "log"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.environment = inherited | {"TMPDIR": str(self.tmp), "PYTHON": sys.executable}
        # Sampling loops are compiled once for all model caches, which takes nine seconds. One web process costs less to start
        # than two; tests of two ask for them.
        shared = {"MODEL_CACHE": str(MODEL_CACHE), "NUMBA_CACHE_DIR": str(MODEL_CACHE / "numba"), "WEB_CONCURRENCY": "1"}
        self.environment |= shared | environment
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=cwd, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", str(self.tmp)], check=True)

    @property
    def log(self):
        return self.log_path.read_text()

    @property
    def run_dir(self):
        return next(iter(self.tmp.glob("neuron-textgen.*")), None)

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            return "Connected" in self.log

        wait_until(ready, f"ready; log so far:\n{self.log}")
        return self

    def wait_healthy(self):
        """As `wait_ready`, where the log does not say so."""

        def healthy():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            with contextlib.suppress(OSError):
                return self.get("/health")[0] == 200

        wait_until(healthy, f"health; log so far:\n{self.log}")
        return self

    def wait_exit(self, seconds=WAIT_S):
        """The exit code; fails when anything of the run is left behind."""
        code = self.process.wait(seconds)
        wait_until(lambda: not self.survivors(), "the end of every process", 20)
        assert self.run_dir is None, "the run's folder is left behind"
        return code

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.wait_exit()

    def survivors(self):
        """Process ids of this run, found by its environment; the starting script is not one of them."""
        return [pid for pid, _command in self.processes()]

    def processes(self):
        mark = f"NEURON_TEXTGEN_RUN_DIR={self.tmp}/".encode()
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (proc / "environ").read_bytes() and (proc / "stat").read_text().rsplit(") ", 1)[1][0] != "Z":
                    found.append((int(proc.name), (proc / "cmdline").read_bytes().decode().replace("\0", " ").strip()))
            except (OSError, IndexError):
                continue
        return found

    def pids(self, script):
        """The processes that run `script`, the oldest first (for web.py that is gunicorn's master)."""
        return sorted(pid for pid, command in self.processes() if script in command)

    def request(self, method, path, body=None, **headers):
        """An open http.client response; close it when done."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"} | headers)
        response = connection.getresponse()
        response.connection = connection  # keeps the socket open as long as the response
        return response

    def get(self, path):
        response = self.request("GET", path)
        return response.status, response.read().decode()

    def generate(self, inputs, **parameters):
        response = self.request("POST", "/generate", {"inputs": inputs, "parameters": parameters})
        return response.status, json.loads(response.read())

    def post(self, path, body):
        """The response to a request that succeeds."""
        response = self.request("POST", path, body)
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def stream(self, inputs, **parameters):
        """All events of a stream."""
        response = self.request("POST", "/generate_stream", {"inputs": inputs, "parameters": parameters})
        assert response.status == 200, response.read()
        return list(events(response))

    def status(self):
        """The worker's phase, whether it is full, and what its metrics count: running and waiting requests, decode steps."""
        peer = Peer(f"ipc://{self.run_dir}/worker.sock")
        try:
            status = peer.next(Status)
            peer.send(MetricsRequest(1))
            text = peer.next(MetricsText).text.decode()
        finally:
            peer.close()
        running, queued, steps = (
            float(re.search(rf"^tgi_{name} (.+)$", text, re.MULTILINE)[1]) for name in ("slots_busy", "queue_size", "steps")
        )
        return SimpleNamespace(phase=status.phase, full=status.full, running=running, queued=queued, steps=steps)

    def wait_idle(self):
        """The leak check: nothing runs, nothing waits."""

        def idle():
            status = self.status()
            return (status.phase, status.running, status.queued) == ("ready", 0, 0)

        wait_until(idle, "all slots free and no request known", 30)


def events(response):
    """The events of an open stream, one by one, as they come."""
    for line in response:
        if line.startswith(b"data:"):
            yield json.loads(line.removeprefix(b"data:"))


def memory_mb(pid):
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024
