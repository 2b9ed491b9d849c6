"""`POST /v1/responses`: its requests become chats, and its responses and events are those of OpenAI's API reference."""

import json
import logging
import re
from itertools import pairwise

import pytest
from asked import CALLS, USER, answer_to, as_openai, nameless, prepared, refusal, serving, with_thinking, written
from openai_api import CHAT, MESSAGES, RESPONSES
from openai_api import whole as asked

from api.chats.client_tools import SHELL
from api.chats.reasoning import unseal
from api.chats.tools import CUSTOM_INPUT
from api.http import fields as api_fields
from api.openai import responses
from api.openai.responses import SUMMARY
from api.openai.responses_output import ResponsesWriter
from api.openai.responses_tools import ResponsesTools
from api.openai.responses_types import ResponsesRequest

BODY = {"input": "Hi", "max_output_tokens": 12, "temperature": 0}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
NESTED = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Oslo"}', "id": "fc_1"}


def whole(served, body):
    return asked(served, RESPONSES, body)


def events_of(data):
    """The events of a stream, whose names and numbers are as promised."""
    assert data.endswith("\n\n")
    blocks = [block.split("\n") for block in data.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def stream(served, body):
    response = served.post(RESPONSES, body | {"stream": True})
    assert response.content_type == "text/event-stream; charset=utf-8"
    return events_of(response.get_data(as_text=True))


def answered(text, finish_reason="eos_token", thinking="", **fields):
    """The whole response and the events of a text, which a model with Hermes' format writes."""

    def answer(streams):
        body = {"input": "Hi", "tools": [WEATHER], "stream": streams} | fields
        (asked_for,) = answer_to("responses", body).requests
        request = api_fields.read(body, ResponsesRequest)
        tools = ResponsesTools(request, [])
        return ResponsesWriter(with_thinking(asked_for, thinking), serving(), request, tools)

    whole, stream = (written(answer(streams), text, finish_reason) for streams in (False, True))
    return whole, events_of(stream)


def built(events):
    """The output items of a stream, put together from its deltas, as clients do."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind == "reasoning_summary_part.added":
            items[-1]["summary"].append(event["part"])
        elif kind == "reasoning_summary_text.delta":
            items[-1]["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"] and event["delta"]
            holder = items[-1] if "call" in kind else items[-1]["content"][event["content_index"]]
            holder["arguments" if "call" in kind else "text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (items[-1]["name"], items[-1]["arguments"])
        elif kind == "output_item.done":
            sealed = {"encrypted_content": event["item"].get("encrypted_content")}
            assert event["item"] | {"status": "in_progress"} | sealed == items[-1] | sealed
            items[-1] = event["item"]
    return items


# Requests

PARTS = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
SAID = [{"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}]
OUTPUT = {"type": "function_call_output", "output": "sun"}
FUNCTION = {"name": "weather", "arguments": '{"city":"Oslo"}'}
CALLS_OF = {name: {"id": name, "type": "function", "function": FUNCTION} for name in ("call_1", "call_2")}
SYSTEM = {"role": "system", "content": "Be brief"}
SKIPPED = ["web_search_call", "image_generation_call", "mcp_list_tools"]
SKIPPED += ["mcp_approval_request", "mcp_approval_response", "configuration_update", "a type of next year"]
# Items of tools that OpenAI ran, as far as they have no text.
SILENT = [
    "file_search_call",
    "code_interpreter_call",
    "mcp_call",
    "program",
    "tool_search_call",
    "tool_search_output",
    "reasoning",
]
SILENT.append("additional_tools")
TOOLS = {"tools": [WEATHER]}
NESTED_TOOLS = {"tools": [NESTED]}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"mode": "required", "tools": [WEATHER]}
NESTED_ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
UNSEEN = "[image omitted: this server reads text only]"
HOSTED = [
    {"type": kind} for kind in ("web_search", "image_generation", "file_search", "code_interpreter", "mcp", "tool_search")
]
PATCH = {"type": "custom", "name": "patch", "description": "Changes files", "format": {"type": "grammar", "syntax": "lark"}}
PATCH["format"]["definition"] = "start: /.*/"
TOLD = "Changes files\nThe input has to match this grammar (lark):\nstart: /.*/"


FOUND = json.dumps(NESTED["function"])


CHOSEN = {"type": "shell"}
SHELL_FUNCTION = {"type": "function", "function": {"name": "shell", **SHELL}}


def called(call_id, name, arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CHATS = [  # a request, and the chat that it is
    ({"input": "Hi"}, {"messages": [USER]}),
    ({"input": "Hi", "instructions": "Be brief"}, {"messages": [SYSTEM, USER]}),
    (
        {"input": [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": PARTS}]},
        {"messages": [SYSTEM, USER]},
    ),
    (
        {"input": [{"type": "message", **USER}, {"role": "assistant", "content": SAID, "id": "msg_1", "status": "completed"}]},
        {"messages": [USER, {"role": "assistant", "content": "Yes?"}]},
    ),
    (
        {
            "input": [
                USER,
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
                {"role": "assistant", "content": "Let me see"},
                CALL,
                CALL | {"call_id": "call_2"},
                OUTPUT | {"call_id": "call_1"},
                OUTPUT | {"call_id": "call_2", "output": PARTS},
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "Let me see", "tool_calls": list(CALLS_OF.values())},
                {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
                {"role": "tool", "content": "Hi", "tool_call_id": "call_2"},
            ]
        },
    ),
    ({"input": [CALL]}, {"messages": [{"role": "assistant", "tool_calls": [CALLS_OF["call_1"]]}]}),
    (TOOLS | {"parallel_tool_calls": False}, NESTED_TOOLS | {"parallel_tool_calls": False}),
    (TOOLS | {"tool_choice": {"type": "function", "name": "weather"}}, NESTED_TOOLS | {"tool_choice": NAMED}),
    (TOOLS | {"tool_choice": ALLOWED | {"type": "allowed_tools"}}, NESTED_TOOLS | {"tool_choice": NESTED_ALLOWED}),
    (TOOLS | {"tool_choice": "required"}, NESTED_TOOLS | {"tool_choice": "required"}),
    (
        {"text": {"format": {"type": "json_schema", **SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": {"type": "text"}}}, {}),
    ({"text": {"format": None}}, {}),
    ({"max_output_tokens": 7, "top_logprobs": 2}, {"max_tokens": 7, "logprobs": True, "top_logprobs": 2}),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
    (
        {"store": True, "truncation": "auto", "prompt_cache_key": "x", "client_metadata": {"a": "b"}, "safety_identifier": "x"},
        {},
    ),
    ({"input": [USER, *({"type": kind} for kind in SILENT)]}, {}),
    (
        {"input": [USER, {"type": "reasoning", "id": "rs_1", "summary": [], "content": SAID}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "Yes?"}, USER]},
    ),
    ({"input": [{"role": "user", "content": [PARTS[0], IMAGE]}]}, {"messages": [{"role": "user", "content": "H" + UNSEEN}]}),
    (
        {
            "input": [
                CALL | {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"},
                {"type": "custom_tool_call_output", "call_id": "call_1", "output": [IMAGE]},
                {"type": "local_shell_call", "call_id": "call_2", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "call_id": "call_2", "output": "a.txt"},
            ]
        },
        {
            "messages": [
                {"role": "assistant", "tool_calls": [called("call_1", "patch", {"input": "*** Begin"})]},
                {"role": "tool", "content": UNSEEN, "tool_call_id": "call_1"},
                {"role": "assistant", "tool_calls": [called("call_2", "local_shell", {"command": ["ls"]})]},
                {"role": "tool", "content": "a.txt", "tool_call_id": "call_2"},
            ]
        },
    ),
    (
        {
            "input": [
                {"type": "shell_call", "call_id": "call_1", "action": {"commands": ["ls"]}},
                {
                    "type": "shell_call_output",
                    "call_id": "call_1",
                    "output": [
                        {"stdout": "a.txt", "stderr": "no b", "outcome": {"type": "exit", "exit_code": 2}},
                        {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                    ],
                },
                {"type": "apply_patch_call", "call_id": "call_2", "operation": {"type": "delete_file", "path": "a"}},
                {"type": "apply_patch_call_output", "call_id": "call_2", "status": "failed", "output": "No a"},
                {"type": "local_shell_call_output", "id": "call_3", "output": "b.txt"},
            ]
        },
        {
            "messages": [
                {"role": "assistant", "tool_calls": [called("call_1", "shell", {"commands": ["ls"]})]},
                {"role": "tool", "content": "a.txt\nno b\nexit code 2\ntimed out", "tool_call_id": "call_1"},
                {
                    "role": "assistant",
                    "tool_calls": [called("call_2", "apply_patch", {"type": "delete_file", "path": "a"})],
                },
                {"role": "tool", "content": "failed\nNo a", "tool_call_id": "call_2"},
                {"role": "tool", "content": "b.txt", "tool_call_id": "call_3"},
            ]
        },
    ),
    (
        {
            "input": [
                {"type": "tool_search_call", "call_id": "call_1", "arguments": {"query": "rain"}},
                *[{"type": "tool_search_output", "call_id": "call_1", "tools": [WEATHER]}] * 2,
            ]
        },
        NESTED_TOOLS
        | {
            "messages": [
                {"role": "assistant", "tool_calls": [called("call_1", "tool_search", {"query": "rain"})]},
                *[{"role": "tool", "content": FOUND, "tool_call_id": "call_1"}] * 2,
            ]
        },
    ),
    (
        {"input": [USER, {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}]},
        NESTED_TOOLS | {"messages": [USER, {"role": "system", "content": f"You may also call these functions:\n{FOUND}"}]},
    ),
    (
        {"input": [SYSTEM | {"type": None}, {"type": "additional_tools", "tools": [WEATHER]}, USER]},
        NESTED_TOOLS | {"messages": [SYSTEM, USER]},
    ),
    (
        {"input": [SYSTEM, {"type": "additional_tools", "tools": [WEATHER]}, USER], "tools": [WEATHER]},
        NESTED_TOOLS | {"messages": [SYSTEM, USER]},
    ),
    (
        {
            "input": [
                {"type": "computer_call", "call_id": "call_1", "actions": [{"type": "wait"}]},
                {"type": "computer_call_output", "call_id": "call_1", "output": {"type": "computer_screenshot"}},
                {"type": "computer_call", "call_id": "call_2", "action": {"type": "wait", "keys": None}},
                {"type": "computer_call", "call_id": "call_2"},
            ]
        },
        {
            "messages": [
                {"role": "assistant", "tool_calls": [called("call_1", "computer", {"actions": [{"type": "wait"}]})]},
                {"role": "tool", "content": UNSEEN, "tool_call_id": "call_1"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        called("call_2", "computer", {"action": {"type": "wait", "keys": None}}),
                        called("call_2", "computer", {}),
                    ],
                },
            ]
        },
    ),
    (
        {"input": [{"type": "additional_tools", "tools": [{"type": "namespace", "name": "x", "tools": [WEATHER]}]}, USER]},
        NESTED_TOOLS,
    ),
    (
        {
            "input": [
                {"type": "file_search_call", "results": [{"filename": "a.md", "text": "Nine", "score": 1}]},
                {"type": "code_interpreter_call", "code": "1", "outputs": [{"type": "logs", "logs": "2"}, {"type": "image"}]},
                {"type": "mcp_call", "name": "f", "arguments": "{}", "output": "3"},
                {"type": "program_output", "result": "4"},
            ]
        },
        {"messages": [{"role": "assistant", "content": text} for text in ("a.md\nNine", f"1\n2\n{UNSEEN}", "3", "4")]},
    ),
    # A task for a sub-agent of Codex: its text is where OpenAI's server would encrypt it.
    (
        {
            "input": [
                {
                    "type": "agent_message",
                    "author": "/root",
                    "recipient": "/root/a",
                    "content": [
                        {"type": "input_text", "text": "NEW_TASK: "},
                        {"type": "encrypted_content", "encrypted_content": "Count files"},
                        {"type": "encrypted_content", "encrypted_content": "gAAAAA" * 20},
                    ],
                },
                {"type": "agent_message", "content": []},
            ]
        },
        {"messages": [{"role": "user", "content": "Message from /root:\nNEW_TASK: Count files"}]},
    ),
    ({"tools": HOSTED}, {}),
    ({"tools": [*HOSTED, WEATHER]}, NESTED_TOOLS),
    ({"tools": [{"type": "namespace", "name": "mcp", "tools": [WEATHER]}]}, NESTED_TOOLS),
    (
        {"tools": [{"type": "namespace", "name": name, "tools": [WEATHER]} for name in ("a", "b")]},
        {"tools": [{"type": "function", "function": NESTED["function"] | {"name": f"{name}__weather"}} for name in ("a", "b")]},
    ),
    (
        {"tools": [CHOSEN], "tool_choice": {"type": "shell"}},
        {"tools": [SHELL_FUNCTION], "tool_choice": {"type": "function", "function": {"name": "shell"}}},
    ),
    (
        {"tools": [CHOSEN], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [CHOSEN]}},
        {
            "tools": [SHELL_FUNCTION],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SHELL_FUNCTION]}},
        },
    ),
    (
        {"tools": [PATCH]},
        {"tools": [{"type": "function", "function": {"name": "patch", "description": TOLD, "parameters": CUSTOM_INPUT}}]},
    ),
]


@pytest.mark.parametrize(("fields", "chat"), CHATS)
def test_a_request_asks_for_what_a_chat_asks_for(fields, chat):
    made = [prepared("responses", temperature=0, **fields), prepared("greedy chat", **chat)]
    assert nameless(made[0]) == nameless(made[1])


@pytest.mark.parametrize("kind", SKIPPED)
def test_an_item_of_another_type_is_skipped_whatever_it_holds(kind, caplog):
    caplog.set_level(logging.DEBUG, "web")
    item = {"type": kind, "role": 5, "output": {"type": []}, "call_id": 5, "arguments": {}, "content": {"text": []}}
    given = prepared("responses", input=[item, {"role": "user", "content": [item, *PARTS]}, item])
    assert given.prompt == prepared("responses", input="Hi").prompt
    assert caplog.messages == [f"skipped parts of the conversation that this server does not read: {kind}"]


def test_tools_that_a_search_found_are_no_part_of_a_message():
    found = {"type": "tool_search_output", "call_id": "1", "tools": [WEATHER]}
    given = prepared("responses", input=[{"role": "user", "content": [found, *PARTS]}])
    assert given.prompt == prepared("responses", input="Hi").prompt


def test_a_request_may_have_its_text_elsewhere_than_in_its_input():
    given = prepared("responses", input=None, instructions="Be brief")
    assert given.prompt == "s:Be brief;a:"
    assert str(refusal("responses", input=None)).endswith("`input` cannot be empty")


def test_a_request_of_skipped_items_only_says_what_it_needs():
    error = refusal("responses", input=[{"type": "compaction"}])
    assert str(error).endswith("`input` needs an item that the model can read, such as a message")


DEFERRED = {"type": "function", "name": "forecast", "parameters": {"type": "object"}, "defer_loading": True}
REFUSED = {
    "truncation": "middle",
    "top_logprobs": 99,
    "max_output_tokens": 0,
    "input": [],
    "tool_choice.type": {"tools": [{"type": "file_search"}], "tool_choice": {"type": "file_search"}},
    "tool_choice.name": {"tools": [DEFERRED], "tool_choice": {"type": "function", "name": "forecast"}},
    "tools[0].description": {"tools": [{"type": "tool_search", "execution": "client", "description": 5}]},
    "tools[0].inputSchema": {"tools": [{"type": "function", "name": "x", "inputSchema": {"type": "object"}}]},
    "tools[0].format": {"tools": [{"type": "custom", "name": "x", "format": {"definition": 5}}]},
    "tools[1].tools[0].name": {"tools": [HOSTED[0], {"type": "namespace", "name": "x", "tools": [WEATHER | {"name": "<"}]}]},
    "previous_response_id": "resp_1",
    "chat_template_kwargs": {"tools": []},
    "text.format": {"text": {"format": {"type": "json_schema", "name": "x"}}},
    "text.format.type": {"text": {"format": {"type": "xml"}}},
    "text.format.schema": {"text": {"format": {"type": "json_schema", "schema": 5}}},
    "input[0].content[1]": {"input": [{"role": "user", "content": [PARTS[0], {"type": "input_text"}]}]},
    "input[0].id": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "input[0]": {"input": [{"type": "shell_call", "call_id": "x"}]},
    "input[0].action": {"input": [{"type": "shell_call", "call_id": "x", "action": "ls"}]},
    "input[0].output[0]": {"input": [{"type": "shell_call_output", "call_id": "x", "output": [{"stdout": "x"}]}]},
    "tools[0].type": {"tools": [{"name": "weather", "parameters": {"type": "object"}}]},
    "input[0].tools[0].name": {"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}, USER]},
    "input[0].tools[1]": {"input": [{"type": "additional_tools", "tools": [WEATHER, 3]}, USER]},
    "input[1].tools": {"input": [USER, {"type": "additional_tools", "tools": "weather"}]},
    "input[1].id": {"input": [CALL, {"id": "msg_1"}]},
    "conversation": "conv_1",
}


def test_a_search_result_with_a_role_is_read_as_one_without():
    found = {"type": "tool_search_output", "call_id": "c", "tools": [WEATHER]}
    with_role = prepared("responses", input=[found | {"role": "system"}, USER])
    assert with_role.prompt == prepared("responses", input=[found, USER]).prompt


@pytest.mark.parametrize("param", REFUSED)
def test_what_is_not_supported_is_refused_in_the_names_of_this_api(param):
    value = REFUSED[param]
    fields = value if isinstance(value, dict) and param not in ResponsesRequest.__struct_fields__ else {param: value}
    error = refusal("responses", **fields)
    assert (error.status, error.param) == (422, param)
    assert f"`{param}`" in str(error)
    assert not {"messages", "response_format", "max_completion_tokens"} & set(re.findall(r"\w+", str(error)))


@pytest.mark.parametrize(
    ("fields", "param", "quoted"),
    [
        ({"input": [{"role": "`messages`", "content": "x"}]}, "input[0].role", "'`messages`'"),
        ({"truncation": "`logprobs`"}, "truncation", "'`logprobs`'"),
        ({"text": {"format": {"type": "`response_format"}}}, "text.format.type", "'`response_format'"),
        ({"tools": [WEATHER | {"name": "`messages`"}]}, "tools[0].name", "'`messages`'"),
        ({"tools": [WEATHER], "tool_choice": "`max_tokens"}, "tool_choice", "'`max_tokens'"),
        ({"input": [{"role": "tool", "content": "x"}]}, None, "no id of `messages`"),  # the words of the template
    ],
)
def test_an_error_leaves_the_words_of_others_alone(fields, param, quoted):
    error = refusal("responses", **fields)
    assert (error.status, error.param) == (422, param)
    assert as_openai(error)["message"].endswith(quoted)


def test_what_changes_nothing_is_accepted_and_repeated(served):
    given = {"metadata": {"a": "b"}, "user": "x", "service_tier": "auto", "truncation": "auto", "store": True}
    given |= {"background": False, "reasoning": {"effort": "low"}, "previous_response_id": None, "text": {"verbosity": "low"}}
    ignored = {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}}
    answer = whole(served, BODY | given | ignored)
    assert answer["output"][0]["content"] == whole(served, BODY)["output"][0]["content"]
    text = {"text": {"verbosity": "low", "format": {"type": "text"}}}
    assert {name: answer[name] for name in given} == given | text


# The fields that Open Responses requires of a response; OpenAI's own have them too.
REQUIRED = """background completed_at created_at error frequency_penalty id incomplete_details instructions max_output_tokens
max_tool_calls metadata model object output parallel_tool_calls presence_penalty previous_response_id prompt_cache_key reasoning
safety_identifier service_tier status store temperature text tool_choice tools top_logprobs top_p truncation usage"""


def test_a_response_has_the_fields_that_open_responses_requires(served):
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    function = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    given = {"prompt_cache_key": "k", "safety_identifier": "s", "presence_penalty": 0.5, "seed": 1, "max_tool_calls": 3}
    given |= {"tools": [function], "text": {"format": schema}, "tool_choice": "none"}
    for answer in (whole(served, BODY | given), stream(served, BODY | given)[-1]["response"]):
        assert not set(REQUIRED.split()) - answer.keys()
        assert (answer["prompt_cache_key"], answer["safety_identifier"], answer["max_tool_calls"]) == ("k", "s", 3)
        assert (answer["presence_penalty"], answer["frequency_penalty"], answer["service_tier"]) == (0.5, 0.0, "default")
        assert answer["tools"] == [function | {"strict": False, "description": None}]
        assert answer["text"]["format"] == schema | {"strict": False, "description": None}
        assert answer["completed_at"] >= answer["created_at"]
        assert not {"seed", "top_k", "stop", "logit_bias"} & answer.keys()
    first = stream(served, BODY)[0]["response"]
    assert (first["status"], first["completed_at"]) == ("in_progress", None)


def test_the_tokens_of_an_input_are_counted(served):
    body = {"input": "Hi", "instructions": "Be brief", "previous_response_id": whole(served, BODY)["id"]}
    counted = served.post(f"{RESPONSES}/input_tokens", body)
    assert counted.json == {
        "object": "response.input_tokens",
        "input_tokens": whole(served, BODY | body)["usage"]["input_tokens"],
    }
    assert served.post(f"{RESPONSES}/input_tokens", {"input": 5}).json["error"]["param"] == "input"


def test_a_compacted_conversation_is_a_summary_in_later_requests(served):
    body = {"model": "m", "input": [USER, {"role": "assistant", "content": "Ho"}], "instructions": "Be brief"}
    compacted = served.post(f"{RESPONSES}/compact", body).json
    assert compacted["object"] == "response.compaction" and compacted["id"].startswith("resp_")
    (item,) = compacted["output"]
    prompt = "s:Be brief;u:Hi;a:Ho;u:Sum up;a:"
    assert compacted["usage"]["input_tokens"] == len(prompt)
    summary = served.tokenizer.decode(served.expected(prompt, compacted["usage"]["output_tokens"]))
    assert unseal(item["encrypted_content"]) == summary
    assert prepared("responses", input=[item, USER]).prompt == f"u:{SUMMARY.format(summary)};u:Hi;a:"
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert prepared("responses", input=[foreign, USER]).prompt == "u:Hi;a:"
    shorter = served.post(f"{RESPONSES}/compact", {"model": "m", "previous_response_id": whole(served, BODY)["id"]}).json
    assert unseal(shorter["output"][0]["encrypted_content"])
    missing = served.post(f"{RESPONSES}/compact", {"input": "Hi"})
    assert (missing.status_code, missing.json["error"]["param"]) == (400, "model")


def test_a_trigger_at_the_end_of_a_conversation_compacts_it(served):
    """As Codex asks for it: the response has a summary of the conversation, and nothing else."""
    items = [USER, {"role": "assistant", "content": "Ho"}, {"type": "compaction_trigger"}]
    body = {"input": items, "tools": [WEATHER], "temperature": 1, "max_output_tokens": 2, "store": True}
    body |= {"stop": ["e", "a"], "min_tokens": 2000, "ignore_eos": True, "logit_bias": {"7": 100}}
    compacted = served.post(f"{RESPONSES}/compact", {"model": "m", "input": items[:2]}).json
    answer = whole(served, body)
    (item,) = answer["output"]
    assert unseal(item["encrypted_content"]) == unseal(compacted["output"][0]["encrypted_content"])
    assert (answer["status"], answer["incomplete_details"], answer["store"]) == ("completed", None, False)
    created, begun, added, done, completed = stream(served, body)
    assert [event["type"].removeprefix("response.") for event in (created, begun, added, done, completed)] == [
        "created",
        "in_progress",
        "output_item.added",
        "output_item.done",
        "completed",
    ]
    assert added["item"] == done["item"] and completed["response"]["output"] == [done["item"]]
    assert done["item"] | {"id": item["id"]} == item
    assert prepared("responses", input=[item, USER]).prompt.startswith(f"u:{SUMMARY.format('')[:-1]}")


def test_a_conversation_is_compacted_with_the_fields_that_codex_sends(served):
    items = [USER, {"role": "assistant", "content": "Ho"}]
    codex = {"tools": [WEATHER, HOSTED[0]], "parallel_tool_calls": True, "reasoning": {"effort": "high", "summary": "auto"}}
    codex |= {"text": {"verbosity": "low"}, "service_tier": "auto", "prompt_cache_key": "x", "instructions": "Be brief"}
    compacted = served.post(f"{RESPONSES}/compact", {"model": "m", "input": items, **codex}).json
    answer = whole(served, {"input": [*items, {"type": "compaction_trigger"}], **codex})
    summaries = [unseal(output[0]["encrypted_content"]) for output in (compacted["output"], answer["output"])]
    assert summaries[0] == summaries[1] and compacted["usage"] == answer["usage"]


def test_a_summary_calls_no_tool_whoever_adds_it():
    added = {"type": "additional_tools", "tools": [WEATHER]}
    for tools, items in (([WEATHER], [USER]), ([], [USER, added])):
        (made,) = responses.compact({"model": "m", "tools": tools, "input": items}, serving()).requests
        assert made.parser_config.calls is None and "weather" in made.prompt


def test_what_only_openai_can_decrypt_is_skipped_with_a_debug_line(caplog):
    caplog.set_level(logging.DEBUG)
    parts = [{"type": "input_text", "text": "Hi"}, {"type": "encrypted_content", "encrypted_content": "gAAAAAB"}]
    assert "Hi" in prepared("responses", input=[{"type": "agent_message", "content": parts}]).prompt
    assert "does not read: encrypted_content" in caplog.text


@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "m", "input": []}])
def test_nothing_is_not_summarized(served, body):
    trigger = {"input": [*body.get("input", []), {"type": "compaction_trigger"}]}
    for refused in (served.post(f"{RESPONSES}/compact", body), served.post(RESPONSES, trigger)):
        assert (refused.status_code, refused.json["error"]["param"]) == (400, "input")
        assert "has no conversation to summarize" in refused.json["error"]["message"]


def test_a_blank_summary_is_an_error(served, monkeypatch):
    """As the item that stands for the conversation it would lose all of it."""
    monkeypatch.setattr(responses, "MAX_SUMMARY_TOKENS", 1)

    def is_blank(text):
        return not served.tokenizer.decode(served.expected(f"u:{text};u:Sum up;a:", 1)).strip()

    text = next(text for text in map(str, range(10_000)) if is_blank(text))
    failed = served.post(f"{RESPONSES}/compact", {"model": "m", "input": text})
    assert failed.status_code == 424 and "wrote no summary" in failed.json["error"]["message"]
    body = {"input": [{"role": "user", "content": text}, {"type": "compaction_trigger"}]}
    assert served.post(RESPONSES, body).status_code == 424
    assert [event["type"] for event in stream(served, body)[-2:]] == ["error", "response.failed"]


def test_sampling_fields_of_chats_are_there_too():
    given = {"seed": 3, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.5, "logit_bias": {"7": 1.5}, "stop": "x"}
    given |= {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5], "frequency_penalty": 0.5}
    made, chatted = prepared("responses", max_output_tokens=9, **given), prepared("chat", max_tokens=9, **given)
    assert made.sampling == chatted.sampling and made.stop_token_ids == {5}
    assert (made.stop, made.min_new_tokens, made.ignore_eos) == (chatted.stop, 2, True)


# Responses


def test_a_response_says_what_a_chat_says(served):
    answer = whole(served, BODY)
    chatted = asked(served, CHAT, MESSAGES)
    (choice,), usage = chatted["choices"], chatted["usage"]
    (message,) = answer["output"]
    assert message["content"] == [
        {"type": "output_text", "text": choice["message"]["content"], "annotations": [], "logprobs": []}
    ]
    assert (message["type"], message["role"]) == ("message", "assistant")
    is_truncated = choice["finish_reason"] == "length"
    assert answer["status"] == message["status"] == ("incomplete" if is_truncated else "completed")
    assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if is_truncated else None)
    counts = (answer["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens"))
    assert list(counts) == [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
    defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None, "store": True}
    assert {name: answer[name] for name in defaults} == defaults
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["model"] == "m"


def test_a_stream_says_the_same_as_a_whole_response(served):
    events, answer = stream(served, BODY), whole(served, BODY)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", answer["status"]]
    assert deltas > 1 and kinds == begin + ["output_text.delta"] * deltas + end
    assert "".join(event["delta"] for event in events if "delta" in event) == answer["output"][0]["content"][0]["text"]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert first["id"] == last["id"] != answer["id"]
    for response in (last, answer):
        del response["id"], response["created_at"], response["completed_at"], response["output"][0]["id"]
    assert last == answer


@pytest.mark.parametrize(
    ("text", "options", "kinds"),
    [
        ("Just text", {}, ["message"]),
        ("", {}, ["message"]),
        (CALLS[0], {}, ["function_call"]),
        ("\n".join(CALLS), {}, ["function_call", "function_call"]),
        ("Let me see. " + CALLS[0], {}, ["message", "function_call"]),
        ("<think>Hm.</think>Yes", {"thinking": "before"}, ["reasoning", "message"]),
        ("Hm.</think>" + CALLS[0], {"thinking": "inside"}, ["reasoning", "function_call"]),
        (CALLS[0], {"tool_choice": "none"}, ["message"]),
    ],
)
def test_a_text_is_split_into_items_the_same_in_a_stream_and_in_a_whole_response(text, options, kinds):
    whole, events = answered(text, **options)
    assert [item["type"] for item in whole["output"]] == kinds
    assert built(events) == events[-1]["response"]["output"]
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.completed", "completed")
    for each in (whole, events[-1]["response"]):
        assert {item["status"] for item in each["output"]} == {"completed"}
        for item in each["output"]:
            assert item.pop("id").startswith({"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}[item["type"]])
            if "call_id" in item:
                assert item.pop("call_id").startswith("call_")
    assert whole["output"] == events[-1]["response"]["output"]


def test_a_call_is_announced_by_name_before_its_arguments_come():
    _, events = answered(CALLS[0])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("function_call_arguments.delta")
    begin = ["created", "in_progress", "output_item.added"]
    end = ["function_call_arguments.done", "output_item.done", "completed"]
    assert deltas > 1 and kinds == begin + ["function_call_arguments.delta"] * deltas + end
    item = events[2]["item"]
    assert (item["type"], item["name"], item["arguments"], item["status"]) == ("function_call", "weather", "", "in_progress")
    assert json.loads(events[-1]["response"]["output"][0]["arguments"]) == {"city": "Oslo"}


def test_a_call_of_a_tool_in_a_namespace_is_given_back_with_it():
    for names, called_as in ((("mcp",), "weather"), (("mcp", "other"), "mcp__weather")):
        tools = [{"type": "namespace", "name": name, "tools": [WEATHER]} for name in names]
        whole, events = answered(CALLS[0].replace("weather", called_as), tools=tools)
        for (item,) in (whole["output"], built(events)):
            assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp", "weather")
        assert "namespace" not in answered(CALLS[0])[0]["output"][0]


PATCHED = 'One\n"two" \U0001f642.'
PATCHES = f'<tool_call>\n{{"name": "patch", "arguments": {{"input": {json.dumps(PATCHED)}}}}}\n</tool_call>'


def test_a_call_of_a_custom_tool_is_given_back_with_its_text():
    whole, events = answered(PATCHES, tools=[PATCH])
    kinds = [event["type"].removeprefix("response.") for event in events]
    said = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds == ["created", "in_progress", "output_item.added", *said, "output_item.done", "completed"]
    assert (events[2]["item"]["input"], events[3]["delta"], events[4]["input"]) == ("", PATCHED, PATCHED)
    for (item,) in (whole["output"], events[-1]["response"]["output"]):
        assert item.pop("id").startswith("ctc_") and item.pop("call_id").startswith("call_")
        assert item == {"type": "custom_tool_call", "name": "patch", "input": PATCHED, "status": "completed"}


def test_a_call_of_a_custom_tool_that_the_limit_of_tokens_cuts_is_incomplete_and_has_the_text_so_far():
    said = []
    begins, ends = PATCHES.index('"input"'), PATCHES.index("}}")
    for end in range(begins, ends):
        whole, events = answered(PATCHES[:end], "length", tools=[PATCH])
        for response in (whole, events[-1]["response"]):
            (item,) = response["output"]
            assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
            assert PATCHED.startswith(item["input"])
        said.append(item["input"])
    assert said == sorted(said) and said[0] == "" and said[-1] == PATCHED
    assert len(set(said)) == len(PATCHED) + 1


def test_the_input_of_a_custom_tool_that_is_nested_too_deeply_is_empty():
    whole, events = answered(PATCHES[: PATCHES.index('"input"')] + '"input": ' + "[" * 3000, "length", tools=[PATCH])
    for response in (whole, events[-1]["response"]):
        (item,) = response["output"]
        assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", "")


def test_the_input_of_each_of_several_calls_of_a_custom_tool_is_given_back():
    whole, events = answered(f"{PATCHES}\n{PATCHES.replace('One', 'Two')}", tools=[PATCH])
    for output in (whole["output"], events[-1]["response"]["output"]):
        assert [item["input"] for item in output] == [PATCHED, PATCHED.replace("One", "Two")]


BUILT_IN = [  # a tool that the client runs, the arguments of a call, its item, and the item of its result
    (
        {"type": "shell", "environment": {"type": "local"}},
        {"commands": ["ls", "pwd"]},
        {"type": "shell_call", "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
        {"type": "shell_call_output", "output": [{"stdout": "sun", "stderr": "", "outcome": {"type": "timeout"}}]},
    ),
    (
        {"type": "local_shell"},
        {"command": ["ls"], "timeout_ms": 5},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}},
        {"type": "local_shell_call_output", "output": "sun"},
    ),
    (
        {"type": "apply_patch"},
        {"type": "create_file", "path": "a", "diff": "+sun"},
        {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "+sun"}},
        {"type": "apply_patch_call_output", "status": "completed", "output": "sun"},
    ),
    (
        {"type": "tool_search", "execution": "client"},
        {"query": "rain"},
        {"type": "tool_search_call", "arguments": {"query": "rain"}, "execution": "client"},
        {"type": "tool_search_output", "tools": [WEATHER | {"description": "sun"}]},
    ),
]


def built_in_call(tool, arguments):
    return f'<tool_call>\n{{"name": "{tool["type"]}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(("tool", "arguments", "item", "result"), BUILT_IN, ids=lambda value: value.get("type"))
def test_a_call_of_a_tool_that_the_client_runs_is_an_item_of_its_own_and_is_taken_back(tool, arguments, item, result):
    whole, events = answered(built_in_call(tool, arguments), tools=[tool], tool_choice="required")
    for (given,) in (whole["output"], events[-1]["response"]["output"]):
        own = {name: given[name] for name in ("id", "call_id", "status")}
        assert given == item | own and own["status"] == "completed"
    changes = [event for event in events if event["type"].startswith("response.output_item")]
    assert [event["type"].split(".")[-1] for event in changes] == ["added", "done"]
    assert changes[0]["item"] == given | {"status": "in_progress"} and changes[1]["item"] == given
    given = {name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in given.items()}
    history = [USER, given, result | {"call_id": given["call_id"]}]
    prompt = prepared("responses", tools=[tool], input=history).prompt
    assert json.dumps({"name": tool["type"], "arguments": arguments}) in prompt, "as the model wrote it"
    assert "sun" in prompt.rpartition("t:")[2]


@pytest.mark.parametrize(("tool", "arguments", "item", "_result"), BUILT_IN, ids=lambda value: value.get("type"))
def test_a_call_of_a_tool_that_the_client_runs_may_be_cut_anywhere(tool, arguments, item, _result):
    text = built_in_call(tool, arguments)
    begins, ends = text.index('"arguments": {') + len('"arguments": {'), text.index("\n</tool_call>") - 1
    for end in range(begins, ends):
        whole, events = answered(text[:end], "length", tools=[tool])
        for (given,) in (whole["output"], events[-1]["response"]["output"]):
            assert given.keys() == item.keys() | {"id", "call_id", "status"}
            assert given["status"] == ("in_progress" if tool["type"] == "apply_patch" else "incomplete")
            for name in item.get("action", {}).keys() & {"command", "commands"}:
                assert isinstance(given["action"][name], list), "clients expect it"
        prepared("responses", tools=[tool], input=[USER, given])


def test_the_commands_of_a_shell_call_have_events_of_their_own():
    tool, arguments, _item, _result = BUILT_IN[0]
    _, events = answered(built_in_call(tool, arguments), tools=[tool])
    commands = [event for event in events if "shell_call_command" in event["type"]]
    kinds = ["added", "delta", "done"]
    assert [event["type"] for event in commands] == [f"response.shell_call_command.{kind}" for kind in kinds * 2]
    assert [event["command_index"] for event in commands] == [0, 0, 0, 1, 1, 1]
    assert [event.get("delta", event.get("command")) for event in commands] == ["", "ls", "ls", "", "pwd", "pwd"]
    assert events.index(commands[0]) == 3, "after output_item.added"


def test_a_tool_of_a_container_and_a_search_of_openais_are_left_out():
    tools = [{"type": "shell", "environment": {"type": "container_auto"}}, {"type": "tool_search"}]
    for tool in tools:
        assert refusal("responses", tools=[tool], tool_choice={"type": tool["type"]}).param == "tool_choice.type"
    assert prepared("responses", tools=tools).prompt == prepared("responses").prompt


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "computer"},
        {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"},
        {"type": "namespace", "name": "x", "tools": [{"type": "computer"}]},
    ],
    ids=lambda tool: tool["type"],
)
def test_computer_use_is_refused_by_name_and_left_out_where_the_conversation_adds_it(tool):
    error = refusal("responses", tools=[WEATHER, tool])
    assert error.param == ("tools[1].tools[0].type" if "tools" in tool else "tools[1].type")
    assert "is not supported: this server has no computer or browser use; leave this tool out" in str(error)
    added = {"type": "additional_tools", "tools": [tool]}
    assert prepared("responses", input=[USER, added]).prompt == prepared("responses", input=[USER]).prompt


def of_turns(*turns, **fields):
    """The prompts of a conversation that grows by these items, and the functions that the last one may call."""
    items, prompts = [], []
    for turn in turns:
        items += turn
        made = prepared("responses", input=items, **fields)
        prompts.append(made.prompt)
    return prompts, made.parser_config.calls.names


SEARCH = {"type": "tool_search", "execution": "client"}
SEARCHED = [
    {"type": "tool_search_call", "call_id": "call_1", "arguments": {"query": "rain"}},
    {"type": "tool_search_output", "call_id": "call_1", "tools": [DEFERRED]},
]
CALLED_IT = [CALL | {"name": "forecast"}, OUTPUT | {"call_id": "call_1"}]


ADDED = "call these functions:\n{}"


@pytest.mark.parametrize(
    ("added", "definition"),
    [
        (SEARCHED, "t:{}"),
        ([{"type": "additional_tools", "role": "developer", "tools": [WEATHER | {"name": "forecast"}]}], ADDED),
        ([{"type": "tool_search_output", "tools": [DEFERRED]}], ADDED),
    ],
)
def test_a_deferred_tool_stands_where_an_item_adds_it_and_may_be_called_from_there(added, definition):
    fields = {"tools": [SEARCH, DEFERRED]}
    prompts, names = of_turns([USER], added, CALLED_IT, [USER], **fields)
    for shorter, longer in pairwise(prompts):
        assert longer.startswith(shorter.removesuffix("a:")), "what a prompt shares with the one before stays as it is"
    assert "forecast" not in prompts[0]
    assert definition.format('{"name": "forecast"') in prompts[1]
    assert names == ["tool_search", "forecast"]
    assert prepared("responses", **fields).parser_config.calls.names == ["tool_search"]
    chosen = {"type": "function", "name": "forecast"}
    assert prepared("responses", input=[USER, *added], tool_choice=chosen, **fields).parser_config.calls.names == ["forecast"]


def test_a_choice_among_tools_leaves_out_those_that_are_deferred():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER, DEFERRED]}
    made = prepared("responses", tools=[WEATHER, DEFERRED], tool_choice=choice)
    assert made.parser_config.calls.names == ["weather"]
    error = refusal("responses", tools=[WEATHER], tool_choice=choice | {"tools": [{"type": {}, "name": []}]})
    assert error.param == "tool_choice.tools[0].name"


def test_a_deferred_tool_that_only_openai_would_find_is_not_deferred():
    made = prepared("responses", tools=[{"type": "tool_search"}, WEATHER, DEFERRED])
    assert made.parser_config.calls.names == ["weather", "forecast"] and "forecast" in made.prompt


def test_the_description_of_a_namespace_stands_in_front_of_its_first_tool():
    inner = [WEATHER | {"description": "Rain or sun"}, WEATHER | {"name": "wind"}]
    letters = {"type": "namespace", "name": "post", "description": "For letters.", "tools": [DEFERRED, *inner]}
    prompt = prepared("responses", tools=[letters]).prompt
    assert prompt.count("Namespace post: For letters.") == 1
    assert '"Namespace post: For letters.\\nRain or sun"' in prompt
    found = [{"type": "tool_search_output", "call_id": "call_1", "tools": [letters]}]
    assert of_turns([USER], found, tools=[letters])[0][1].count("Namespace post: For letters.") == 2


def test_a_call_cannot_be_forced_where_all_tools_are_left_out():
    assert refusal("responses", tools=HOSTED, tool_choice="required").param == "tool_choice"


def test_tools_that_are_left_out_are_named_in_the_log(served, caplog):
    caplog.set_level(logging.DEBUG, "web")
    whole(served, BODY | {"tools": HOSTED[:2]})
    assert "left out tools that this server does not run: image_generation, web_search" in caplog.text


def test_reasoning_is_an_item_of_its_own_and_its_tokens_are_counted():
    whole, _ = answered("<think>Hm.</think>Yes", thinking="before")
    reasoning, message = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Yes"
    assert 3 <= whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]


def test_reasoning_has_a_summary_and_an_opaque_form_where_they_are_requested():
    fields = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    whole, events = answered("<think>Hm.</think>Yes", thinking="before", **fields)
    (streamed, _message) = built(events)
    for reasoning in (whole["output"][0], streamed):
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm."}]
        assert unseal(reasoning["encrypted_content"]) == "Hm."
    ends = [event["type"] for event in events if event["type"].endswith(".done")]
    summary = ["response.reasoning_summary_text.done", "response.reasoning_summary_part.done"]
    assert ends[:5] == ["response.reasoning_text.done", "response.content_part.done", *summary, "response.output_item.done"]


@pytest.mark.parametrize("text", ["Just te", CALLS[0][:-20], "Hm."])
def test_an_item_that_the_limit_of_tokens_cuts_is_incomplete_and_so_is_the_response(text):
    whole, events = answered(text, finish_reason="length", thinking="inside" if text == "Hm." else "")
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][-1]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city":]}}'


def test_a_call_that_cannot_be_read_is_content():
    whole, events = answered(BROKEN, tools=[WEATHER | {"strict": False}])
    for output in (whole["output"], built(events), events[-1]["response"]["output"]):
        (message,) = output
        assert message["content"][0]["text"] == BROKEN


def test_a_strict_call_that_breaks_off_is_incomplete_and_not_those_before_it():
    whole, events = answered(CALLS[0] + BROKEN)
    for output in (whole["output"], events[-1]["response"]["output"]):
        kinds = [(item["type"], item["status"]) for item in output]
        assert kinds == [("function_call", "completed"), ("function_call", "incomplete"), ("message", "completed")]
    assert built(events) == events[-1]["response"]["output"]


def test_log_probabilities_come_with_the_text_that_they_belong_to(served):
    body = BODY | {"top_logprobs": 20}
    answer, events = whole(served, body), stream(served, body)
    content = answer["output"][0]["content"][0]
    assert "".join(each["token"] for each in content["logprobs"]) == content["text"]
    tops = [top for each in content["logprobs"] for top in each["top_logprobs"]]
    assert len(tops) == 20 * len(content["logprobs"])
    assert {top["token"] for top in tops if top["bytes"] == []} == {"<eos>"}, "special tokens have none"
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [logprob for event in deltas for logprob in event["logprobs"]] == content["logprobs"]
    asked = whole(served, BODY | {"include": ["message.output_text.logprobs"]})["output"][0]["content"][0]["logprobs"]
    assert [each["logprob"] for each in asked] == [each["logprob"] for each in content["logprobs"]]


@pytest.mark.parametrize("before", ["Hm.</think>\n\n", CALLS[0]])
def test_log_probabilities_of_a_text_have_no_markers_in_front_of_it(before):
    fields = {"include": ["message.output_text.logprobs"], "thinking": "inside" if "think" in before else ""}
    whole, events = answered(f"{before}Yés", **fields)
    for output in (whole["output"], events[-1]["response"]["output"]):
        logprobs = output[-1]["content"][0]["logprobs"]
        assert bytes(byte for each in logprobs for byte in each["bytes"]).decode() == "Yés"
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == logprobs


def test_a_failure_ends_a_stream_with_an_error_that_clients_raise(served):
    served.model.may_decode.clear()
    with served.post(RESPONSES, BODY | {"stream": True}) as response:
        served.model.fail_next_decode = True
        served.model.may_decode.set()
        events = events_of(response.get_data(as_text=True))
    *_, error, failed = events
    assert [event["type"] for event in (events[0], error, failed)] == ["response.created", "error", "response.failed"]
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["message"] == error["message"]
    assert error["message"] == error["error"]["message"] and error["code"] == "generation"
