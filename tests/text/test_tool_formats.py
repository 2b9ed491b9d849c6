"""How models write calls of tools: which format a chat template shows, and which texts the grammars allow."""

import json

import pytest
import templates
import tiny_tokenizers
from judge import Judge
from tool_calls import CALLS, ENDS, FORMATS, FORMS, KINDS, TEMPLATES, WEATHER, WRITTEN, parsed, tokenizer_of, tool, use

from api.errors import ApiError
from config import TOOL_PARSERS
from text import tool_formats
from text.grammar import of_json_schema
from text.output_parser import ParserConfig
from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities
from text.tokenizer import Tokenizer
from text.tool_formats import MOST_CALLS, ModelTools


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_calls_is_detected_in_the_chat_template(name, tmp_path):
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    template = ChatTemplate(TEMPLATES[name], {})
    assert TemplateCapabilities.of(template).tools
    found = ModelTools.of(template, True, tokenizer, None)
    assert found.format.name == name and not found.in_prompt
    assert found.short_ids == name.startswith("mistral")
    assert found.parallel == (name != "llama3_json"), "its template refuses messages with several calls"
    for parser in ("none", "hermes"):
        assert ModelTools.of(template, True, tokenizer, parser).format.name == parser
    named = ModelTools.of(template, True, tokenizer, "mistral").format.name
    assert named == ("mistral_v11" if name == "mistral_v11" else "mistral"), "vLLM has one name for both"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}", None),
        ('{{ tools }}<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>', None),
        ("{{ tools }}<start_of_turn>[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<|python_start|>", "pythonic"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ('{{ tools }}"parameters"', None),
    ],
)
def test_an_unknown_format_is_not_taken_for_another(template, name, tmp_path):
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    found = ModelTools.of(ChatTemplate(template, {}), True, tokenizer, None)
    assert (found.format and found.format.name) == name


PUBLISHED = {
    "deepseek_v3": "deepseek_v3",
    "llama3_2": "llama3_json",
    "mistral_nemo": "mistral",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
}


@pytest.mark.parametrize(("model", "name"), PUBLISHED.items())
def test_a_published_template_shows_one_format(model, name):
    if model not in (published := templates.published()):
        pytest.skip("the published templates are not installed")
    source = published[model].for_tools.source
    assert [form.name for form in tool_formats.FORMATS if form.detect(source)] == [name]


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }}[TOOL_CALLS]f[ARGS]{}", None])
def test_without_a_place_for_tools_calls_are_read_as_the_prompt_asks_for_them(template, tmp_path):
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    template = ChatTemplate(template, {}) if template else None
    for parser in (None, "hermes", "mistral"):
        found = ModelTools.of(template, False, tokenizer, parser)
        assert found.in_prompt and found.format.name == "hermes"
    refusing = ModelTools.of(template, False, tokenizer, "none")
    assert refusing.in_prompt and refusing.format is tool_formats.AS_TEXT


def test_every_format_may_be_set():
    assert set(TOOL_PARSERS) == {form.name for form in tool_formats.FORMATS}


def test_a_template_of_its_own_for_tools_is_used_for_them(tmp_path):
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    tokenizer = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template=templates)
    template = ChatTemplate.load(tokenizer)
    assert template.render([{"role": "user", "content": ""}]) == "d"
    assert template.for_tools.render([{"role": "user", "content": ""}], ["f"]) == "['f']<tool_call>"
    assert ModelTools.of(template, True, Tokenizer(tokenizer), None).format.name == "hermes"


def test_python_calls_need_names_that_python_allows():
    with pytest.raises(ApiError, match="'a-b'") as raised:
        assert use("pythonic", [tool(parameters={"properties": {"a-b": {}}})], "required").grammar
    assert raised.value.param == "tools[0].function.parameters"


# Grammars


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
    assert judge.allows(one[: one.index("ern")]) is None
    assert not judge.allows("Hello")
    assert judge.allows("Hello" + one + end) is False
    assert judge.allows((one + end).replace("weather", "wether")) is False
    assert judge.allows((one + end).replace("city", "town")) is False
    if name != "qwen3_coder":  # where a text has no quotes
        assert judge.allows((one + end).replace('"Bern"', "1")) is False


def test_calls_that_are_asked_for_have_an_end(tokenizer):
    judge = Judge(tokenizer, use("hermes", choice="required", token_id=tokenizer.token_to_id).grammar)
    one, more = CALLS["hermes"]
    assert judge.allows(one + more * (MOST_CALLS - 1) + ENDS.get("hermes", ""))
    assert not judge.allows(one + more * MOST_CALLS + ENDS.get("hermes", ""))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("choice", "parallel"), [("weather", None), ("required", False)])
def test_a_named_tool_and_no_parallel_calls_allow_one_call(name, choice, parallel, tokenizer):
    found = use(name, choice=choice, token_id=tokenizer.token_to_id, parallel=parallel)
    judge = Judge(tokenizer, found.grammar)
    one, more = CALLS[name]
    end = ENDS.get(name, "")
    assert judge.allows(one + end)
    assert not judge.allows(one + more + end)
    other = (one + end).replace("weather", "now").replace('"city": "Bern"', "").replace('city="Bern"', "")
    other = other.replace("<parameter=city>\nBern\n</parameter>\n", "")
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
    if not FORMS[name].implicit_start:
        assert judge.allows("Let me see.\n" + written)
        assert judge.allows("Let me see.\n" + written.replace("weather", "other")) is False
    if name == "hermes":
        assert judge.allows(written + "\n" + written + " Done.")
        assert judge.allows(written + "\n" + written.replace("city", "town")) is False
    if name != "pythonic":
        free = written.replace("weather", "free").replace('"city": "Bern"', '"b": [1]').replace("=city>", "=b>")
        assert judge.allows(free), "a tool that is not strict gets any object"


@pytest.mark.parametrize("name", FORMATS)
def test_with_a_format_of_the_text_an_answer_is_a_call_or_has_that_format(name, tokenizer):
    body = of_json_schema({"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
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
        assert parsed(ParserConfig(use("pythonic")), written).calls


@pytest.mark.parametrize("value", ['"a"', "-1.5e3", "True", "None", "[1, [2], 'x']", '{"a": {"b": False}, "c": []}', "{}"])
def test_arguments_of_python_calls_without_a_type_are_any_literal(value):
    found = use("pythonic", [tool("f", {"properties": {"x": {}}})], "required")
    judge = Judge(tokenizer_of("text"), found.grammar)
    assert judge.allows(f"[f(x={value})]") and judge.allows("[f()]")
    (call,) = parsed(ParserConfig(found), f"[f(x={value})]").calls
    assert json.loads(call.arguments) == {"x": eval(value)}


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAGGED = {
    "properties": {
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/Point"},
        "any": {},
    },
    "required": ["text"],
    "$defs": {"Point": POINT},
}


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"text": "Bern"}, {"text": "Bern"}),
        ({"text": "a <b>\n\n</c> 1"}, {"text": "a <b>\n\n</c> 1"}),
        ({"text": ""}, {"text": ""}),
        ({"text": "5", "days": "-5", "unit": "F"}, {"text": "5", "days": -5, "unit": "F"}),
        ({"text": "x", "maybe": "null", "point": '{"x": 1}'}, {"text": "x", "maybe": None, "point": {"x": 1}}),
        ({"text": "x", "any": "[1]"}, {"text": "x", "any": [1]}),
        ({"text": "x", "days": "soon"}, None),
        ({"text": "x", "unit": "K"}, None),
        ({"text": "x", "point": '{"x": "1"}'}, None),
        ({"days": "5"}, None),
        ({"days": "5", "text": "x"}, None),
        ({}, None),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(values, arguments):
    found = use("qwen3_coder", [tool("f", TAGGED)], "required")
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    written = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    assert bool(Judge(tokenizer_of("text"), found.grammar).allows(written)) == (arguments is not None)
    if arguments is not None:
        (call,) = parsed(ParserConfig(found), written).calls
        assert json.loads(call.arguments) == arguments


def test_a_function_in_tags_whose_schema_names_no_parameters_gets_any():
    written = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    for parameters, is_allowed in (({"type": "object"}, True), ({"additionalProperties": False}, False)):
        grammar = use("qwen3_coder", [tool("f", parameters)], "required").grammar
        assert bool(Judge(tokenizer_of("text"), grammar).allows(written)) == is_allowed
    with pytest.raises(ApiError, match="without `>`"):
        assert use("qwen3_coder", [tool("f", {"properties": {"a>": {}}})], "required").grammar


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_whose_name_begins_with_that_of_another_is_called_by_its_own(name, tokenizer):
    tools = [tool("now", {"properties": {}, "additionalProperties": False}), tool("nowhere"), tool("now.here_2-x")]
    if name == "pythonic":
        tools.pop()  # no name in Python
    found = use(name, tools, "required", token_id=tokenizer.token_to_id)
    for each in tools[1:]:
        called = each["function"]["name"]
        written = (CALLS[name][0] + ENDS.get(name, "")).replace("weather", called)
        assert Judge(tokenizer, found.grammar).allows(written)
        assert [call.name for call in parsed(ParserConfig(found), written).calls] == [called]
