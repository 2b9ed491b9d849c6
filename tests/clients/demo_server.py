"""Starts the real server with the demonstration model, as a person would, and stops it; and what that model answers.

Used in a client's environment, which holds no package of the project: nothing of it is imported here.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180  # for a busy machine; it takes some six seconds

QUESTION = "What is Deep Learning?"
QUESTION_TOKENS = 8
CHAT = [{"role": "user", "content": QUESTION}]
CHAT_TOKENS = 10
# What the model says when it does not sample. A chat answers in these words, a text goes on with a space in front.
CHAT_ANSWER = (
    "Deep learning is a branch of machine learning that uses neural networks with many layers. Each layer turns its input into "
    "a slightly more abstract description, so the network learns useful features from raw data by itself. It is called deep "
    "because the layers are stacked one on top of the other."
)
ANSWER = " " + CHAT_ANSWER
ANSWER_TOKENS = 70  # the last of them ends it
CHAT_ANSWER_TOKENS = 69


@contextlib.contextmanager
def serving(port_name="PORT", command=("./entrypoint.sh", "serve"), **settings):
    """The URL of a server of its own, ready; `settings` are environment variables. Fails when it does not end well."""
    port = free_port()
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    # /tmp: the path of a socket may have 107 characters, and folders of pytest's own are long
    with tempfile.TemporaryDirectory(prefix="textgen-clients-", dir="/tmp") as folder:
        own = {"PYTHON": os.environ["SERVER_PYTHON"], "TMPDIR": folder, "OMP_NUM_THREADS": "1", port_name: str(port)}
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=inherited | own | settings, stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            yield url
            process.send_signal(signal.SIGTERM)
            assert _exit_code(process) == 0, log.read_text() + _processes()
        finally:
            process.kill()  # what it started ends with it
            process.wait()


def _exit_code(process):
    """None when it does not end in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(WAIT_S)


def _processes():
    """Every process and what it waits for, to see what holds up one that does not end."""
    return subprocess.run(["sh", "-c", "ps -eo pid,ppid,stat,wchan:20,etimes,args"], capture_output=True, text=True).stdout


def free_port():
    """A port that nobody listens on. Not one of those that Linux gives to who connects: one of the many clients that run at the
    same time could have it before the server does."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("0.0.0.0", port))
            return port


def _wait_ready(url, process, log):
    deadline = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None, f"it ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"not ready; log so far:\n{log.read_text()}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):  # nobody listens yet, or 503
            return
        time.sleep(0.05)
