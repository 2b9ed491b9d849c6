"""LiteLLM's proxy as docs/agents.md configures it, before this server: it gives three APIs, and asks one or another of ours."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from demo_server import CHAT, CHAT_ANSWER, CHAT_ANSWER_TOKENS
from scripted_server import Home, documented
from weather import TOOL, GetWeather

ALONE = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
FUNCTION = TOOL["function"]
MESSAGE = {"model": "local", "max_tokens": 200, "messages": CHAT, "temperature": 0}
FORCED = {
    "tools": [{"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}],
    "tool_choice": {"type": "tool", "name": FUNCTION["name"]},
}


@pytest.fixture(scope="module", params=["openai", "anthropic"])
def proxy(request, url, tmp_path_factory):
    """The URL of a proxy that asks /v1/chat/completions and /v1/responses, or /v1/messages."""
    home = Home(tmp_path_factory.mktemp("litellm"))
    config = documented("LiteLLM", url)
    if request.param == "anthropic":
        config = config.replace("openai/local", "anthropic/local").replace(f"{url}/v1", url)
    home.write("config.yaml", config)
    command = [
        str(Path(sys.executable).parent / "litellm"),
        "--config",
        home.home / "config.yaml",
        "--host",
        "127.0.0.1",
        "--port",
    ]
    with home.serving(command, "/health/liveliness", **ALONE) as address:
        yield address


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def ask(proxy, path, **body):
    return json.loads(post(proxy + path, body))


def test_a_message_is_answered(proxy):
    message = ask(proxy, "/v1/messages", **MESSAGE)
    assert [(block["type"], block["text"]) for block in message["content"]] == [("text", CHAT_ANSWER)]
    assert message["usage"]["output_tokens"] == CHAT_ANSWER_TOKENS


def test_a_streamed_message_has_anthropics_events(proxy):
    written = post(f"{proxy}/v1/messages", {**MESSAGE, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in written.splitlines() if line.startswith("data: {")]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == CHAT_ANSWER


def test_a_tool_is_called_and_its_result_answered(proxy):
    message = ask(proxy, "/v1/messages", **MESSAGE, **FORCED)
    (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
    GetWeather(**call["input"])
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    messages = [*CHAT, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    answer = ask(proxy, "/v1/messages", **{**MESSAGE, "messages": messages}, tools=FORCED["tools"])
    assert answer["content"][0]["text"]


def test_a_chat_and_a_response_are_answered(proxy):
    chat = ask(proxy, "/v1/chat/completions", **MESSAGE)
    assert chat["choices"][0]["message"]["content"] == CHAT_ANSWER
    response = ask(proxy, "/v1/responses", model="local", input=CHAT, temperature=0)
    assert [part["text"] for item in response["output"] for part in item["content"]] == [CHAT_ANSWER]


def test_a_wrong_value_is_a_bad_request_with_the_words_of_the_server(proxy):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(proxy, "/v1/messages", **{**MESSAGE, "temperature": -1})
    assert caught.value.code == 400
    assert "temperature" in caught.value.read().decode()
