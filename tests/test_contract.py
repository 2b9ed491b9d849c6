"""Whatever a client sends, the answer is one that our own OpenAPI document promises, and the server is well afterwards.

Every field at and beyond its bounds, on every route; random bodies are in test_fuzz.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Server

from config import DEMO_MODEL

pytestmark = pytest.mark.processes

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The first layer of the demonstration model alone, with a small window, so that an example takes milliseconds. Its text
    makes no sense; without an end-of-sequence token it has a known length."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("model") / "demo")
    changes = {
        "config.json": {"num_hidden_layers": 1, "eos_token_id": None},
        "generation_config.json": {"eos_token_id": None},
        "tokenizer_config.json": {"eos_token": None},
    }
    for name, values in changes.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    with Server(MODEL_ID=str(folder), MAX_TOTAL_TOKENS="32", MAX_BATCH_SIZE="8", LOG_LEVEL="warning") as server:
        server.wait_healthy()
        yield server
        assert server.stop() == 0


@pytest.mark.timeout(600)
def test_thousands_of_requests_get_the_answers_that_the_document_promises(server):
    document = f"http://127.0.0.1:{server.port}/api-doc/openapi.json"
    command = ["-m", "schemathesis.cli", "run", document, "--checks", CHECKS, "--phases", "coverage"]
    for path in ("/", "/v1", "/invocations", "/generate_stream"):  # they take what others take
        command += ["--exclude-path", path]
    command += ["--seed", "1", "--no-color", "--max-failures", "5", "--request-timeout", "120"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "contract_hooks", "PYTHONPATH": str(Path(__file__).parent / "helpers")}
    done = subprocess.run([sys.executable, *command], cwd=server.tmp, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (generated,) = re.findall(r"(\d+) generated", done.stdout)
    assert int(generated) >= 3000
    assert server.get("/health")[0] == 200
    server.wait_idle()
    assert "Traceback" not in server.log
