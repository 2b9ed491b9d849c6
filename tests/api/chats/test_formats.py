"""Every shape in which clients ask for JSON, a regular expression or a choice becomes a grammar, or a refusal that names it."""

from __future__ import annotations

import json
import re

import pytest
from asked import ON_DEVICE, all_prepared, as_openai, prepared, refusal

from api.http.errors import ApiError
from api.http.fields import NEEDS_HOST
from text.grammar import of_choice, of_json_schema, of_regex

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
NAMED = {"name": "x", "schema": SCHEMA}
JSON, ANY_OBJECT = of_json_schema(SCHEMA), of_json_schema({"type": "object"})
REGEX, CHOICE = of_regex("a+"), of_choice(["a", "b"])
OPENAI = ["chat", "completion"]

NATIVE_SHAPES = [
    ({"type": "json", "value": SCHEMA}, JSON),
    ({"type": "json", "value": TEXT}, JSON),
    ({"type": "json", "value": {"type": "array", "items": SCHEMA}}, of_json_schema({"type": "array", "items": SCHEMA})),
    ({"type": "regex", "value": "a+"}, REGEX),
    ({"type": "json_schema", "value": NAMED}, JSON),
    ({"type": "json_schema", "value": {"schema": SCHEMA}}, JSON),
    ({}, ""),
    (None, ""),
]
OPENAI_SHAPES = [
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": False, "description": "d"}}}, JSON),
    ({"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, JSON),  # as in responses
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
    *[({"response_format": shape}, grammar) for shape, grammar in NATIVE_SHAPES],
    ({"response_format": {"type": "text"}}, ""),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": TEXT, "regex": None, "grammar": None, "disable_fallback": False}}, JSON),
    ({"structured_outputs": {"regex": "a+"}}, REGEX),
    ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, of_json_schema(SCHEMA, None)),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, of_json_schema(SCHEMA, " ")),
    ({"regex": "a+"}, REGEX),
    ({"json_schema": TEXT}, JSON),
]
NATIVE_REFUSALS = [
    ({"type": "xml", "value": "a"}, "grammar.type", "must be one of .*json_schema.* Given: 'xml'"),
    ({"value": "a"}, "grammar.type", "must be one of"),
    ({"type": "json"}, "grammar", "of the type json needs `value`"),
    ({"type": "json", "value": 5}, "grammar.value", "must be a JSON schema"),
    ({"type": "json", "value": "{"}, "grammar.value", "must be a JSON schema: Input data was truncated"),
    ({"type": "json", "value": "[" * 5000}, "grammar.value", "must be a JSON schema"),
    ({"type": "json_schema", "value": {"name": "x"}}, "grammar", "needs .*`value.schema`"),
    ({"type": "regex", "value": {"a": 1}}, "grammar.value", "must be a regular expression"),
    ({"type": "regex", "value": "a\0"}, "grammar.value", "NUL"),
]
ONE = "cannot be combined with"
LONG = {"description": "x" * 120_000}
OPENAI_REFUSALS = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs `json_schema.schema`"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "needs `json_schema.schema`",
    ),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type", "'structural_tag'"),
    ({"response_format": {"type": "json_object", "schema": LONG}}, "response_format.schema", "at most 120000 bytes"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of `json`, `regex`, `choice` and `json_object`"),
    ({"structured_outputs": {"yaml": SCHEMA}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "is not supported",
    ),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must be a list of non-empty strings"),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "structured_outputs.grammar", "is not supported"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "is not supported"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", f"{ONE} `structured_outputs.json`"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", f"{ONE} `response_format`"),
    ({"json_schema": "no JSON"}, "json_schema", "must be a JSON schema"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "must be a list of non-empty strings"),
    ({"regex": "a" * 4001}, "regex", "at most 4000 bytes"),
    ({"regex": "a", "json_schema": TEXT}, "regex", f"{ONE} `json_schema`"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", f"{ONE} `regex`"),
]


def assert_names(error: ApiError, param: str, words: str) -> None:
    assert (error.status, error.param) == (422, param)
    assert re.match(f"Input validation error: `{re.escape(param)}` .*{words}", str(error)), str(error)
    assert as_openai(error)["param"] == param


@pytest.mark.parametrize(("grammar", "expected"), NATIVE_SHAPES)
def test_every_shape_of_tgis_grammar_is_taken(grammar, expected):
    assert prepared(grammar=grammar).grammar == expected


@pytest.mark.parametrize("route", OPENAI)
@pytest.mark.parametrize(("fields", "expected"), OPENAI_SHAPES)
def test_every_shape_of_openais_vllms_and_sglangs_clients_is_taken(route, fields, expected):
    assert prepared(route, **fields).grammar == expected


@pytest.mark.parametrize(("grammar", "param", "words"), NATIVE_REFUSALS)
def test_a_grammar_that_cannot_be_used_is_refused_by_name(grammar, param, words):
    assert_names(refusal("native", grammar=grammar), param, words)


@pytest.mark.parametrize("route", OPENAI)
@pytest.mark.parametrize(("fields", "param", "words"), OPENAI_REFUSALS)
def test_a_format_that_cannot_be_used_is_refused_by_name(route, fields, param, words):
    assert_names(refusal(route, **fields), param, words)


def test_every_prompt_of_a_request_gets_the_grammar():
    assert [prepared.grammar for prepared in all_prepared("completion", prompt=["a", "b"], regex="a+")] == [REGEX] * 2


@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ("native", {"details": True}),
        ("native", {"decoder_input_details": True}),
        ("native", {"top_n_tokens": 1}),
        ("chat", {"logprobs": True}),
        ("completion", {"logprobs": 0}),
    ],
)
def test_the_end_token_is_generated_where_the_client_gets_single_tokens(route, wanted):
    assert not prepared(route).keep_eos
    assert prepared(route, **wanted).keep_eos


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("native", {"grammar": {"type": "regex", "value": "a"}}),
        ("chat", {"regex": "a"}),
        ("completion", {"regex": "a"}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_device_that_samples_refuses_grammars(route, fields):
    assert prepared(route, **fields).grammar
    assert NEEDS_HOST in str(refusal(route, ON_DEVICE, **fields))


NOT = {"not": {"type": "string"}, "type": "array", "items": {"type": "null"}, "uniqueItems": True}  # no mask can say this
NATIVE = {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "grammar": {"type": "json", "value": NOT}}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
COMPLETION = {"prompt": "Hi", "max_tokens": 3, "json_schema": NOT}
RESPONSE = {"input": "Hi", "max_output_tokens": 16}
MESSAGES = {"messages": CHAT["messages"], "max_tokens": 3}
HEADER = "x-schema-not-enforced"


def openai(**more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT, **more}}}


def of_response(**more):
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": NOT, **more}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", NATIVE),
        ("/", NATIVE | {"stream": True}),
        ("/v1/chat/completions", CHAT | openai(strict=False)),
        ("/v1/chat/completions", CHAT | openai(strict=None) | {"stream": True}),
        ("/v1/completions", COMPLETION | {"prompt": ["Hi", "Ho"]}),
        ("/v1/responses", RESPONSE | of_response() | {"stream": True}),
        ("/v1/messages", MESSAGES | {"output_config": {"format": {"type": "json_schema", "schema": NOT}}}),
        ("/vertex", {"instances": [CHAT | openai()]}),
    ],
)
def test_keywords_that_cannot_be_enforced_are_left_out_and_named_in_a_header_and_a_log_line(served, caplog, path, body):
    with caplog.at_level("DEBUG", "web"):
        response = served.post(path, body)
    assert response.status_code == 200
    assert response.headers[HEADER] == "not, uniqueItems"
    assert response.get_data()
    (line,) = [record.message for record in caplog.records if "not enforced" in record.message]
    assert "/not" in line and "/uniqueItems" in line


def test_the_header_names_at_most_ten_keywords_and_is_absent_where_all_are_enforced(served):
    assert HEADER not in served.post("/v1/completions", COMPLETION | {"json_schema": SCHEMA}).headers
    names = ("not", "if", "contains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
    many = {name: {"title": "x"} for name in names} | {"allOf": [{}], "pattern": "(?=a)", "format": "x", "then": {}}
    many |= {"dependentSchemas": {str(n): {} for n in range(9)}, "uniqueItems": True, "propertyNames": {"minLength": 3}}
    response = served.post("/v1/completions", COMPLETION | {"json_schema": many})
    assert response.status_code == 200
    kept = response.headers[HEADER].split(", ")
    assert len(kept) == 10 and kept == sorted(kept)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", CHAT | openai(strict=True) | {"stream": True}, "response_format.json_schema.schema"),
        ("/v1/responses", RESPONSE | of_response(strict=True), "text.format.schema"),
        ("/vertex", {"instances": [CHAT | openai(strict=True)]}, "response_format.json_schema.schema"),
    ],
)
def test_with_strict_they_are_rejected_before_the_first_byte(served, path, body, name):
    response = served.post(path, body)
    assert response.status_code == (400 if path.startswith("/v1/") else 422)
    wanted = f"`{name}` has keywords that cannot be enforced: /uniqueItems, /not; remove them, or set `strict: false`"
    assert wanted in response.get_data(as_text=True)
    assert HEADER not in response.headers


KEYWORDS = """$defs $ref additionalProperties allOf anyOf const definitions enum format items maxLength multipleOf not oneOf
pattern patternProperties prefixItems properties required type x-guidance"""


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_a_keyword_that_holds_anything_gives_a_grammar_or_a_refusal(keyword):
    for value in (None, True, -5, 1e300, "x", "\0", [], {}, [None], [[5]], {"a": None}, {"a": {"a": []}}):
        schema = {"type": "object", "properties": {"a": {keyword: value}}}
        for sent in (schema, {keyword: value}, {"allOf": [schema, {keyword: value}]}):
            grammar_or_refusal("native", grammar={"type": "json", "value": sent})


def grammar_or_refusal(route, **fields):
    try:
        asked = prepared(route, **fields)
    except ApiError as error:
        assert error.status == 422
        assert next(iter(fields)) in error.param
    else:
        assert isinstance(asked.grammar, str)
