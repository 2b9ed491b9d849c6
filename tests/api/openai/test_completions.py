"""`/v1/completions`: the forms of a prompt, `echo`, `best_of`, log-probabilities in the older form."""

import dataclasses

import pytest
import tiny_tokenizers
from asked import INFO, all_prepared, refusal, serving
from fakes.model import next_logprobs
from fakes.tokenizer import VOCABULARY
from msgspec.structs import replace
from openai_api import COMPLETION, PROMPT, SAMPLED, UNCACHED, chunks, streamed_text, whole

from api.generation.prepared_request import ids_of
from api.http.errors import ApiError
from api.openai import completions
from text.tokenizer import Tokenizer

LAST = VOCABULARY - 1
REFUSED = [
    ({"prompt": []}, "prompt", "Empty array detected. Do not use an empty array for the prompt."),
    ({"prompt": ""}, "prompt", "`prompt` cannot be empty"),
    ({"prompt": ["a", ""]}, "prompt", "`prompt` cannot be empty"),
    ({"prompt": [[]]}, "prompt", "`prompt` cannot be empty"),
    ({"prompt": ["a"] * 5}, "prompt", "Number of prompts exceeds the maximum allowed batch size of 4"),
    ({"prompt": [1, LAST + 1]}, "prompt", f"holds token {LAST + 1}, but the model's vocabulary has the tokens 0 to {LAST}"),
    ({"prompt": [1, -1]}, "prompt", "`prompt` holds token -1"),
    ({"prompt": [1, "a"]}, "prompt", "not a mixture"),
    ({"prompt": [[1], "a"]}, "prompt", "not a mixture"),
    ({"prompt": [1.5]}, "prompt[0]", "Expected"),
    ({"prompt": None}, "prompt", "prompt: Expected"),
    ({"max_tokens": 0}, "max_tokens", "must be strictly positive, unless `echo` asks for the prompt alone"),
    ({"logprobs": 6}, "logprobs", "must be >= 0 and <= 5 (--max-top-n-tokens raises it). Given: 6"),
    ({"best_of": 4}, "best_of", "must be > 0 and <= 3 (--max-best-of raises it). Given: 4"),
    ({"n": 3, "best_of": 2}, "best_of", "must be >= `n`. Given: 2 and 3"),
    ({"best_of": 2, "stream": True}, "best_of", "> `n` is not supported when streaming tokens"),
    ({"logit_bias": [1]}, "logit_bias", "Expected"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_a_completion_cannot_be_is_refused_by_name(fields, param, words):
    error = refusal("completion", **fields)
    assert (error.status, error.param) == (422, param)
    assert words in str(error)


def test_a_suffix_needs_a_model_that_fills_in_the_middle():
    error = refusal("completion", suffix="end")
    assert error.param == "suffix" and "its tokenizer has no tokens for filling in the middle" in str(error)


LAYOUT = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


@pytest.fixture
def infilling(tmp_path):
    """A model with the tokens of StarCoder."""
    made = tiny_tokenizers.byte_level()
    made.add_special_tokens(LAYOUT)
    served = serving()
    tokenizer = Tokenizer(tiny_tokenizers.save(made, tmp_path), [], escapes=True)
    info = replace(INFO, vocab_size=made.get_vocab_size())
    return dataclasses.replace(served, info=info, text=served.text._replace(tokenizer=tokenizer))


def test_a_suffix_follows_the_output(infilling):
    body = {"prompt": "def f():", "suffix": "<fim_middle>\n", "stop_token_ids": [5]}
    (made,) = completions.completion(body, infilling).requests
    tokenizer = infilling.text.tokenizer
    before, after, middle = map(tokenizer.token_to_id, LAYOUT)
    ids = ids_of(made, infilling)
    assert (ids[0], ids[-1]) == (before, middle)
    assert ids.count(middle) == 1, "the client's own words are text"
    first, second = tokenizer.decode(ids[: ids.index(after)]), tokenizer.decode(ids[ids.index(after) :])
    assert (first, second) == ("def f():", "<fim_middle>\n")
    assert made.stop_token_ids == {5, before, after, middle}
    assert ids_of(completions.completion(body | {"prompt": ""}, infilling).requests[0], infilling)[:2] == [before, after]


@pytest.mark.parametrize(("fields", "param"), [({"echo": True}, "echo"), ({"prompt": [1, 2]}, "prompt")])
def test_what_cannot_be_combined_with_a_suffix_is_refused(infilling, fields, param):
    with pytest.raises(ApiError) as refused:
        completions.completion({"prompt": "a", "suffix": "b"} | fields, infilling)
    assert refused.value.param == param


def test_log_probabilities_are_computed_where_they_are_returned_or_rank_sequences():
    wanted = [{}, {"logprobs": 0}, {"best_of": 2}, {"n": 2}]
    assert [all_prepared("completion", **fields)[0].logprobs for fields in wanted] == [False, True, True, False]


# Answers


def test_several_prompts_are_answered_in_their_order(served):
    answer = whole(served, COMPLETION, PROMPT | {"prompt": ["Hi", "Ho", "Hi"]})
    expected = [served.tokenizer.decode(served.expected(text, 12)) for text in ("Hi", "Ho", "Hi")]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 6
    stream = chunks(served, COMPLETION, PROMPT | {"prompt": ["Hi", "Ho", "Hi"]})
    assert [streamed_text(stream, n) for n in range(3)] == expected


def test_a_prompt_may_come_as_token_ids(served):
    ids = served.tokenizer.encode("Hi").ids
    told = whole(served, COMPLETION, PROMPT)["choices"]
    for prompt in (ids, [ids]):
        assert whole(served, COMPLETION, PROMPT | {"prompt": prompt})["choices"] == told
    assert whole(served, COMPLETION, PROMPT | {"prompt": [ids, ids]})["choices"][1]["text"] == told[0]["text"]


def test_echo_puts_the_prompt_before_the_text(served):
    plain = whole(served, COMPLETION, PROMPT)["choices"][0]["text"]
    for prompt in ("Hi", served.tokenizer.encode("Hi").ids):
        body = PROMPT | {"echo": True, "prompt": prompt}
        assert whole(served, COMPLETION, body)["choices"][0]["text"] == "Hi" + plain
        assert streamed_text(chunks(served, COMPLETION, body)) == "Hi" + plain


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_a_completion_tell_of_prompt_and_answer(served, top):
    body = PROMPT | {"echo": True, "logprobs": top, "prompt": "Hello"}
    answer = whole(served, COMPLETION, body)
    text, told = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == answer["usage"]["total_tokens"]
    assert told["token_logprobs"][0] is None
    ids = served.tokenizer.encode("Hello").ids + served.expected("Hello", 12)
    expected = [next_logprobs(ids[:n], VOCABULARY)[ids[n]] for n in range(1, len(ids))]
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    for token, offset in zip(told["tokens"], told["text_offset"]):
        assert text.startswith(token, offset) or token == "<eos>"
    if top:
        assert told["top_logprobs"][0] is None
        assert all(top <= len(entry) <= top + 1 for entry in told["top_logprobs"][1:])
    else:
        assert told["top_logprobs"] is None
    pieces = [c["logprobs"] for chunk in chunks(served, COMPLETION, body) for c in chunk["choices"] if c["logprobs"]]
    for column in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[column]] == told[column]


def test_a_prompt_may_be_scored_without_an_answer(served):
    answer = whole(served, COMPLETION, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1})
    assert answer["choices"][0]["text"] == "Hello"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5} | UNCACHED


def test_the_best_of_several_is_the_one_that_the_model_finds_likeliest(served):
    body = PROMPT | SAMPLED | {"logprobs": 0}

    def mean(choice):
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    candidates = whole(served, COMPLETION, body | {"n": 2})["choices"]
    (best,) = whole(served, COMPLETION, body | {"best_of": 2})["choices"]
    assert best | {"index": 0} == max(candidates, key=mean) | {"index": 0}


def test_of_several_tokens_with_the_same_text_the_likeliest_is_told(served):
    prompt = "☀☀"
    told = whole(served, COMPLETION, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 5})
    ids = served.tokenizer.encode(prompt).ids
    for n, entry in list(enumerate(told["choices"][0]["logprobs"]["top_logprobs"]))[1 : len(ids)]:
        logprobs = next_logprobs(ids[:n], VOCABULARY)
        best = sorted(logprobs, reverse=True)[:5]
        expected = best if logprobs[ids[n]] >= best[-1] else [*best, logprobs[ids[n]]]
        assert sorted(entry.values(), reverse=True) == pytest.approx(expected, abs=1e-5)
    assert any(key.startswith("bytes:\\x") for key in entry)


def test_offsets_count_what_the_echo_shows_of_special_tokens(served):
    body = {"prompt": "<eos>Hi", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    choice = whole(served, COMPLETION, body)["choices"][0]
    assert choice["text"].startswith("<eos>Hi")
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]):
        assert choice["text"].startswith(token, offset)
