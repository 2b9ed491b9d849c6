"""Every field of every request: it changes the output, or a 4xx names it, or the documents say that it is ignored.

The cases are generated from the table of routes and the types of their bodies: a new field fails here until it has a value in
`VALUES` and, where docs/api has a table for its type, a row there.
"""

from __future__ import annotations

import json
import re

import pytest
from fakes.model import EOS
from served import Served

from api.anthropic.types import MessagesRequest
from api.chats.conversation import ChatRequest
from api.clouds import VertexRequest
from api.http.fields import NEEDS_HOST
from api.http.types import SamplingOptions
from api.openai.completions import CompletionRequest
from api.openai.responses_types import CompactRequest, ResponsesRequest
from api.routes import ROUTES
from api.tgi import GenerateRequest, Parameters
from run import HERE

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Ho"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEMPLATE = (
    "{{ greeting }}{{ enable_thinking }}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ m.name }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}{{ '<|python_tag|>' if loop.first else '; ' }}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %};{% endfor %}a:'
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"additionalProperties": False}}} for name in "fg"]
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]  # as in a Responses request
TYPES = [{"name": name, "input_schema": {"type": "object", "additionalProperties": False}} for name in "fg"]  # Anthropic's
FUNCTION = {"type": "function", "name": "f"}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "x"}
SEVERAL = {"tool_choice": "required", "logit_bias": {str(ord(";") - 32): 100}}  # the tokens are bytes
EARLY_END = {"logit_bias": {str(EOS): 100}}
RANDOM = {"seed": 1, "temperature": 5}
REPEATING = {"logit_bias": {"5": 12}, "ignore_eos": True}
ARRAY = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3}

# For each field of each type: the other fields of both requests, and the value that the second request has.
OPENAI_VALUES = {
    "model": ({}, "gpt-x"),
    "max_tokens": ({}, 2),
    "temperature": ({"seed": 1}, 0.3),
    "top_p": (RANDOM, 0.01),
    "top_k": (RANDOM, 1),
    "min_p": (RANDOM, 1.0),
    "typical_p": (RANDOM, 0.01),
    "n": ({}, 2),
    "stop": ({}, None),  # replaced by a piece of the text that is generated without it
    "seed": (RANDOM, 2),
    "presence_penalty": (REPEATING, 2),
    "frequency_penalty": (REPEATING, 2),
    "repetition_penalty": (REPEATING, 50),
    "stop_token_ids": ({}, []),  # replaced by a token that is generated without it
    "add_special_tokens": ({}, True),
    "return_token_ids": ({}, True),
    "prompt_logprobs": ({}, 1),
    "logit_bias": ({}, {"5": 100}),
    "min_tokens": (EARLY_END, 3),
    "ignore_eos": (EARLY_END, True),
    "skip_special_tokens": ({}, False),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "response_format": ({}, {"type": "json_object"}),
    "structured_outputs": ({}, {"choice": ["ab"]}),
    "regex": ({}, "ab"),
    "json_schema": ({}, json.dumps(ARRAY)),
}
VALUES = {
    GenerateRequest: {"inputs": ({}, "Ho"), "parameters": ({}, {"max_new_tokens": 2}), "stream": ({}, True)},
    Parameters: {
        "best_of": ({"top_p": 1e-9}, 2),
        "temperature": ({"seed": 1}, 0.3),
        "repetition_penalty": ({}, 0.01),
        "frequency_penalty": ({"max_new_tokens": 50, "top_k": 1}, -2),
        "presence_penalty": ({"max_new_tokens": 50, "top_k": 1}, -2),
        "top_k": (RANDOM, 1),
        "top_p": (RANDOM, 0.01),
        "min_p": (RANDOM, 1.0),
        "typical_p": (RANDOM, 0.01),
        "do_sample": ({"seed": 1}, True),
        "max_new_tokens": ({}, 2),
        "return_full_text": ({"return_full_text": False}, True),
        "stop": ({}, None),
        "truncate": ({}, 1),
        "details": ({}, True),
        "decoder_input_details": ({}, True),
        "seed": (RANDOM, 2),
        "top_n_tokens": ({"details": True}, 2),
        "grammar": ({}, {"type": "regex", "value": "a"}),
        "adapter_id": ({}, "other"),
    },
    ChatRequest: OPENAI_VALUES
    | {
        "messages": ({}, [{"role": "user", "content": "Ho"}]),
        "max_completion_tokens": ({}, 2),
        "logprobs": ({}, True),
        "top_logprobs": ({"logprobs": True}, 2),
        "tools": ({}, TOOLS),
        "tool_choice": ({"tools": TOOLS}, "required"),
        "parallel_tool_calls": ({"tools": TOOLS, "max_tokens": 45} | SEVERAL, False),
        "chat_template_kwargs": ({}, {"greeting": "Ho"}),
        "mm_processor_kwargs": ({}, {"max_pixels": 9}),
        "prediction": ({}, {"type": "content", "content": "Hi"}),
        "reasoning_effort": ({}, "none"),
        "continue_final_message": ({"messages": [USER, BEGUN]}, True),
        "add_generation_prompt": ({"messages": [USER, BEGUN], "continue_final_message": True}, False),
        "enable_thinking": ({}, False),
        "think": ({}, False),
        "thinking": ({}, {"type": "disabled"}),
        "reasoning": ({}, {"effort": "none"}),
        "thinking_token_budget": ({}, 2),
        "thinking_budget_tokens": ({}, 2),
        "thinking_budget": ({}, 2),
    },
    CompletionRequest: OPENAI_VALUES
    | {
        "prompt": ({}, "Ho"),
        "best_of": (RANDOM, 2),
        "echo": ({}, True),
        "logprobs": ({}, 1),
        "suffix": ({}, "end"),
    },
    VertexRequest: {"instances": ({}, [{"inputs": "Ho"}])},
    ResponsesRequest: {name: OPENAI_VALUES[name] for name in SamplingOptions.__struct_fields__}
    | {
        "input": ({}, "Ho"),
        "instructions": ({}, "Be"),
        "model": ({}, "gpt-x"),
        "max_output_tokens": ({}, 2),
        "top_logprobs": ({}, 2),
        "text": ({}, {"format": {"type": "json_object"}}),
        "tools": ({}, FUNCTIONS),
        "tool_choice": ({"tools": FUNCTIONS}, "required"),
        "parallel_tool_calls": ({"tools": FUNCTIONS, "tool_choice": "required", "max_output_tokens": 45}, False),
        "stream": ({}, True),
        "include": ({}, ["message.output_text.logprobs"]),
        "store": ({}, False),
        "previous_response_id": ({}, None),  # replaced by the id of a response
        "conversation": ({}, "conv_1"),
        "background": ({}, True),
        "prompt": ({}, {"id": "x"}),
        "max_tool_calls": ({}, 1),
        "truncation": ({}, "auto"),
        "metadata": ({}, {"a": "b"}),
        "reasoning": ({}, {"effort": "none"}),
        "service_tier": ({}, "auto"),
        "safety_identifier": ({}, "x"),
        "prompt_cache_key": ({}, "x"),
        "user": ({}, "someone"),
        "chat_template_kwargs": ({}, {"greeting": "Ho"}),
    },
    CompactRequest: {
        "model": ({}, "gpt-x"),
        "input": ({}, "Ho"),
        "instructions": ({}, "Be"),
        "tools": ({}, FUNCTIONS),
        "reasoning": ({}, {"effort": "high"}),
        "previous_response_id": ({}, "resp_1"),
        "prompt_cache_key": ({}, "x"),
    },
    MessagesRequest: {
        "messages": ({}, [{"role": "user", "content": "Ho"}]),
        "system": ({}, "Be"),
        "model": ({}, "claude"),
        "max_tokens": ({}, 2),
        "stop_sequences": ({}, None),
        "temperature": ({}, 100),
        "top_p": ({"temperature": 100}, 1e-9),
        "top_k": ({"temperature": 100}, 1),
        "stream": ({}, True),
        "tools": ({}, TYPES),
        "tool_choice": ({"tools": TYPES}, {"type": "any"}),
        "thinking": ({}, {"type": "enabled", "budget_tokens": 5}),
        "output_config": ({}, {"format": {"type": "json_schema", "schema": ARRAY}}),
        "output_format": ({}, {"type": "json_schema", "schema": ARRAY}),
        "chat_template_kwargs": ({}, {"greeting": "Ho"}),
        "mcp_servers": ({}, [{"type": "url", "url": "https://example.com", "name": "x"}]),
        "metadata": ({}, {"user_id": "x"}),
        "compaction": ({}, {"type": "summarize"}),
        "thread": ({}, {"type": "continue", "previous_message_id": "x"}),
    },
}
UNTYPED = ({}, "something")  # of fields that the documents name and no type has: they are rejected, or ignored
# The tables of each type, by page and heading.
OF_ALL = ("openai", "Chats, completions and responses")
OF_BOTH = ("openai", "Chats and completions")
TABLES = {
    Parameters: [("tgi", "TGI")],
    ChatRequest: [OF_ALL, OF_BOTH, ("openai", "Chat completions")],
    CompletionRequest: [OF_ALL, OF_BOTH, ("openai", "Completions")],
    ResponsesRequest: [OF_ALL, ("responses", "OpenAI: responses")],
    MessagesRequest: [("messages", "Anthropic: messages")],
}
# The routes that differ from the tables: Vertex returns only texts.
TEXT_ALONE = ("details", "decoder_input_details", "top_n_tokens", "logprobs", "top_logprobs", "n", "stream")
TEXT_ALONE += ("return_token_ids", "prompt_logprobs")
# They change the speed, what is stored, models that think, tokenizers that add tokens, or nothing that does not happen anyway.
UNSEEN = ("prediction", "skip_special_tokens", "store", "thinking_token_budget", "thinking_budget_tokens", "thinking_budget")
UNSEEN += ("add_special_tokens", "continue_final_message", "add_generation_prompt", "mm_processor_kwargs")
EXCEPTIONS = {
    **{("/generate", "stream"): "ignored", ("/generate_stream", "stream"): "ignored"},
    **{("/generate_stream", "best_of"): "rejected", ("/generate_stream", "decoder_input_details"): "rejected"},
    **{("/vertex", name): "rejected" for name in TEXT_ALONE},
    **{("/v1/responses/compact", name): "ignored" for name in ("model", "reasoning", "prompt_cache_key")},
    # The model does not fill in the middle.
    **{(path, "suffix"): "rejected" for path in ("/v1/completions", "/invocations")},
    **{("/vertex", "tools"): "rejected", ("/vertex", "tool_choice"): "rejected", ("/vertex", "parallel_tool_calls"): "ignored"},
}
# The shortest request of each type.
BODIES = {
    GenerateRequest: {"inputs": "Hi", "parameters": {"max_new_tokens": 12}},
    ChatRequest: {"messages": [USER], "max_tokens": 12, "temperature": 0},
    CompletionRequest: {"prompt": "Hi", "max_tokens": 12, "temperature": 0},
    VertexRequest: {"instances": [{"inputs": "Hi"}]},
    ResponsesRequest: {"input": "Hi", "max_output_tokens": 12, "temperature": 0},
    CompactRequest: {"model": "m", "input": "Hi"},
    MessagesRequest: {"messages": [USER], "max_tokens": 12, "temperature": 0},
}


def table(page, title):
    """What the table below a heading says of each parameter."""
    section = (HERE / "docs" / "api" / f"{page}.md").read_text().split(f"# {title}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| (supported|rejected|ignored) \|", section, flags=re.MULTILINE)
    return {name: said for names, said in rows for name in re.findall(r"`(\w+)`", names)}


DOCUMENTED = {kind: dict(row for place in places for row in table(*place).items()) for kind, places in TABLES.items()}
WHOLE = {GenerateRequest: "/generate", ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}
DEVICE_TABLE = table("sampling", "On-device sampling")


def names_of(kind):
    return dict.fromkeys((*kind.__struct_fields__, *DOCUMENTED.get(kind, ())))


# (path, type of the body, type of the field, field): every field of every route that generates text.
CASES = [
    pytest.param(route.path, body, kind, name, id=f"{route.path}-{kind.__name__}.{name}")
    for route in ROUTES
    if route.bodies and not re.search("token|adapter", route.path)
    for body in (*route.bodies, *((GenerateRequest, ChatRequest) if route.path == "/vertex" else ()))
    for kind in ((GenerateRequest, Parameters) if body is GenerateRequest else (body,))
    for name in names_of(kind)
    if (route.path, name) != ("/vertex", "stream_options")  # `stream` is rejected there
]


def request_of(body, kind, fields):
    if kind is Parameters:
        fields = {"parameters": {"max_new_tokens": 12} | fields}
    return BODIES[body] | fields


def ask(served, path, body):
    """The status, how many tokens were generated, and the body without ids and times."""
    if path == "/vertex" and "instances" not in body:
        body = {"instances": [body]}
    response = served.post(path, body)
    text = response.get_data(as_text=True)
    if path == "/v1/responses" and response.is_json and response.status_code == 200:
        text = json.dumps(response.json["output"])  # all else of it repeats the request
    text = re.sub(r'"(id|call_id|created|created_at)": ?("[\w-]*"|\d+)', "", text)
    return response.status_code, (response.headers.get("x-generated-tokens"), text)


def is_drawn(kind, name):
    """Whether the field narrows what is drawn, in a request that cannot say a seed."""
    return name in ("top_p", "top_k") and "seed" not in kind.__struct_fields__


def generated_text(answer):
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    choice = (answer.get("choices") or answer.get("content") or [answer])[0]
    return choice.get("generated_text") or choice.get("text") or choice["message"]["content"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("served"))
    (served.folder / "chat_template.jinja").write_text(TEMPLATE)
    yield served.get_ready()
    served.assert_idle()
    served.close()


def test_every_field_and_every_row_of_the_tables_has_a_value_here():
    for kind in {*BODIES, Parameters}:
        assert set(VALUES[kind]) == set(kind.__struct_fields__)
    for kind, documented in DOCUMENTED.items():
        assert set(kind.__struct_fields__) <= set(documented)


@pytest.mark.parametrize(("path", "body", "kind", "name"), CASES)
def test_a_field_does_what_the_documents_say(served, path, body, kind, name):
    fields, value = VALUES[kind].get(name, UNTYPED)
    said = DOCUMENTED.get(kind, {}).get(name, "supported")
    if (path, name) in EXCEPTIONS:
        fields, said = {}, EXCEPTIONS[path, name]
    without = request_of(body, kind, fields)
    if name in ("stop", "stop_sequences"):
        value = [generated_text(served.post(WHOLE.get(body, path), without).json)[2]]
    if name == "stop_token_ids":
        shown = {"return_token_ids": True} | (BODIES[ChatRequest] if body is ResponsesRequest else without)
        shown_by = "/v1/chat/completions" if body is ResponsesRequest else WHOLE[body]
        value = [served.post(shown_by, shown).json["choices"][0]["token_ids"][2]]
    if name == "previous_response_id":
        value = served.post("/v1/responses", BODIES[ResponsesRequest]).json["id"]
    status, before = ask(served, path, without)
    assert status == 200, before
    if is_drawn(kind, name):  # two draws without a seed differ anyway; those from one token are the greedy text
        before = ask(served, path, BODIES[body])[1]
        assert ask(served, path, request_of(body, kind, fields | {name: value})) == (200, before)
        return
    assert ask(served, path, without)[1] == before, "else a difference would show nothing"
    status, after = ask(served, path, request_of(body, kind, fields | {name: value}))
    if said == "rejected":
        is_native = body in (GenerateRequest, VertexRequest) or path == "/vertex"
        assert status == (422 if is_native else 400), after
        assert re.search(rf'`([\w.\[\]]+\.)?{name}`|"param":"{name}"', after[1])
    else:
        assert status == 200, after
        assert (after == before) == (said == "ignored" or name in UNSEEN)


@pytest.mark.parametrize("sampling", ["device", "hybrid"])
@pytest.mark.parametrize("body", WHOLE)
def test_what_the_documents_say_of_sampling_on_the_device_is_so(serve, body, sampling):
    served = serve(sampling=sampling)
    (served.folder / "chat_template.jinja").write_text(TEMPLATE)
    served.get_ready()
    kind = Parameters if body is GenerateRequest else body
    sampled = {"do_sample": True} if kind is Parameters else {"temperature": 1, "logprobs": None}
    apart = {"decoder_input_details", "prompt_logprobs", "suffix", "continue_final_message", "add_generation_prompt"}
    supported = {name for name, said in DOCUMENTED[kind].items() if said == "supported"} - apart
    rejected = set()
    for name in supported:
        value = {"top_k": 257, "stop": ["a"]}.get(name, VALUES[kind][name][1])
        needed = {"top_logprobs": {"logprobs": True}, "tool_choice": {"tools": TOOLS}, "stream_options": {"stream": True}}
        status, (_, answer) = ask(served, WHOLE[body], request_of(body, kind, sampled | needed.get(name, {}) | {name: value}))
        assert status == 200 or NEEDS_HOST in answer, (name, answer)
        rejected |= {name} if status != 200 else set()
    assert rejected == (set(DEVICE_TABLE) & supported if sampling == "device" else set())
    assert set(DEVICE_TABLE.values()) == {"rejected"}
    served.assert_idle()
