"""Starts servers for the benchmarks, watches their processes in /proc, and ends them with everything that they started.

A `Server` is a command in a session of its own with its log in a file. devices.py, peers.py, long_prompt.py, demo.py, soak.py
and first_run.py use it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
READY_S = 900


def clean_environment(temporary: Path, port: int, **settings: str) -> dict[str, str]:
    """An environment with only the caller's caches, the run folder in `temporary`, this Python, and one local port."""
    kept = ("PATH", "HOME", "LANG", "MODEL_CACHE", "NUMBA_CACHE_DIR")
    inherited = {name: os.environ[name] for name in kept if name in os.environ}
    own = {"PYTHON": sys.executable, "TMPDIR": str(temporary), "HOSTNAME": "127.0.0.1", "PORT": str(port)}
    return inherited | own | settings


def free_port() -> int:
    """A port without a listener, outside of the range that Linux takes ports for connections from: a client could take it
    before the server does."""
    while True:
        port = 12000 + secrets.randbelow(8000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


class Server:
    """A running command that serves HTTP on `port`. As a context manager it ends the command."""

    def __init__(self, command: Sequence[str | Path], port: int, log_path: Path, environment: dict[str, str]):
        self.port, self.url, self.log_path = port, f"http://127.0.0.1:{port}", log_path
        self.started_at, self.ready_s = time.monotonic(), 0.0
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self.end()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, log_text: str | None = "Connected", limit_s: float = READY_S) -> Server:
        """Waits until the log holds that text or, with None, until GET /health responds. Raises RuntimeError."""
        while not self._is_ready(log_text):
            if self.process.poll() is not None or time.monotonic() > self.started_at + limit_s:
                raise RuntimeError(f"the server did not start; the end of its log:\n{self.log[-2000:]}")
            time.sleep(0.02 if log_text else 0.2)
        self.ready_s = time.monotonic() - self.started_at
        return self

    def _is_ready(self, log_text: str | None) -> bool:
        if log_text:
            return log_text in self.log
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=5):
            return True
        return False

    def pids(self, script: str = "") -> list[int]:
        """The session's processes that have `script` in their command line, the oldest first."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()  # empty when it has ended
                if command and script.encode() in command and os.getsid(int(folder.name)) == self.process.pid:
                    found.append(int(folder.name))
        return sorted(found)

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM to the command; returns its exit code. Raises subprocess.TimeoutExpired."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        self.signal(signal.SIGKILL)
        self.process.wait()
        while self.pids():
            time.sleep(0.02)


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of the processes so far, from the scheduler's own count."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def machine_busy_s() -> float:
    """CPU time of all processes of the machine so far."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory in 10^6 bytes. Raises OSError for a process that has ended."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
