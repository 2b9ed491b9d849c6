"""The OpenAPI document as the tools that read it see it: openapi-python-client makes a client of it, redocly lints it."""

import importlib
import json
import os
import subprocess
import sysconfig
import urllib.request
from pathlib import Path

import pytest
from demo_server import ANSWER, CHAT_ANSWER, CHAT_ANSWER_TOKENS, QUESTION, QUESTION_TOKENS

REDOCLY = Path(os.environ["NODE_PATH"], ".bin/redocly")


@pytest.fixture(scope="module")
def document(url, tmp_path_factory):
    path = tmp_path_factory.mktemp("openapi") / "openapi.json"
    with urllib.request.urlopen(f"{url}/api-doc/openapi.json") as response:
        path.write_bytes(response.read())
    return path


@pytest.fixture(scope="module")
def generated(document):
    """Finds a module of the generated client by its name."""
    tools = sysconfig.get_path("scripts")
    settings = document.parent / "settings.yaml"
    settings.write_text('content_type_overrides: {"text/plain": "application/octet-stream"}')  # it knows no bodies of text
    command = ["openapi-python-client", "generate", "--path", document, "--output-path", document.parent / "textgen_client"]
    command += ["--config", settings]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", tools, prepend=os.pathsep)  # it formats what it writes with ruff
        done = subprocess.run([*command, "--meta", "none", "--fail-on-warning"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        patch.syspath_prepend(document.parent)
        yield lambda name: importlib.import_module(f"textgen_client.{name}")


@pytest.fixture(scope="module")
def client(generated, url):
    with generated("client").Client(base_url=url) as client:
        yield client


@pytest.fixture
def chat(generated, client):
    def ask(**parameters):
        models = generated("models")
        body = models.ChatRequest(messages=[models.Message(role="user", content=QUESTION)], temperature=0, **parameters)
        return generated("api.default.post_v1_chat_completions").sync_detailed(client=client, body=body)

    return ask


def test_the_generated_client_chats(chat):
    completion = chat().parsed
    assert completion.choices[0].message.content == CHAT_ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.completion_tokens == CHAT_ANSWER_TOKENS


def test_the_generated_client_gives_log_probabilities_typed(chat):
    (choice,) = chat(max_tokens=2, logprobs=True, top_logprobs=3).parsed.choices
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3, 3]


def test_an_error_reaches_the_generated_client_in_its_type(chat, generated):
    response = chat(top_p=7)
    assert response.status_code == 400
    assert isinstance(response.parsed, generated("models").OpenAIErrorBody)
    assert (response.parsed.error.param, response.parsed.error.type_) == ("top_p", "invalid_request_error")


def test_the_generated_client_generates_with_details(client, generated):
    models = generated("models")
    parameters = models.Parameters(details=True, decoder_input_details=True)
    body = models.GenerateRequest(inputs=QUESTION, parameters=parameters)
    output = generated("api.default.post_generate").sync(client=client, body=body)
    assert output.generated_text == ANSWER
    assert output.details.finish_reason == "eos_token"
    assert len(output.details.prefill) == QUESTION_TOKENS


def test_the_generated_client_reads_a_stream_as_text(client, generated):
    models = generated("models")
    body = models.GenerateRequest(inputs=QUESTION, parameters=models.Parameters(max_new_tokens=2))
    events = generated("api.default.post_generate_stream").sync(client=client, body=body)
    assert [json.loads(event.removeprefix("data: "))["index"] for event in events.strip().split("\n\n")] == [1, 2]


@pytest.mark.skipif(not REDOCLY.exists(), reason="no npm here: redocly is not installed")
def test_redocly_finds_nothing_against_its_recommended_rules(document):
    quiet = os.environ | {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    command = [REDOCLY, "lint", document, "--extends", "recommended", "--format", "json"]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)["problems"]) == (0, []), done.stderr
