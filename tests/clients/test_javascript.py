"""The clients in JavaScript: each file beside this one that ends in .test.js, by Node's own test runner.

They ask a server with an API key that runs one request at a time.
"""

import os
import shutil
import subprocess
from pathlib import Path

import demo_server
import pytest

HERE = Path(__file__).parent
PACKAGES = Path(os.environ["NODE_PATH"])
GIVEN = ("QUESTION", "ANSWER", "ANSWER_TOKENS", "CHAT_ANSWER", "CHAT_ANSWER_TOKENS", "CHAT_TOKENS")
KEY = "secret"

pytestmark = pytest.mark.skipif(not PACKAGES.exists(), reason="no npm here: the JavaScript clients are not installed")


@pytest.fixture(scope="module")
def environment():
    with demo_server.serving(API_KEY=KEY, MAX_CONCURRENT_REQUESTS="1") as url:
        yield (os.environ | {"SERVER": url, "KEY": KEY} | {name: str(getattr(demo_server, name)) for name in GIVEN})


@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.js")), ids=lambda file: file.name.removesuffix(".test.js"))
def test_a_javascript_client_gets_what_it_expects(file, environment):
    command = [shutil.which("node"), "--test", "--test-reporter=spec", file]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
