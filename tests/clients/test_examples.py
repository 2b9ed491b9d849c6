"""The examples of docs/clients.md, run as they are written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_server import CHAT_ANSWER, ROOT, serving

CLIENTS = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = re.findall(r"^```(\w+)\n(.*?)^```", CLIENTS, flags=re.DOTALL | re.MULTILINE)
COMMANDS = {"python": [sys.executable, "-c"], "javascript": ["node", "-e"], "sh": ["bash", "-c"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of a model whose generation_config.json asks for no sampling: the examples ask for none of their own."""
    model = tmp_path_factory.mktemp("examples") / "model"
    shutil.copytree(ROOT / "demo" / "model", model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0}))
    with serving(MODEL_ID=str(model)) as url:
        yield url


def test_every_block_of_the_page_is_run():
    assert 2 * len(EXAMPLES) == CLIENTS.count("```") > 10


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_prints_what_the_model_says(language, code, url):
    if language == "javascript" and not Path(os.environ["NODE_PATH"]).exists():
        pytest.skip("no npm here: the JavaScript clients are not installed")
    command = [*COMMANDS[language], code.replace("http://localhost:8080", url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert CHAT_ANSWER[:80] in done.stdout, done.stdout + done.stderr
