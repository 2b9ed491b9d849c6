"""TGI's own API: the limits of its parameters in TGI's words, what sampling they ask for, whole responses and streams."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace

import msgspec
import pytest
from asked import (
    CONFIG,
    INFO,
    TEMPLATE,
    answer_to,
    assert_invalid,
    prepared,
    refusal,
    refusal_of,
    serving,
)
from fakes.model import next_logprobs
from fakes.tokenizer import VOCABULARY
from served import LIMITS, WINDOW, events

from api.generation.prepared_request import PreparedRequest
from api.http.types import encode_json
from api.tgi import Info
from config import VERSION
from protocol import SamplingParams

STOPS = "`stop` supports up to 4 stop sequences (--max-stop-sequences raises it). Given: "
TOP_N = "`top_n_tokens` must be >= 0 and <= 5 (--max-top-n-tokens raises it). Given: "
TRUNCATE = "`truncate` must be strictly positive and at most 100. Given: "
PENALTY = "`frequency_penalty` must be >= -2.0 and <= 2.0"
LIMITS_OF = [  # field, what is just right, what is just wrong, the detail
    ("temperature", [1e-30, 0.01, 1, 1.0, 1000], [0, 0.0, -0.0, 1e-999, -1e-30, -1], "`temperature` must be strictly positive"),
    ("repetition_penalty", [1e-30, 1, 1.3], [0, 0.0, -1e-30, -1.3], "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", [-2, -2.0, 0, 2, 2.0], [-2.0001, 2.0001, 3], PENALTY),
    ("top_p", [1e-30, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 2], "`top_p` must be > 0.0 and <= 1.0"),
    ("min_p", [0, 0.0, 1e-30, 0.5, 1, 1.0], [-0.1, -1e-30, 1.0000001, 2], "`min_p` must be >= 0.0 and <= 1.0"),
    ("typical_p", [1e-30, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 2], "`typical_p` must be > 0.0 and <= 1.0"),
    ("top_k", [1, 2**31 - 1], [0, -1, -(2**31)], "`top_k` must be strictly positive"),
    ("max_new_tokens", [1, 2**32 - 1], [0], "`max_new_tokens` must be strictly positive"),
    ("stop", [[], ["a"] * 4, ["", "b", "", ""]], [["a"] * 5], STOPS + "5"),
    ("stop", [["x" * 1000]], [["a", "x" * 1001]], "`stop` may have at most 1000 characters in a stop sequence. Given: 1001"),
    ("top_n_tokens", [0, 5], [6], TOP_N + "6"),
    ("truncate", [1, 100], [0], TRUNCATE + "0"),
    ("truncate", [99], [101], TRUNCATE + "101"),
    ("best_of", [0, 1], [4], "`best_of` must be > 0 and <= 3 (--max-best-of raises it). Given: 4"),
    ("best_of", [None], [2, 3], "`best_of` > 1 needs sampling: set `do_sample` or `temperature`"),
    ("watermark", [False], [True], "`watermark` is not supported"),
    (
        "adapter_id",
        [""],
        ["other"],
        "`adapter_id` is not supported: no adapter is served (--lora-adapters). Given: 'other'",
    ),
    ("grammar", [None, {}, {"type": "regex", "value": "a"}], [{"type": "json"}], "`grammar` of the type json needs `value`"),
]


def test_the_served_adapter_may_be_named():
    merged, info = replace(CONFIG, merge_lora="merged=/adapter"), msgspec.structs.replace(INFO, adapters={"mine": "a/b"})
    assert prepared(config=merged, adapter_id="merged").adapter == ""  # its weights are those of the model
    assert prepared("native", info, merged, adapter_id="mine").adapter == "mine"
    assert [prepared("native", info, adapter_id=none).adapter for none in (None, "")] == ["", ""]
    error = refusal("native", info, merged, adapter_id="other")
    assert_invalid(error, "`adapter_id` must be a served adapter: mine, merged (--lora-adapters). Given: 'other'")


@pytest.mark.parametrize(("field", "right", "wrong", "detail"), LIMITS_OF)
def test_a_value_just_inside_a_limit_is_accepted_and_one_just_outside_is_refused_in_tgis_words(field, right, wrong, detail):
    for value in right:
        assert isinstance(prepared(**{field: value}), PreparedRequest)
    for value in wrong:
        assert_invalid(refusal("native", **{field: value}), detail)


def test_the_limits_are_those_of_the_configuration_and_the_model():
    asked = {"stop": ["a"] * 9, "top_n_tokens": 9, "truncate": 900}
    larger = replace(CONFIG, max_stop_sequences=9, max_top_n_tokens=9)
    long = msgspec.structs.replace(INFO, max_input_tokens=900)
    assert prepared(info=long, config=larger, **asked).top_n_tokens == 9
    for config, info, words in [
        (
            replace(larger, max_stop_sequences=8),
            INFO,
            "`stop` supports up to 8 stop sequences (--max-stop-sequences raises it). Given: 9",
        ),
        (
            replace(larger, max_top_n_tokens=8),
            INFO,
            "`top_n_tokens` must be >= 0 and <= 8 (--max-top-n-tokens raises it). Given: 9",
        ),
        (larger, INFO, "`truncate` must be strictly positive and at most 100. Given: 900"),
    ]:
        assert_invalid(refusal("native", info, config, **asked), words)
    one = replace(CONFIG, max_best_of=1)
    assert_invalid(refusal("sampled", config=one, best_of=2), "`best_of` != 1 is not allowed for this endpoint")
    blind = msgspec.structs.replace(INFO, prompt_logprobs=False)
    assert prepared(decoder_input_details=True).prompt_logprobs
    assert refusal("native", blind, decoder_input_details=True).param == "decoder_input_details"


def test_empty_inputs_are_refused():
    assert_invalid(refusal_of("native", {"inputs": ""}), "`inputs` cannot be empty")
    assert answer_to("native", {"inputs": " "}).requests[0].prompt == " "


@pytest.mark.parametrize(
    ("field", "right", "wrong", "detail"),
    [
        ("best_of", [1, None], [0, 2], "`best_of` != 1 is not supported when streaming tokens"),
        ("decoder_input_details", [False], [True], "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_a_stream_refuses_what_tgi_refuses_in_a_stream(field, right, wrong, detail):
    for value in right:
        assert isinstance(prepared("stream", **{field: value}), PreparedRequest)
    for value in wrong:
        assert_invalid(refusal("stream", **{field: value}), detail)


# What is asked for


def test_what_is_asked_for_arrives_and_nothing_else():
    assert prepared() == prepared("native", details=None) == PreparedRequest("Hello", stop=[])
    asked = prepared(max_new_tokens=7, stop=["a", "b"], truncate=9, top_n_tokens=3, details=True)
    assert asked == PreparedRequest("Hello", max_new_tokens=7, stop=["a", "b"], truncate=9, top_n_tokens=3, keep_eos=True)
    for body in ({"inputs": "Hello"}, {"inputs": "Hello", "parameters": None}):
        assert answer_to("native", body).requests == [prepared()]


def test_sampling_is_on_exactly_when_something_asks_for_it():
    choices = {
        "do_sample": [..., None, False, True],
        "temperature": [..., None, 1.0, 0.5],
        "top_k": [..., 50],
        "top_p": [..., 1.0, 0.9],
        "min_p": [..., 0.0, 0.1],
        "typical_p": [..., 1.0, 0.9],
    }
    asking = {("do_sample", True), ("temperature", 1.0), ("temperature", 0.5), ("top_k", 50)}
    asking |= {("top_p", 0.9), ("min_p", 0.1), ("typical_p", 0.9)}
    for values in itertools.product(*choices.values()):
        parameters = {field: value for field, value in zip(choices, values) if value is not ...}
        asks = any(pair in asking for pair in parameters.items())
        assert (prepared(**parameters).sampling.seed is not None) == asks, parameters
    for silent in ({"seed": 5}, {"repetition_penalty": 1.2}, {"frequency_penalty": 1}, {"top_n_tokens": 2}):
        assert prepared(**silent).sampling.seed is None


def test_sampling_takes_the_values_that_are_given_and_draws_a_seed_of_64_bits_where_none_is():
    values = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95}
    values |= {"repetition_penalty": 1.1, "frequency_penalty": -0.5}
    assert prepared(**values, seed=9).sampling == SamplingParams(seed=9, is_seed_given=True, **values)
    for seed in (0, 9, 2**64 - 1):
        assert prepared("sampled", seed=seed).sampling == SamplingParams(seed=seed, is_seed_given=True)
    seeds = {prepared("sampled").sampling.seed for _ in range(50)}
    assert len(seeds) == 50 and 2**56 <= max(seeds) < 2**64


def test_best_of_draws_several_sequences_with_a_random_stream_each():
    asked = prepared(best_of=3, temperature=0.5)
    assert asked.sequences == len({asked.sampling_of(n).seed for n in range(3)}) == 3
    error = refusal("native", best_of=2, temperature=0.5, seed=1)
    assert_invalid(error, "`seed` must not be set when `best_of` > 1")


# Answers


def generate(served, route="/generate", **parameters):
    response = served.post(route, {"inputs": "Hello", "parameters": parameters})
    assert response.status_code == 200, response.json
    return response.json


def test_generate_returns_the_text_of_the_models_tokens(served):
    expected = served.expected("Hello", 8)
    text = served.tokenizer.decode(expected)
    assert generate(served, max_new_tokens=8) == {"generated_text": text}
    answer = generate(served, max_new_tokens=8, details=True)
    assert answer["generated_text"] == text
    assert [token["id"] for token in answer["details"]["tokens"]] == expected
    assert list(answer["details"]) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert list(answer["details"]["tokens"][0]) == ["id", "text", "logprob", "special"]
    assert answer["details"]["generated_tokens"] == len(expected)
    assert generate(served, max_new_tokens=8, return_full_text=True)["generated_text"] == "Hello" + text


def test_a_stream_says_the_same_as_a_whole_response(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 12, "details": True, "seed": 5, "temperature": 0.8}}
    whole = served.post("/generate", body).json
    response = served.post("/generate_stream", body)
    assert response.content_type == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    stream = events(response)
    assert {tuple(event) for event in stream} == {("index", "token", "generated_text", "details")}
    assert [event["index"] for event in stream] == list(range(1, len(stream) + 1))
    assert [event["token"] for event in stream] == whole["details"]["tokens"]
    assert all(event["generated_text"] is None and event["details"] is None for event in stream[:-1])
    assert stream[-1]["generated_text"] == whole["generated_text"]
    assert "".join(event["token"]["text"] for event in stream if not event["token"]["special"]) == whole["generated_text"]
    reason = whole["details"]["finish_reason"]
    expected = {"finish_reason": reason, "generated_tokens": len(stream), "seed": 5, "input_length": 5}
    assert stream[-1]["details"] == expected


def test_a_device_that_samples_gives_the_same_greedy_text_and_null_for_what_it_does_not_tell(serve):
    served = serve(sampling="device").get_ready()
    assert served.client.get("/info").json["sampling"] == "device"
    expected = served.expected("Hello", 8)
    for more in ({}, {"do_sample": True, "top_k": 1}):
        details = generate(served, max_new_tokens=8, details=True, **more)["details"]
        assert [token["id"] for token in details["tokens"]] == expected
        assert {token["logprob"] for token in details["tokens"]} == {details["seed"]} == {None}
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 8, "details": True} | more}
        stream = events(served.post("/generate_stream", body))
        assert [event["token"] for event in stream] == details["tokens"]
        assert stream[-1]["details"]["seed"] is None
    assert len({generate(served, max_new_tokens=30, temperature=5.0)["generated_text"] for _ in range(4)}) > 1
    served.assert_idle()


def test_hybrid_sampling_gives_log_probabilities_and_a_seed_to_those_who_ask_for_details(serve):
    served = serve(sampling="hybrid").get_ready()
    stream = events(served.post("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}))
    assert [event["token"]["id"] for event in stream] == served.expected("Hello", 4)
    assert {event["token"]["logprob"] for event in stream} == {None}
    details = generate(served, max_new_tokens=4, details=True, do_sample=True, seed=3)["details"]
    assert details["seed"] == 3 and all(token["logprob"] <= 0 for token in details["tokens"])


def test_top_tokens_come_when_asked_for(served):
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 3}}
    top = served.post("/generate", body).json["details"]["top_tokens"]
    assert [len(tokens) for tokens in top] == [3, 3]
    assert [event["top_tokens"] for event in events(served.post("/generate_stream", body))] == top


def test_a_stop_string_ends_the_text_which_keeps_it(served):
    full = generate(served, max_new_tokens=30)["generated_text"]
    stop = full[4:7]
    asked = {"max_new_tokens": 30, "stop": [stop], "details": True}
    answer = generate(served, **asked)
    assert answer["generated_text"] == full[: full.index(stop) + len(stop)]
    last = events(served.post("/generate_stream", {"inputs": "Hello", "parameters": asked}))[-1]
    assert last["generated_text"] == answer["generated_text"]
    assert last["details"]["finish_reason"] == answer["details"]["finish_reason"] == "stop_sequence"


def test_truncate_runs_the_end_of_the_prompt(served):
    short = served.post("/generate", {"inputs": "llo", "parameters": {"max_new_tokens": 5}}).json
    assert generate(served, max_new_tokens=5, truncate=3) == short


@pytest.mark.parametrize("route", ["/", "/v1", "/invocations"])
def test_the_root_answers_in_a_list_with_the_prompt_unless_told_not_to(served, route):
    text = generate(served, max_new_tokens=5)["generated_text"]
    assert generate(served, route, max_new_tokens=5) == [{"generated_text": "Hello" + text}]
    assert generate(served, route, max_new_tokens=5, return_full_text=False) == [{"generated_text": text}]
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 5, "return_full_text": False}}
    stream = events(served.post(route, body | {"stream": True}))
    assert stream == events(served.post("/generate_stream", body))


def test_best_of_tells_the_likeliest_and_shows_the_others(served):
    answer = generate(served, best_of=2, temperature=0.9, max_new_tokens=8, details=True)
    details = answer["details"]
    (other,) = details["best_of_sequences"]

    def mean(told):
        return sum(token["logprob"] for token in told["tokens"]) / len(told["tokens"])

    assert mean(details) >= mean(other)
    assert details["seed"] != other["seed"]
    again = generate(served, temperature=0.9, max_new_tokens=8, seed=other["seed"])
    assert again["generated_text"] == other["generated_text"]


def test_decoder_input_details_are_the_models_log_probabilities_of_the_prompt(served):
    prefill = generate(served, decoder_input_details=True, max_new_tokens=2)["details"]["prefill"]
    ids = served.tokenizer.encode("Hello").ids
    assert [token["id"] for token in prefill] == ids
    assert [token["text"] for token in prefill] == list("Hello")
    assert prefill[0]["logprob"] is None
    for n, token in enumerate(prefill[1:], 1):
        assert token["logprob"] == pytest.approx(next_logprobs(ids[:n], VOCABULARY)[ids[n]], abs=1e-5)
    kept = generate(served, decoder_input_details=True, max_new_tokens=2, truncate=2)["details"]["prefill"]
    assert [token["id"] for token in kept] == ids[-2:]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "Failed to parse the request body as JSON: "),
        ({"parameters": {}}, 422, "Failed to deserialize the JSON body into the target type: "),
        ({"inputs": "a", "parameters": {"top_k": 0}}, 422, "Input validation error: `top_k` must be strictly positive"),
        (
            {"inputs": "a" * WINDOW},
            422,
            f"Input validation error: `inputs` must have at most {WINDOW - 1} tokens (--max-input-tokens raises it). Given: 60",
        ),
    ],
)
def test_a_bad_body_gets_its_status_and_words_before_the_first_byte(served, route, body, status, words):
    response = served.post(route, body)
    assert (response.status_code, response.content_type) == (status, "application/json")
    assert list(response.json) == ["error", "error_type"]
    assert response.json["error_type"] == "validation" and response.json["error"].startswith(words)


def test_info_has_tgis_keys_and_the_limits_in_force(served):
    info = served.client.get("/info").json
    assert (info["max_total_tokens"], info["max_concurrent_requests"]) == (WINDOW, LIMITS["max_concurrent_requests"])
    config = replace(CONFIG, max_concurrent_requests=77, web_concurrency=3)
    model = msgspec.structs.replace(
        INFO,
        quantize="int8",
        kv_cache_dtype="u8",
        kv_bytes_per_token=7,
        anonymous_bytes=8,
        mapped_bytes=9,
        neuron_versions={"driver": None},
    )
    assert json.loads(encode_json(Info.of(serving(model, config)))) == {
        **dict.fromkeys(["model_pipeline_tag", "sha", "docker_label"]),
        **{"model_id": "someone/model", "model_sha": "abc123", "model_device_type": "cpu", "model_dtype": "float32"},
        **{"max_concurrent_requests": 77, "max_best_of": 3, "max_stop_sequences": 4, "max_client_batch_size": 4},
        **{"max_input_tokens": 100, "max_total_tokens": 120, "max_batch_size": 8, "validation_workers": 3},
        **{
            "router": "neuron-textgen",
            "version": VERSION,
            "eos_token_ids": [0],
            "sampling": "host",
            "quantize": "int8",
            "kv_cache_dtype": "u8",
            "kv_bytes_per_token": 7,
            "anonymous_bytes": 8,
            "mapped_bytes": 9,
            "state_bytes": 0,
            "max_snapshots": 0,
            "neuron_versions": {"driver": None},
            "sampling_defaults": {},
            "stop_strings": [],
            "chat_template": {"origin": "", "sha256": hashlib.sha256(TEMPLATE.encode()).hexdigest()},
            "tool_parser": "hermes",
            "reasoning_parser": None,
            "input_modalities": ["text"],
            "adapters": [],
        },
    }
