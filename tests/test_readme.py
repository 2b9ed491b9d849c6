"""The README and the quickstart: their commands are run as they are written, and what they show is what comes out."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
from processes import Server, wait_until

from run import HERE

pytestmark = pytest.mark.processes

README = (HERE / "README.md").read_text()
QUICKSTART = (HERE / "docs" / "quickstart.md").read_text()
API = "".join(path.read_text() for path in HERE.glob("docs/api/*.md"))
CURL = re.compile(r"```sh\n(curl .*?)```", re.DOTALL)
CURLS = CURL.findall(README + QUICKSTART)
MIGRATING = "".join(path.read_text() for path in HERE.glob("docs/migrating/*.md"))


def commands_of_the_guide():
    """What its steps send to this server: in their last column, or in the one before where that is "the same"."""
    for there, here in re.findall(r"^\| \w+ \| (.*) \| (.*) \|$", MIGRATING, flags=re.MULTILINE):
        same = there if here.startswith("the same") else ""
        yield from re.findall(r"`(curl [^`]*localhost:8080[^`]*)`", same + here)


@pytest.fixture(scope="module")
def made_and_run():
    """`make run`, on a port of its own."""
    assert "`make run` alone serves" in README
    with Server(command=("make", "run")) as server:
        server.wait_ready()
        yield server
        server.stop()


def the_curl(what):
    """The one command with these words, which may be on both pages."""
    (command,) = {command for command in CURLS if what in command}
    return command


def events(text):
    return [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data: {")]


def run(command, server):
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    command = command.replace("localhost:8080", f"127.0.0.1:{server.port}")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_each_command_with_curl_is_answered(made_and_run):
    assert len(CURLS) > 4
    for command in CURLS + CURL.findall(API):
        run(command.replace("curl ", "curl --fail "), made_and_run)


def test_make_test_runs_the_tests():
    """Only those of this file, and only collected: they are running already."""
    command = ["make", "test", "TESTS_AT_A_TIME=0", "ARGS=--collect-only tests/test_readme.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "test_make_test_runs_the_tests" in done.stdout


def test_the_stream_is_what_the_quickstart_shows(made_and_run):
    printed = events(run(the_curl("/generate_stream"), made_and_run))
    shown = events(QUICKSTART)
    assert len(shown) == 3
    assert shown[-1]["index"] == len(printed)
    for event in shown:
        same = printed[event["index"] - 1]
        # Another processor adds up in another order: the last digits may differ.
        assert event["token"].pop("logprob") == pytest.approx(same["token"].pop("logprob"), abs=1e-3)
        assert event == same


def test_a_chat_is_answered(made_and_run):
    (choice,) = json.loads(run(the_curl('"What is Deep Learning?"}],"max_tokens"'), made_and_run))["choices"]
    assert choice["message"]["content"].startswith("Deep learning is")
    assert choice["finish_reason"] == "stop"


def test_the_commands_of_the_guide_are_answered(made_and_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sample_text.txt").write_text("Today the weather is really nice")
    commands = set(commands_of_the_guide())
    assert len(commands) > 10
    for command in commands:
        command = command.replace("/predictions/llama-2-13b", "/predictions/neuron-textgen/demo")
        answer = run(command.replace("curl ", "curl --fail ", 1), made_and_run)
        assert "generated_text" in answer or not re.search("generate|invocations", command), command


def schema_in(command, name):
    """The JSON schema of the body that a command sends, by the name of what it is for."""
    body = json.loads(re.search(r"-d '(.*)'", command, flags=re.DOTALL)[1])
    (found,) = [function["function"] for function in body.get("tools", [])] or [body["response_format"]["json_schema"]]
    assert found["name"] == name
    return found.get("schema") or found["parameters"]


def test_an_answer_is_json_that_the_schema_allows(made_and_run):
    (choice,) = json.loads(run(the_curl("response_format"), made_and_run))["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), schema_in(the_curl("response_format"), "person"))
    assert choice["finish_reason"] == "stop"


def test_a_tool_is_called_with_arguments_that_its_schema_allows(made_and_run):
    (choice,) = json.loads(run(the_curl("get_weather"), made_and_run))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        assert call["function"]["name"] == "get_weather"
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema_in(the_curl("get_weather"), "get_weather"))


def test_health_and_info_answer_as_written(made_and_run):
    health, _, info = run(the_curl("/health"), made_and_run).rpartition("\n")
    assert "200 OK" in health
    assert json.loads(info)["model_id"] == "neuron-textgen/demo"


def test_the_second_run_is_quick_to_its_first_line(made_and_run):
    wait_until(lambda: "Starting neuron-textgen" in made_and_run.log, "the first line")
    assert "Installing" not in made_and_run.log, "what is installed is installed again"
