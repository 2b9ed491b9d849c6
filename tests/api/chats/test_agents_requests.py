"""What agents and clients of other servers send: lines that change, switches of reasoning, thoughts, parts of other APIs."""

import json
from dataclasses import replace

import msgspec
import pytest
from asked import DIALECTS, USER, prepared, record_renders, refusal, serving, text
from fakes.model import EOS
from tool_calls import parsed_pieces, tool, use, whole

from api import tokenize
from api.anthropic.messages import count_tokens
from api.anthropic.types import MessagesRequest
from api.chats.conversation import ChatRequest
from api.generation.prepared_request import TokenizedPrompt
from api.generation.response_writer import GeneratedSequence
from api.openai import chat
from api.openai.completions import CompletionRequest
from api.openai.responses_types import ResponsesRequest
from protocol import Token
from text.json_schema import without_nulls
from text.output.parser import ParserConfig
from text.output.reasoning_formats import REASONING_FORMATS, THINK, ModelReasoning, Thinking
from text.stream import Piece
from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities

BILLING = "x-anthropic-billing-header: cc_version=2.1.332; cch={};"
SYSTEM = [f"{BILLING}\nBe brief.", "Be brief.\n" + BILLING, "X-Anthropic-Billing-Header: a\nBe brief."]


def with_system(dialect, written):
    parts = [{"type": "text", "text": written.format("a1")}, {"type": "text", "text": "Be kind."}]
    return {
        "chat": {"messages": [{"role": "system", "content": parts}, USER]},
        "messages": {"system": parts},
        "responses": {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": part["text"]} for part in parts]},
                USER,
            ]
        },
    }[dialect]


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("written", [BILLING, *SYSTEM])
def test_the_line_that_claude_code_changes_is_in_no_prompt(dialect, written):
    prompt = prepared(dialect, **with_system(dialect, written)).prompt
    assert "billing" not in prompt.lower() and "Be kind." in prompt
    assert ("Be brief." in prompt) == ("Be brief." in written)


def test_a_system_message_of_that_line_alone_is_left_out_and_users_may_write_it():
    alone = {"role": "system", "content": BILLING.format(1)}
    assert prepared("chat", messages=[alone, USER]).prompt == prepared("chat", messages=[USER]).prompt
    assert prepared("chat", messages=[{"role": "system", "content": ""}, USER]).prompt != prepared("chat").prompt
    said = prepared("chat", messages=[{"role": "user", "content": BILLING.format(1)}])
    assert "x-anthropic-billing-header" in said.prompt
    told = prepared("responses", instructions=BILLING.format(1) + "\nBe brief.")
    assert "billing" not in told.prompt and "Be brief." in told.prompt


# Reasoning


OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True}, ON),
        ({"think": False}, OFF),
        ({"think": "low"}, ON | {"reasoning_effort": "low", "low_effort": True}),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled"}}, ON),
        ({"thinking": {"type": "auto"}}, {}),
        ({"reasoning": {"effort": "none"}}, OFF),
        ({"reasoning": {"effort": "high"}}, ON | {"reasoning_effort": "high", "low_effort": False}),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": "high"}, ON | {"reasoning_effort": "high", "low_effort": False}),
        ({"reasoning": False}, OFF),
        ({"thinking": True, "reasoning": {"max_tokens": 9.0}}, ON),
        ({"enable_thinking": None, "thinking": None, "reasoning": None, "think": None}, {}),
    ],
)
def test_other_servers_switches_of_reasoning_are_taken(fields, options, monkeypatch):
    rendered = record_renders(monkeypatch)
    prepared("chat", **fields)
    assert rendered[0][1] == options


@pytest.mark.parametrize(
    ("dialect", "fields", "words"),
    [
        ("chat", {"extra_body": {"top_k": 1}}, "`extra_body` is an unknown field, but a parameter of OpenAI's clients"),
        ("completion", {"enable_thinking": False}, "`enable_thinking` is an unknown field"),
        ("messages", {"enable_thinking": False}, "use `thinking`"),
        ("responses", {"thinking": {"type": "disabled"}}, "use `reasoning`"),
        ("chat", {"n_predict": 5}, "use `max_completion_tokens`"),
        ("completion", {"n_predict": 5}, "use `max_tokens`"),
        ("chat", {"repeat_penalty": 1.1}, "use `repetition_penalty`"),
    ],
)
def test_what_this_server_calls_otherwise_is_refused_with_its_own_name(dialect, fields, words):
    assert words in str(refusal(dialect, **fields))


def served_with(template, reasoning=None):
    template = ChatTemplate(template, {})
    known = text()._replace(template=template, capabilities=TemplateCapabilities.of(template))
    known = known._replace(reasoning=reasoning or ModelReasoning())
    return replace(serving(), text=known)


MISTRAL = (
    "{% macro parts(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'thinking' %}[THINK]{{ part['thinking'] }}[/THINK]{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ m.role }}:{{ parts(m.content) }};{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }};{% endfor %}"
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
THINKS = [
    {"role": "system", "content": [{"type": "text", "text": "First."}, THOUGHT | {"thinking": "Draft."}]},
    USER,
    {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Hello."}]},
    USER,
]


def test_thoughts_of_mistrals_api_are_parts_for_the_templates_that_read_those():
    (made,) = chat.chat({"messages": THINKS}, served_with(MISTRAL)).requests
    assert made.prompt == "system:First.[THINK]Draft.[/THINK];user:Hi;assistant:[THINK]Hm.[/THINK]Hello.;user:Hi;"
    (made,) = chat.chat({"messages": THINKS}, served_with(PLAIN)).requests
    assert made.prompt == "system:First.Draft.;user:Hi;assistant:Hm.Hello.;user:Hi;"


def test_a_thought_is_plain_text_where_no_template_reads_it():
    nested = {"type": "thinking", "thinking": [THOUGHT]}
    body = {"messages": [USER, {"role": "assistant", "content": [nested, {"type": "text", "text": "Hello."}]}, USER]}
    assert "Hm.Hello." in chat.chat(body, served_with(PLAIN)).requests[0].prompt
    predicted = {"type": "content", "content": [THOUGHT, {"type": "text", "text": "abc"}]}
    assert len(prepared("chat", prediction=predicted).prediction) == 3


@pytest.mark.parametrize("more", [{}, {"continue_final_message": True, "add_generation_prompt": False}])
def test_thoughts_as_parts_are_continued_and_not_where_reasoning_is_off(more):
    chat_with = {"messages": [USER, {"role": "assistant", "content": [THOUGHT]}], **more}
    template = "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    served = served_with(template, ModelReasoning(THINK))
    assert chat.chat(chat_with, served).requests[0].prompt == "Hi;a:<think>Hm."
    served = served_with(template.replace("a:", "a:<think></think>"), ModelReasoning(THINK))
    assert chat.chat(chat_with, served).requests[0].prompt == "Hi;a:<think></think>"


@pytest.mark.parametrize("end", ["a:", "a:<think>\n"])
def test_reasoning_without_an_answer_is_continued(end):
    served = served_with("{% for m in messages %}{{ m.content }};{% endfor %}{{ " + repr(end) + " }}", ModelReasoning(THINK))
    (made,) = chat.chat({"messages": [USER, {"role": "assistant", "reasoning_content": "Hm, "}]}, served).requests
    assert made.prompt == "Hi;a:<think>" + "\n" * end.endswith("\n") + "Hm, "
    assert made.parser_config.thinking.is_open
    assert parsed_pieces(made.parser_config, [Piece(1, "so.</think>Hello", None, False, [])])[:2] == ("Hello", "so.")


def test_deepseek_r1s_output_begins_within_reasoning():
    form = next(form for form in REASONING_FORMATS if form.name == "deepseek_r1")
    config = ParserConfig(None, ModelReasoning(form).thinking("a:"))
    for begin in ("", "<think>", "<think>\n"):
        for size in (1, 100):
            written = begin + "Hm.</think>\n\nSix."
            pieces = [Piece(1, written[at : at + size], None, False, []) for at in range(0, len(written), size)]
            told = parsed_pieces(config, pieces)
            assert (told.reasoning.strip(), told.content) == ("Hm.", "Six.")


def generated(parser_config, stop, pieces):
    """The sequence of a request with these stop strings, after tokens with these texts."""
    (made,) = chat.chat({"messages": [USER], "stop": stop}, serving()).requests
    made = msgspec.structs.replace(made, parser_config=parser_config)
    tokenizer = text().tokenizer
    sequence = GeneratedSequence(tokenizer, TokenizedPrompt(made, [1], 500), 0, 0)
    for token in tokenizer.encode("".join(pieces), add_special_tokens=False):
        if sequence.finish_reason is None:
            sequence.pieces += sequence.take(Token(1, token, None))
    if sequence.finish_reason is None:
        sequence.pieces += sequence.truncate()
    return sequence, whole(sequence.output)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("written", "reasoning", "content", "stop"),
    [
        ("Question: eggs?\n\nHm.</think>\n\nNine.", "Question: eggs?\n\nHm.", "Nine.", None),
        ("Hm.</think>\n\nNine.\n\nQuestion: next", "Hm.", "Nine.", "\n\n"),
        ("eggs</think>Nine eggs.", "eggs", "Nine ", "eggs"),
        ("Hm.</think>eggs", "Hm.", "", "eggs"),
        ("eg</think>gs and eggs", "eg", "gs and ", "eggs"),
        ("only eggs", "only eggs", "", None),
    ],
)
def test_stop_strings_count_in_the_answer_and_not_in_reasoning(is_open, written, reasoning, content, stop):
    config = ParserConfig(None, Thinking(is_open=is_open))
    begin = "" if is_open else "<think>"
    sequence, told = generated(config, ["\n\n", "eggs", "Question:"], [begin, written])
    assert (told.reasoning, told.content, sequence.stream.stop) == (reasoning, content, stop)


CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "STOP\\n<"}}\n</tool_call>'
OTHER = CALL.replace('"a"', '"b"')


@pytest.mark.parametrize(
    ("stop", "written", "content", "calls", "found"),
    [
        (["\n"], "\n" + CALL, "", 1, None),
        (["\n", "STOP"], CALL + "\n" + OTHER, "", 2, None),
        (["tool", "<"], "Hi " + CALL, "Hi ", 1, None),
        (["STOP"], CALL + "\nSTOP and more", "", 1, "STOP"),
        (["<b>"], "a <b> c", "a ", 0, "<b>"),
        (["STOP"], "<tool_call>none STOP more", "<tool_call>none ", 0, "STOP"),
    ],
)
def test_stop_strings_do_not_count_in_calls_or_around_them(stop, written, content, calls, found):
    config = ParserConfig(use("hermes", [tool("now"), tool()]))
    sequence, told = generated(config, stop, [written])
    assert (told.content.rstrip("\n"), len(told.calls), sequence.stream.stop) == (content, calls, found)


def test_special_tokens_are_text_where_they_are_not_to_be_skipped(served):
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0, "logit_bias": {str(EOS): 100}}
    texts = {}
    for ignores in (True, False):
        for skips in (True, False):
            more = {"ignore_eos": ignores, "skip_special_tokens": skips}
            texts[ignores, skips] = served.post("/v1/completions", body | more).json["choices"][0]["text"]
    name = served.tokenizer.id_to_token(EOS)
    assert texts == {(True, True): "", (True, False): name * 9, (False, True): "", (False, False): ""}


# Parts, nulls, numbers


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image", "image": "data:image/png;base64,AA=="}, "image"),
        ({"type": "image", "source": {"type": "base64", "data": "AA=="}}, "image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "image"),
        ({"type": "input_image", "image_url": "data:image/png;base64,AA=="}, "image"),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "audio"),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_part_of_another_api_that_cannot_be_read_leaves_a_note(dialect, part, kind):
    content = [{"type": "text", "text": "What?"}, part]
    field = "input" if dialect == "responses" else "messages"
    prompt = prepared(dialect, **{field: [{"role": "user", "content": content}]}).prompt
    assert "What?" in prompt and f"[{kind} omitted" in prompt


TYPES = {"chat": ChatRequest, "completion": CompletionRequest, "messages": MessagesRequest, "responses": ResponsesRequest}


@pytest.mark.parametrize("dialect", TYPES)
def test_null_is_absent_in_every_optional_field(dialect):
    body = DIALECTS[dialect][1]
    optional = [field.encode_name for field in msgspec.structs.fields(TYPES[dialect]) if not field.required]
    assert len(optional) > 15
    made = prepared(dialect)
    same = prepared(dialect, **{name: None for name in optional if name not in body})
    seedless = {"sampling": msgspec.structs.replace(made.sampling, seed=1)}
    assert msgspec.structs.replace(made, **seedless) == msgspec.structs.replace(
        same, sampling=msgspec.structs.replace(same.sampling, seed=1)
    )


NULLS = {
    "type": "object",
    "description": None,
    "properties": {"a": {"type": "string", "enum": None, "default": None}, "b": None, "c": {"enum": ["x", None]}},
    "required": None,
    "additionalProperties": None,
}


def test_null_is_absent_in_tools_and_schemas_but_for_values():
    tool = {"type": None, "function": {"name": "f", "description": None, "parameters": NULLS, "strict": None}}
    for choice in ("auto", "required"):
        made = prepared("chat", tools=[tool | {"type": "function"}], tool_choice=choice)
        assert '"default": null' in made.prompt and '"required"' not in made.prompt and '"b"' not in made.prompt
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": NULLS, "strict": True}}
    assert prepared("chat", response_format=shaped).grammar
    assert prepared(
        "chat", tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": None}}}]
    )


def test_a_property_may_have_the_name_of_a_keyword():
    named = {"type": "object", "properties": {"default": {"type": "string", "enum": None}, "const": None}}
    assert without_nulls(named) == {"type": "object", "properties": {"default": {"type": "string"}}}


def test_items_may_have_nulls():
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": None, "namespace": None, "status": None}
    result = {"type": "function_call_output", "call_id": "1", "output": None, "id": None}
    answer = {"type": "message", "role": "assistant", "content": None, "id": None}
    thought = {"type": "reasoning", "summary": None, "content": None, "encrypted_content": None}
    assert "Hi" in prepared("responses", input=[USER, thought, call, result, answer, USER]).prompt
    used = {"type": "tool_use", "id": "1", "name": "f", "input": None}
    told = {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}
    turns = [USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [told]}]
    assert "Hi" in prepared("messages", messages=turns).prompt


def test_whole_numbers_may_be_written_as_others():
    assert prepared("chat", max_tokens=10.0, top_k=5.0, seed=7.0).max_new_tokens == 10
    assert prepared("native", max_new_tokens=10.0).max_new_tokens == 10
    assert "max_tokens" in str(refusal("chat", max_tokens=10.5))


def test_a_whole_message_is_counted_and_a_chat_without_the_beginning_of_an_answer():
    body = {"messages": [USER], "max_tokens": 60, "temperature": 0, "stream": True, "stop_sequences": ["x"]}
    assert count_tokens(body, serving())() == count_tokens({"messages": [USER]}, serving())()
    served = served_with("{% for m in messages %}{{ m.content }};{% endfor %}{{ 'a:' if add_generation_prompt }}")
    counts = [tokenize.tokenize({"messages": [USER]} | more, served)().count for more in ({}, {"add_generation_prompt": False})]
    assert counts == [5, 3]


def test_the_end_of_the_context_is_told_apart_from_the_limit_of_a_message(served):
    post = lambda **more: served.post("/v1/messages", {"messages": [USER], "temperature": 0} | more).json  # noqa: E731
    assert post(max_tokens=2)["stop_reason"] == "max_tokens"
    assert post(max_tokens=32_000)["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{'path': 'a.txt', 'limit': 3, 'all': True, 'none': None}", {"path": "a.txt", "limit": 3, "all": True, "none": None}),
        ('{"text": "one\ntwo"}', {"text": "one\ntwo"}),
        (r'{"path": "C:\Users\me", "it": "it\'s"}', {"path": r"C:\Users\me", "it": "it's"}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        ('{"a": [1, 2,], }', {"a": [1, 2]}),
        ('{"a": 1, "b": "tw', {"a": 1}),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_arguments_of_the_history_are_mended_as_those_of_an_output(dialect, written, read, monkeypatch):
    rendered = record_renders(monkeypatch)
    function = {"name": "f", "arguments": written}
    if dialect == "chat":
        prepared("chat", messages=[USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}])
    else:
        prepared("responses", input=[USER, {"type": "function_call", "call_id": "1", **function}])
    assert rendered[0][0][1]["tool_calls"][0]["function"]["arguments"] == read
