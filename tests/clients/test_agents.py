"""Coding agents as docs/agents.md configures them: the model calls a tool, the agent runs it, the model answers.

The first request of an agent has some ten thousand tokens and all that it can send. Each agent is tried with three published
templates: one that has a place for tools, one that has none, and one that raises for what Mistral's do.
"""

import json
import sys
from itertools import pairwise

import mcp_server
import pytest
from image_files import IMAGE_TOKENS, png
from scripted_server import (
    KNOWS,
    PACKAGES,
    SECRET,
    SECRET_FILE,
    documented,
    exported,
    needs_node,
    needs_npm,
    serving_script,
    written_call,
)

pytestmark = [needs_npm(), pytest.mark.timeout(600)]

READ = f"cat {SECRET_FILE}"
# The tool that each agent has for a command, and the arguments that it must have.
TOOLS = {
    "claude": ("Bash", {"command": READ, "description": "Reads it"}),
    "codex": ("exec_command", {"cmd": READ}),
    "opencode": ("bash", {"command": READ, "description": "Reads it"}),
    "continue": ("Bash", {"command": READ}),
    "qwen": ("run_shell_command", {"command": READ, "is_background": False}),
}
FOUND = "mcp__oracle__tell"  # Claude Code's name for the tool of mcp_server.py


@pytest.fixture(scope="module", params=["qwen2_5", "gemma3", "mistral_nemo"])
def url(request, tmp_path_factory):
    calls = {asked(agent): written_call(request.param, tool, **arguments) for agent, (tool, arguments) in TOOLS.items()}
    calls[asked("search")] = written_call(request.param, "ToolSearch", query=f"select:{FOUND}")
    calls[mcp_server.TOOL["description"]] = written_call(request.param, FOUND, what="It")
    with serving_script(tmp_path_factory.mktemp("agents"), request.param, {**calls, SECRET: KNOWS}) as url:
        yield url


def asked(agent):
    """The word that lets the model call the tool of this agent."""
    return f"use-{agent}"


def program(pattern):
    """A native program of a package, whose install script has not been run."""
    found = sorted(PACKAGES.glob(pattern))
    if not found:
        pytest.skip(f"npm has no {pattern} for this machine")
    return str(found[0])


def test_claude_code_runs_a_tool(home, url):
    claude = program("@anthropic-ai/claude-code-linux-*/claude")
    command = [claude, "-p", asked("claude"), "--allowedTools", "Bash", "--output-format", "json"]
    said = json.loads(home.run(command, **exported(documented("Claude Code", url))))
    assert (said["is_error"], said["result"], said["num_turns"]) == (False, KNOWS, 2), said
    assert said["usage"]["cache_read_input_tokens"] > 10_000


def test_claude_code_finds_a_tool_and_the_prefix_stays_cached(home, url, request):
    claude = program("@anthropic-ai/claude-code-linux-*/claude")
    oracle = {"command": sys.executable, "args": [mcp_server.__file__, SECRET]}
    command = [claude, "-p", asked("search"), "--allowedTools", f"ToolSearch,{FOUND}", "--output-format", "stream-json"]
    command += ["--verbose", "--mcp-config", json.dumps({"mcpServers": {"oracle": oracle}})]
    said = home.run(command, **exported(documented("Claude Code", url)), ENABLE_TOOL_SEARCH="true")
    events = [json.loads(line) for line in said.splitlines()]
    turns = [event["message"] for event in events if event["type"] == "assistant"]
    called = [block["name"] for turn in turns for block in turn["content"] if block["type"] == "tool_use"]
    assert (called, events[-1]["result"]) == (["ToolSearch", FOUND], KNOWS), events
    if request.node.callspec.params["url"] == "mistral_nemo":
        return  # its template writes the tools in front of the newest user message
    usages = [turn["usage"] for turn in turns]
    for earlier, later in pairwise(usages):
        shared = earlier["input_tokens"] + earlier["cache_read_input_tokens"]
        assert shared > 10_000 and later["cache_read_input_tokens"] >= shared - 32, usages


def test_claude_code_prefills_what_is_new_in_a_conversation_and_in_the_next_one(home, url, request):
    claude = [program("@anthropic-ai/claude-code-linux-*/claude"), "--output-format", "stream-json", "--verbose"]
    claude += ["--allowedTools", "Bash"]

    def usages(*arguments):
        said = home.run([*claude, *arguments], **exported(documented("Claude Code", url)))
        messages = {}  # one event for each block
        for event in map(json.loads, said.splitlines()):
            if event["type"] == "assistant":
                messages[event["message"]["id"]] = event["message"]["usage"]
        return list(messages.values())

    turns = [*usages("-p", asked("claude")), *usages("--continue", "-p", "Thank you, and now?")]
    assert len(turns) >= 3
    totals = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in turns]
    if request.node.callspec.params["url"] == "mistral_nemo":
        return  # its template writes the tools in front of the newest user message
    for before, usage in zip(totals, turns[1:], strict=False):
        assert usage["cache_read_input_tokens"] >= before - 64, turns
    (other, *_) = usages("-p", "Something else: hello")
    assert other["cache_read_input_tokens"] > 9_000 and other["input_tokens"] < 3_000, (
        turns,
        other,
    )  # what it is told first is new


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Of a model that reads images: it tells the secret where an image is in the prompt, and nothing else says so."""
    read = written_call("qwen2_5", "Read", file_path="picture.png")
    with serving_script(tmp_path_factory.mktemp("seeing"), "qwen2_5", {"use-eyes": read, SECRET: KNOWS}, SECRET) as url:
        yield url


def test_claude_code_reads_an_image(home, seeing):
    (home.work / "picture.png").write_bytes(png(640, 480))
    claude = program("@anthropic-ai/claude-code-linux-*/claude")
    command = [claude, "-p", "use-eyes", "--allowedTools", "Read", "--max-turns", "4"]
    command += ["--output-format", "stream-json", "--verbose"]
    events = [json.loads(line) for line in home.run(command, **exported(documented("Claude Code", seeing))).splitlines()]
    assert (events[-1]["is_error"], events[-1]["result"], events[-1]["num_turns"]) == (False, KNOWS, 2), events
    asked, answered = [event["message"]["usage"] for event in events if event["type"] == "assistant"][-2:]
    before, after = (usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (asked, answered))
    assert IMAGE_TOKENS < after - before < IMAGE_TOKENS + 500, events


def test_codex_runs_a_tool(home, url):
    home.write(".codex/config.toml", documented("Codex", url))
    codex = [str(PACKAGES / ".bin" / "codex"), "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"]
    events = [json.loads(line) for line in home.run([*codex, asked("codex")]).splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == [SECRET + "\n"], events
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [KNOWS], events
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["input_tokens"] > 10_000


def test_opencode_runs_a_tool(home, url):
    home.write(".config/opencode/opencode.json", documented("opencode", url))
    said = home.run([program("opencode-linux-x64*/bin/opencode"), "run", asked("opencode")])
    assert said.strip().endswith(KNOWS), said


@needs_node(20)
def test_continue_runs_a_tool(home, url):
    home.write(".continue/config.yaml", documented("Continue", url))
    said = home.run([str(PACKAGES / ".bin" / "cn"), "-p", asked("continue"), "--allow", "Bash"])
    assert said.strip() == KNOWS


@needs_node(20)
def test_qwen_code_runs_a_tool(home, url):
    qwen = [str(PACKAGES / ".bin" / "qwen"), "-p", asked("qwen"), "--approval-mode", "yolo"]
    assert home.run(qwen, **exported(documented("qwen-code", url))).strip() == KNOWS
