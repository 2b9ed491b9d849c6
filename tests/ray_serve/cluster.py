"""Starts the application as the README does, with real Ray, and finds the processes and servers of its replicas."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = str(Path(sys.executable).with_name("serve"))
PORT = 8000  # Ray's; `make test-ray` runs in a network namespace of its own
DASHBOARD_PORT = 8265
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2"}
WAIT_S = 120  # for what takes seconds on an idle machine


def wait_until(holds, what, seconds=WAIT_S):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what}: did not happen"
        time.sleep(0.05)
    return found


class Replica:
    """The processes of a replica: Ray's own, and those of the server that it started, which is asked directly here."""

    def __init__(self, supervisor):
        self.supervisor = supervisor
        self.pid = int(Path(f"/proc/{supervisor}/stat").read_text().rsplit(") ", 1)[1].split()[1])
        command = Path(f"/proc/{supervisor}/cmdline").read_text().split("\0")
        self.port = int(command[command.index("--port") + 1])

    def metric(self, name):
        text = request("GET", "/metrics", port=self.port).read().decode()
        return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])


class Cluster:
    """`serve run` with a temporary folder of its own. Fails when anything is left behind."""

    def __init__(self, *arguments, **environment):
        self.tmp = Path(tempfile.mkdtemp(prefix="textgen-ray-", dir="/tmp"))
        self.log_path = self.tmp / "log"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.environment = inherited | {
            "PYTHON": os.environ["SERVER_PYTHON"],
            "TMPDIR": str(self.tmp),
            "RAY_TMPDIR": str(self.tmp),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "MODEL_CACHE": str(ROOT / ".pytest_cache" / "models"),
            "WEB_CONCURRENCY": "1",
            "PYTHONPATH": str(ROOT),  # where Ray builds the application of a configuration file
        }
        # Ray makes a folder for each node below these.
        self.environment |= {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{self.tmp}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{self.tmp}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.tmp),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{self.tmp}/server-state",
        }
        self.environment |= environment
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [SERVE, "run", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error:
            print(self.log)
        for pid in [self.process.pid, *self.pids("")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.tmp, ignore_errors=True)

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def pids(self, command):
        """The processes of this cluster whose command line contains `command`."""
        mark, found = f"TMPDIR={self.tmp}\0".encode(), []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                is_zombie = (proc / "stat").read_text().rsplit(") ", 1)[1][0] == "Z"
                line = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if mark in (proc / "environ").read_bytes() and command in line and not is_zombie:
                    found.append(int(proc.name))
        return found

    def replicas(self):
        """The replicas whose servers take requests now."""
        found = []
        for pid in self.pids("entrypoint.sh serve"):
            with contextlib.suppress(OSError, ValueError):  # one that is starting or stopping
                replica = Replica(pid)
                if request("GET", "/health", port=replica.port).status == 200:
                    found.append(replica)
        return found

    def wait_replicas(self, count, seconds=WAIT_S):
        """Until there are `count` replicas, and Ray serves the application."""
        assert self.process.poll() is None, self.log

        def ready():
            replicas = self.replicas()
            return len(replicas) == count and self.is_running() and replicas

        return wait_until(ready, f"{count} replicas (log: {self.log_path})", seconds)

    def is_running(self):
        """Whether Ray calls the application running; a replica that dies before fails the deployment as a whole."""
        with contextlib.suppress(OSError):
            answer = json.loads(request("GET", "/api/serve/applications/", port=DASHBOARD_PORT).read())
            return all(application["status"] == "RUNNING" for application in answer["applications"].values())

    def stop(self):
        """As Ctrl-C does. Nothing may be left behind."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(WAIT_S)
        wait_until(lambda: not self.pids(""), "the end of every process", 30)
        assert not list(self.tmp.glob("neuron-textgen.*")), "a server left its folder behind"


def request(method, path, body=None, port=PORT, **headers):
    """An open response; close it when done."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    response.connection = connection
    return response


def generation(tokens, stream=False):
    """A request body for `/v1/completions` that generates exactly so many tokens."""
    return {"prompt": "Deep learning", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}


def busy(replicas):
    return [replica.metric("tgi_slots_busy") for replica in replicas]


class Load:
    """Clients that stream one generation after the other, and note how each went."""

    def __init__(self, clients=2, tokens=60):
        self.results = []  # (began_at, ended_at, error or None)
        self._body = generation(tokens, stream=True)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self):
        while not self._stop.is_set():
            began_at = time.monotonic()
            error = self._send()
            self.results.append((began_at, time.monotonic(), error))

    def _send(self):
        try:
            response = request("POST", "/v1/completions", self._body)
            data = response.read()
            if response.status != 200 or not data.endswith(b"data: [DONE]\n\n") or b'"error"' in data:
                return f"{response.status} {data[-300:]}"
        except Exception as error:
            return repr(error)

    def wait_for(self, count):
        target = len(self.results) + count
        wait_until(lambda: len(self.results) >= target, f"{count} more requests")

    @property
    def failed(self):
        return [(began_at, ended_at, error) for began_at, ended_at, error in self.results if error]
