"""From bytes to types: what is no JSON, has wrong types, or has names that mean nothing here; what a device cannot do."""

from __future__ import annotations

import json

import pytest
from asked import DIALECTS, INFO, ON_DEVICE, all_prepared, assert_invalid, prepared, refusal, refusal_of

from api.anthropic.types import MessagesRequest
from api.chats.conversation import ChatRequest
from api.clouds import VertexRequest
from api.http import fields
from api.http.errors import ApiError
from api.http.fields import CHANGES_TEXT, HARMLESS_LOOKALIKES, NOT_SUPPORTED
from api.openai.completions import CompletionRequest
from api.openai.responses_types import ResponsesRequest
from api.tgi import GenerateRequest, Parameters

# The types whose names a client writes, with the shortest body of each; `Parameters` are a part of a native one.
KINDS = {
    GenerateRequest: {"inputs": "a"},
    Parameters: {"inputs": "a"},
    ChatRequest: {"messages": []},
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": [], "max_tokens": 1},
    VertexRequest: {"instances": []},
}
FIELDS = {name for kind in KINDS for name in kind.__struct_fields__}
# Fields that may be ignored by other APIs than theirs: they name the request, or do nothing by themselves.
SILENT = """inputs parameters messages prompt input instances instructions text conversation model stream stream_options details
decoder_input_details logprobs top_logprobs suffix user metadata store service_tier background reasoning include truncation
parallel_tool_calls previous_response_id max_tool_calls prediction
system thinking output_config mcp_servers safety_identifier prompt_cache_key compaction thread"""


def read(kind, **given):
    body = KINDS[kind]
    if kind is Parameters:
        return fields.read(body | {"parameters": given}, GenerateRequest, parameters=Parameters)
    return fields.read(body | given, kind, Parameters if kind is GenerateRequest else None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"inputs":"a",}',
        b'{"inputs":"a"} b',
        b"{'inputs':'a'}",
        b'{"inputs":"a\nb"}',
        b'{"inputs":"\xff"}',
        b'{"inputs":"\xed\xa0\x80"}',
        b'{"inputs":"\\ud800",}',
        b'{"inputs":"\\ud800","seed":NaN}',
        b'{"inputs":"\\x41"}',
        b'\xef\xbb\xbf\xef\xbb\xbf{"inputs":"a"}',
        '{"inputs":"a"}'.encode("utf-16"),
        b'{"inputs":"a","parameters":{"temperature":NaN}}',
        b'{"inputs":"a","parameters":{"temperature":01}}',
        b'{"inputs":"a","unknown":' + b"[" * 100_000,
        b'{"inputs":"a","unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:50]),
)
def test_what_is_no_json_is_answered_with_400(body):
    error = refusal_of("native", body)
    assert (error.status, error.error_type, error.param) == (400, "validation", None)
    assert str(error).startswith("Failed to parse the request body as JSON: ")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b"see \\ud83d... more", "see ?... more"),
        (b"\\udc00\\ud800", "??"),
        (b"\\ud83d\\ud83d\\ude00\\ude00", "?\U0001f600?"),
        (b"\\\\ud83d \\ud83d \\u00e9", "\\ud83d ? \u00e9"),
    ],
)
def test_half_of_a_surrogate_pair_ends_no_session(text, read):
    """An agent that cuts a tool's output within an emoji sends it again with every later request."""
    assert fields.parse_body(b'{"inputs":"%b"}' % text) == {"inputs": read}
    assert fields.parse_body(b'{"%b":1}' % text) == {read: 1}


def test_half_of_a_surrogate_pair_is_not_blamed_for_another_fault():
    with pytest.raises(ApiError, match=r"trailing characters \(byte 10\)"):
        fields.parse_body(b'{"a":"\\ud83d"}]')


@pytest.mark.parametrize(
    ("body", "expected", "param"),
    [
        (b"[]", "Expected `object`, got `array`", None),
        (b"null", "Expected `object`, got `null`", None),
        (b'"inputs"', "Expected `object`, got `str`", None),
        (b"{}", "Object missing required field `inputs`", "inputs"),
        (b'{"inputs":null}', "inputs: Expected `str`, got `null`", "inputs"),
        (b'{"inputs":["a"]}', "inputs: Expected `str`, got `array`", "inputs"),
        (b'{"inputs":"a","parameters":[]}', "parameters: Expected `object | null`, got `array`", "parameters"),
        (
            b'{"inputs":"a","parameters":{"stop":["b",1]}}',
            "parameters.stop[1]: Expected `str`, got `int`",
            "parameters.stop[1]",
        ),
        (b'{"inputs":"a","parameters":{"temperature":1e999}}', "Number out of range", None),
        (b'{"inputs":"\\ud800","parameters":{"temperature":1e999}}', "Number out of range", None),
        (b'{"inputs":"a","parameters":{"seed":' + b"1" * 5000 + b"}}", "Integer value out of range", None),
        (
            b'{"inputs":"a","parameters":{"temperature":' + b"1" * 400 + b"}}",
            "parameters.temperature: Number out of range",
            "parameters.temperature",
        ),
    ],
    ids=lambda value: repr(value[:50]) if isinstance(value, bytes) else "",
)
def test_json_of_the_wrong_shape_is_answered_with_422_and_the_path(body, expected, param):
    error = refusal_of("native", body)
    assert (error.status, error.error_type, error.param) == (422, "validation", param)
    assert str(error) == f"Failed to deserialize the JSON body into the target type: {expected}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_type_is_refused_with_the_path_of_its_field(kind):
    for name in set(kind.__struct_fields__) - {"instances"}:
        with pytest.raises(ApiError, match=rf"\b{name}[\d\[\]]*: Expected ") as refused:
            read(kind, **{name: [[[]]]})
        assert refused.value.status == 422 and name in refused.value.param


@pytest.mark.parametrize(
    ("field", "right", "wrong", "words"),
    [
        ("top_k", [2**31 - 1], [2**31], "Expected `int` <= 2147483647"),
        ("top_k", [1], [-(2**31) - 1], "Expected `int` >= -2147483648"),
        ("top_k", [1, 1.0, 1e3], ["1", 1.5, True], "Expected `int | null`, got `"),
        ("max_new_tokens", [2**32 - 1], [2**32], "Expected `int` <= 4294967295"),
        ("best_of", [0], [-1], "Expected `int` >= 0"),
        ("seed", [0, 2**64 - 1], [2**64, 10**400], "Expected `int` <= 18446744073709551615"),
        ("temperature", [1, 1.0], ["0.5", True], "Expected `float | null`, got `"),
        ("details", [True], [0, 1, "true"], "Expected `bool | null`, got `"),
    ],
)
def test_a_number_is_neither_a_text_nor_a_switch_and_has_its_width(field, right, wrong, words):
    for value in right:
        assert prepared(**{field: value})
    for value in wrong:
        assert f": parameters.{field}: {words}" in str(refusal("native", **{field: value}))


NEEDED = {
    "native": {"inputs"},
    "chat": {"messages"},
    "completion": {"prompt"},
    "responses": {"input"},
    "messages": {"messages", "max_tokens"},
    "vertex": {"instances"},
}


@pytest.mark.parametrize("dialect", NEEDED)
def test_in_every_dialect_a_body_is_an_object_with_the_fields_that_it_needs(dialect):
    for body in (b"[]", b"null", b"5"):
        assert (refusal_of(dialect, body).status, refusal_of(dialect, b"{").status) == (422, 400)
    body = DIALECTS[dialect][1]
    assert body.keys() == NEEDED[dialect]
    for name in NEEDED[dialect]:
        error = refusal_of(dialect, {other: body[other] for other in body if other != name})
        assert (error.status, error.param) == (422, name)


# Names


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelled_field_is_rejected_with_the_right_name(kind):
    for name in set(kind.__struct_fields__) - {"n"}:
        for misspelt in (name + "x", name[:-1], name.replace("_", "", 1) if "_" in name else name + "s"):
            if misspelt in {*kind.__struct_fields__, *NOT_SUPPORTED, *CHANGES_TEXT, *HARMLESS_LOOKALIKES}:
                continue
            with pytest.raises(ApiError, match=f"`{misspelt}` .*did you mean"):
                read(kind, **{misspelt: 1})


@pytest.mark.parametrize("written", ["maxTokens", "max-tokens", "MaxTokens", "topP", "parallelToolCalls", "logitBias"])
def test_a_field_in_another_languages_case_is_rejected_with_the_right_name(written):
    with pytest.raises(ApiError, match=f"`{written}` .*did you mean"):
        read(ChatRequest, **{written: 1})


@pytest.mark.parametrize(
    "kind, fields, path, meant",
    [
        (ChatRequest, {"stream_options": {"includeUsage": True}}, "stream_options.includeUsage", "include_usage"),
        (ChatRequest, {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        (ResponsesRequest, {"text": {"formats": {}}}, "text.formats", "format"),
        (MessagesRequest, {"thinking": {"type": "enabled", "budget_token": 5}}, "thinking.budget_token", "budget_tokens"),
        (MessagesRequest, {"output_config": {"formats": {}}}, "output_config.formats", "format"),
    ],
)
def test_a_misspelled_field_of_an_object_is_rejected_with_its_path_and_other_fields_are_ignored(kind, fields, path, meant):
    with pytest.raises(ApiError, match=f"did you mean `{meant}`") as refused:
        read(kind, **fields)
    assert refused.value.param == path
    name = path.partition(".")[0]
    read(kind, **{name: fields[name] | {path.partition(".")[2]: None, "new_in_2027": 1}})


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_a_field_of_another_server_that_asks_for_something_is_refused_by_name(name):
    for kind in (kind for kind in KINDS if name not in kind.__struct_fields__):
        for neutral in (None, *NOT_SUPPORTED[name]):
            read(kind, **{name: neutral})
        with pytest.raises(ApiError, match=rf"`{name}` is not supported"):
            read(kind, **{name: "something"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_another_dialect_that_would_change_the_text_is_refused_by_name(kind):
    for name in {*FIELDS, *CHANGES_TEXT} - {*kind.__struct_fields__, *NOT_SUPPORTED, *SILENT.split()}:
        read(kind, **{name: None})
        with pytest.raises(ApiError, match=f"`{name}` is an unknown field"):
            read(kind, **{name: 1})


@pytest.mark.parametrize(
    "kind, name, meant",
    [
        (GenerateRequest, "max_tokens", "; use `max_new_tokens` in `parameters`"),
        (GenerateRequest, "temperature", "; use `temperature` in `parameters`"),
        (GenerateRequest, "min_tokens", "is an unknown field"),
        (GenerateRequest, "guided_json", "; use `grammar` in `parameters`"),
        (ChatRequest, "guided_json", "; use `response_format`"),
        (Parameters, "stop_sequences", "; use `stop`"),
        (Parameters, "response_format", "; use `grammar`"),
        (ChatRequest, "max_new_tokens", "; use `max_completion_tokens`"),
        (ChatRequest, "grammar", "; use `response_format`"),
        (CompletionRequest, "max_completion_tokens", "; use `max_tokens`"),
        (ResponsesRequest, "max_tokens", "; use `max_output_tokens`"),
        (ResponsesRequest, "response_format", "; use `text`"),
        (MessagesRequest, "stop", "; use `stop_sequences`"),
        (ChatRequest, "output_format", "; use `response_format`"),
        (ChatRequest, "format", "; use `response_format`"),
        (ChatRequest, "min_new_tokens", "; use `min_tokens`"),
        (ChatRequest, "stop_strings", "; use `stop`"),
        (MessagesRequest, "stop_strings", "; use `stop_sequences`"),
        (ResponsesRequest, "json_mode", "; use `text`"),
    ],
)
def test_the_refusal_of_another_apis_field_names_what_to_use(kind, name, meant):
    with pytest.raises(ApiError) as refused:
        read(kind, **{name: 1})
    assert (str(refused.value).endswith(meant), refused.value.param) == (True, name)


def test_other_fields_are_ignored():
    names = ("model", "user", "metadata", "request_id", "mode", "models", "priority", "options", "max_retries")
    for kind in KINDS:
        for name in set(names) - set(kind.__struct_fields__):
            read(kind, **{name: {"nested": [1, None, {}]}})
    for dialect in ("native", "greedy chat"):
        assert prepared(dialect, request_id="x", quantile=-5) == prepared(dialect)


def test_a_request_with_more_fields_than_any_client_sends_is_refused():
    names = [f"max_tok{i}" for i in range(256)]
    read(GenerateRequest, **dict.fromkeys(names[:255], 1))
    for kind in (GenerateRequest, Parameters):
        with pytest.raises(ApiError, match=r"at most 256 fields\. Given: 257"):
            read(kind, **dict.fromkeys([*names, "another"][: 256 + (kind is Parameters)], 1))


@pytest.mark.parametrize("dialect", ["native", "stream", "greedy chat", "completion", "responses", "messages"])
def test_null_means_absent(dialect):
    kinds = {
        "greedy chat": ChatRequest,
        "completion": CompletionRequest,
        "responses": ResponsesRequest,
        "messages": MessagesRequest,
    }
    kind = kinds.get(dialect, Parameters)
    greedy = {} if kind is Parameters else {"temperature": 0}
    without = prepared(dialect, **greedy)
    for name in set(kind.__struct_fields__) - {*greedy, *DIALECTS[dialect][1]}:
        assert prepared(dialect, **greedy | {name: None}) == without, name


def test_a_byte_order_mark_before_a_body_is_skipped():
    for body in ({"inputs": "a\ufeff"}, {"inputs": "\ufeffa", "parameters": {"seed": None}}):
        written = json.dumps(body, ensure_ascii=False)
        assert fields.parse_body(bytearray(written.encode("utf-8-sig"))) == body
    assert fields.parse_body(b'\xef\xbb\xbf{"inputs":"\\ud83d"}') == {"inputs": "?"}
    for text, charset in (("héllo", "utf-8"), ("hello", "us-ascii"), ("ï»¿héllo", "iso-8859-1")):
        assert fields.parse_text(text.encode(charset), charset) == {"inputs": text}
    assert fields.parse_text("héllo".encode("utf-8-sig"), "utf-8") == {"inputs": "héllo"}


def test_null_means_absent_also_where_a_name_looks_misspelled():
    read(ResponsesRequest, previous_response=None, inputs=None)
    with pytest.raises(ApiError, match="did you mean `previous_response_id`"):
        read(ResponsesRequest, previous_response={"id": "resp_1"})


def test_a_wrong_type_is_refused_before_a_wrong_value_and_an_unknown_name():
    assert "parameters.top_n_tokens" in str(refusal("native", temperature=0, top_n_tokens=-1, temprature=1))
    assert "parameters.seed" in str(refusal("native", best_of=2, seed=2**64))


# A device that samples

NEEDS_HOST = [  # API, field, what does nothing and so is taken, what is rejected
    ("native", "seed", [None, 5], []),  # a greedy text needs no seed
    ("native", "repetition_penalty", [None, 1, 1.0], [0.9, 1.2]),
    ("native", "typical_p", [None, 1, 1.0], [0.95]),
    ("native", "top_n_tokens", [None, 0], [1, 5]),
    ("native", "min_p", [None, 0, 0.0], [0.05]),
    ("sampled", "seed", [None], [0, 5]),
    ("sampled", "best_of", [None, 1], [2, 3]),
    ("chat", "seed", [None], [0, -1]),
    ("chat", "min_p", [None, 0], [0.05]),
    ("greedy chat", "min_p", [None, 0, 0.05], []),  # it filters nothing from a greedy text
    ("chat", "logprobs", [None, False], [True]),
    ("chat", "presence_penalty", [None, 0], [0.1]),
    ("chat", "logit_bias", [None, {}, {"5": 0}], [{"5": 1}, {"5": 0, "6": -1}]),
    ("chat", "min_tokens", [None, 0], [1]),
    ("greedy chat", "seed", [None, 5], []),
    ("completion", "logprobs", [None], [0, 1]),
    ("completion", "best_of", [None, 1], [2]),
    ("responses", "top_logprobs", [None, 0], [1]),
]


@pytest.mark.parametrize(("dialect", "field", "right", "wrong"), NEEDS_HOST)
def test_a_device_that_samples_refuses_what_it_cannot_do_and_takes_what_does_nothing(dialect, field, right, wrong):
    for value in right:
        assert all_prepared(dialect, ON_DEVICE, **{field: value})
    for value in wrong:
        assert all_prepared(dialect, INFO, **{field: value})
        error = refusal(dialect, ON_DEVICE, **{field: value})
        assert_invalid(error, f"`{field}` needs --sampling host or hybrid (SAMPLING): this server samples on the device")
        assert error.param == field


def test_a_device_draws_from_256_tokens_at_most():
    for dialect in ("native", "chat"):
        assert prepared(dialect, ON_DEVICE, top_k=256).sampling.top_k == 256
        assert prepared(dialect, INFO, top_k=257).sampling.top_k == 257
        error = refusal(dialect, ON_DEVICE, top_k=257)
        assert_invalid(
            error, "`top_k` above 256 needs --sampling host or hybrid (SAMPLING): this server samples on the device. Given: 257"
        )
    assert prepared("greedy chat", ON_DEVICE, top_k=5000).sampling.seed is None
    for everything in (0, -1):
        assert prepared("chat", ON_DEVICE, top_k=everything).sampling.top_k == 0


def test_filters_of_a_greedy_request_keep_no_step_from_sampling_on_the_device():
    filtered = prepared("greedy chat", min_p=0.05, top_k=5000, top_p=0.5).sampling
    assert filtered == prepared("greedy chat").sampling
    assert filtered.host_only == [] and prepared("chat", min_p=0.05).sampling.host_only == ["min_p"]
