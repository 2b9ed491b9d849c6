"""The examples of docs/clients.md, run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from demo_server import ROOT

CLIENTS = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = re.findall(r"^```(\w+)\n(.*?)^```", CLIENTS, flags=re.DOTALL | re.MULTILINE)
COMMANDS = {"python": [sys.executable, "-c"], "javascript": ["node", "-e"], "sh": ["bash", "-c"]}


def test_every_block_of_the_page_is_run():
    assert 2 * len(EXAMPLES) == CLIENTS.count("```") > 10


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_prints_what_the_model_says(language, code, url):
    if language == "javascript" and not Path(os.environ["NODE_PATH"]).exists():
        pytest.skip("no npm here: the JavaScript clients are not installed")
    command = [*COMMANDS[language], code.replace("http://localhost:8080", url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "learning is a branch of machine learning" in done.stdout, done.stdout + done.stderr
