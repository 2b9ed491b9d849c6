"""How models write calls of tools: which format a chat template shows, and which texts the grammars allow."""

import json
import random
import re

import pytest
from grammars import Judge
from tool_calls import (
    CALLS,
    ENDS,
    FORMATS,
    FORMS,
    KINDS,
    NOW,
    PYTHON,
    TAGS,
    WEATHER,
    WRITTEN,
    beside,
    in_tags,
    parsed,
    tokenizer_of,
    tool,
    use,
    with_argument,
)

from api.http.errors import ApiError
from text.grammar import of_json_schema
from text.output.call_syntaxes import MOST_CALLS, Function, mended_calls, not_written, types_of
from text.output.parser import ParserConfig


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("pythonic", "a b"),
        ("lfm2", "1a"),
        *(("gemma4", key) for key in ("a:b", "a=b", 'a"b')),
        *((name, key) for name in TAGS for key in ("a>b", "a<b", 'a"b', " a", "a\nb")),
    ],
)
def test_calls_whose_arguments_are_not_json_need_names_that_they_can_write(name, key):
    with pytest.raises(ApiError, match=re.escape(repr(key))) as raised:
        assert use(name, [tool(parameters={"properties": {key: {}}})], "required").constraint.grammar
    assert raised.value.param == "tools[0].function.parameters"


# Grammars


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return tokenizer_of(request.param)


@pytest.mark.parametrize("name", FORMATS)
def test_required_forces_calls_in_the_format_of_the_model(name, tokenizer):
    judge = Judge(tokenizer, use(name, choice="required", token_id=tokenizer.token_to_id).constraint.grammar)
    one, more = CALLS[name]
    end = ENDS.get(name, "")
    assert judge.allows(one + end)
    assert judge.allows(one + more + end)
    assert judge.allows(one[: one.index("ern")]) is None
    assert not judge.allows("Hello")
    assert judge.allows("Hello" + one + end) is False
    assert judge.allows((one + end).replace("weather", "wether")) is False
    assert judge.allows(with_argument(name, "town")) is False
    if name not in TAGS:  # where a text has no quotes
        assert judge.allows(with_argument(name, value="1", raw=True)) is False


ENDING = ("</s>", "]", "}", '"', '<|"|>')
DRAWN = {
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["unit"],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_a_grammar_has_drawn_are_read_back(name, seed):
    tokenizer = tokenizer_of("special")
    found = use(name, [tool("draw", DRAWN), NOW], "required", token_id=tokenizer.token_to_id)
    matcher = Judge(tokenizer, found.constraint.grammar).matcher
    draw = random.Random(seed)
    ids = []
    while not matcher.is_stopped() and len(ids) < 2000:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(tokenizer.get_vocab_size()) if mask >> token & 1]
        ends = [token for token in allowed if tokenizer.id_to_token(token) in ENDING]
        ids.append(draw.choice(ends or allowed) if len(ids) > 100 else draw.choice(allowed))
        matcher.consume_token(ids[-1])
    written = tokenizer.decode([token for token in ids if tokenizer.id_to_token(token) != "</s>"], skip_special_tokens=False)
    whole = parsed(ParserConfig(found), written)
    assert whole.calls and not whole.content and not whole.is_truncated, written
    for call in whole.calls:
        arguments = json.loads(call.arguments)
        assert not arguments if call.name == "now" else arguments["unit"] in ("C", "F")
        assert isinstance(arguments.get("point", {}), dict) and isinstance(arguments.get("list", []), list)


def test_calls_that_are_asked_for_have_an_end(tokenizer):
    judge = Judge(tokenizer, use("hermes", choice="required", token_id=tokenizer.token_to_id).constraint.grammar)
    one, more = CALLS["hermes"]
    assert judge.allows(one + more * (MOST_CALLS - 1) + ENDS.get("hermes", ""))
    assert not judge.allows(one + more * MOST_CALLS + ENDS.get("hermes", ""))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("choice", "parallel"), [("weather", None), ("required", False)])
def test_a_named_tool_and_no_parallel_calls_allow_one_call(name, choice, parallel, tokenizer):
    found = use(name, choice=choice, token_id=tokenizer.token_to_id, parallel=parallel)
    judge = Judge(tokenizer, found.constraint.grammar)
    one, more = CALLS[name]
    end = ENDS.get(name, "")
    assert judge.allows(one + end)
    assert not judge.allows(one + more + end)
    assert bool(judge.allows(with_argument(name, "", function="now"))) == (choice == "required")


@pytest.mark.parametrize("name", FORMATS)
def test_strict_allows_any_text_and_constrains_the_calls_in_it(name, tokenizer):
    tools = [tool(strict=True), tool("free", {"type": "object", "properties": {"a": {"type": "string"}}})]
    judge = Judge(tokenizer, use(name, tools, token_id=tokenizer.token_to_id).constraint.grammar)
    written = with_argument(name)
    for answer in ("", "Hello {1} [2] <b>", "Hello\n\nthere"):
        assert judge.allows(answer), answer
    if FORMS[name].auto and tokenizer.token_to_id(FORMS[name].inner[0]) is None:
        return  # its markers are tokens in each of its models
    assert judge.allows(written)
    assert judge.allows(written.replace("city", "town")) is False
    assert judge.allows(written.replace("weather", "other")) is False
    if not FORMS[name].implicit_start and not FORMS[name].auto:
        assert judge.allows("Let me see.\n" + written)
        assert judge.allows("Let me see.\n" + written.replace("weather", "other")) is False
    if name == "hermes":
        assert judge.allows(written + "\n" + written + " Done.")
        assert judge.allows(written + "\n" + written.replace("city", "town")) is False
    if name != "pythonic":
        free = with_argument(name, "b", "[1]", raw=True, function="free")
        assert judge.allows(free), "a tool that is not strict gets any object"


@pytest.mark.parametrize("kind", ["added", "special"])
def test_strict_allows_the_messages_of_harmony_and_constrains_the_call_after_them(kind):
    tokenizer = tokenizer_of(kind)
    judge = Judge(tokenizer, use("openai", [tool(strict=True)], token_id=tokenizer.token_to_id).constraint.grammar)
    preamble = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    for before in ("", "<|start|>assistant", preamble, "<|start|>assistant" + preamble):
        assert judge.allows(before + CALLS["openai"][0])
        assert judge.allows(before + "<|channel|>final<|message|>Hello {1}")
        assert judge.allows(before + CALLS["openai"][0].replace("weather", "other")) is False
        assert judge.allows(before + with_argument("openai", "town")) is False
    assert judge.allows("<|channel|>analysis<|message|>Hm") is False


@pytest.mark.parametrize("name", FORMATS)
def test_with_a_format_of_the_text_an_answer_is_a_call_or_has_that_format(name, tokenizer):
    body = of_json_schema({"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    found = use(name, choice="auto", token_id=tokenizer.token_to_id)
    judge = Judge(tokenizer, beside(found, "response_format", body).constraint.grammar)
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
    judge = Judge(tokenizer, use(tools=tools, choice="required").constraint.grammar)
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
    judge = Judge(tokenizer_of("text"), use("pythonic", choice="weather").constraint.grammar)
    written = f"[weather({arguments})]"
    assert bool(judge.allows(written)) == is_allowed
    if is_allowed:
        assert parsed(ParserConfig(use("pythonic")), written).calls


@pytest.mark.parametrize("value", ['"a"', "-1.5e3", "True", "None", "[1, [2], 'x']", '{"a": {"b": False}, "c": []}', "{}"])
def test_arguments_of_python_calls_without_a_type_are_any_literal(value):
    found = use("pythonic", [tool("f", {"properties": {"x": {}}})], "required")
    judge = Judge(tokenizer_of("text"), found.constraint.grammar)
    assert judge.allows(f"[f(x={value})]") and judge.allows("[f()]")
    (call,) = parsed(ParserConfig(found), f"[f(x={value})]").calls
    assert json.loads(call.arguments) == {"x": eval(value)}


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ('city:<|"|>Bern<|"|>,days:3,unit:<|"|>F<|"|>', True),
        ('city:<|"|>say "hi",\n{a:1}<|"|>', True),
        ('city:<|"|><|"|>,days:-3', True),
        ('city:<|"|>x<|"|>,days:2.5', False),
        ('city:<|"|>x<|"|>,unit:<|"|>K<|"|>', False),
        ('city:"x"', False),
        ("days:3", False),
        ("", False),
    ],
)
def test_arguments_of_gemmas_calls_have_the_types_of_the_schema(arguments, is_allowed, tokenizer):
    found = use("gemma4", choice="weather", token_id=tokenizer.token_to_id)
    written = f"<|tool_call>call:weather{{{arguments}}}<tool_call|>"
    assert bool(Judge(tokenizer, found.constraint.grammar).allows(written)) == is_allowed
    if is_allowed:
        assert parsed(ParserConfig(use("gemma4")), written).calls


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('<|"|>a<|"|>', "a"),
        ("-1.5e3", -1500),
        ("true", True),
        ("null", None),
        ('[1,[2],<|"|>x<|"|>]', [1, [2], "x"]),
        ("{a:{b:false},c:[]}", {"a": {"b": False}, "c": []}),
        ("{}", {}),
    ],
)
def test_arguments_of_gemmas_calls_without_a_type_are_any_literal(literal, value):
    found = use("gemma4", [tool("f", {"properties": {"x": {}}})], "required")
    judge = Judge(tokenizer_of("text"), found.constraint.grammar)
    for arguments, read in ((f"x:{literal}", {"x": value}), ("", {})):
        written = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
        assert judge.allows(written)
        (call,) = parsed(ParserConfig(found), written).calls
        assert json.loads(call.arguments) == read


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAGGED = {
    "properties": {
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/Point"},
        "any": {},
        "kind": {"type": "string", "enum": ["a", None, 5]},  # the nulls and numbers are not of the type
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
        ({"text": "x", "kind": "a"}, {"text": "x", "kind": "a"}),
        ({"text": "x", "kind": "null"}, None),
        ({"text": "x", "days": "soon"}, None),
        ({"text": "x", "unit": "K"}, None),
        ({"text": "x", "point": '{"x": "1"}'}, None),
        ({"days": "5"}, None),
        ({"days": "5", "text": "x"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("name", TAGS)
def test_values_in_tags_have_the_types_of_the_schema(name, values, arguments):
    found = use(name, [tool("f", TAGGED)], "required")
    written = in_tags(name, "f", **values)
    assert bool(Judge(tokenizer_of("text"), found.constraint.grammar).allows(written)) == (arguments is not None)
    if arguments is not None:
        (call,) = parsed(ParserConfig(found), written).calls
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("name", TAGS)
def test_a_function_in_tags_whose_schema_names_no_parameters_gets_any(name):
    written = in_tags(name, "f", a="1")
    for parameters, is_allowed in (({"type": "object"}, True), ({"additionalProperties": False}, False)):
        grammar = use(name, [tool("f", parameters)], "required").constraint.grammar
        assert bool(Judge(tokenizer_of("text"), grammar).allows(written)) == is_allowed


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_whose_name_begins_with_that_of_another_is_called_by_its_own(name, tokenizer):
    tools = [tool("now", {"properties": {}, "additionalProperties": False}), tool("nowhere"), tool("now.here_2-x")]
    if name in PYTHON:
        tools.pop()  # no name in Python
    found = use(name, tools, "required", token_id=tokenizer.token_to_id)
    for each in tools[1:]:
        called = each["function"]["name"]
        written = with_argument(name, function=called)
        assert Judge(tokenizer, found.constraint.grammar).allows(written)
        assert [call.name for call in parsed(ParserConfig(found), written).calls] == [called]


PLACES = [
    ({"additionalProperties": {"type": "integer"}, "required": ["a"]}, ["/additionalProperties", "/required"]),
    ({"properties": {"a": {"type": "string"}}, "required": ["b"]}, ["/required"]),
    ({"properties": {"a/b": {"type": "string", "format": "date"}}, "required": ["a/b"]}, ["/properties/a~1b/format"]),
    ({"properties": {"a": {"enum": ["x"]}}, "additionalProperties": False, "title": "T", "$comment": "c"}, []),
]


@pytest.mark.parametrize("name", ["glm45", "gemma4"])
@pytest.mark.parametrize(("parameters", "places"), PLACES)
def test_what_a_call_that_is_not_json_does_not_enforce_is_named(name, parameters, places):
    function = Function("f", {"type": "object"} | parameters)
    assert sorted(not_written(use(name).format, function)) == places


def test_definitions_that_name_each_other_many_times_are_looked_at_once():
    many = [{"$ref": "#/$defs/X"}] * 300
    parameters = {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"anyOf": many}}}
    assert types_of(parameters["properties"]["a"], parameters) == set()


def test_a_call_is_read_whatever_the_number_of_definitions_that_name_the_next():
    names = [f"#/$defs/{n}" for n in range(2000)]
    definitions = {str(n): {"$ref": name} for n, name in enumerate(names[1:])}
    parameters = {"properties": {"a": {"$ref": names[0]}}, "$defs": definitions | {"1999": {"type": "string"}}}
    policy = use("qwen3_coder", [tool("f", parameters=parameters)])
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    assert mended_calls(text, policy) == [("f", '{"a": "x"}')]


def test_an_empty_list_of_values_says_nothing_about_types():
    assert types_of({"enum": [], "anyOf": [{"type": "boolean"}, {"type": "null"}]}, {}) == {"boolean", "null"}
    assert types_of({"enum": [], "$ref": "#/$defs/Text"}, {"$defs": {"Text": {"type": "string"}}}) == {"string"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "allOf": [{"type": ["null", "array"]}]}, {"null"}),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}], "anyOf": [{"type": "number"}, {}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}], "allOf": [{"type": "number"}]}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/Color"}, {"description": "of the car"}]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "array"}]}]}, {"string"}),
        ({"type": ["string", "null"], "$ref": "#/$defs/Color"}, {"string"}),
        ({"properties": {}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"object"}),
        ({"anyOf": [], "allOf": [{"minimum": 0}]}, set()),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"$ref": "#/$defs/Color"}, {"type": "null"}]}, {"string", "null"}),
    ],
)
def test_types_are_those_that_all_keywords_of_a_schema_allow(schema, types):
    assert types_of(schema, {"$defs": {"Color": {"enum": ["red", "blue"]}}}) == types


def test_a_definition_that_names_itself_has_the_types_of_its_other_options():
    parameters = {"$defs": {"Text": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Text"}]}}}
    assert types_of({"$ref": "#/$defs/Text"}, parameters) == {"string"}
    assert types_of({"$ref": "#"}, parameters) == set(), "a value is written without what is around it"
