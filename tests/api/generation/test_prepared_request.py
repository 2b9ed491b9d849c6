"""The prompts of requests: what fits into the context length, in the names of the request's fields."""

import msgspec
import pytest
from asked import CONFIG, INFO, all_prepared, assert_invalid, prepared, serving
from fakes.tokenizer import VOCABULARY

from api.generation.prepared_request import prompts_of
from api.http.errors import ApiError
from protocol import SamplingParams


def fit(ids, **limits):
    """The ids and the limit of what runs."""
    asked = msgspec.structs.replace(prepared(), prompt=ids, **limits)
    (prompt,) = prompts_of([asked], serving())
    return prompt.ids, prompt.max_new_tokens


def unfit(ids, **limits) -> ApiError:
    with pytest.raises(ApiError) as refused:
        fit(ids, **limits)
    return refused.value


def test_prompt_and_answer_together_fill_the_window_and_no_more():
    assert fit([1] * 80, max_new_tokens=40) == ([1] * 80, 40)
    assert fit([1] * 80) == ([1] * 80, 40)
    for prompt, most in ((80, 41), (10, 100_000), (101, 20)):  # the last is too long a prompt as well
        expected = f"must be <= 120 (--max-total-tokens raises it). Given: {prompt} `inputs` tokens and {most} `max_new_tokens`"
        assert_invalid(unfit([1] * prompt, max_new_tokens=most), f"`inputs` tokens + `max_new_tokens` {expected}")


def test_the_longest_prompt_is_max_input_tokens():
    assert fit([1] * 100, max_new_tokens=20) == ([1] * 100, 20)
    for length, most in ((101, 19), (101, None), (5000, None)):
        error = unfit([1] * length, max_new_tokens=most)
        assert_invalid(error, f"`inputs` must have at most 100 tokens (--max-input-tokens raises it). Given: {length}")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    longest = serving().text.tokenizer.longest_token
    error = unfit("a" * (120 * longest + 1))
    assert_invalid(
        error, f"`inputs` must have at most 100 tokens (--max-input-tokens raises it). Given: at least {120 + 1 // longest}"
    )
    assert len(fit("a" * 5000, truncate=7)[0]) == 7


def test_truncate_keeps_the_last_tokens():
    prompt = list(range(1, 41))
    assert fit(prompt, truncate=3) == ([38, 39, 40], 117)
    for enough in (40, 100):
        assert fit(prompt, truncate=enough)[0] == prompt
    assert fit([1] * 5000, truncate=100, max_new_tokens=20) == ([1] * 100, 20)


def test_a_prompt_without_tokens_and_a_token_that_the_model_does_not_have_are_refused():
    for limits in ({}, {"max_new_tokens": 5}):
        assert_invalid(unfit([], **limits), "`inputs` cannot be empty")
    last = VOCABULARY - 1
    assert fit([last])[0] == [last]
    detail = f"`inputs` holds token {last + 1}, but the model's vocabulary has the tokens 0 to {last}"
    assert_invalid(unfit([1, last + 1]), detail)
    assert fit([last + 1, last], truncate=1)[0] == [last]


DIALECTS = [("completion", "prompt"), ("chat", "messages"), ("responses", "input"), ("messages", "messages")]
LIMITS = {"responses": "max_output_tokens"}


@pytest.mark.parametrize("dialect", [dialect for dialect, _ in DIALECTS])
def test_the_other_dialects_cut_a_limit_to_what_is_left_of_the_window(dialect):
    limit = LIMITS.get(dialect, "max_tokens")
    for asked in (32_000, 120, 5):
        (prompt,) = prompts_of(all_prepared(dialect, **{limit: asked}), serving())
        assert prompt.max_new_tokens == min(asked, 120 - len(prompt.ids))
        assert prompt.prepared.limit_name == limit


@pytest.mark.parametrize(("dialect", "name"), DIALECTS)
def test_a_prompt_that_does_not_fit_is_told_as_openai_does_in_the_names_of_the_dialect(dialect, name):
    said = "a" * 101
    said = [{"role": "user", "content": said}] if name == "messages" else said
    with pytest.raises(ApiError) as refused:
        prompts_of(all_prepared(dialect, **{name: said}), serving())
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", name)
    words = "This model's maximum context length is 120 tokens (--max-total-tokens raises it): "
    words += f"`{name}` must have at most 100 tokens"
    assert str(error).startswith(f"{words}. Given: 1")


def test_more_sequences_than_may_ever_run_and_wait_are_refused():
    most = CONFIG.max_concurrent_requests
    many = msgspec.structs.replace(prepared(), sequences=most)
    assert prompts_of([many], serving(INFO))
    with pytest.raises(ApiError, match=f"asks for {most + 1} sequences, and at most {most} may run and wait"):
        prompts_of([many, prepared()], serving())


def test_the_seeds_of_several_sequences_follow_from_the_first_and_stay_64_bits_wide():
    asked = msgspec.structs.replace(prepared(), sampling=SamplingParams(seed=2**64 - 1))
    assert [asked.sampling_of(n).seed for n in range(3)] == [2**64 - 1, 0, 1]
    assert prepared().sampling_of(1).seed is None
