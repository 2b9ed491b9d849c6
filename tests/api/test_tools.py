"""Calls of tools: what is asked for, in which format a model writes calls, and what the text of an answer is read as."""

import json
import re

import pytest
import served as served_app
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from api import types as schema
from api.answer import ChatAnswer, Sequence
from api.errors import ApiError
from api.fields import Job
from api.tools import after_thinking, tool_format, tool_use
from protocol import ModelInfo, Token
from text.reader import MARKERS, Arguments, CallBegin, Calls, Content, Reading, Reasoning, ToolFormat
from text.template import ChatTemplate
from text.tokenizer import Tokenizer

# Written for these tests, in the style of the published ones.
TEMPLATES = {
    "hermes": (
        "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n"
        'Write calls as <tool_call>\n{"name": <function-name>, "arguments": <object>}\n</tool_call><|im_end|>{% endif %}'
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant\n"
    ),
    "llama3_json": (
        "{% if tools is not none %}<|start_header_id|>system<|end_header_id|>Environment: ipython{% for t in tools %}{{ t }}"
        '{% endfor %}{{ \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}{% endif %}'
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        '{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}{{ m.content }}{% endfor %}'
    ),
    "pythonic": (
        "{% if tools %}Put calls in the format of [func_name1(params_name1=params_value1), func_name2(params)]"
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|start_header_id|>{% for m in messages %}{{ m.content }}"
        "{% endfor %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}{{ c.id }}{% endfor %}]'
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.tool_call_id }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# What each format makes of `weather(city="Bern")` and `now()`.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ('{"name": "weather", "parameters": {"city": "Bern"}}', '; {"name": "now", "parameters": {}}'),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}', ', {"name": "now", "arguments": {}}'),
    "pythonic": ('[weather(city="Bern")', ", now()"),
}
ENDS = {"mistral": "]", "pythonic": "]"}
FORMATS = list(CALLS)
WRITTEN = {name: "".join(CALLS[name]) + ENDS.get(name, "") for name in FORMATS}
BOTH = [("weather", {"city": "Bern"}), ("now", {})]


def tool(name="weather", parameters=WEATHER, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [tool(), NOW]


def request(tools=TOOLS, choice=None, **more):
    return schema.ChatRequest(messages=[], tools=tools, tool_choice=choice, **more)


def use(name="hermes", tools=TOOLS, choice=None, token_id=lambda _text: None, several=True, **more):
    return tool_use(request(tools, choice, **more), ToolFormat(name, token_id, several))


def read(reader, text, size=None):
    """The parts of `text`, which arrives in pieces of `size` characters, as (kind, index, text); texts that follow each other
    are joined, and the ids of calls left out."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    parts = []
    for part in [part for piece in pieces for part in reader.push(piece)] + reader.finish():
        kind, index = type(part), getattr(part, "index", None)
        if parts and kind is not CallBegin and parts[-1][:2] == (kind, index):
            parts[-1] = (kind, index, parts[-1][2] + part.text)
        else:
            parts.append((kind, index, part.name if kind is CallBegin else part.text))
    return parts


def calls_of(whole):
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]


# Formats


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_calls_is_detected_in_the_chat_template(name, tmp_path):
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    found = tool_format(ChatTemplate(TEMPLATES[name], {}), tokenizer, None)
    assert found.name == name
    assert found.short_ids == (name == "mistral")
    assert found.several == (name != "llama3_json"), "its template refuses messages with several calls"
    assert tool_format(ChatTemplate(TEMPLATES[name], {}), tokenizer, "none").name == "none"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("{{ messages }}{{ tools_in_user_message }}", None),
        ("{{ tools }}", ""),
        ("{{ tools }}<tool_call>\n<function=f>", ""),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]{}", ""),
        ("{{ tools }}<|python_start|>", "pythonic"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ('{{ tools }}"parameters"', ""),
    ],
)
def test_a_template_without_tools_or_with_an_unknown_format_is_not_taken_for_another(template, name, tmp_path):
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    found = tool_format(ChatTemplate(template, {}), tokenizer, None)
    assert (found and found.name) == name
    assert tool_format(None, tokenizer, "hermes") is None


def test_a_template_of_its_own_for_tools_is_used_for_them(tmp_path):
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    tokenizer = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template=templates)
    template = ChatTemplate.load(tokenizer)
    assert template.render([{"role": "user", "content": ""}]) == "d"
    assert template.for_tools.render([{"role": "user", "content": ""}], ["f"]) == "['f']<tool_call>"
    assert tool_format(template, Tokenizer(tokenizer), None).name == "hermes"


# Requests


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "names"),
    [
        (TOOLS, None, "auto", ["weather", "now"]),
        (TOOLS, "auto", "auto", ["weather", "now"]),
        (TOOLS, "required", "required", ["weather", "now"]),
        (TOOLS, "now", "named", ["now"]),
        (TOOLS, {"type": "function", "function": {"name": "now"}}, "named", ["now"]),
        (TOOLS, {"function": {"name": "now"}}, "named", ["now"]),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}, "auto", ["now"]),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}, "required", ["now"]),
    ],
)
def test_a_tool_choice_says_whether_and_what_is_called(tools, choice, mode, names):
    found = use(tools=tools, choice=choice)
    assert (found.mode, found.names) == (mode, names)
    assert found.is_forced == (mode != "auto") == bool(found.grammar)
    assert found.is_named == (mode == "named")


@pytest.mark.parametrize(("tools", "choice"), [([], None), (None, None), ([], "auto"), (None, "none"), (TOOLS, "none")])
@pytest.mark.parametrize("form", [None, ToolFormat("hermes"), ToolFormat("")])
def test_nothing_is_called_without_tools_and_with_the_choice_none(tools, choice, form):
    assert tool_use(request(tools, choice), form) is None


MULTIPLE = {"properties": {"a": {"type": "integer", "multipleOf": 9973}}}


def allowed(**more):
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW], **more}}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        ([], "required", "tool_choice", "needs `tools`"),
        (None, {"function": {"name": "f"}}, "tool_choice", "needs `tools`"),
        (TOOLS, "other", "tool_choice", "'other'"),
        (TOOLS, "", "tool_choice", "''"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "tool_choice.function", "'other'"),
        (TOOLS, {"type": "function"}, "tool_choice.function", "missing"),
        (TOOLS, {"type": "function", "function": {}}, "tool_choice.function.name", "missing"),
        (TOOLS, {"type": "custom"}, "tool_choice.type", "'custom'"),
        (TOOLS, allowed(mode="none"), "tool_choice.allowed_tools", "mode"),
        (TOOLS, allowed(tools=None), "tool_choice.allowed_tools", "tools"),
        (TOOLS, allowed(tools=[]), "tool_choice.allowed_tools", "no tool"),
        (TOOLS, allowed(tools=["now"]), "tool_choice.allowed_tools.tools[0].function", "missing"),
        (TOOLS, allowed(tools=[tool("other")]), "tool_choice.allowed_tools", "'other'"),
        ([{"type": "web_search"}], None, "tools[0].type", "web_search"),
        ([tool(), {}], None, "tools[1].function", "missing"),
        ([{"function": {"name": 1}}], None, "tools[0].function.name", "missing"),
        ([tool("a b")], None, "tools[0].function.name", "'a b'"),
        ([tool("")], None, "tools[0].function.name", "''"),
        ([tool("x" * 129)], "none", "tools[0].function.name", "128"),
        ([tool(), tool()], None, "tools[1].function.name", "'weather'"),
        ([tool(parameters=[])], None, "tools[0].function.parameters", "object"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters", "object"),
        ([tool(parameters={"properties": []})], None, "tools[0].function.parameters", "object"),
        ([tool(), tool("g", {"properties": {"a": {"multipleOf": 99999}}})], "g", "tools[1].function.parameters", "multipleOf"),
        ([tool(f"t{n}", MULTIPLE) for n in range(9)], "required", "tools", "all together"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_by_the_name_of_the_field(tools, choice, param, words):
    with pytest.raises(ApiError, match=re.escape(words)) as raised:
        assert use(tools=tools, choice=choice).grammar
    assert (raised.value.status, raised.value.param) == (422, param)


@pytest.mark.parametrize(
    ("form", "tools", "choice", "param", "words"),
    [
        (None, TOOLS, None, "tools", "no place for tools"),
        (ToolFormat(""), TOOLS, "required", "tools", "--tool-parser (TOOL_PARSER)"),
        (ToolFormat("none"), TOOLS, "required", "tool_choice", "--tool-parser none"),
        (ToolFormat("none"), [tool(strict=True)], "auto", "tools", "--tool-parser none"),
    ],
)
def test_tools_that_the_model_cannot_call_are_refused_with_what_to_do(form, tools, choice, param, words):
    with pytest.raises(ApiError, match=re.escape(words)) as raised:
        tool_use(request(tools, choice), form)
    assert (raised.value.status, raised.value.param) == (422, param)
    assert tool_use(request(TOOLS), ToolFormat("none")) is None, "calls stay text"


def test_a_forced_call_and_a_format_of_the_text_are_refused_together():
    with pytest.raises(ApiError, match="`response_format`") as raised:
        use(choice="required").grammar_beside("response_format", "")
    assert raised.value.param == "tool_choice"


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_beyond_the_limits_of_grammars_are_refused(name):
    nested = {}
    for _ in range(70):
        nested = {"properties": {"a": nested}}
    with pytest.raises(ApiError, match="nested") as raised:
        assert use(name, [tool(parameters=nested)], "required").grammar
    assert raised.value.param == "tools[0].function.parameters"


def test_python_calls_need_names_that_python_allows():
    with pytest.raises(ApiError, match="'a-b'") as raised:
        assert use("pythonic", [tool(parameters={"properties": {"a-b": {}}})], "required").grammar
    assert raised.value.param == "tools[0].function.parameters"


# Grammars

THINKING = ("<think>", "</think>")
KINDS = ["text", "added", "special"]  # what the markers are in the tokenizer


def tokenizer_of(kind):
    tokenizer = tiny_tokenizers.byte_level()
    if kind != "text":
        markers = [marker for markers in (*MARKERS.values(), THINKING) for marker in markers]
        tokenizer.add_tokens([AddedToken(marker, special=kind == "special", normalized=False) for marker in markers])
    return tokenizer


class Judge:
    """Which texts a grammar allows."""

    def __init__(self, tokenizer, grammar):
        self.tokenizer = tokenizer
        ll_tokenizer = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))
        self.matcher = LLMatcher(ll_tokenizer, grammar, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def allows(self, text):
        """Whether `text` is allowed as a whole; None: as a beginning."""
        matcher = self.matcher.deep_copy()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) < len(ids):
            return False
        assert not matcher.is_error(), matcher.get_error()
        return matcher.is_accepting() or None


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return tokenizer_of(request.param)


@pytest.mark.parametrize("name", FORMATS)
def test_required_forces_calls_in_the_format_of_the_model(name, tokenizer):
    judge = Judge(tokenizer, use(name, choice="required", token_id=tokenizer.token_to_id).grammar)
    one, more = CALLS[name]
    end = ENDS.get(name, "")
    assert judge.allows(one + end)
    assert judge.allows(one + more + end)
    assert judge.allows(one[:-5]) is None or name == "hermes"
    assert not judge.allows("Hello")
    assert judge.allows("Hello" + one + end) is False
    assert judge.allows((one + end).replace("weather", "wether")) is False
    assert judge.allows((one + end).replace("city", "town")) is False
    assert judge.allows((one + end).replace('"Bern"', "1")) is False


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("choice", "parallel"), [("weather", None), ("required", False)])
def test_a_named_tool_and_no_parallel_calls_allow_one_call(name, choice, parallel, tokenizer):
    found = use(name, choice=choice, token_id=tokenizer.token_to_id, parallel_tool_calls=parallel)
    judge = Judge(tokenizer, found.grammar)
    one, more = CALLS[name]
    end = ENDS.get(name, "")
    assert judge.allows(one + end)
    assert not judge.allows(one + more + end)
    other = (one + end).replace("weather", "now").replace('"city": "Bern"', "").replace('city="Bern"', "")
    assert bool(judge.allows(other)) == (choice == "required")


@pytest.mark.parametrize("name", FORMATS)
def test_strict_allows_any_text_and_constrains_the_calls_in_it(name, tokenizer):
    tools = [tool(strict=True), tool("free", {"type": "object", "properties": {"a": {"type": "string"}}})]
    judge = Judge(tokenizer, use(name, tools, token_id=tokenizer.token_to_id).grammar)
    written = CALLS[name][0] + ENDS.get(name, "")
    for answer in ("", "Hello {1} [2] <b>", "Hello\n\nthere", written):
        assert judge.allows(answer), answer
    assert judge.allows(written.replace("city", "town")) is False
    assert judge.allows(written.replace("weather", "other")) is False
    if name in ("hermes", "mistral"):
        assert judge.allows("Let me see.\n" + written)
        assert judge.allows("Let me see.\n" + written.replace("weather", "other")) is False
    if name == "hermes":
        assert judge.allows(written + "\n" + written + " Done.")
        assert judge.allows(written + "\n" + written.replace("city", "town")) is False
    if name != "pythonic":
        free = written.replace("weather", "free").replace('"city": "Bern"', '"b": [1]')
        assert judge.allows(free), "a tool that is not strict gets any object"


@pytest.mark.parametrize("name", FORMATS)
def test_with_a_format_of_the_text_an_answer_is_a_call_or_has_that_format(name, tokenizer):
    body = LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    )
    found = use(name, choice="auto", token_id=tokenizer.token_to_id)
    judge = Judge(tokenizer, found.grammar_beside("response_format", body))
    assert judge.allows(WRITTEN[name])
    assert judge.allows('{"ok": true}')
    assert judge.allows("Hello") is False
    assert judge.allows('{"no": true}') is False


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": WEATHER}},
        {"properties": {"city": {"$ref": "#/$defs/C"}}, "$defs": {"C": {"type": "string"}}},
        {"anyOf": [WEATHER, {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}]},
        {},
    ],
)
def test_each_tool_has_definitions_of_its_own(schema):
    tokenizer = tokenizer_of("text")
    tools = [
        tool(parameters=schema),
        tool("other", {"properties": {"a": {"$ref": "#/$defs/C"}}, "$defs": {"C": {"type": "null"}}}),
    ]
    judge = Judge(tokenizer, use(tools=tools, choice="required").grammar)
    assert judge.allows(CALLS["hermes"][0])
    assert judge.allows(CALLS["hermes"][0].replace('{"city": "Bern"}', "[]")) is False


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ('city="Bern", days=3, unit="F"', True),
        ("city='Bern', unit=\"C\"", True),
        ('city="say \\"hi\\""', True),
        ('city="x", days=-3', True),
        ('city="x", days=2.5', False),
        ('city="x", unit="K"', False),
        ("days=3", False),
        ('days=3, city="x"', False),
        ("", False),
    ],
)
def test_arguments_of_python_calls_have_the_types_of_the_schema(arguments, is_allowed):
    judge = Judge(tokenizer_of("text"), use("pythonic", choice="weather").grammar)
    written = f"[weather({arguments})]"
    assert bool(judge.allows(written)) == is_allowed
    if is_allowed:
        assert Reading(use("pythonic")).whole(written).calls


@pytest.mark.parametrize("value", ['"a"', "-1.5e3", "True", "None", "[1, [2], 'x']", '{"a": {"b": False}, "c": []}', "{}"])
def test_arguments_of_python_calls_without_a_type_are_any_literal(value):
    found = use("pythonic", [tool("f", {"properties": {"x": {}}})], "required")
    judge = Judge(tokenizer_of("text"), found.grammar)
    assert judge.allows(f"[f(x={value})]") and judge.allows("[f()]")
    (call,) = Reading(found).whole(f"[f(x={value})]").calls
    assert json.loads(call.arguments) == {"x": eval(value)}


@pytest.mark.parametrize("thinking", ["inside", "before"])
def test_a_grammar_begins_after_the_end_of_thinking(thinking, tokenizer):
    grammar = after_thinking(LLMatcher.grammar_from_json_schema({"const": 1}), thinking, tokenizer.token_to_id)
    judge = Judge(tokenizer, grammar)
    opening = "<think>" if thinking == "before" else ""
    assert judge.allows(opening + "\nHm, {2}?\n</think>\n\n1")
    assert judge.allows(opening + "Hm</think>1")
    assert judge.allows(opening + "Hm</think>2") is False
    assert bool(judge.allows("1")) == (thinking == "before"), "a model need not think"
    assert after_thinking("x", "", tokenizer.token_to_id) == "x"


# Readers


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
def test_calls_are_read_however_the_text_is_split(name, size):
    parts = read(Reading(use(name)).reader(), WRITTEN[name], size)
    assert parts == [(CallBegin, 0, "weather"), (Arguments, 0, '{"city": "Bern"}'), (CallBegin, 1, "now"), (Arguments, 1, "{}")]


SNIPPETS = [
    '{"name": "now", ',
    '"arguments": {',
    '"parameters": {',
    "}",
    "]",
    "[",
    "; ",
    " ",
    "\n",
    '"',
    "\\",
    "[now(",
    ")",
    "Hi",
]
SNIPPETS += ['"type": "function", ', '{"name": "oth', "<thi", "</", ",", *THINKING, *WRITTEN.values()]
SNIPPETS += [marker for markers in MARKERS.values() for marker in markers]


@given(
    name=st.sampled_from(FORMATS),
    snippets=st.lists(st.sampled_from(SNIPPETS), max_size=9),
    thinking=st.sampled_from(["", "inside", "before"]),
    several=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_text_gives_the_same_parts_however_it_is_split(name, snippets, thinking, several, size):
    reading, text = Reading(use(name, several=several), thinking), "".join(snippets)
    reader = reading.reader()
    parts = read(reader, text, size)
    other = reading.reader()
    assert parts == read(other, text)
    assert (reader.failed, reader.has_calls) == (other.failed, other.has_calls)
    whole = reading.whole(text)
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)
    assert other.failed or [call.name for call in whole.calls] == [name for kind, _, name in parts if kind is CallBegin]
    if other.failed and not thinking:
        assert whole == (text, "", [])


@given(name=st.sampled_from(FORMATS), snippets=st.lists(st.sampled_from(SNIPPETS), max_size=9))
def test_no_text_is_lost_or_made_up_in_a_text_without_calls(name, snippets):
    text = "".join(snippets)
    reader = Reading(use(name)).reader()
    parts = read(reader, text, 1)
    if not any(kind is CallBegin for kind, *_ in parts):
        assert "".join(written for *_, written in parts) == text


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Let me see.\n" + WRITTEN["hermes"], "Let me see.\n", BOTH),
        ("hermes", "\n\n" + WRITTEN["hermes"] + "\n", "", BOTH),
        ("hermes", WRITTEN["hermes"] + " Done.", " Done.", BOTH),
        ("hermes", '<tool_call>{"name":"now","arguments":{}}', "", BOTH[1:]),
        ("hermes", '<tool_call>{"arguments": {"city": "}"}, "name": "weather"}</tool_call>', "", [("weather", {"city": "}"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "x"}</tool_call>', "", BOTH[1:]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\"}\\\\"}}', "", [("weather", {"city": '"}\\'})]),
        ("llama3_json", "<|python_tag|>" + WRITTEN["llama3_json"], "", BOTH),
        ("llama3_json", "One moment.<|python_tag|>" + WRITTEN["llama3_json"], "One moment.", BOTH),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", BOTH[1:]),
        ("llama3_json", '{"name": "now", "arguments": {}}', "", BOTH[1:]),
        ("llama3_json", WRITTEN["llama3_json"].replace(";", "\n") + "\nDone", "Done", BOTH),
        ("mistral", "Hm" + WRITTEN["mistral"], "Hm", BOTH),
        ("mistral", WRITTEN["mistral"].replace("] [", "][")[:-1] + " \n]", "", BOTH),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', "", BOTH[1:]),
        ("pythonic", "<|python_start|>" + WRITTEN["pythonic"] + "<|python_end|>", "", BOTH),
        ("pythonic", "[weather(city='[)', unit=\"F\")]", "", [("weather", {"city": "[)", "unit": "F"})]),
    ],
)
def test_calls_are_read_as_models_write_them(name, text, content, calls):
    whole = Reading(use(name)).whole(text)
    assert (whole.content, calls_of(whole)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Hello"),
        ("hermes", "a <b> <tool_"),
        ("hermes", "The tag <tool_call> begins a call."),
        ("hermes", WRITTEN["hermes"].replace("now", "then")),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2001),
        ("llama3_json", '{"name": "Alice", "parameters": {}}'),
        ("llama3_json", '{"answer": 1}'),
        ("llama3_json", "{} is an empty object"),
        ("llama3_json", 'Use {"name": "now", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", '[TOOL_CALLS] [{"name": "now"}]'),
        ("pythonic", "[1] see below"),
        ("pythonic", "[now] is a tool"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[now(**{})]"),
        ("pythonic", "[now(a=b)]"),
        ("pythonic", "[now(a=1e999)]"),
        ("pythonic", "[now(a=" + "-" * 20000 + "1)]"),
        ("pythonic", "<|python_start|>"),
    ],
)
def test_what_is_not_a_call_stays_content(name, text):
    assert Reading(use(name)).whole(text) == (text, "", [])


def test_a_stream_gives_as_content_what_it_has_not_sent_as_a_call():
    reader = Reading(use()).reader()
    text = CALLS["hermes"][0] + "\n<tool_call>nonsense"
    assert read(reader, text, 1) == [
        (CallBegin, 0, "weather"),
        (Arguments, 0, '{"city": "Bern"}'),
        (Content, None, "\n<tool_call>nonsense"),
    ]
    assert reader.failed and reader.has_calls


def test_nothing_is_held_back_that_cannot_belong_to_a_call():
    reader = Reading(use()).reader()
    assert reader.push("Hello <") == [Content("Hello ")]
    assert reader.push("b> <tool") == [Content("<b> ")]
    assert reader.push("_call>") == []
    assert reader.push('{"name": "weather", "arguments": {"ci')[1:] == [Arguments(0, '{"ci')]
    assert reader.push('ty": "B') == [Arguments(0, 'ty": "B')]
    json_answer = Reading(use("llama3_json")).reader()
    assert json_answer.push('{"na') == []
    assert json_answer.push("il") == [Content('{"nail')]


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_read_where_only_one_may_be_made(name):
    whole = Reading(use(name, parallel_tool_calls=False)).whole(WRITTEN[name] + " and more")
    assert calls_of(whole) == BOTH[:1]


def test_only_allowed_tools_are_called():
    found = use(choice=allowed())
    assert calls_of(Reading(found).whole(CALLS["hermes"][1])) == BOTH[1:]
    assert Reading(found).whole(CALLS["hermes"][0]).calls == []


def test_ids_have_the_form_that_templates_require():
    for short, form in ((False, r"call_[0-9a-f]{24}"), (True, r"[0-9a-zA-Z]{9}")):
        found = Calls(ToolFormat("hermes", short_ids=short), ["weather"], "auto", several=True)
        first, second = Reading(found).whole(CALLS["hermes"][0] * 2).calls
        assert re.fullmatch(form, first.id) and first.id != second.id


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        ("inside", "Hm.\n</think>\n\nYes <think>", "Hm.\n", "Yes <think>"),
        ("inside", "Hm", "Hm", ""),
        ("before", "\n<think>Hm <tool_call></think>Yes", "Hm <tool_call>", "Yes"),
        ("before", "<think></think>Yes", "", "Yes"),
        ("before", " Yes</think>", "", " Yes</think>"),
        ("before", "<thin", "", "<thin"),
        ("", "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_thinking_is_separated_from_the_answer(thinking, text, reasoning, content):
    assert Reading(None, thinking).whole(text) == (content, reasoning, [])
    parts = read(Reading(None, thinking).reader(), text, 1)
    assert parts == [part for part in ((Reasoning, None, reasoning), (Content, None, content)) if part[2]]


def test_calls_follow_thinking():
    whole = Reading(use(), "inside").whole("Bern?</think>\n\n" + WRITTEN["hermes"])
    assert (whole.reasoning, whole.content, calls_of(whole)) == ("Bern?", "", BOTH)
    failed = Reading(use(), "inside").whole("Bern?</think>\n\n<tool_call>")
    assert failed == ("<tool_call>", "Bern?", [])


# Messages


def test_foreign_ids_are_shortened_in_calls_and_results_where_the_template_requires_it():
    chat = ChatTemplate(TEMPLATES["mistral"], {})
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    ids = ["call_0123456789", "abcDEF123"]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": given} for given in ids]},
        *({"role": "tool", "content": "12:00", "tool_call_id": given} for given in ids),
    ]
    written = chat.render(messages, TOOLS)
    first, second = re.findall(r"\[TOOL_RESULTS\] (\w{9})\[", written)
    assert f"[TOOL_CALLS] [{first}{second}]" in written
    assert second == "abcDEF123" and first != second
    assert chat.render(messages, TOOLS) == written
    assert messages[1]["tool_call_id"] == ids[0]


# Answers


def chat_answer(folder, written, kind="special", streams=False, reading=None, logprobs=False, finish="eos_token"):
    """An answer whose sequences have the texts `written`, token by token: whole, or as the choices of its stream."""
    tokenizer = Tokenizer(tiny_tokenizers.save(tokenizer_of(kind), folder))
    job = Job("", reading=reading, sequences=len(written), logprobs=logprobs)
    info = ModelInfo("m", None, str(folder), 1000, [], 1, 1, 2, "fake", "float32")
    answer = ChatAnswer([job], info, tokenizer, streams, request=schema.ChatRequest(messages=[], logprobs=logprobs))
    sequences, events = [Sequence(tokenizer, job, [5], 99, n, n) for n in range(len(written))], b""
    for sequence, text in zip(sequences, written):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for n, token in enumerate(ids):
            pieces = sequence.take(Token(0, token, -1.0, [], finish if n == len(ids) - 1 else None))
            sequence.pieces += pieces
            events += answer.events(sequence, pieces) if streams else b""
    if not streams:
        return json.loads(schema.encode(answer.whole(sequences)))["choices"]
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_written_whole_as_openai_writes_them(name, kind, tmp_path):
    (choice,) = chat_answer(tmp_path, [WRITTEN[name]], kind, reading=Reading(use(name)))
    assert choice["finish_reason"] == "tool_calls"
    assert list(choice["message"]) == ["role", "content", "tool_calls"]
    assert choice["message"]["content"] is None
    for call, (called, arguments) in zip(choice["message"]["tool_calls"], BOTH, strict=True):
        assert call.keys() == {"id", "type", "function"} and call["type"] == "function"
        assert call["function"] == {"name": called, "arguments": json.dumps(arguments)}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_streamed_in_openais_sequence(kind, tmp_path):
    choices = chat_answer(tmp_path, ["Hm\n" + WRITTEN["hermes"]], kind, streams=True, reading=Reading(use()))
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:] if "content" in delta) == "Hm\n"
    called = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(calls) == 1 for calls in called)
    for index, (name, arguments) in enumerate(BOTH):
        begin, *rest = [call for (call,) in called if call["index"] == index]
        assert re.fullmatch("call_[0-9a-f]{24}", begin.pop("id"))
        assert begin == {"index": index, "type": "function", "function": {"name": name, "arguments": ""}}
        assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
        assert json.loads("".join(call["function"]["arguments"] for call in rest)) == arguments
    assert deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("choice", "finish", "text", "reason"),
    [
        ("auto", "eos_token", CALLS["hermes"][0], "tool_calls"),
        ("auto", "stop_sequence", CALLS["hermes"][0], "tool_calls"),
        ("required", "eos_token", CALLS["hermes"][0], "tool_calls"),
        ("weather", "eos_token", CALLS["hermes"][0], "stop"),
        ("auto", "length", CALLS["hermes"][0], "length"),
        ("auto", "eos_token", "Hello", "stop"),
        ("auto", "eos_token", "<tool_call>x", "stop"),
        ("auto", "length", CALLS["hermes"][0][:-20], "length"),
    ],
)
def test_the_finish_reason_says_whether_tools_are_to_be_called(choice, finish, text, reason, streams, tmp_path):
    answer = chat_answer(tmp_path, [text], streams=streams, reading=Reading(use(choice=choice)), finish=finish)
    assert answer[-1]["finish_reason"] == reason
    if not streams and choice in ("required", "weather"):
        assert answer[0]["message"]["content"] == ""
    if not streams and not text.endswith("}\n</tool_call>"):
        assert answer[0]["message"] == {"role": "assistant", "content": text}


@pytest.mark.parametrize("streams", [False, True])
def test_each_choice_is_read_by_itself(streams, tmp_path):
    choices = chat_answer(tmp_path, [CALLS["hermes"][0], "Hello"], streams=streams, reading=Reading(use()))
    first, second = ([choice for choice in choices if choice["index"] == index] for index in range(2))
    assert (first[-1]["finish_reason"], second[-1]["finish_reason"]) == ("tool_calls", "stop")
    texts = [choice.get("delta", choice.get("message")).get("content") or "" for choice in second]
    assert "".join(texts) == "Hello"


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_is_written_under_both_of_its_names(kind, tmp_path):
    reading = Reading(None, "before")
    (choice,) = chat_answer(tmp_path, ["<think>Hm</think>Yes"], kind, reading=reading)
    assert choice["message"] == {"role": "assistant", "content": "Yes", "reasoning": "Hm", "reasoning_content": "Hm"}
    deltas = [c["delta"] for c in chat_answer(tmp_path, ["<think>Hm</think>Yes"], kind, streams=True, reading=reading)]
    for name, written in (("content", "Yes"), ("reasoning", "Hm"), ("reasoning_content", "Hm")):
        assert "".join(delta.get(name, "") for delta in deltas) == written


@pytest.mark.parametrize("reading", [Reading(use()), Reading(use(), "before")])
def test_every_token_has_its_log_probability_whatever_is_held_back(reading, tmp_path):
    written = "<think>Hm</think>Hello" + CALLS["hermes"][0]
    (choice,) = chat_answer(tmp_path, [written], "text", reading=reading, logprobs=True)
    stream = chat_answer(tmp_path, [written], "text", streams=True, reading=reading, logprobs=True)
    streamed = [token for each in stream for token in (each["logprobs"] or {"content": []})["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert "".join(token["token"] for token in streamed) == written


# Over HTTP


def served_with(serve, monkeypatch, template, **settings):
    monkeypatch.setattr(served_app, "WINDOW", 600)
    made = serve(**settings)
    (made.folder / "chat_template.jinja").write_text(template + served_app.TEMPLATE)
    return made.get_ready()


USER = {"role": "user", "content": "Hi"}
SHORT = tool(
    parameters={"properties": {"day": {"enum": ["Monday", "Sunday"]}}, "required": ["day"], "additionalProperties": False}
)
LLAMA = "{% if tools %}<|python_tag|>{{ tools[0].function.name }};{% endif %}"


def streamed(response):
    events = [line.removeprefix("data: ") for line in response.get_data(as_text=True).split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), ("weather", "stop")])
def test_a_forced_call_is_answered_whole_and_streamed(serve, monkeypatch, choice, reason):
    served = served_with(serve, monkeypatch, LLAMA)
    body = {"messages": [USER], "temperature": 0, "tools": [SHORT], "tool_choice": choice, "parallel_tool_calls": False}
    answer = served.post("/v1/chat/completions", body).json["choices"][0]
    assert answer["finish_reason"] == reason
    message = answer["message"]
    assert list(message) == ["role", "content", "tool_calls"] and message["content"] == ""
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]).keys() == {"day"}
    stream = streamed(served.post("/v1/chat/completions", body | {"stream": True}))
    first, begin, *pieces, last = [choice["delta"] for choice in stream]
    assert first == {"role": "assistant", "content": ""}
    (begun,) = begin["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", begun.pop("id"))
    assert begun == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert all(piece["tool_calls"][0].keys() == {"index", "function"} for piece in pieces)
    arguments = [piece["tool_calls"][0]["function"] for piece in pieces]
    assert all(piece.keys() == {"arguments"} for piece in arguments)
    assert "".join(piece["arguments"] for piece in arguments) == call["function"]["arguments"]
    assert last == {} and stream[-1]["finish_reason"] == reason


def test_tools_are_printed_by_the_template_whatever_the_choice_is(serve, monkeypatch):
    served = served_with(serve, monkeypatch, LLAMA)
    for choice in ("auto", "none"):
        body = {"messages": [USER], "tools": [SHORT], "tool_choice": choice}
        assert served.post("/chat_tokenize", body).json["templated_text"] == "<|python_tag|>weather;u:Hi;a:"


@pytest.mark.parametrize(
    ("body", "param"), [({"tool_choice": "required"}, "tool_choice"), ({"tools": [tool(strict=True)]}, "tools")]
)
def test_a_device_that_samples_cannot_constrain_calls(serve, monkeypatch, body, param):
    served = served_with(serve, monkeypatch, LLAMA, sampling="device")
    body = {"messages": [USER], "tools": [SHORT], "max_tokens": 3} | body
    error = served.post("/v1/chat/completions", body).json["error"]
    assert error["param"] == param and "SAMPLING=host" in error["message"]
    assert served.post("/v1/chat/completions", {"messages": [USER], "tools": [SHORT], "max_tokens": 3}).status_code == 200


def test_a_model_without_a_place_for_tools_refuses_them(served):
    error = served.post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS}).json["error"]
    assert error["param"] == "tools" and "no place for tools" in error["message"]
    assert served.post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}).status_code == 200


def test_a_tool_whose_schema_cannot_be_enforced_is_refused_as_one_of_the_tools(serve, monkeypatch):
    served = served_with(serve, monkeypatch, LLAMA)
    parameters = {"type": "object", "properties": {"city": {"not": {}}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    response = served.post("/v1/chat/completions", {"messages": [USER], "tools": tools, "tool_choice": "required"})
    assert response.status_code == 422 and response.json["error"]["param"] == "tools"
    assert "Unimplemented keys" in response.json["error"]["message"]


def test_a_tool_parser_may_be_set(serve, monkeypatch):
    served = served_with(serve, monkeypatch, "{% if tools %}{% endif %}", tool_parser="pythonic")
    body = {"messages": [USER], "temperature": 0, "tools": [SHORT], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = served.post("/v1/chat/completions", body).json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"day"}


def test_a_format_begins_after_thinking_which_is_a_field_of_its_own(serve, monkeypatch):
    served = served_with(serve, monkeypatch, "", reasoning_parser="think")
    (served.folder / "chat_template.jinja").write_text("")
    body = {"messages": [USER], "temperature": 0, "response_format": {"type": "regex", "value": "ab{3}"}}
    body["logit_bias"] = {str(served.tokenizer.token_to_id("<")): -100}  # or the model could think
    message = served.post("/v1/chat/completions", body).json["choices"][0]["message"]
    assert message["content"] == "abbb"
