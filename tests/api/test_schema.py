"""The public contract: what is accepted, what is refused and in which words, on both sides of every limit; every shape."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from api import errors
from api import fields as validate
from api import routes as openapi
from api import types as schema
from api.answer import rounded
from api.errors import ApiError
from api.fields import Job, check, fit, parse
from api.stream import end_error
from api.types import ChatRequest, CompletionRequest, GenerateRequest, Parameters, TokenOut, encode
from config import VERSION, Config
from protocol import ModelInfo, Sampling
from run import HERE

CONFIG = Config(max_stop_sequences=4, max_top_n_tokens=5, max_best_of=3, max_client_batch_size=4)
FACTS = ModelInfo(
    model_name="someone/model",
    model_sha="abc123",
    tokenizer_dir="/somewhere",
    vocab_size=50,
    eos_token_ids=[2, 7],
    batch_size=8,
    max_input_tokens=100,
    max_total_tokens=120,
    device="cpu",
    dtype="float32",
)
FIELDS = Parameters.__struct_fields__
WRONG_TYPE = "Failed to deserialize the JSON body into the target type: "
NOT_JSON = "Failed to parse the request body as JSON: "

thorough = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def job(parameters=None, inputs="Hello", streaming=False, **more) -> Job:
    """A request for `inputs` with these `parameters`, all the way from its bytes."""
    body = {"inputs": inputs, **more} if parameters is None else {"inputs": inputs, "parameters": parameters, **more}
    return check(parse(json.dumps(body).encode(), GenerateRequest), CONFIG, FACTS, streaming)


def refusal(parameters=None, **more) -> ApiError:
    with pytest.raises(ApiError) as refused:
        job(parameters, **more)
    return refused.value


def assert_invalid(error: ApiError, detail: str) -> None:
    assert error.status == 422
    assert json.loads(error.json) == {"error": f"Input validation error: {detail}", "error_type": "validation"}


# Rules of the fields

STOPS = "`stop` supports up to 4 stop sequences. Given: "
TOP_N = "`top_n_tokens` must be >= 0 and <= 5. Given: "
TRUNCATE = "`truncate` must be strictly positive and at most 100. Given: "
PENALTY = "`frequency_penalty` must be >= -2.0 and <= 2.0"
LIMITS = [  # field, what is just right, what is just wrong, the detail
    ("temperature", [1e-30, 0.01, 1, 1.0, 1000], [0, 0.0, -0.0, 1e-999, -1e-30, -1], "`temperature` must be strictly positive"),
    ("repetition_penalty", [1e-30, 1, 1.3], [0, 0.0, -1e-30, -1.3], "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", [-2, -2.0, 0, 2, 2.0], [-2.0001, 2.0001, 3], PENALTY),
    ("top_p", [1e-30, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 2], "`top_p` must be > 0.0 and <= 1.0"),
    ("min_p", [0, 0.0, 1e-30, 0.5, 1, 1.0], [-0.1, -1e-30, 1.0000001, 2], "`min_p` must be >= 0.0 and <= 1.0"),
    ("typical_p", [1e-30, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 2], "`typical_p` must be > 0.0 and <= 1.0"),
    ("top_k", [1, 2**31 - 1], [0, -1, -(2**31)], "`top_k` must be strictly positive"),
    ("max_new_tokens", [1, 2**32 - 1], [0], "`max_new_tokens` must be strictly positive"),
    ("stop", [[], ["a"] * 4, ["", "b", "", ""]], [["a"] * 5], STOPS + "5"),
    ("stop", [["x" * 10_000]], [["a"] * 100], STOPS + "100"),
    ("top_n_tokens", [0, 5], [6], TOP_N + "6"),
    ("top_n_tokens", [1], [2**32 - 1], TOP_N + str(2**32 - 1)),
    ("truncate", [1, 100], [0], TRUNCATE + "0"),
    ("truncate", [99], [101], TRUNCATE + "101"),
    ("best_of", [0, 1], [4], "`best_of` must be > 0 and <= 3. Given: 4"),
    ("best_of", [None], [2, 3], "`best_of` > 1 needs sampling: set `do_sample` or `temperature`"),
    ("watermark", [False], [True], "`watermark` is not supported"),
    ("adapter_id", [""], ["someone/adapter"], "`adapter_id` is not supported"),
    ("grammar", [None, {}, {"type": "regex", "value": "a"}], [{"type": "json"}], "`grammar` of the type json needs `value`"),
]
ACCEPTED = [(field, value) for field, right, _, _ in LIMITS for value in right]
REFUSED = [(field, value, detail) for field, _, wrong, detail in LIMITS for value in wrong]


@pytest.mark.parametrize(("field", "value"), ACCEPTED)
def test_what_is_just_inside_a_limit_is_accepted(field, value):
    assert isinstance(job({field: value}), Job)


@pytest.mark.parametrize(("field", "value", "detail"), REFUSED)
def test_what_is_just_outside_a_limit_is_refused_in_tgis_words(field, value, detail):
    assert_invalid(refusal({field: value}), detail)


def test_the_limits_are_those_of_the_configuration_and_the_model():
    request = GenerateRequest("x", Parameters(stop=["a"] * 9, top_n_tokens=9, truncate=900))
    larger = replace(CONFIG, max_stop_sequences=9, max_top_n_tokens=9)
    assert check(request, larger, msgspec.structs.replace(FACTS, max_input_tokens=900), streaming=False).top_n_tokens == 9
    for config, facts, words in [
        (replace(larger, max_stop_sequences=8), FACTS, "`stop` supports up to 8 stop sequences. Given: 9"),
        (replace(larger, max_top_n_tokens=8), FACTS, "`top_n_tokens` must be >= 0 and <= 8. Given: 9"),
        (larger, FACTS, "`truncate` must be strictly positive and at most 100. Given: 900"),
    ]:
        with pytest.raises(ApiError) as refused:
            check(request, config, facts, streaming=False)
        assert_invalid(refused.value, words)


def test_empty_inputs_are_refused():
    assert_invalid(refusal(inputs=""), "`inputs` cannot be empty")
    assert job(inputs=" ").prompt == " "


@pytest.mark.parametrize(
    ("field", "right", "wrong", "detail"),
    [
        ("best_of", 1, 2, "`best_of` != 1 is not supported when streaming tokens"),
        ("best_of", None, 0, "`best_of` != 1 is not supported when streaming tokens"),
        ("decoder_input_details", False, True, "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_a_stream_refuses_what_tgi_refuses_in_a_stream(field, right, wrong, detail):
    assert isinstance(job({field: right}, streaming=True), Job)
    assert_invalid(refusal({field: wrong}, streaming=True), detail)


@pytest.mark.parametrize("streaming", [False, True])
def test_of_several_wrong_fields_the_first_in_tgis_order_is_named(streaming):
    wrong = {
        "best_of": (4, "`best_of`"),
        "temperature": (0, "`temperature`"),
        "repetition_penalty": (0, "`repetition_penalty`"),
        "frequency_penalty": (3, "`frequency_penalty`"),
        "top_p": (0, "`top_p`"),
        "min_p": (2, "`min_p`"),
        "typical_p": (0, "`typical_p`"),
        "top_k": (0, "`top_k`"),
        "max_new_tokens": (0, "`max_new_tokens`"),
        "stop": (["a"] * 5, "`stop`"),
        "top_n_tokens": (6, "`top_n_tokens`"),
        "inputs": ("", "`inputs`"),
        "truncate": (0, "`truncate`"),
        "grammar": ({"type": "json"}, "`grammar`"),
    }
    for first, second in itertools.combinations(wrong, 2):
        body = {"inputs": "x", second: wrong[second][0], first: wrong[first][0]}
        inputs = body.pop("inputs")
        message = refusal(body, inputs=inputs, streaming=streaming).message
        assert message.startswith(f"Input validation error: {wrong[first][1]}"), (first, second)


def test_a_wrong_type_is_refused_before_a_wrong_value():
    assert "parameters.top_n_tokens" in refusal({"temperature": 0, "top_n_tokens": -1}).message
    assert "parameters.seed" in refusal({"best_of": 2, "seed": 2**64}).message


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_null_means_absent(field, streaming):
    assert job({field: None}, streaming=streaming) == job({}, streaming=streaming)


def test_parameters_that_are_null_empty_or_absent_are_the_same():
    assert (
        job(parameters={})
        == job()
        == check(parse(b'{"inputs":"Hello","parameters":null}', GenerateRequest), CONFIG, FACTS, False)
    )
    assert job() == Job("Hello", stop=[])


def test_unknown_fields_are_ignored():
    unknown = {"model": "x", "stream": True, "nested": {"deep": [1, None, {}]}, "quantile": -5}
    assert job(unknown, **unknown) == job()


def test_what_is_asked_for_arrives():
    asked = job({"max_new_tokens": 7, "stop": ["a", "b"], "truncate": 9, "top_n_tokens": 3, "details": True})
    assert asked == Job("Hello", max_new_tokens=7, stop=["a", "b"], truncate=9, top_n_tokens=3, keep_eos=True)


def test_best_of_draws_several_sequences_with_a_random_stream_each():
    asked = job({"best_of": 3, "temperature": 0.5})
    assert asked.sequences == 3
    assert len({asked.sampling_of(n).seed for n in range(3)}) == 3
    assert_invalid(refusal({"best_of": 2, "temperature": 0.5, "seed": 1}), "`seed` must not be set when `best_of` > 1")
    with pytest.raises(ApiError) as refused:
        check(GenerateRequest("x", Parameters(best_of=2, top_k=3)), replace(CONFIG, max_best_of=1), FACTS, streaming=False)
    assert_invalid(refused.value, "`best_of` != 1 is not allowed for this endpoint")


def test_the_seeds_of_several_sequences_follow_from_the_first_and_stay_64_bits_wide():
    asked = msgspec.structs.replace(job(), sampling=Sampling(seed=2**64 - 1))
    assert [asked.sampling_of(n).seed for n in range(3)] == [2**64 - 1, 0, 1]
    assert job().sampling_of(1).seed is None


def test_log_probabilities_of_the_prompt_are_refused_where_the_device_has_none():
    assert job({"decoder_input_details": True}).prompt_logprobs
    blind = msgspec.structs.replace(FACTS, prompt_logprobs=False)
    with pytest.raises(ApiError) as refused:
        check(GenerateRequest("x", Parameters(decoder_input_details=True)), CONFIG, blind, streaming=False)
    assert refused.value.status == 422
    assert "`decoder_input_details`" in str(refused.value)


# A device that samples

ON_DEVICE = msgspec.structs.replace(FACTS, sampling="device")
USER = [{"role": "user", "content": "Hi"}]
NEEDS_HOST = [  # route, field, what does nothing and so is taken, what is refused
    ("native", "seed", [None, 5], []),  # a greedy text needs no seed
    ("native", "repetition_penalty", [None, 1, 1.0], [0.9, 1.2]),
    ("native", "frequency_penalty", [None, 0, -0.0], [0.1, -2]),
    ("native", "typical_p", [None, 1, 1.0], [0.95]),
    ("native", "top_n_tokens", [None, 0], [1, 5]),
    ("native", "best_of", [None, 0, 1], []),
    ("native", "min_p", [None, 0, 0.0], [0.05]),
    ("sampled", "seed", [None], [0, 5]),
    ("sampled", "best_of", [None, 1], [2, 3]),
    ("sampled", "repetition_penalty", [1], [1.2]),
    ("chat", "seed", [None], [0, -1]),
    ("chat", "min_p", [None, 0], [0.05]),
    ("greedy chat", "min_p", [None, 0, 0.05], []),  # it filters nothing from a greedy text
    ("completion", "min_p", [0], [1]),
    ("chat", "logprobs", [None, False], [True]),
    ("chat", "presence_penalty", [None, 0], [0.1]),
    ("chat", "logit_bias", [None, {}, {"5": 0}], [{"5": 1}, {"5": 0, "6": -1}]),
    ("chat", "min_tokens", [None, 0], [1]),
    ("greedy chat", "seed", [None, 5], []),
    ("greedy chat", "frequency_penalty", [0], [1]),
    ("completion", "seed", [None], [5]),
    ("completion", "logprobs", [None], [0, 1]),
    ("completion", "best_of", [None, 1], [2]),
    ("completion", "repetition_penalty", [1], [1.1]),
]


def asked_of(route, facts, **fields):
    """The jobs of a request of that kind, all the way from its bytes."""
    if route in ("native", "sampled"):
        parameters = {"do_sample": route == "sampled"} | fields
        body = json.dumps({"inputs": "Hello", "parameters": parameters}).encode()
        return [check(parse(body, GenerateRequest), CONFIG, facts, streaming=False)]
    if route.endswith("chat"):
        fields |= {"messages": USER} | ({"temperature": 0} if route.startswith("greedy") else {})
        return [validate.check_chat(parse(json.dumps(fields).encode(), schema.ChatRequest), CONFIG, facts)]
    body = json.dumps({"prompt": "Hello"} | fields).encode()
    return validate.check_completion(parse(body, schema.CompletionRequest), CONFIG, facts)


@pytest.mark.parametrize(("route", "field", "right", "wrong"), NEEDS_HOST)
def test_a_device_that_samples_refuses_what_it_cannot_do_and_takes_what_does_nothing(route, field, right, wrong):
    for value in right:
        assert asked_of(route, ON_DEVICE, **{field: value})
    for value in wrong:
        assert asked_of(route, FACTS, **{field: value})
        with pytest.raises(ApiError) as refused:
            asked_of(route, ON_DEVICE, **{field: value})
        assert_invalid(refused.value, f"`{field}` needs SAMPLING=host: this server samples on the device")
        assert json.loads(refused.value.openai_json)["error"]["param"] == field


def test_the_document_says_that_log_probabilities_and_seeds_may_be_null():
    schemas = openapi.openapi()["components"]["schemas"]
    for kind, field in [("TokenOut", "logprob"), ("Details", "seed"), ("StreamDetails", "seed"), ("BestOfSequence", "seed")]:
        assert {"type": "null"} in schemas[kind]["properties"][field]["anyOf"]


def test_a_device_draws_from_256_tokens_at_most():
    for route in ("native", "chat"):
        assert asked_of(route, ON_DEVICE, top_k=256)[0].sampling.top_k == 256
        assert asked_of(route, FACTS, top_k=257)[0].sampling.top_k == 257
        with pytest.raises(ApiError) as refused:
            asked_of(route, ON_DEVICE, top_k=257)
        assert_invalid(refused.value, "`top_k` above 256 needs SAMPLING=host: this server samples on the device. Given: 257")
    assert asked_of("greedy chat", ON_DEVICE, top_k=5000)[0].sampling.seed is None
    for everything in (0, -1):
        assert asked_of("chat", ON_DEVICE, top_k=everything)[0].sampling.top_k == 0


def test_a_device_that_samples_takes_all_that_it_can_do():
    everything = {"top_k": 256, "top_p": 0.5, "temperature": 0.1, "max_new_tokens": 5, "stop": ["a"], "details": True}
    (native,) = asked_of("sampled", ON_DEVICE, **everything)
    assert (native.sampling.top_k, native.sampling.top_p, native.sampling.temperature) == (256, 0.5, 0.1)
    fields = {"n": 2, "ignore_eos": True, "max_tokens": 5, "top_p": 0.5, "stop": "a"}
    (chat,) = asked_of("chat", ON_DEVICE, **fields)
    assert (chat.sequences, chat.ignore_eos, list(chat.stop)) == (2, True, ["a"])
    assert asked_of("completion", ON_DEVICE, **fields, best_of=2)[0].sequences == 2


# Types

INTEGERS = ["best_of", "top_k", "max_new_tokens", "truncate", "seed", "top_n_tokens"]
NUMBERS = ["temperature", "repetition_penalty", "frequency_penalty", "top_p", "min_p", "typical_p"]
SWITCHES = ["do_sample", "return_full_text", "details", "decoder_input_details"]
WRONG_VALUES = {
    **{field: ["1", 1.0, 1.5, 1e3, True, [1], {}] for field in INTEGERS},
    **{field: ["0.5", True, [0.5], {}] for field in NUMBERS},
    **{field: [0, 1, "true", [], {}] for field in SWITCHES},
    "stop": ["a", 1, {"a": 1}, True],
    "grammar": ["a", 1, [], True],
}


def test_every_field_has_its_wrong_types():
    assert set(WRONG_VALUES) == set(FIELDS)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG_VALUES for value in WRONG_VALUES[field]])
def test_a_wrong_type_is_refused_with_the_path_of_its_field(field, value):
    error = refusal({field: value})
    assert (error.status, error.error_type) == (422, "validation")
    assert error.message.startswith(f"{WRONG_TYPE}parameters.{field}: Expected ")
    assert list(json.loads(error.json)) == ["error", "error_type"]


@pytest.mark.parametrize(
    ("field", "right", "wrong", "words"),
    [
        ("best_of", 0, -1, "Expected `int` >= 0"),
        ("top_k", 2**31 - 1, 2**31, "Expected `int` <= 2147483647"),
        ("top_k", 1, -(2**31) - 1, "Expected `int` >= -2147483648"),
        ("max_new_tokens", 2**32 - 1, 2**32, "Expected `int` <= 4294967295"),
        ("max_new_tokens", 1, -1, "Expected `int` >= 0"),
        ("truncate", 1, -1, "Expected `int` >= 0"),
        ("top_n_tokens", 0, -1, "Expected `int` >= 0"),
        ("seed", 0, -1, "Expected `int` >= 0"),
        ("seed", 2**64 - 1, 2**64, "Expected `int` <= 18446744073709551615"),
        ("seed", 2**63, 10**400, "Expected `int` <= 18446744073709551615"),
    ],
)
def test_an_integer_beyond_its_width_is_a_wrong_type(field, right, wrong, words):
    assert isinstance(job({field: right}), Job)
    assert refusal({field: wrong}).message == f"{WRONG_TYPE}parameters.{field}: {words}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", "Object missing required field `inputs`"),
        (b'{"inputs":null}', "inputs: Expected `str`, got `null`"),
        (b'{"inputs":["a"]}', "inputs: Expected `str`, got `array`"),
        (b'{"inputs":5}', "inputs: Expected `str`, got `int`"),
        (b'{"inputs":"a","parameters":[]}', "parameters: Expected `object | null`, got `array`"),
        (b'{"inputs":"a","parameters":"b"}', "parameters: Expected `object | null`, got `str`"),
        (b'{"inputs":"a","parameters":{"stop":["b",1]}}', "parameters.stop[1]: Expected `str`, got `int`"),
        (b'{"inputs":"a","parameters":{"temperature":1e999}}', "parameters.temperature: Number out of range"),
        (b'{"inputs":"a","parameters":{"seed":' + b"1" * 5000 + b"}}", "parameters.seed: Integer value out of range"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'"inputs"', "Expected `object`, got `str`"),
    ],
)
def test_json_of_the_wrong_shape_is_answered_with_422_and_the_path(body, expected):
    with pytest.raises(ApiError) as refused:
        parse(body, GenerateRequest)
    assert refused.value.status == 422
    assert json.loads(refused.value.json) == {"error": WRONG_TYPE + expected, "error_type": "validation"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"inputs":"a"',
        b'{"inputs":"a",}',
        b'{"inputs":"a"} b',
        b"{'inputs':'a'}",
        b'{"inputs":a}',
        b'{"inputs":"a\nb"}',
        b'{"inputs":"a\x00b"}',
        b'{"inputs":"\xff"}',
        b'{"inputs":"\xed\xa0\x80"}',
        b'{"inputs":"\\ud800"}',
        b'{"inputs":"\\udc00"}',
        b'{"inputs":"\\ud800\\ud800"}',
        b'{"inputs":"\\x41"}',
        b'\xef\xbb\xbf{"inputs":"a"}',
        b'{"inputs":"a","parameters":{"temperature":NaN}}',
        b'{"inputs":"a","parameters":{"temperature":-Infinity}}',
        b'{"inputs":"a","parameters":{"temperature":01}}',
        b'{"inputs":"a","unknown":' + b"[" * 100_000,
        b'{"inputs":"a","unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"inputs":"a","parameters":{"grammar":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}}",
    ],
    ids=lambda body: repr(body[:50]),
)
def test_what_is_no_json_is_answered_with_400(body):
    with pytest.raises(ApiError) as refused:
        parse(body, GenerateRequest)
    assert (refused.value.status, refused.value.error_type) == (400, "validation")
    assert str(refused.value).startswith(NOT_JSON)
    json.loads(refused.value.json)


def job_or_refusal(body: bytes, streaming: bool) -> None:
    """Fails on any other exception, and on a job that promises what it must not."""
    try:
        asked = check(parse(body, GenerateRequest), CONFIG, FACTS, streaming)
    except ApiError as error:
        assert error.status in (400, 422)
        assert json.loads(error.json).keys() == {"error", "error_type"}
        return
    sampling = asked.sampling
    assert asked.prompt
    assert sampling.seed is None or 0 <= sampling.seed < 2**64
    assert 0 < sampling.temperature < math.inf
    assert 0 < sampling.repetition_penalty < math.inf
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 < sampling.typical_p <= 1
    assert 0 <= sampling.top_k < 2**31
    assert -2 <= sampling.frequency_penalty <= 2
    assert asked.max_new_tokens is None or 0 < asked.max_new_tokens < 2**32
    assert asked.truncate is None or 0 < asked.truncate <= FACTS.max_input_tokens
    assert len(asked.stop) <= CONFIG.max_stop_sequences
    assert 0 <= asked.top_n_tokens <= CONFIG.max_top_n_tokens


NUMBER = st.one_of(st.integers(-5, 10), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.floats(-3, 3))
ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBER, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
# Mostly what a field could be, so that many bodies get past the first check.
LIKELY = {
    **dict.fromkeys(INTEGERS, NUMBER),
    **dict.fromkeys(NUMBERS, NUMBER),
    **dict.fromkeys(SWITCHES, st.booleans()),
    "stop": st.lists(st.text(max_size=3), max_size=6),
}
ANY_PARAMETERS = st.fixed_dictionaries(
    {}, optional={field: st.one_of(LIKELY[field], ANY_JSON) if field in LIKELY else ANY_JSON for field in FIELDS}
)


@given(parameters=st.one_of(ANY_PARAMETERS, ANY_JSON), inputs=st.one_of(st.text(max_size=5), ANY_JSON), streaming=st.booleans())
@thorough
def test_any_values_give_a_job_or_a_refusal(parameters, inputs, streaming):
    job_or_refusal(json.dumps({"inputs": inputs, "parameters": parameters}).encode(), streaming)


@given(field=st.sampled_from(sorted(LIKELY)), data=st.data(), streaming=st.booleans())
@thorough
def test_any_value_of_one_field_gives_a_job_or_a_refusal(field, data, streaming):
    value = data.draw(LIKELY[field])
    job_or_refusal(json.dumps({"inputs": "x", "parameters": {field: value}}).encode(), streaming)


@given(body=st.binary(max_size=60))
@thorough
def test_any_bytes_give_a_job_or_a_refusal(body):
    job_or_refusal(body, streaming=False)


@given(at=st.integers(0, 200), length=st.integers(0, 9), inserted=st.binary(max_size=6))
@example(at=62, length=3, inserted=b"1e999")
@thorough
def test_any_damage_to_a_good_body_gives_a_job_or_a_refusal(at, length, inserted):
    good = b'{"inputs":"a \\u00e9 \\ud83d\\ude00","parameters":{"temperature":0.5,"top_k":3,"stop":["a"],"x":{"y":[null]}}}'
    job_or_refusal(good[:at] + inserted + good[at + length :], streaming=True)


# OpenAI's requests


def chat(**fields) -> Job:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return validate.check_chat(parse(json.dumps(body).encode(), schema.ChatRequest), CONFIG, FACTS)


def completion(prompt="Hello", **fields) -> list[Job]:
    body = json.dumps({"prompt": prompt, **fields}).encode()
    return validate.check_completion(parse(body, schema.CompletionRequest), CONFIG, FACTS)


def test_what_openais_clients_ask_for_arrives():
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": 1.5, "07": 2, "0": -100},
    }
    sampling = Sampling(**asked | {"logit_bias": [(7, 2.0), (0, -100.0)]})
    assert chat(**asked).sampling == completion(**asked)[0].sampling == sampling
    more = {"max_tokens": 9, "min_tokens": 4, "ignore_eos": True, "stop": "x", "n": 2}
    for job in (chat(**more), completion(**more)[0]):
        assert (job.max_new_tokens, job.min_new_tokens, job.ignore_eos, job.sequences) == (9, 4, True, 2)
        assert (job.stop, job.keep_stop) == (["x"], False)
    assert not chat().add_special_tokens, "the template has put them"
    assert completion()[0].add_special_tokens


@pytest.mark.parametrize("ask", [chat, lambda **fields: completion(**fields)[0]])
def test_openais_requests_are_greedy_at_temperature_0_and_sample_otherwise(ask):
    assert ask(temperature=0, top_p=0.5, top_k=4, seed=1).sampling.seed is None
    assert ask(temperature=0.0).sampling.seed is None
    for seed in (ask().sampling.seed, ask(temperature=1).sampling.seed, ask(top_p=0.5).sampling.seed):
        assert 0 <= seed < 2**64
    assert ask(seed=-1).sampling.seed == 2**64 - 1
    assert ask(top_k=-1).sampling.top_k == ask(top_k=0).sampling.top_k == 0


@pytest.mark.parametrize("kind", [schema.ChatRequest, schema.CompletionRequest])
def test_null_means_absent_in_openais_requests_too(kind):
    ask, needed = {schema.ChatRequest: (chat, "messages"), schema.CompletionRequest: (completion, "prompt")}[kind]
    without = ask(temperature=0)
    for field in set(kind.__struct_fields__) - {needed, "temperature"}:
        assert ask(temperature=0, **{field: None}) == without, field


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], None),
        ([{"role": "function", "content": "a", "name": "n", "tool_calls": None, "refusal": None}], None),
        ([{"role": "tool", "content": "a", "tool_call_id": "1"}], [{"role": "tool", "content": "a", "tool_call_id": "1"}]),
    ],
)
def test_messages_come_as_templates_read_them(messages, expected):
    body = json.dumps({"messages": messages}).encode()
    got = validate.messages_of(parse(body, schema.ChatRequest).messages)
    if expected is None:
        expected = [{"role": messages[0]["role"], "content": "ab" if isinstance(messages[0]["content"], list) else "a"}]
        expected[0] |= {"name": "n"} if "name" in messages[0] else {}
    assert got == expected


def test_a_role_is_a_known_one_or_a_word_of_the_template():
    messages = [schema.Message("user", "a"), schema.Message("ipython", "b")]
    assert validate.messages_of(messages, {"ipython"})[1]["role"] == "ipython"
    with pytest.raises(ApiError) as refused:
        validate.messages_of(messages, {"<|end|>"})
    assert refused.value.status == 422
    assert all(word in refused.value.message for word in ("messages[1].role", "'ipython'", *validate.ROLES))


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("nonsense", "nonsense"), ("[" * 9999, "[" * 9999)],
)
def test_the_arguments_of_a_tool_call_are_read_where_they_can_be(arguments, read):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = validate.messages_of([schema.Message("assistant", None, tool_calls=[call])])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


def test_more_messages_than_a_prompt_has_tokens_are_refused():
    body = {"messages": [{"role": "user", "content": "a"}] * 100}
    assert chat(**body)
    body["messages"].append({"role": "user", "content": "a"})
    with pytest.raises(ApiError, match=r"`messages` holds 101: .* may have 100 \(--max-input-tokens"):
        chat(**body)


def test_errors_have_openais_shape_too():
    error = json.loads(errors.invalid("top_p", "must be > 0.0 and <= 1.0").openai_json)["error"]
    assert error == {
        "message": "Input validation error: `top_p` must be > 0.0 and <= 1.0",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "validation",
    }
    error = json.loads(errors.overloaded().openai_json)["error"]
    assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "rate_limit_exceeded")
    error = json.loads(errors.not_ready("loading").openai_json)["error"]
    assert (error["type"], error["code"], error["phase"]) == ("server_error", "unavailable", "loading")


OPENAI_LIKELY = {
    **dict.fromkeys(("max_tokens", "top_k", "n", "seed", "min_tokens", "best_of", "logprobs"), NUMBER),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("ignore_eos", "stream", "echo"), st.booleans()),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=3), max_size=6),
    "logit_bias": st.dictionaries(st.integers(-2, 60).map(str) | st.text(max_size=3), NUMBER, max_size=3),
}
ANY_IDS = st.lists(st.integers(-2, 60))
ANY_PROMPT = st.text(max_size=3) | st.lists(st.text(max_size=2) | st.integers(-2, 60) | ANY_IDS, max_size=5)


@given(
    prompt=ANY_PROMPT | ANY_JSON,
    fields=st.fixed_dictionaries({}, optional={name: value | ANY_JSON for name, value in OPENAI_LIKELY.items()}),
)
@thorough
def test_any_completion_request_gives_jobs_that_can_run_or_a_refusal(prompt, fields):
    try:
        jobs = completion(prompt, **fields)
    except ApiError as error:
        assert error.status in (400, 422)
        assert json.loads(error.openai_json)["error"].keys() == {"message", "type", "param", "code"}
        return
    assert 1 <= len(jobs) <= CONFIG.max_client_batch_size
    for job in jobs:
        assert 1 <= job.sequences <= CONFIG.max_client_batch_size
        assert 0 <= job.top_n_tokens <= CONFIG.max_top_n_tokens
        assert all(0 <= token < FACTS.vocab_size and abs(bias) <= 100 for token, bias in job.sampling.logit_bias)
        assert job.max_new_tokens is None or job.min_new_tokens <= job.max_new_tokens
        if isinstance(job.prompt, list):
            assert all(0 <= token < FACTS.vocab_size for token in job.prompt)


@given(
    route=st.sampled_from(["native", "sampled", "chat", "greedy chat", "completion"]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("top_k", "seed", "min_tokens", "best_of", "top_n_tokens"), st.none() | st.integers(0, 300)),
            **dict.fromkeys(("presence_penalty", "frequency_penalty"), st.sampled_from([None, 0, 0.5])),
            **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), st.sampled_from([None, 1, 0.5])),
            "min_p": st.sampled_from([None, 0, 0.5]),
            "logprobs": st.none() | st.booleans() | st.integers(0, 2),
            "logit_bias": st.none() | st.dictionaries(st.sampled_from(["5", "6"]), st.sampled_from([0, 1])),
        },
    ),
)
@thorough
def test_a_device_that_samples_takes_a_request_as_the_host_does_or_names_what_it_cannot_do(route, fields):
    def ask(facts):
        try:
            jobs = asked_of(route, facts, **fields)
        except ApiError as error:
            return str(error)
        for n, job in enumerate(jobs):  # a seed that is not given is drawn
            drawn = job.sampling.seed is not None and fields.get("seed") is None
            jobs[n] = msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, seed=0)) if drawn else job
        return jobs

    on_host, on_device = ask(FACTS), ask(ON_DEVICE)
    if on_device != on_host:
        assert "needs SAMPLING=host: this server samples on the device" in on_device
        return
    for job in on_device if isinstance(on_device, list) else []:
        can = {"seed": job.sampling.seed, "temperature": job.sampling.temperature, "top_p": job.sampling.top_p}
        can["min_p"] = job.sampling.min_p if job.sampling.seed is None else 0.0
        bias = [(token, 0) for token, _bias in job.sampling.logit_bias]
        assert job.sampling == Sampling(**can, top_k=job.sampling.top_k, logit_bias=bias)
        assert job.sampling.seed is None or (job.sampling.top_k <= 256 and fields.get("seed") is None)
        assert (job.top_n_tokens, job.min_new_tokens) == (0, 0)


# Sampling


def test_sampling_is_on_exactly_when_something_asks_for_it():
    choices = {
        "do_sample": [..., None, False, True],
        "temperature": [..., None, 1.0, 0.5],
        "top_k": [..., None, 1, 50],
        "top_p": [..., None, 1.0, 0.9],
        "min_p": [..., 0.0, 0.1],
        "typical_p": [..., None, 1.0, 0.9],
    }
    asking = {("do_sample", True), ("temperature", 1.0), ("temperature", 0.5), ("top_k", 1), ("top_k", 50)}
    asking |= {("top_p", 0.9), ("min_p", 0.1), ("typical_p", 0.9)}
    for values in itertools.product(*choices.values()):
        parameters = {field: value for field, value in zip(choices, values) if value is not ...}
        asks = any(pair in asking for pair in parameters.items())
        assert (job(parameters).sampling.seed is not None) == asks, parameters


@pytest.mark.parametrize(
    "parameters", [{"seed": 5}, {"repetition_penalty": 1.2}, {"frequency_penalty": 1}, {"top_n_tokens": 2}]
)
def test_a_seed_a_penalty_or_a_wish_for_details_alone_does_not_turn_sampling_on(parameters):
    assert job(parameters).sampling.seed is None


def test_a_seed_is_drawn_when_none_is_given():
    seeds = {job({"do_sample": True}).sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**56, "all 64 bits are used"


def test_sampling_takes_the_values_that_are_given_and_does_nothing_otherwise():
    values = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.5,
    }
    assert job({**values, "seed": 9}).sampling == Sampling(seed=9, **values)
    for seed in (0, 9, 2**64 - 1):
        assert job({"do_sample": True, "seed": seed}).sampling == Sampling(seed=seed)
    assert job().sampling == Sampling()


# Lengths


def asked(max_new_tokens=None, truncate=None) -> Job:
    return msgspec.structs.replace(job(), max_new_tokens=max_new_tokens, truncate=truncate)


def unfit(length: int, token: int = 1, **limits) -> ApiError:
    with pytest.raises(ApiError) as refused:
        fit(asked(**limits), [token] * length, FACTS)
    return refused.value


def test_prompt_and_answer_together_fill_the_window_and_no_more():
    assert fit(asked(max_new_tokens=40), [1] * 80, FACTS) == ([1] * 80, 40)
    for prompt, most in ((80, 41), (10, 100_000), (101, 20)):  # the last is too long a prompt as well
        expected = f"must be <= 120. Given: {prompt} `inputs` tokens and {most} `max_new_tokens`"
        assert_invalid(unfit(prompt, max_new_tokens=most), f"`inputs` tokens + `max_new_tokens` {expected}")


def test_the_longest_prompt_is_max_input_tokens():
    assert fit(asked(max_new_tokens=20), [1] * 100, FACTS) == ([1] * 100, 20)
    assert_invalid(unfit(101, max_new_tokens=19), "`inputs` must have at most 100 tokens. Given: 101")
    assert_invalid(unfit(101), "`inputs` must have at most 100 tokens. Given: 101")
    assert_invalid(unfit(5000), "`inputs` must have at most 100 tokens. Given: 5000")


def test_truncate_keeps_the_last_tokens():
    prompt = list(range(1, 41))
    assert fit(asked(truncate=3), prompt, FACTS) == ([38, 39, 40], 117)
    assert fit(asked(truncate=40), prompt, FACTS)[0] == prompt
    assert fit(asked(truncate=100), prompt, FACTS)[0] == prompt
    assert fit(asked(truncate=100, max_new_tokens=20), [1] * 5000, FACTS) == ([1] * 100, 20)


def test_a_prompt_without_tokens_is_refused():
    assert_invalid(unfit(0), "`inputs` cannot be empty")
    assert_invalid(unfit(0, max_new_tokens=5), "`inputs` cannot be empty")


def test_a_token_that_the_model_does_not_have_is_refused():
    assert fit(asked(), [49], FACTS)[0] == [49]
    assert_invalid(unfit(2, token=50), "`inputs` holds token 50, but the model's vocabulary has the tokens 0 to 49")
    assert fit(asked(truncate=1), [50, 49], FACTS)[0] == [49]


@given(length=st.integers(0, 250), max_new_tokens=st.none() | st.integers(1, 250), truncate=st.none() | st.integers(1, 100))
@thorough
def test_what_fits_is_never_more_than_the_slot_holds(length, max_new_tokens, truncate):
    kept = min(length, truncate or length)
    fits = 0 < kept <= 100 and kept + (max_new_tokens or 0) <= 120
    if fits:
        prompt, follow = fit(asked(max_new_tokens, truncate), [1] * length, FACTS)
        assert len(prompt) == kept
        assert follow == (max_new_tokens or 120 - kept)
    else:
        assert unfit(length, max_new_tokens=max_new_tokens, truncate=truncate).status == 422


# Shapes on the wire

X = TokenOut(5, " x", -0.5, False)
END = TokenOut(2, "</s>", -0.25, True)


def test_an_event_of_a_stream():
    assert encode(schema.StreamResponse(1, X)) == (
        b'{"index":1,"token":{"id":5,"text":" x","logprob":-0.5,"special":false},"generated_text":null,"details":null}'
    )


def test_an_event_with_top_tokens():
    assert encode(schema.StreamResponse(1, X, top_tokens=[X, END])) == (
        b'{"index":1,"token":{"id":5,"text":" x","logprob":-0.5,"special":false},"top_tokens":['
        b'{"id":5,"text":" x","logprob":-0.5,"special":false},{"id":2,"text":"</s>","logprob":-0.25,"special":true}],'
        b'"generated_text":null,"details":null}'
    )


def test_the_last_event_of_a_stream():
    details = schema.StreamDetails("eos_token", 2, None, 7)
    assert encode(schema.StreamResponse(2, END, generated_text=" x y", details=details)) == (
        b'{"index":2,"token":{"id":2,"text":"</s>","logprob":-0.25,"special":true},"generated_text":" x y",'
        b'"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null,"input_length":7}}'
    )
    assert b'"generated_text":" x","details":null}' in encode(schema.StreamResponse(2, END, generated_text=" x"))


def test_an_answer_without_details():
    assert encode(schema.GenerateResponse(" x é\n")) == '{"generated_text":" x é\\n"}'.encode()


def test_an_answer_with_details():
    details = schema.Details("length", 1, None, [], [X])
    assert encode(schema.GenerateResponse(" x", details)) == (
        b'{"generated_text":" x","details":{"finish_reason":"length","generated_tokens":1,"seed":null,"prefill":[],'
        b'"tokens":[{"id":5,"text":" x","logprob":-0.5,"special":false}]}}'
    )


def test_an_answer_with_top_tokens_and_a_seed():
    details = schema.Details("stop_sequence", 1, 2**64 - 1, [], [X], top_tokens=[[X]])
    assert encode(schema.GenerateResponse(" x", details)) == (
        b'{"generated_text":" x","details":{"finish_reason":"stop_sequence","generated_tokens":1,"seed":18446744073709551615,'
        b'"prefill":[],"tokens":[{"id":5,"text":" x","logprob":-0.5,"special":false}],'
        b'"top_tokens":[[{"id":5,"text":" x","logprob":-0.5,"special":false}]]}}'
    )


def test_a_logprob_that_is_no_number_is_null():
    for value in (math.nan, -math.inf):
        assert b'"logprob":null' in encode(TokenOut(5, "x", rounded(value), False))


def test_info_has_tgis_keys_in_their_order_and_then_others():
    config = replace(CONFIG, max_concurrent_requests=77, web_concurrency=3)
    assert encode(schema.Info.of(config, FACTS)).decode() == (
        '{"model_id":"someone/model","model_sha":"abc123","model_pipeline_tag":null,"max_concurrent_requests":77,'
        '"max_best_of":3,"max_stop_sequences":4,"max_input_tokens":100,"max_total_tokens":120,"validation_workers":3,'
        f'"max_client_batch_size":4,"router":"neuron-textgen","version":"{VERSION}","sha":null,"docker_label":null,'
        '"max_batch_size":8,"model_device_type":"cpu","model_dtype":"float32","eos_token_ids":[2,7],"sampling":"host",'
        '"quantize":null}'
    )
    assert schema.Info.of(config, msgspec.structs.replace(FACTS, quantize="int8")).quantize == "int8"


@pytest.mark.parametrize(
    ("error", "status", "retry_after_s", "body"),
    [
        (errors.invalid(None, "no"), 422, None, b'{"error":"Input validation error: no","error_type":"validation"}'),
        (errors.overloaded(), 429, 1, b'{"error":"Model is overloaded","error_type":"overloaded"}'),
        (
            end_error("failed", "it broke"),
            424,
            None,
            b'{"error":"Request failed during generation: it broke","error_type":"generation"}',
        ),
        (
            errors.too_large(2000),
            413,
            None,
            b'{"error":"Failed to buffer the request body: length limit exceeded (at most 2000 bytes; --payload-limit raises '
            b'it)","error_type":"validation"}',
        ),
        (end_error("cancelled"), 500, None, b'{"error":"Incomplete generation","error_type":"incomplete_generation"}'),
        (
            errors.not_ready("loading"),
            503,
            5,
            b'{"error":"The model cannot take requests now: loading","error_type":"unavailable","phase":"loading"}',
        ),
    ],
    ids=lambda value: getattr(value, "error_type", None),
)
def test_errors_have_tgis_shape(error, status, retry_after_s, body):
    assert (error.status, error.retry_after_s, error.json) == (status, retry_after_s, body)
    assert str(error) == json.loads(body)["error"]


# Numbers


@pytest.mark.parametrize(
    ("logprob", "written"),
    [(-0.3400000035762787, b"-0.34"), (-16.777217864990234, b"-16.7772179"), (-1.1920929e-7, b"-1e-7"), (-1e-9, b"0.0")],
)
def test_a_logprob_is_written_with_seven_decimals(logprob, written):
    assert encode(rounded(logprob)) == written


def test_the_first_requests_of_a_process_may_come_all_at_once():
    """msgspec crashes when several threads make it learn a type, so none of them may be the first to need it."""
    program = """
import os, sys, threading
from api import fields as validate, types as schema
sys.setswitchinterval(1e-6)
threading.excepthook = lambda failure: (sys.__excepthook__(failure.exc_type, failure.exc_value, None), os._exit(1))
body = b'{"inputs": "a", "parameters": {"max_new_tokens": 3, "stop": ["x"]}}'
together = threading.Barrier(64)
def parse():
    together.wait()
    validate.parse(body, schema.GenerateRequest)
threads = [threading.Thread(target=parse) for _ in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", program], cwd=HERE, check=True)


def test_log_probabilities_are_computed_where_they_are_returned_or_rank_sequences():
    assert [chat(logprobs=wanted).logprobs for wanted in (None, False, True)] == [False, False, True]
    wanted = [{}, {"logprobs": 0}, {"best_of": 2}, {"n": 2}]
    assert [completion(**fields)[0].logprobs for fields in wanted] == [False, True, True, False]
    assert check(GenerateRequest("x", Parameters()), CONFIG, FACTS, streaming=False).logprobs


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, schema.Parameters, GenerateRequest])
def test_a_misspelt_field_is_refused_with_the_right_name(kind):
    for name in set(kind.__struct_fields__) - {"n"}:
        for misspelt in (name + "x", name[:-1], name.replace("_", "", 1) if "_" in name else name + "s"):
            if misspelt in {*kind.__struct_fields__, *validate.NOT_SUPPORTED, *validate.CHANGES_TEXT, *validate.NOT_MISSPELT}:
                continue
            with pytest.raises(ApiError, match="did you mean") as error:
                parse_with(kind, misspelt, 1)
            assert misspelt in str(error.value)


def test_a_request_with_more_fields_than_any_client_sends_is_refused():
    names = [f"max_tok{i}" for i in range(256)]
    parse(json.dumps({"inputs": "a"} | dict.fromkeys(names[:255], 1)).encode(), GenerateRequest)
    with pytest.raises(ApiError, match=r"at most 256 fields\. Given: 257"):
        parse(json.dumps({"inputs": "a"} | dict.fromkeys(names, 1)).encode(), GenerateRequest)


def parse_with(kind, name, value):
    required = {CompletionRequest: {"prompt": "a"}, ChatRequest: {"messages": []}, GenerateRequest: {"inputs": "a"}}
    required[schema.ResponsesRequest] = {"input": "a"}
    if kind is schema.Parameters:
        return validate.parse(json.dumps({"inputs": "a", "parameters": {name: value}}).encode(), GenerateRequest)
    return validate.parse(json.dumps(required[kind] | {name: value}).encode(), kind)


@pytest.mark.parametrize("name", validate.NOT_SUPPORTED)
def test_a_field_of_another_server_that_asks_for_something_is_refused_by_name(name):
    for kind in (CompletionRequest, ChatRequest, schema.Parameters):
        for neutral in (None, *validate.NOT_SUPPORTED[name]):
            parse_with(kind, name, neutral)
        with pytest.raises(ApiError, match=rf"`{name}` is not supported|\b{name}: Expected"):
            parse_with(kind, name, "something")


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, schema.Parameters, GenerateRequest])
def test_a_field_that_would_change_the_text_of_another_route_is_refused_by_name(kind):
    for name in validate.CHANGES_TEXT - {*kind.__struct_fields__, *validate.NOT_SUPPORTED}:
        parse_with(kind, name, None)
        with pytest.raises(ApiError, match=f"`{name}` is not a field of this request") as error:
            parse_with(kind, name, 1)
        if kind is GenerateRequest and name in schema.Parameters.__struct_fields__:
            assert f"use `{name}` in `parameters`" in str(error.value)


@pytest.mark.parametrize(
    "kind, name, meant",
    [
        (GenerateRequest, "max_tokens", "; use `max_new_tokens` in `parameters`"),
        (GenerateRequest, "min_tokens", "is not a field of this request"),
        (schema.Parameters, "stop_sequences", "; use `stop`"),
        (ChatRequest, "max_new_tokens", "; use `max_completion_tokens`"),
        (CompletionRequest, "max_completion_tokens", "; use `max_tokens`"),
        (schema.ResponsesRequest, "response_format", "; use `text`"),
        (GenerateRequest, "guided_json", "; use `grammar` in `parameters`"),
        (schema.Parameters, "response_format", "; use `grammar`"),
        (ChatRequest, "grammar", "; use `response_format`"),
    ],
)
def test_the_refusal_of_another_apis_field_names_what_to_use(kind, name, meant):
    with pytest.raises(ApiError) as error:
        parse_with(kind, name, 1)
    assert str(error.value).endswith(meant)


HARMLESS = ("user", "metadata", "store", "service_tier", "request_id", "mode", "models", "priority", "options")


@pytest.mark.parametrize("name", ["model", *HARMLESS])
def test_other_fields_are_ignored(name):
    for kind in (CompletionRequest, ChatRequest, GenerateRequest):
        parse_with(kind, name, "something")
