"""Coding agents as docs/agents.md configures them: their first request has some ten thousand tokens and all that they can send.

The model answers with one text. That the agents show it means that they took the answer, its events and its usage.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from demo_server import ROOT, serving

PACKAGES = Path(os.environ.get("AGENTS", "/nowhere"))
TEXT = "Served from your own machine."
DOCUMENT = (ROOT / "docs" / "agents.md").read_text()

pytestmark = [
    pytest.mark.skipif(not PACKAGES.exists(), reason="npm could not install the agents"),
    pytest.mark.timeout(600),
]


def documented(agent, url):
    """The first block of code below the heading of an agent, for this server."""
    section = DOCUMENT.split(f"## {agent}\n")[1].split("\n## ")[0]
    return section.split("```")[1].partition("\n")[2].replace("http://localhost:8080", url)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    tokenizer = PACKAGES / "@lenml" / "tokenizer-qwen2_5" / "models"
    make = [os.environ["SERVER_PYTHON"], "tests/clients/scripted_model.py", folder / "model", tokenizer, TEXT]
    subprocess.run(make, cwd=ROOT, check=True)
    settings = {"MODEL_ID": str(folder / "model"), "MODEL_CACHE": str(folder / "cache"), "LOG_LEVEL": "debug"}
    with serving(**settings, MAX_TOTAL_TOKENS="65536", MAX_BATCH_SIZE="2") as url:
        yield url


@pytest.fixture
def run(tmp_path):
    """Runs an agent in a home and a folder of its own, and returns what it writes. Its only network is this server."""
    proxy = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()

    def run(command, **variables):
        own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            command,
            cwd=tmp_path / "work",
            env=own | proxy | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.home = tmp_path / "home"
    return run


def program(pattern):
    """A native program of a package, whose install script has not been run."""
    found = sorted(PACKAGES.glob(pattern))
    if not found:
        pytest.skip(f"npm has no {pattern} for this machine")
    return str(found[0])


def test_claude_code_is_answered(run, url):
    lines = [line.removeprefix("export ") for line in documented("Claude Code", url).splitlines() if line.startswith("export ")]
    variables = dict(line.split("=", 1) for line in lines)
    claude = program("@anthropic-ai/claude-code-linux-*/claude")
    said = json.loads(run([claude, "-p", "Hello", "--output-format", "json"], **variables))
    assert (said["is_error"], said["result"]) == (False, TEXT), said
    assert said["usage"]["input_tokens"] + said["usage"]["cache_read_input_tokens"] > 5000


def test_codex_is_answered(run, url):
    (run.home / ".codex").mkdir()
    (run.home / ".codex" / "config.toml").write_text(documented("Codex", url))
    codex = [str(PACKAGES / ".bin" / "codex"), "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", "Hello"]
    events = [json.loads(line) for line in run(codex, LOCAL_API_KEY="none").splitlines()]
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert said == [TEXT], events
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["input_tokens"] > 5000
