"""`POST /v1/messages`: requests become chats; messages, events and errors are those of Anthropic's API reference."""

import json
import logging
from itertools import pairwise

import pytest
from asked import (
    CALLS,
    USER,
    allows,
    answer_to,
    nameless,
    prepared,
    record_renders,
    refusal,
    serving,
    with_thinking,
    written,
)
from openai_api import CHAT, MESSAGES
from openai_api import whole as asked

from api.anthropic.output import MessagesResponseWriter
from api.anthropic.tools import MessagesTools
from api.anthropic.types import MessagesRequest, ThinkingConfig
from api.chats.reasoning import THINKING_OFF, THINKING_ON, unseal
from api.http.errors import ANTHROPIC, ApiError

ROUTE = "/v1/messages"
BODY = {"messages": [USER], "max_tokens": 12, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"name": "weather", "description": "Rain or sun", "input_schema": {"type": "object"}, "strict": True}
NESTED = {"name": "weather", "parameters": {"type": "object"}, "description": "Rain or sun", "strict": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}
PARTS = [{"type": "text", "text": "H", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "i"}]


def whole(served, **fields):
    return asked(served, ROUTE, BODY | fields)


def events_of(data):
    blocks = [block.split("\n") for block in data.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def stream(served, **fields):
    response = served.post(ROUTE, BODY | fields | {"stream": True})
    assert response.content_type == "text/event-stream; charset=utf-8"
    return events_of(response.get_data(as_text=True))


def answered(text, finish_reason="eos_token", thinking="", display=None, **fields):
    """The whole message and the events of a text, which a model with Hermes' format writes."""
    tools = {"tools": fields.get("tools", [WEATHER])}
    (asked_for,) = answer_to("messages", BODY | tools | fields).requests
    asked_for = with_thinking(asked_for, thinking)
    tools["thinking"] = ThinkingConfig("adaptive", display=display)
    requests = [MessagesRequest(messages=[], max_tokens=9, stream=streams, **tools) for streams in (False, True)]
    whole, stream = (
        written(MessagesResponseWriter(asked_for, serving(), request, MessagesTools(request)), text, finish_reason)
        for request in requests
    )
    return whole, events_of(stream)


DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def built(events):
    """The message of a stream, put together from its events, as clients do; fails where they are out of order."""
    first, ping, *middle, delta, stop = events
    assert (first["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    texts, is_open = [], False
    for event in middle:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            message["content"].append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta" and event["delta"]["type"] == "signature_delta":
            message["content"][-1]["signature"] += event["delta"]["signature"]
        elif kind == "content_block_delta":
            assert event["delta"][DELTAS[event["delta"]["type"]]]
            texts[-1] += event["delta"][DELTAS[event["delta"]["type"]]]
        else:
            assert kind == "content_block_stop"
        is_open = kind != "content_block_stop"
        assert event["index"] == len(message["content"]) - 1
    assert not is_open
    for block, text in zip(message["content"], texts):
        name = {"tool_use": "input"}.get(block["type"], block["type"])
        assert not block[name]
        block[name] = json.loads(text or "{}") if name == "input" else text
    assert delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": delta["usage"]}


# Requests

SYSTEM = {"role": "system", "content": "Be brief"}
PLAIN = [USER, {"role": "assistant", "content": "Yes"}, SYSTEM, USER]
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOLD = {"role": "tool", "content": "sun", "tool_call_id": "toolu_1"}
TOOLS = {"tools": [WEATHER]}
NESTED_TOOLS = {"tools": [{"type": "function", "function": NESTED}]}
NAMED = {"type": "function", "function": {"name": "weather"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Read me"}}
SEARCHED = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result", "url": "x"}]},
]


SKIPPED = ["redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload", "fallback", "a type of next year"]
PAGE = {"type": "document", "title": "A page", "source": {"type": "text", "media_type": "text/plain", "data": "Read me"}}
DEFINITION = json.dumps({"name": "weather", "parameters": {"type": "object"}, "description": "Rain or sun", "strict": True})
ADDED = "You may also call these functions:\n{}"
READ = [  # a block, and its text
    ({"type": "search_result", "source": "a.md", "title": "Hours", "content": PARTS}, "Hours\na.md\nH\ni"),
    (PAGE | {"source": {"type": "content", "content": PARTS}, "context": "Old"}, "A page\nOld\nH\ni"),
    ({"type": "tool_reference", "tool_name": "weather"}, DEFINITION),
    ({"type": "tool_reference", "tool_name": "unknown"}, "unknown"),
    ({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "weather"}}, ADDED.format(DEFINITION)),
    ({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER}}, ADDED.format(DEFINITION)),
    ({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}, "You may no longer call the function x."),
    (
        {"type": "browser_state", "tabs": [{"tab_id": "1", "title": "Ä", "url": "u", "active": True}, {"url": "v"}]},
        'Browser tabs: [{"tab_id": "1", "title": "Ä", "url": "u", "active": true}, {"url": "v"}]',
    ),
    ({"type": "compaction", "content": "They greeted", "encrypted_content": "x"}, "They greeted"),
    ({"type": "web_search_tool_result", "content": [{"type": "web_search_result", "title": "A", "url": "u"}]}, "A\nu"),
    (
        {"type": "web_fetch_tool_result", "content": {"type": "web_fetch_result", "url": "u", "content": PAGE}},
        "u\nA page\nRead me",
    ),
    (
        {"type": "code_execution_tool_result", "content": {"type": "code_execution_result", "stdout": "3", "stderr": "no"}},
        "3\nno",
    ),
    (
        {"type": "tool_search_tool_result", "content": {"type": "tool_search_tool_search_result", "tool_references": [
            {"type": "tool_reference", "tool_name": "weather"}
        ]}},
        DEFINITION,
    ),
    ({"type": "mcp_tool_result", "tool_use_id": "x", "content": "sun"}, "sun"),
]  # fmt: skip


def user(*content):
    return {"role": "user", "content": list(content)}


def says(*content):
    return {"role": "assistant", "content": list(content)}


CHATS = [  # a request, and the chat that it is
    ({}, {"messages": [USER]}),
    ({"system": "Be brief"}, {"messages": [SYSTEM, USER]}),
    ({"system": [{"type": "text", "text": "Be brief"}]}, {"messages": [SYSTEM, USER]}),
    ({"messages": PLAIN}, {"messages": PLAIN}),
    ({"messages": [user(*PARTS)]}, {"messages": [{"role": "user", "content": "H\ni"}]}),
    ({"messages": [{"role": "ctx", "content": "a"}, USER]}, {"messages": [{"role": "user", "content": "a"}, USER]}),
    (
        {"messages": [USER, says({"type": "text", "text": "Well"}, CALL), user(RESULT, *PARTS)]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "Well", "tool_calls": [CALLED]},
                TOLD,
                {"role": "user", "content": "H\ni"},
            ]
        },
    ),
    (
        {"messages": [USER, says(CALL), user(PARTS[0], RESULT | {"content": [*PARTS, IMAGE], "is_error": True})]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                {"role": "user", "content": "H"},
                TOLD | {"content": "Error: H\ni\n[image omitted: this server reads text only]"},
            ]
        },
    ),
    (
        {"messages": [USER, says(CALL), user({"type": "tool_result", "tool_use_id": "toolu_1"})]},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, TOLD | {"content": ""}]},
    ),
    (
        {"messages": [user(IMAGE, PDF, DOCUMENT)]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": "[image omitted: this server reads text only]\n"
                    "[document omitted: this server reads text only]\nRead me",
                }
            ]
        },
    ),
    (
        {"messages": [USER, says(*SEARCHED, {"type": "redacted_thinking", "data": "x"}, PARTS[0]), USER]},
        {"messages": [USER, {"role": "assistant", "content": "\nx\nH"}, USER]},
    ),
    (TOOLS, NESTED_TOOLS),
    ({"tools": [SEARCH, WEATHER | {"type": "custom"}]}, NESTED_TOOLS),
    ({"tools": [SEARCH]}, {}),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}], "mcp_servers": [{"name": "x"}]}, {}),
    (
        TOOLS | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        NESTED_TOOLS | {"parallel_tool_calls": False},
    ),
    (TOOLS | {"tool_choice": {"type": "any"}}, NESTED_TOOLS | {"tool_choice": "required"}),
    (TOOLS | {"tool_choice": {"type": "tool", "name": "weather"}}, NESTED_TOOLS | {"tool_choice": NAMED}),
    (TOOLS | {"tool_choice": {"type": "none"}}, NESTED_TOOLS | {"tool_choice": "none"}),
    ({"tool_choice": {"type": "auto"}}, {}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    # As LiteLLM sends it.
    (
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"top_k": 0}, {}),
    (
        {
            "betas": ["x"],
            "metadata": {"user_id": "x"},
            "context_management": {"edits": []},
            "container": None,
            "service_tier": "auto",
        },
        {},
    ),
]


@pytest.mark.parametrize(("fields", "chat"), CHATS)
def test_a_request_asks_for_what_a_chat_asks_for(fields, chat):
    made = [prepared("messages", temperature=0, **fields), prepared("greedy chat", max_tokens=9, **chat)]
    assert nameless(made[0]) == nameless(made[1])


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_block_of_another_type_is_skipped_in_every_message_whatever_it_holds(kind, caplog):
    caplog.set_level(logging.DEBUG, "web")
    block = {"type": kind, "id": 5, "name": [], "input": "x", "content": {"type": "x"}, "text": {}, "data": "x"}
    given = [user(block, *PARTS), says(*PARTS, block), user(RESULT | {"content": [block, *PARTS]})]
    left = [user(*PARTS), says(*PARTS), user(RESULT | {"content": PARTS})]
    made = [prepared("messages", system=system, messages=messages) for system, messages in (([block], given), ("", left))]
    assert made[0].prompt.removeprefix("s:;") == made[1].prompt
    assert f"skipped parts of the conversation that this server does not read: {kind}" in caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("block", "text"), READ)
def test_the_text_of_a_block_is_in_the_prompt(block, text):
    def prompt(*messages):
        return prepared("messages", tools=[WEATHER], messages=messages).prompt

    result = RESULT | {"content": [block]}
    assert prompt(user(block)) == prompt({"role": "user", "content": text})
    assert prompt(USER, says(CALL), user(result)) == prompt(USER, says(CALL), user(RESULT | {"content": text}))
    assert prompt(USER, says(*PARTS, block)) == prompt(USER, {"role": "assistant", "content": f"Hi\n{text}\n"})


def test_a_message_of_skipped_blocks_only_is_empty():
    assert prepared("messages", messages=[user({"type": "x"}), says({"type": "x"}), USER]).prompt == "u:;a:;u:Hi;a:"


@pytest.mark.parametrize(("thinking", "options"), [("enabled", THINKING_ON), ("disabled", THINKING_OFF), ("adaptive", {})])
def test_thinking_is_a_variable_of_the_template(thinking, options, monkeypatch):
    rendered = record_renders(monkeypatch)
    prepared("messages", thinking={"type": thinking, "budget_tokens": 99})
    prepared("messages", thinking={"type": thinking}, chat_template_kwargs={"enable_thinking": None, "a": [1, "b"]})
    assert [seen for _, seen in rendered] == [options, options | {"enable_thinking": None, "a": [1, "b"]}]


def test_omitted_thinking_is_in_the_signature_only():
    message, events = answered("<think>Hm.</think>Yes", thinking="before", display="omitted")
    thoughts, text = message["content"]
    assert (thoughts["thinking"], unseal(thoughts["signature"]), text["text"]) == ("", "Hm.", "Yes")
    assert built(events)["content"][0]["signature"]
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in events)


REFUSED = {
    "compaction": {"compaction": {"type": "summarize"}},
    "thread": {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
    "temperature": {"temperature": -1},
    "stop_sequences": {"stop_sequences": list("abcde")},
    "messages": {"messages": []},
    "messages[0].content[1]": {"messages": [user(PARTS[0], {"type": "text"})]},
    "messages[0].content[0]": {"messages": [user({"text": "no type"})]},
    "messages[0].content[0].source": {"messages": [user({"type": "document", "source": {"data": "x"}})]},
    "messages[0].content[0].source.type": {"messages": [user({"type": "document", "source": {"type": []}})]},
    "messages[0].content[0].content[0]": {"messages": [user(RESULT | {"content": [{"type": "text"}]})]},
    "messages[0].content[0].content": {"messages": [user(RESULT | {"content": 5})]},
    "messages[1].content[0].input": {"messages": [USER, says(CALL | {"input": "x"})]},
    "messages[1].content[0]": {"messages": [USER, says({"type": "tool_use", "id": "x"})]},
    "messages[1].role": {"messages": [USER, {"role": "<|x|>", "content": "a"}]},
    "system[0]": {"system": [{"type": "text"}]},
    "tools[1]": {"tools": [SEARCH, {"name": "f"}]},
    "tools[0].description": {"tools": [WEATHER | {"description": 5}]},
    "messages[0].content[0].tool.definition": {
        "messages": [user({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "f"}}})]
    },
    "tools[1].name": {"tools": [SEARCH, WEATHER | {"name": "no name"}]},
    "tools[0].input_schema": {"tools": [WEATHER | {"input_schema": {"type": "array"}}]},
    "tool_choice": {"tools": [SEARCH], "tool_choice": {"type": "any"}},
    "tool_choice.name": {"tools": [SEARCH, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
    "output_config.format.type": {"output_config": {"format": {"type": "xml"}}},
    "output_format.type": {"output_format": {"type": "xml"}},
    "output_format": {"output_format": {"type": "json_schema"}},
    "output_format.schema": {"output_format": {"type": "json_schema", "schema": 5}},
    "output_config.format.schema": {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
    "chat_template_kwargs": {"chat_template_kwargs": {"messages": []}},
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_is_not_supported_is_refused_in_the_names_of_this_api(param):
    error = refusal("messages", **REFUSED[param])
    assert (error.status, error.param) == (422, param)
    assert f"`{param}`" in str(error)


DEFERRED = {"name": "forecast", "input_schema": {"type": "object"}, "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "forecast"}
CHANGED = {"type": "tool_reference", "name": "forecast"}
FOUND = json.dumps({"name": "forecast", "parameters": {"type": "object"}})


def of_turns(*turns, **fields):
    """The prompts of a conversation that grows by these messages, and the functions that each may call."""
    messages, made = [], []
    for turn in turns:
        messages += turn
        made.append(prepared("messages", messages=messages, **fields))
    return [each.prompt for each in made], [each.parser_config.calls and each.parser_config.calls.names for each in made]


def added(block):
    return [{"role": "system", "content": [block]}]


@pytest.mark.parametrize(
    "messages",
    [
        [says(CALL), user(RESULT | {"content": [REFERENCE]})],
        added({"type": "tool_addition", "tool": CHANGED}),
        added({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": DEFERRED}}),
        [says({"type": "tool_search_tool_result", "content": {"tool_references": [REFERENCE]} | {
            "type": "tool_search_tool_search_result"
        }}), USER],
    ],
    ids=["tool_result", "tool_reference", "tool_definition", "tool_search_tool_result"],
)  # fmt: skip
def test_a_deferred_tool_stands_where_a_block_names_it_and_may_be_called_from_there(messages):
    after = [says(CALL | {"name": "forecast"}), user(RESULT), USER]
    prompts, names = of_turns([USER], messages, after, tools=[WEATHER, DEFERRED])
    for shorter, longer in pairwise(prompts):
        assert longer.startswith(shorter.removesuffix("a:")), "what a prompt shares with the one before stays as it is"
    assert "forecast" not in prompts[0]
    assert FOUND in prompts[1].removeprefix(prompts[0].removesuffix("a:"))
    assert names == [["weather"], ["weather", "forecast"], ["weather", "forecast"]]
    choice = {"type": "tool", "name": "forecast"}
    error = refusal("messages", tools=[WEATHER, DEFERRED], tool_choice=choice)
    assert error.param == "tool_choice.name" and "defer_loading" in str(error)
    chosen = prepared("messages", tools=[WEATHER, DEFERRED], messages=[USER, *messages], tool_choice=choice)
    assert chosen.parser_config.calls.names == ["forecast"]


def test_tools_that_are_found_are_listed_where_there_are_no_others():
    (_, found), names = of_turns([USER], added({"type": "tool_addition", "tool": CHANGED}), tools=[DEFERRED])
    assert found.startswith('[{"type": "function", "function": ' + FOUND) and names == [None, ["forecast"]]


def test_a_tool_that_is_removed_stays_in_the_list_and_may_not_be_called():
    removal = added({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}})
    again = added({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "weather"}})
    other = WEATHER | {"name": "wind"}
    prompts, names = of_turns([USER], removal, again, tools=[WEATHER, other])
    assert prompts[1].startswith(prompts[0].removesuffix("a:"))
    assert names == [["weather", "wind"], ["wind"], ["weather", "wind"]]
    assert of_turns([USER], removal, tools=[WEATHER])[1] == [["weather"], None]
    error = refusal("messages", tools=[WEATHER], messages=[USER, *removal], tool_choice={"type": "any"})
    assert error.param == "tool_choice.allowed_tools"
    found = [*added({"type": "tool_addition", "tool": CHANGED}), *added({"type": "tool_removal", "tool": CHANGED})]
    assert of_turns([USER], found, tools=[WEATHER, DEFERRED])[1] == [["weather"], ["weather"]]


def test_a_deferred_tool_that_only_anthropic_would_find_is_not_deferred():
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    made = prepared("messages", tools=[search, WEATHER, DEFERRED])
    assert made.parser_config.calls.names == ["weather", "forecast"] and "forecast" in made.prompt


CLIENT_TOOLS = [  # the tool of a request, and the input of a call
    ({"type": "bash_20241022", "name": "bash"}, {"restart": True}),
    ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}),
    (
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"command": "insert", "path": "/a", "new_str": "x", "insert_line": 0},
    ),
    ({"type": "text_editor_20241022", "name": "str_replace_editor"}, {"command": "undo_edit", "path": "/a"}),
    (
        {"type": "text_editor_20250429", "name": "str_replace_based_edit_tool"},
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
    ),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"command": "view", "path": "/a", "view_range": [1, -1]},
    ),
    ({"type": "memory_20250818", "name": "memory"}, {"command": "rename", "old_path": "/memories/a", "new_path": "/b"}),
]


def called(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(("tool", "given"), CLIENT_TOOLS, ids=lambda value: value.get("type"))
def test_a_tool_that_the_client_runs_is_a_function_with_its_documented_schema(tool, given):
    for choice in ({"type": "auto"}, {"type": "tool", "name": tool["name"]}):
        whole, events = answered(called(tool["name"], given), tools=[tool], tool_choice=choice)
        for message in (whole, built(events)):
            (block,) = message["content"]
            assert block == {"type": "tool_use", "id": block["id"], "name": tool["name"], "input": given}
    forced = prepared("messages", tools=[tool], tool_choice={"type": "any"})
    assert allows(forced.grammar, called(tool["name"], given))
    assert not allows(forced.grammar, called(tool["name"], {"other": 1} | given))
    assert ("at most 9 characters" in forced.prompt) == ("max_characters" in tool)


def test_the_tools_of_newer_dates_have_what_was_changed_then():
    def prompt(kind):
        return prepared("messages", tools=[{"type": kind, "name": "x"}]).prompt

    assert "undo_edit" in prompt("text_editor_20250124") and "undo_edit" not in prompt("text_editor_20250429")
    assert "insert_text" not in prompt("text_editor_20250124") and "insert_text" in prompt("text_editor_20250429")


def test_a_tool_in_openais_form_is_refused_instead_of_left_out_as_one_that_anthropic_runs():
    error = refusal("messages", tools=[WEATHER, {"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert error.param == "tools[1].type" and "is OpenAI's" in str(error)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "computer_20251124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
        {"type": "computer_toolset_20260801"},
        {"type": "browser_toolset_20260801"},
    ],
    ids=lambda tool: tool["type"],
)
def test_computer_and_browser_use_are_refused_by_name_and_left_out_where_the_conversation_adds_them(tool):
    error = refusal("messages", tools=[WEATHER, tool])
    assert error.param == "tools[1].type" and tool["type"] in str(error)
    assert "is not supported: this server has no computer or browser use; leave this tool out" in str(error)
    added = says({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}})
    history = [USER, says(PARTS[0]), USER]
    assert prepared("messages", messages=[USER, added, *history]).prompt  # the session goes on


def test_calls_of_a_toolset_in_the_history_are_read():
    block = {"type": "tool_use", "id": "toolu_1", "name": "find", "toolset_name": "browser", "input": {"query": "x"}}
    made = prepared("messages", messages=[USER, says(block), user(RESULT)])
    assert json.dumps({"name": "browser", "arguments": {"action": "find", "query": "x"}}) in made.prompt


# Messages


@pytest.mark.parametrize(
    ("text", "options", "kinds", "stop_reason"),
    [
        ("Just text", {}, ["text"], "end_turn"),
        ("Just te", {"finish_reason": "length"}, ["text"], "max_tokens"),
        ("", {}, [], "end_turn"),
        (CALLS[0], {}, ["tool_use"], "tool_use"),
        ("\n".join(CALLS), {}, ["tool_use", "tool_use"], "tool_use"),
        ("Let me see. " + CALLS[0], {}, ["text", "tool_use"], "tool_use"),
        (CALLS[0], {"tool_choice": {"type": "tool", "name": "weather"}}, ["tool_use"], "tool_use"),
        ("<think>Hm.</think>Yes", {"thinking": "before"}, ["thinking", "text"], "end_turn"),
        ("Hm.</think>" + CALLS[0], {"thinking": "inside"}, ["thinking", "tool_use"], "tool_use"),
        (CALLS[0], {"tool_choice": {"type": "none"}}, ["text"], "end_turn"),
    ],
)
def test_a_text_is_split_into_blocks_the_same_in_a_stream_and_in_a_whole_message(text, options, kinds, stop_reason):
    message, events = answered(text, **options)
    assert [block["type"] for block in message["content"]] == kinds
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, None)
    of_stream = built(events)
    for each in (message, of_stream):
        for block in each["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
                assert block.pop("input")["city"] in ("Oslo", "Rome")
                assert block == {"type": "tool_use", "name": "weather"}
            if block["type"] == "thinking":
                assert block.pop("signature")
                assert block == {"type": "thinking", "thinking": "Hm."}
    assert of_stream == message


def test_a_call_that_cannot_be_read_is_text():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city":]}}'
    message, events = answered(text, tools=[WEATHER | {"strict": False}])
    assert message["content"] == built(events)["content"] == [{"type": "text", "text": text}]
    assert message["stop_reason"] == events[-2]["delta"]["stop_reason"] == "end_turn"


def test_the_request_id_has_anthropics_name_too(served):
    for response in (served.post(ROUTE, BODY), served.post(ROUTE, {}), served.post(f"{ROUTE}/count_tokens", BODY)):
        assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "request-id" not in served.post(CHAT, MESSAGES).headers


def test_a_message_says_what_a_chat_says(served):
    message = whole(served)
    chatted = asked(served, CHAT, MESSAGES)
    (choice,), usage = chatted["choices"], chatted["usage"]
    assert message["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert message["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
    read = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    assert (read, message["usage"]["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
    of_stream = built(stream(served))
    for each in (message, of_stream):
        del each["id"], each["usage"]  # which has what a slot still held
    assert of_stream == message


def test_a_message_of_no_tokens_runs_its_prompt_for_later_requests(served):
    warmed = whole(served, max_tokens=0)
    assert (warmed["content"], warmed["stop_reason"]) == ([], "max_tokens")
    assert warmed["usage"] == whole(served, max_tokens=1)["usage"] | {"output_tokens": 0}
    assert built(stream(served, max_tokens=0))["content"] == []
    assert whole(served, thread={"type": "create"}, max_tokens=1)["content"]


def test_a_stop_sequence_ends_a_message_in_front_of_it_and_is_named(served):
    text = whole(served)["content"][0]["text"]
    stop = text[3:5]
    for message in (whole(served, stop_sequences=["never", stop]), built(stream(served, stop_sequences=["never", stop]))):
        assert message["content"][0]["text"] == text.partition(stop)[0]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_a_limit_beyond_the_window_is_cut_and_the_log_says_so_and_which_tools_are_left_out(served, caplog):
    caplog.set_level(logging.DEBUG, "web")
    message = whole(served, max_tokens=32_000, tools=[SEARCH], mcp_servers=[{"name": "x"}], stop_sequences=[])
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert "clamped `max_tokens` from 32000 to the 53 tokens that are left of the context length" in caplog.text
    assert "left out tools that this server does not run: mcp_servers, web_search_20250305" in caplog.text
    caplog.clear()
    whole(served)
    assert "cut" not in caplog.text and "left out" not in caplog.text


# Errors


@pytest.mark.parametrize(
    ("send", "status", "kind", "words"),
    [
        (lambda post: post(ROUTE, BODY | {"max_tokens": -1}), 400, "invalid_request_error", "max_tokens: Expected"),
        (lambda post: post(ROUTE, {"messages": [USER]}), 400, "invalid_request_error", "`max_tokens`"),
        (lambda post: post(ROUTE, b"{"), 400, "invalid_request_error", "JSON"),
        (lambda post: post(ROUTE, BODY, content_type="text/plain"), 400, "invalid_request_error", "application/json"),
        (
            lambda post: post(ROUTE, BODY | {"messages": [{"role": "user", "content": "a" * 70}]}),
            400,
            "invalid_request_error",
            "Prompt is too long",
        ),
        (lambda post: post(ROUTE, b" " * 6000), 413, "request_too_large", "--payload-limit"),
        (lambda post: post(f"{ROUTE}/batches", BODY), 404, "not_found_error", "/batches"),
        (lambda post: post(f"{ROUTE}/count_tokens", {"messages": []}), 400, "invalid_request_error", "`messages`"),
    ],
)  # fmt: skip
def test_an_error_has_anthropics_shape_type_and_status(served, send, status, kind, words):
    response = send(served.post)
    assert response.status_code == status
    assert response.json.keys() == {"type", "error", "request_id"}
    assert (response.json["type"], response.json["error"]["type"]) == ("error", kind)
    assert response.json["request_id"] == response.headers["x-request-id"]
    assert words in response.json["error"]["message"]


@pytest.mark.parametrize(
    ("status", "own", "kind"),
    [
        (401, 401, "authentication_error"),
        (404, 404, "not_found_error"),
        (405, 404, "not_found_error"),
        (408, 400, "invalid_request_error"),
        (413, 413, "request_too_large"),
        (415, 400, "invalid_request_error"),
        (422, 400, "invalid_request_error"),
        (424, 500, "api_error"),
        (429, 529, "overloaded_error"),
        (500, 500, "api_error"),
        (501, 400, "invalid_request_error"),
        (503, 529, "overloaded_error"),
    ],
)
def test_what_the_server_cannot_do_has_anthropics_status(status, own, kind):
    error = ApiError(status, "x", "no")
    assert error.body(ANTHROPIC).error.type == kind
    assert error.status == own


def test_a_full_server_says_when_to_come_again(served):
    served.admission.limit = 0
    refused = served.post(ROUTE, BODY)
    assert (refused.status_code, refused.json["error"]["type"]) == (529, "overloaded_error")
    assert int(refused.headers["Retry-After"]) > 0


def test_a_failure_ends_a_stream_with_an_error(served):
    served.model.may_decode.clear()
    with served.post(ROUTE, BODY | {"stream": True}) as response:
        served.model.fail_next_decode = True
        served.model.may_decode.set()
        events = events_of(response.get_data(as_text=True))
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["request_id"] == response.headers["x-request-id"]


# What is beside messages


@pytest.mark.parametrize("fields", [{}, {"system": "Be"}, {"messages": [user(*PARTS)]}, {"tools": [SEARCH]}])
def test_the_tokens_of_a_request_are_counted_as_they_run(served, fields):
    counted = asked(served, f"{ROUTE}/count_tokens", {"messages": [USER], "model": "m", **fields})
    usage = whole(served, **fields)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_the_tokens_of_a_prompt_that_does_not_fit_are_counted(served):
    messages = [{"role": "user", "content": "a" * 55}]
    assert asked(served, f"{ROUTE}/count_tokens", {"messages": messages}) == {"input_tokens": 60}
    assert served.post(ROUTE, BODY | {"messages": messages}).status_code == 400


def test_models_are_listed_in_anthropics_shape_for_its_clients(served):
    card = {"id": "m", "display_name": "m", "created_at": "1970-01-01T00:00:00Z", "type": "model", "lifecycle": "active"}
    headers = {"anthropic-version": "2023-06-01"}
    listed = served.client.get("/v1/models", headers=headers).json
    assert listed == {"data": [card], "first_id": "m", "last_id": "m", "has_more": False}
    assert served.client.get("/v1/models/m", headers=headers).json == card
    assert served.client.get("/v1/models").json["object"] == "list"


def test_absent_members_that_a_client_writes_as_null_are_absent_in_every_tool():
    tool = {"name": "f", "description": None, "input_schema": {"type": "object", "properties": None}, "strict": None}
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    made = prepared("messages", messages=[USER, says(PARTS[0]), user(block)], tools=[WEATHER])
    assert '{"name": "f", "parameters": {"type": "object"}}' in made.prompt
    item = {"type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": tool["input_schema"]}]}
    made = prepared("responses", input=[USER, item])
    assert '{"name": "f", "parameters": {"type": "object"}}' in made.prompt
