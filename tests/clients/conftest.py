"""A server for the clients, and no network beyond this machine. Started by `make test-clients`."""

import json
import os
import sys
import urllib.request

import pytest
from demo_server import serving
from scripted_server import Home

os.environ.update(  # before any client is imported
    AWS_EC2_METADATA_DISABLED="true",
    HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    LANGSMITH_TRACING="false",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    NO_PROXY="127.0.0.1",
    no_proxy="127.0.0.1",
)


def _stay_here(event, arguments):
    """An audit hook: a client that would ask somebody else gets an error instead."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if host not in (None, "127.0.0.1", "::1", "localhost", b"127.0.0.1", b"localhost"):
        raise ConnectionRefusedError(f"tests talk to this machine only, not to {host}")


sys.addaudithook(_stay_here)


@pytest.fixture(scope="session")
def url():
    """Of a server that has room for few requests at once: who asks for more answers is told of an overload."""
    with serving(MAX_CONCURRENT_REQUESTS="4", MAX_BEST_OF="8", MAX_CLIENT_BATCH_SIZE="8") as url:
        yield url


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def busy(url, request):
    """While three of the four sequences that may run, or as many as the parameter says, belong to somebody else."""
    asked = {
        "prompt": "Hello",
        "n": getattr(request, "param", 3),
        "temperature": 1,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
    }
    sent = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent) as stream:
        assert stream.readline().startswith(b"data: ")
        yield
