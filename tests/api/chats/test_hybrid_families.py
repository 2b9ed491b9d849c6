"""Chats of the families with recurrent states, as their templates write them: reasoning, calls of tools, and what each turn of
a conversation runs.

Qwen3.5 to 3.8 have their published templates; those of Granite 4, Nemotron 3 and LFM2.5 are in no package, so they are
written for these tests by the rules of the published ones (templates.py).
"""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
import templates
import tiny_tokenizers
from asked import INFO, serving, written
from fakes.model import FakeModel
from loop import Driven, NoMetrics
from tool_calls import FORMS

from api.anthropic import messages
from api.generation.prepared_request import prompts_of
from api.openai import chat
from engine.slots import common_prefix
from protocol import Generate
from text.output.reasoning_formats import THINK, ModelReasoning
from text.output.tool_detection import model_tools
from text.template_capabilities import TemplateCapabilities
from text.tokenizer import Tokenizer

CALLS = {
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "qwen3.8": "qwen3_coder",
    "nemotron-3": "qwen3_coder",
    "granite-4": "hermes",
    "lfm2.5-1.2b": "lfm2",
    "lfm2.5": "lfm2",
    "lfm2.5-8b": "lfm2",
}
ON_REQUEST = [name for name in CALLS if name.startswith(("qwen", "nemotron"))]  # the template opens reasoning
THINKING = [name for name in CALLS if name not in ("granite-4", "lfm2.5-1.2b")]  # it writes earlier reasoning
# What keeps the reasoning of earlier turns.
KEPT = {"preserve_thinking": True, "keep_past_thinking": True, "truncate_history_thinking": False}
PARAMETERS = {
    "zip": {"type": "string"},
    "days": {"type": "integer"},
    "deep": {"type": "object"},
    "from": {"type": "string"},
}
LOOK = {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": PARAMETERS}}
TOOLS = [{"type": "function", "function": each} for each in (LOOK, LOOK | {"name": "sky.get-it"})]
SYSTEM = {"role": "system", "content": "Answer briefly."}
USER = {"role": "user", "content": "Say <tool_call> or <think>"}
LONGEST = 40_000
OF_MODEL = msgspec.structs.replace(
    INFO, vocab_size=1_000, max_input_tokens=LONGEST - 1, max_total_tokens=LONGEST, state_bytes=1
)


@functools.cache
def served_by(name):
    """A model of this family, whose tokenizer has the markers of calls and reasoning as special tokens."""
    template = templates.with_rules().get(name) or templates.collected(name)
    if template is None:
        return None
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_special_tokens([*FORMS[CALLS[name]].markers, *THINK.markers])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(tiny_tokenizers.save(tokenizer, Path(folder)), escapes=True)
    served = serving(OF_MODEL)
    capabilities = TemplateCapabilities.of(template)
    text = served.text._replace(
        tokenizer=tokenizer,
        template=template,
        capabilities=capabilities,
        tools=model_tools(template, capabilities, tokenizer, None),
        reasoning=ModelReasoning.of(template, tokenizer, None),
    )
    return replace(served, text=text)


@pytest.fixture
def served(name):
    return served_by(name) or pytest.skip("the published templates are not installed")


def asked(served, *chat_messages, **fields):
    (prepared,) = chat.chat({"messages": [*chat_messages], **fields}, served).requests
    return prepared


def called(n, name="look", **arguments):
    return {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize("name", CALLS)
def test_the_format_of_calls_is_the_one_of_the_template_or_of_the_vocabulary(name, served):
    assert served.text.tools.format.name == CALLS[name]
    assert not served.text.tools.in_prompt


@pytest.mark.parametrize("name", CALLS)
def test_the_end_of_the_prompt_says_whether_the_output_is_reasoning(name, served):
    for fields, is_open in (({}, True), ({"enable_thinking": True}, True), ({"reasoning_effort": "none"}, None)):
        for tools in (None, TOOLS):
            thinking = asked(served, SYSTEM, USER, tools=tools, **fields).parser_config.thinking
            if name in ON_REQUEST:
                assert (thinking and thinking.is_open) == is_open
            elif name == "granite-4":
                assert thinking is None
            else:
                assert thinking.is_open is False, "the model decides"


@pytest.mark.parametrize(
    ("effort", "written"),
    [("minimal", "low"), ("low", "low"), ("medium", ""), ("high", "xhigh"), ("xhigh", "xhigh"), ("max", "xhigh")],
)
@pytest.mark.parametrize("name", ["qwen3.8"])
def test_an_effort_is_the_nearest_one_of_those_that_qwen_raises_for_others(name, effort, written, served):
    prompt = asked(served, USER, reasoning_effort=effort).prompt
    assert (f"Reasoning effort is set to {written}" in prompt) == bool(written)


@pytest.mark.parametrize("name", ["nemotron-3"])
def test_low_effort_is_in_the_newest_message_of_the_user(name, served):
    assert "{reasoning effort: low}<|im_end|>" in asked(served, USER, reasoning_effort="low").prompt
    assert "reasoning effort" not in asked(served, USER, reasoning_effort="high").prompt


@pytest.mark.parametrize("fields", [{}, {"chat_template_kwargs": KEPT}])
@pytest.mark.parametrize("name", THINKING)
def test_clients_reasoning_is_in_the_prompt_where_the_template_keeps_it(name, fields, served):
    earlier = {"role": "assistant", "content": "Numbat", "reasoning_content": "Quokka"}
    calling = {"role": "assistant", "content": "Dingo", "reasoning_content": "Wombat", "tool_calls": [called(1, zip="02134")]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
    prompt = asked(served, USER, earlier, USER, calling, result, tools=TOOLS, **fields).prompt
    assert "Wombat" in prompt and "Dingo" in prompt and "02134" in prompt
    if name != "qwen3.5":
        assert ("Quokka" in prompt) == (bool(fields) or name == "qwen3.8")
    blocks = [
        {"type": "thinking", "thinking": "Wombat", "signature": ""},
        {"type": "text", "text": "Dingo"},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"zip": "02134"}},
    ]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "blue"}]}
    tools = [{"name": "look", "input_schema": LOOK["parameters"]}]
    body = {"messages": [USER, {"role": "assistant", "content": blocks}, result], "tools": tools, "max_tokens": 9}
    (prepared,) = messages.messages(body, served).requests
    assert all(word in prepared.prompt for word in ("Wombat", "Dingo", "02134", "blue"))


@pytest.mark.parametrize("name", CALLS)
def test_system_messages_have_a_place_wherever_they_are_and_a_chat_needs_no_user(name, served):
    late = {"role": "system", "content": "Numbat"}
    developer = {"role": "developer", "content": "Dingo"}
    calling = {"role": "assistant", "content": "", "tool_calls": [called(1, days=3)]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
    for given in (
        [SYSTEM, late, USER, {"role": "assistant", "content": "Well"}, developer],
        [developer, USER, late],
        [SYSTEM],
        [SYSTEM, calling, result],
        [calling, result, late],
        [SYSTEM, {"role": "assistant", "content": "Well"}],
    ):
        prompt = asked(served, *given, tools=TOOLS).prompt
        assert all(message["content"] in served.text.tokenizer.unescape(prompt) for message in given)


QWEN_CALL = (
    "<tool_call>\n<function=look>\n<parameter=zip>\n02134\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=deep>\n{"a": [1, null]}\n</parameter>\n</function>\n</tool_call>'
)
QWEN_ARGUMENTS = {"zip": "02134", "days": 3, "deep": {"a": [1, None]}}
LFM = "<|tool_call_start|>[{}]<|tool_call_end|>"
JSON_CALL = '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>'
OUTPUTS = [
    *(
        case
        for name in ON_REQUEST
        for case in [
            (name, "Hm.\n</think>\n\nWell.", "Hm.\n", "Well.", []),
            (name, f"Hm.\n</think>\n\nWell.{QWEN_CALL}", "Hm.\n", "Well.", [("look", QWEN_ARGUMENTS)]),
            (name, f"Hm.{QWEN_CALL}", "Hm.", "", [("look", QWEN_ARGUMENTS)]),
            (
                name,
                "Hm.</think>" + QWEN_CALL.replace("\n3\n", "\nthree\n").replace('{"a": [1, null]}', "{broken"),
                "Hm.",
                "",
                [("look", {"zip": "02134", "days": "three", "deep": "{broken"})],
            ),
        ]
    ),
    ("granite-4", JSON_CALL.format('{"zip": "02134"}'), "", "", [("look", {"zip": "02134"})]),
    ("granite-4", JSON_CALL.format(json.dumps('{"zip": "02134"}')), "", "", [("look", {"zip": "02134"})]),
    *(
        ("lfm2.5", text, reasoning, content, calls)
        for text, reasoning, content, calls in [
            ("<think>Hm.</think>Well.", "Hm.", "Well.", []),
            ("<think>Hm." + LFM.format("look(days=3)"), "Hm.", "", [("look", {"days": 3})]),
            ("Well. " + LFM.format("look(days=3)") + "Done.", "", "Well. Done.", [("look", {"days": 3})]),
            (LFM.format("look(zip='it's', days=-1)"), "", "", [("look", {"zip": "it's", "days": -1})]),
            (LFM.format('look(zip="a "b" c",\n days=1)'), "", "", [("look", {"zip": 'a "b" c', "days": 1})]),
            (LFM.format('look(zip="a\nb")'), "", "", [("look", {"zip": "a\nb"})]),
            (LFM.format('look(from="A", deep={"a": {"b": [true, None]}})'), "", "",
             [("look", {"from": "A", "deep": {"a": {"b": [True, None]}}})]),
            (LFM.format('sky.get-it(zip="A"), look(days=2)'), "", "", [("sky.get-it", {"zip": "A"}), ("look", {"days": 2})]),
            ('[look(zip="A")]', "", "", [("look", {"zip": "A"})]),
            ("[1, 2] and [look] are lists, [look](a) a link", "", "[1, 2] and [look] are lists, [look](a) a link", []),
            ("[", "", "[", []),
            ("[look(", "", "[look(", []),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), OUTPUTS)
def test_outputs_are_read_as_reasoning_content_and_calls(name, text, reasoning, content, calls, served):
    body = {"messages": [SYSTEM, USER], "tools": TOOLS, "max_tokens": 2_000}
    message = written(chat.chat(body, served), text, "eos_token")["choices"][0]["message"]
    assert (message.get("reasoning_content") or "", message["content"] or "") == (reasoning, content)
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or []]
    assert found == calls
    streamed = written(chat.chat(body | {"stream": True}, served), text, "eos_token")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in streamed.split("\n") if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert "".join(piece["function"].get("arguments") or "" for piece in pieces) == "".join(
        call["function"]["arguments"] for call in message.get("tool_calls") or []
    )


# What each turn of a conversation runs


def words(chance, least, most):
    return " ".join(chance.choice(["red", "sky", "fox", "runs", "over", "hill"]) for _ in range(chance.randint(least, most)))


def conversation(chance, turns):
    """Messages of so many turns with reasoning, of which two are loops of three calls."""
    said = []
    for turn in range(turns):
        said.append({"role": "user", "content": words(chance, 5, 30)})
        for n in range(3 if turn in (2, 5) else 0):
            call = called(10 * turn + n, zip=words(chance, 1, 5))
            said.append({"role": "assistant", "content": "", "reasoning_content": words(chance, 9, 40), "tool_calls": [call]})
            said.append({"role": "tool", "tool_call_id": call["id"], "content": words(chance, 9, 40)})
        said.append({"role": "assistant", "content": words(chance, 9, 40), "reasoning_content": words(chance, 9, 60)})
    return said


def driven(snapshots, prefix_slots=0):
    facts = {"supports_chunked_prefill": True, "prefix_granularity": 1, "supports_prefix_copy": True}
    sizes = {"batch_size": 4, "vocab_size": OF_MODEL.vocab_size, "max_total_tokens": LONGEST, "prefix_slots": prefix_slots}
    return Driven(served=FakeModel(snapshots=snapshots, **facts, **sizes), metrics=NoMetrics())


def generate(served, number, chat_messages, **fields):
    (prompt,) = prompts_of([asked(served, *chat_messages, tools=TOOLS, **fields)], served)
    return Generate(number, prompt.ids, 3, borders=prompt.borders)


def responses_in(said):
    return [n for n, message in enumerate(said) if message["role"] == "assistant"]


def longest_message(served, said):
    return max(len(served.text.tokenizer.encode(json.dumps(message))) for message in said)


def run_again(running, request, earlier):
    """How many tokens ran that an earlier prompt of the conversation has, too."""
    known = max((common_prefix(request.prompt, other) for other in earlier), default=0)
    return known - running.prompts[request.id].cached


@pytest.mark.parametrize("kwargs", [{}, KEPT], ids=["left out", "kept"])
@pytest.mark.parametrize("name", CALLS)
def test_a_turn_runs_what_is_new_and_at_most_one_message_more(name, kwargs, served):
    running = driven(snapshots=8)
    said = [SYSTEM, *conversation(Random(0), 8)]
    earlier = []
    for end in responses_in(said):
        request = generate(served, end, said[:end], chat_template_kwargs=kwargs)
        running.arrive(request)
        running.run(at_most=5_000)
        assert run_again(running, request, earlier) <= longest_message(served, said[1:])
        earlier.append(request.prompt)


@pytest.mark.parametrize("name", CALLS)
def test_agents_with_one_system_prompt_run_it_once_a_slot_and_then_what_is_new(name, served):
    chance = Random(0)
    running = driven(snapshots=40, prefix_slots=16)
    system = {"role": "system", "content": words(chance, 3_000, 3_000)}
    long = len(served.text.tokenizer.encode(system["content"]))
    assert long > 8_000
    agents = [[system, *conversation(chance, 2)] for _ in range(12)]
    earlier: list[list[int]] = []
    for turn in range(2):
        requests = [generate(served, 100 * turn + n, said[: responses_in(said)[turn]]) for n, said in enumerate(agents)]
        running.arrive(*requests)
        running.run(at_most=9_000)
        again = [run_again(running, request, earlier) for request in requests]
        if turn == 0:
            whole = [request for request in requests if not running.prompts[request.id].cached]
            assert len(whole) <= 4, "those that run side by side from the beginning"
        else:
            assert max(again) <= longest_message(served, [message for said in agents for message in said[1:]])
        earlier += [request.prompt for request in requests]
