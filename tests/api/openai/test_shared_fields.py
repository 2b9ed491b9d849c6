"""What chats and completions share: the limits of OpenAI's fields, what sampling they ask for, usage, choices, stop strings."""

import dataclasses

import pytest
from asked import INFO, prepared, refusal, serving
from asked import refusal as openai_refusal
from fakes.model import EOS
from fakes.tokenizer import VOCABULARY, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai_api import CHAT, COMPLETION, MESSAGES, PROMPT, SAMPLED, chunks, streamed_text, text_of, whole
from tokenizers import processors

from api.generation.prepared_request import ids_of
from config import Config
from protocol import MAX_LOGIT_BIAS, SamplingParams
from text.tokenizer import Tokenizer

BOTH = pytest.mark.parametrize("dialect", ["chat", "completion"])
STOPS = dict.fromkeys(["native", "chat", "completion", "responses"], "stop") | {"messages": "stop_sequences"}
ROUTES = pytest.mark.parametrize(("route", "body"), [(CHAT, MESSAGES), (COMPLETION, PROMPT)])

several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

LIMITS = [  # field, what is just right, what is just wrong, the detail
    ("temperature", [0, 0.0, 2, 5], [-0.1, -1], "must be >= 0.0"),
    ("top_p", [1e-9, 1], [0, 1.5], "must be > 0.0 and <= 1.0"),
    ("min_p", [0, 1], [-0.1, 1.1], "must be >= 0.0 and <= 1.0"),
    ("top_k", [-1, 0, 50], [-2], "must be >= -1"),
    ("presence_penalty", [-2, 2], [-2.1, 2.5], "must be >= -2.0 and <= 2.0"),
    ("frequency_penalty", [-2, 2], [-3, 2.1], "must be >= -2.0 and <= 2.0"),
    ("repetition_penalty", [0.1, 2], [0, -1], "must be strictly positive"),
    ("n", [1, 4], [0, 5], "must be > 0 and <= 4 (--max-client-batch-size raises it). Given: "),
    ("stop", ["a", ["a"] * 4], [["a"] * 5], "supports up to 4 stop sequences (--max-stop-sequences raises it). Given: 5"),
    ("stop", ["x" * 1000], ["x" * 1001], "may have at most 1000 characters in a stop sequence. Given: 1001"),
    ("min_tokens", [0, 9], [10], "must be <= the maximum of tokens to generate. Given: 10 and 9"),
    ("logit_bias", [{}, {"0": -100, "256": 100}], [{"1": 101}], "must be >= -100 and <= 100. Given: 101"),
    ("logit_bias", [{}], [{str(n): 1 for n in range(MAX_LOGIT_BIAS + 1)}], f"takes up to {MAX_LOGIT_BIAS} tokens. Given: "),
    ("logit_bias", [{"07": 1}], [{str(VOCABULARY): 1}], f"holds token {VOCABULARY}, but the model's vocabulary has"),
    *[
        ("logit_bias", [{}], [{token: 1}], "maps token ids to numbers. Given: ")
        for token in ("0" * 4000 + "1", "9" * 30, "-1", "1.0", "", " 1", "٣")
    ],
]


@BOTH
@pytest.mark.parametrize(("field", "right", "wrong", "detail"), LIMITS)
def test_a_value_just_inside_a_limit_is_accepted_and_one_just_outside_is_refused_by_name(dialect, field, right, wrong, detail):
    for value in right:
        assert prepared(dialect, max_tokens=9, **{field: value})
    for value in wrong:
        error = refusal(dialect, max_tokens=9, **{field: value})
        assert (error.status, error.param) == (422, field)
        assert str(error).startswith(f"Input validation error: `{field}` {detail}")


DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
WITH_DEFAULTS = replace(INFO, sampling_defaults=DEFAULTS)


@pytest.mark.parametrize("dialect", ["chat", "completion", "responses", "messages"])
def test_what_a_request_leaves_out_is_the_models_default(dialect):
    sampling = prepared(dialect, WITH_DEFAULTS).sampling
    assert {name: getattr(sampling, name) for name in DEFAULTS} == DEFAULTS
    assert sampling.seed is not None
    asked = prepared(dialect, WITH_DEFAULTS, temperature=0.1, top_p=None).sampling
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.1, 0.95, 20)
    assert prepared(dialect, WITH_DEFAULTS, temperature=0).sampling.seed is None  # greedy
    assert prepared(dialect, replace(INFO, sampling_defaults={"temperature": 0})).sampling.seed is None


@pytest.mark.parametrize("dialect", ["native", "sampled", "stream", "vertex"])
def test_native_requests_have_tgis_defaults(dialect):
    sampling, expected = prepared(dialect, WITH_DEFAULTS).sampling, prepared(dialect).sampling
    assert replace(sampling, seed=None) == replace(expected, seed=None)
    assert (sampling.seed is None) == (expected.seed is None)


@BOTH
def test_what_openais_clients_ask_for_arrives(dialect):
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
    sampling = SamplingParams(**asked | {"logit_bias": [(7, 2.0), (0, -100.0)], "is_seed_given": True})
    assert prepared(dialect, **asked).sampling == sampling
    made = prepared(dialect, max_tokens=9, min_tokens=4, ignore_eos=True, stop="x", n=2)
    assert (made.max_new_tokens, made.min_new_tokens, made.ignore_eos, made.sequences) == (9, 4, True, 2)
    assert (made.stop, made.keep_stop) == (["x"], False)


@BOTH
def test_a_request_is_greedy_at_temperature_0_and_samples_otherwise(dialect):
    assert prepared(dialect, temperature=0, top_p=0.5, top_k=4, seed=1).sampling.seed is None
    assert prepared(dialect, temperature=0.0).sampling.seed is None
    for fields in ({}, {"temperature": 1}, {"top_p": 0.5}):
        assert 0 <= prepared(dialect, **fields).sampling.seed < 2**64
    assert prepared(dialect, seed=-1).sampling.seed == 2**64 - 1
    assert prepared(dialect, top_k=-1).sampling.top_k == prepared(dialect, top_k=0).sampling.top_k == 0


@pytest.mark.parametrize("dialect", ["chat", "completion", "responses", "messages"])
def test_a_share_of_nothing_is_no_share_but_in_a_greedy_request(dialect):
    assert prepared(dialect, temperature=0, top_p=0).sampling.seed is None
    assert prepared(dialect, temperature=0.0, top_p=0.0, top_k=0).sampling.seed is None
    for fields in ({"temperature": 0.1}, {}):
        assert "`top_p` must be > 0.0 and <= 1.0" in str(refusal(dialect, top_p=0, **fields))
    assert "`top_p` must be" in str(refusal(dialect, temperature=0, top_p=-0.1))


@BOTH
def test_the_tokenizers_special_tokens_are_added_as_the_request_says(dialect, tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    served = serving()
    served = dataclasses.replace(served, text=served.text._replace(tokenizer=Tokenizer(tmp_path)))
    asked = {
        added: ids_of(prepared(dialect, **({} if added is None else {"add_special_tokens": added})), served)
        for added in (None, True, False)
    }
    assert asked[True] == [EOS, *asked[False]] and EOS not in asked[False]
    assert asked[None] == asked[dialect == "completion"], "the template of a chat writes them"


@pytest.mark.parametrize(("dialect", "name"), STOPS.items())
def test_a_request_may_have_as_many_stop_sequences_as_editors_send(dialect, name):
    given = [f"stop {n}" for n in range(32)]
    assert prepared(dialect, config=Config(), **{name: given}).stop == given
    detail = f"`{name}` supports up to 32 stop sequences (--max-stop-sequences raises it). Given: 33"
    assert detail in str(refusal(dialect, config=Config(), **{name: [*given, "one more"]}))
    assert "supports up to 4 stop sequences" in str(refusal(dialect, **{name: given}))


def test_stream_options_need_a_stream():
    for dialect in ("chat", "completion"):
        error = openai_refusal(dialect, stream_options={"include_usage": True})
        assert error.param == "stream_options" and "only if `stream` is true" in str(error)
        assert prepared(dialect, stream=True, stream_options={})


@BOTH
def test_prompt_logprobs_are_neither_streamed_nor_unlimited(dialect):
    for fields, words in (({"stream": True}, "when streaming"), ({"prompt_logprobs": 99}, "--max-top-n-tokens")):
        error = openai_refusal(dialect, **{"prompt_logprobs": 1} | fields)
        assert error.param == "prompt_logprobs" and words in str(error)


# Answers


@ROUTES
def test_a_stop_token_ends_the_text_and_is_no_part_of_it(served, route, body):
    answer = whole(served, route, body | {"return_token_ids": True, "logprobs": 1 if route == COMPLETION else True})
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == answer["usage"]["completion_tokens"] == 12
    last = next(n for n in range(3, 12) if ids[n] not in ids[:n])
    stopping = body | {"stop_token_ids": [ids[last]], "return_token_ids": True}
    stopped = whole(served, route, stopping)
    choice = stopped["choices"][0]
    assert (choice["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", last + 1)
    assert choice["token_ids"] == ids[: last + 1]
    assert text_of(choice) == served.tokenizer.decode(ids[:last], skip_special_tokens=True)
    stream = chunks(served, route, stopping)
    assert streamed_text(stream) == text_of(choice)
    given = [i for chunk in stream for each in chunk["choices"] for i in each.get("token_ids") or ()]
    assert given == ids[: last + 1]
    later = whole(served, route, stopping | {"min_tokens": last + 2})
    assert later["usage"]["completion_tokens"] > last + 1


def test_the_prompts_token_ids_are_where_vllm_has_them(served):
    ids = {"return_token_ids": True}
    chat_ids = served.tokenizer.encode("u:Hi;a:").ids
    assert whole(served, CHAT, MESSAGES | ids)["prompt_token_ids"] == chat_ids
    assert [c.get("prompt_token_ids") for c in chunks(served, CHAT, MESSAGES | ids)][:2] == [chat_ids, None]
    prompt_ids = served.tokenizer.encode("Hi").ids
    assert whole(served, COMPLETION, PROMPT | ids)["choices"][0]["prompt_token_ids"] == prompt_ids
    streamed = [c["choices"][0].get("prompt_token_ids") for c in chunks(served, COMPLETION, PROMPT | ids)]
    assert streamed[:2] == [prompt_ids, None]
    first = whole(served, COMPLETION, PROMPT)["choices"][0]["text"][0]
    held = {"stop": f"{first}\0"}  # which the first token may begin
    for more in (held, {"echo": True}, {"echo": True, "max_tokens": 0}):
        streamed = [c["choices"][0].get("prompt_token_ids") for c in chunks(served, COMPLETION, PROMPT | ids | more)]
        assert streamed == [prompt_ids] + [None] * (len(streamed) - 1)


def test_log_probabilities_of_the_prompt_are_given_by_token(served):
    chat = whole(served, CHAT, MESSAGES | {"prompt_logprobs": 2, "logprobs": True, "top_logprobs": 1})
    assert all(len(each["top_logprobs"]) == 1 for each in chat["choices"][0]["logprobs"]["content"])
    ids = served.tokenizer.encode("u:Hi;a:").ids
    first, *rest = chat["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for token_id, ranked in zip(ids[1:], rest):
        assert ranked[str(token_id)]["decoded_token"] == served.tokenizer.decode([token_id])
        assert {each["rank"] for each in ranked.values()} - {None} == {1, 2}
        assert ranked[str(token_id)]["logprob"] <= max(each["logprob"] for each in ranked.values())
    completion = whole(served, COMPLETION, PROMPT | {"prompt_logprobs": 0})["choices"][0]
    assert [each and len(each) for each in completion["prompt_logprobs"]] == [None, 1]


@ROUTES
def test_usage_comes_last_in_a_stream_when_it_is_asked_for(served, route, body):
    stream = chunks(served, route, body | {"stream_options": {"include_usage": True, "unknown": 1}})
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole(served, route, body)["usage"]
    assert all(chunk["usage"] is None for chunk in stream[:-1])
    always = chunks(served, route, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts)
    assert always[-1]["usage"] == stream[-1]["usage"]


@ROUTES
def test_n_choices_have_a_random_stream_each_which_follows_from_the_seed(served, route, body):
    answer = whole(served, route, body | SAMPLED | {"n": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    alone = [whole(served, route, body | SAMPLED | {"seed": 11 + n})["choices"][0] for n in range(3)]
    assert [choice | {"index": 0} for choice in answer["choices"]] == alone
    assert answer["usage"]["prompt_tokens"] == whole(served, route, body)["usage"]["prompt_tokens"]
    stream = chunks(served, route, body | SAMPLED | {"n": 3})
    assert [streamed_text(stream, n) for n in range(3)] == [text_of(choice) for choice in answer["choices"]]
    ends = [c["index"] for chunk in stream for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


@ROUTES
@given(start=st.integers(0, 10), length=st.integers(1, 5), as_list=st.booleans())
@several
def test_a_stop_string_ends_the_text_and_no_part_of_it_shows(served, route, body, start, length, as_list):
    full = streamed_text(chunks(served, route, body))
    stop = full[start : start + length] or "never"
    body = body | {"stop": [stop] if as_list else stop}
    stream = chunks(served, route, body)
    answer = whole(served, route, body)["choices"][0]
    assert streamed_text(stream) == text_of(answer) == full.split(stop)[0]
    assert answer["finish_reason"] == stream[-1]["choices"][0]["finish_reason"]
    assert stop not in full or answer["finish_reason"] == "stop"


def test_an_end_that_is_ignored_or_comes_too_early_does_not_end_the_text(served):
    for fields, text_tokens, reason in (({}, 1, "stop"), ({"ignore_eos": True}, 12, "length"), ({"min_tokens": 5}, 6, "stop")):
        answer = whole(served, COMPLETION, PROMPT | {"logit_bias": {str(EOS): 100}} | fields)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (text_tokens, reason)


def test_the_model_is_listed_under_its_name(served):
    card = served.client.get("/v1/models").json["data"][0]
    assert (card["id"], card["object"], card["owned_by"]) == ("m", "model", "m")
    assert served.client.get("/v1/models/m").json == card
    missing = served.client.get("/v1/models/other")
    assert (missing.status_code, missing.json["error"]["code"]) == (404, "model_not_found")
