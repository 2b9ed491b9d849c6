"""Whatever a client sends, the answer is one that our own OpenAPI document promises, and the server is well afterwards.

Every field at and beyond its bounds, on every route; random bodies are in test_fuzz.py.
"""

import re
import subprocess
import sys

import pytest
from processes import Server

pytestmark = pytest.mark.processes

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def server():
    """Its window is small, so that an example takes milliseconds."""
    with Server(MAX_TOTAL_TOKENS="32", MAX_BATCH_SIZE="8", LOG_LEVEL="warning") as server:
        server.wait_healthy()
        yield server
        assert server.stop() == 0


@pytest.mark.timeout(600)
def test_thousands_of_requests_get_the_answers_that_the_document_promises(server):
    document = f"http://127.0.0.1:{server.port}/api-doc/openapi.json"
    command = ["-m", "schemathesis.cli", "run", document, "--checks", CHECKS, "--phases", "coverage"]
    for path in ("/", "/v1", "/invocations", "/generate_stream"):  # they take what others take
        command += ["--exclude-path", path]
    command += ["--seed", "1", "--no-color", "--max-failures", "5"]
    done = subprocess.run([sys.executable, *command], cwd=server.tmp, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (generated,) = re.findall(r"(\d+) generated", done.stdout)
    assert int(generated) >= 1000
    assert server.get("/health")[0] == 200
    server.wait_idle()
    assert "Traceback" not in server.log
