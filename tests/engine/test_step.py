"""One step of the device: tokens for each request or an error, and how long it may take."""

import numpy as np
import pytest
from engine_parts import request_of, scheduler_of
from fakes.model import FakeModel, greedy, next_logits
from loop import Driven
from msgspec.structs import replace

from engine.sampling import sampling
from engine.sampling.sampling import SamplerState
from engine.step import StepRunner, StepTimer, needs_logits
from models.errors import DeviceLost
from protocol import End, Generate, SamplingParams


def scheduled(*prompts):
    """The next step of requests with these prompts, on a model that mixes."""
    scheduler = scheduler_of(slots=3, supports_chunked_prefill=True)
    for number, prompt in enumerate(prompts):
        generate = Generate(number, prompt, 5)
        sampler = SamplerState(SamplingParams(), prompt)
        scheduler.add(request_of(generate, sampler=sampler))
    return scheduler.next(0.0)


def test_a_step_gives_a_list_of_tokens_for_each_request():
    output = StepRunner(FakeModel(supports_chunked_prefill=True)).run(scheduled([1, 2], [3, 9]))
    assert output.tokens == [[int(next_logits(prompt).argmax())] for prompt in ([1, 2], [3, 9])]
    assert output.started_at <= output.ran_at <= output.sampled_at
    assert (output.errors, output.failure) == ({}, None)


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), DeviceLost("gone")])
def test_a_step_that_fails_has_a_message_for_every_request(error):
    model = FakeModel(supports_chunked_prefill=True)
    model.failures.append(error)
    output = StepRunner(model).run(scheduled([1, 2], [3, 9]))
    assert output.failure is error and output.tokens == [[], []]
    assert output.errors == dict.fromkeys((0, 1), "a step on the device failed")


def test_logits_are_kept_only_while_somebody_wants_log_probabilities():
    step = scheduled([1, 2], [3, 9])
    assert np.array_equal(StepRunner(FakeModel(supports_chunked_prefill=True)).run(step).logits[1], next_logits([3, 9]))
    spared = [request_of(Generate(i, [1], 1, logprobs=False)) for i in (1, 2)]
    for request, like in zip(spared, step.requests):
        request.sampler = like.sampler
    assert StepRunner(FakeModel(supports_chunked_prefill=True)).run(step._replace(requests=spared)).logits is None


def test_a_prefix_that_cannot_be_copied_ends_the_worker_instead_of_giving_wrong_text(monkeypatch):
    driven = Driven(batch_size=3, supports_chunked_prefill=True, prefix_granularity=1, supports_prefix_copy=True)
    driven.arrive(Generate(1, list(range(1, 20)), 15, ignore_eos=True))
    driven.step()
    monkeypatch.setattr(driven.model, "copy_prefix", lambda *_: 1 / 0)
    driven.arrive(Generate(2, list(range(1, 20)), 5))
    with pytest.raises(DeviceLost, match="a prefix cannot be copied"):
        driven.step()


@pytest.mark.parametrize("sampling", ["host", "device"])  # where the device samples, it gives an id that is no token
def test_logits_that_are_not_a_number_end_that_request_alone(sampling):
    driven = Driven(sampling=sampling)
    driven.arrive(Generate(1, [1, 2], 8), Generate(2, [3], 8, ignore_eos=True))
    driven.step(3)
    driven.model.nan_slots = {1}
    driven.run()
    assert driven.ends[2] == "failed"
    assert driven.tokens[1] == greedy([1, 2], 8)


@pytest.mark.parametrize(
    ("error", "message"),
    [(sampling.SamplingError("no token is left"), "no token is left"), (KeyError(3), "the next token could not be sampled")],
)
def test_a_row_that_cannot_be_sampled_ends_that_request_alone_and_internal_errors_are_not_shown(error, message, monkeypatch):
    driven, sample = Driven(), sampling.sample
    driven.arrive(Generate(1, [1, 2], 8), Generate(2, [3], 8, ignore_eos=True))
    driven.step(3)
    monkeypatch.setattr(sampling, "sample", lambda *a: [error if i == 1 else t for i, t in enumerate(sample(*a))])
    driven.run()
    assert [m.message for _peer, m in driven.wire.sent if isinstance(m, End)] == [message]
    assert driven.ends[2] == "failed"
    assert driven.tokens[1] == greedy([1, 2], 8)


def test_a_device_that_samples_gets_the_parameters_before_each_prompt_and_gives_no_log_probabilities():
    driven = Driven(batch_size=2, sampling="device")
    sampled = SamplingParams(seed=7, top_k=5, top_p=0.5, temperature=2.0)
    driven.arrive(Generate(1, [1, 2], 8), Generate(2, [3], 8, sampling=sampled), Generate(3, [4, 5], 8))
    driven.step(2)
    assert driven.model.device_sampling == {0: (1, 1.0, 1.0), 1: (5, 0.5, 2.0)}
    driven.run()
    assert [driven.tokens[i] for i in (1, 3)] == [greedy([1, 2], 8), greedy([4, 5], 8)]
    assert {token.logprob for _peer, message in driven.wire.sent for token in message.tokens} == {None}


PLAIN = SamplingParams(seed=7, top_k=5, top_p=0.5, temperature=2.0)


@pytest.mark.parametrize(
    ("options", "returns_ids"),
    [
        ({"logprobs": False}, True),
        ({"logprobs": False, "sampling": PLAIN}, True),
        ({"logprobs": False, "ignore_eos": True}, True),
        ({}, False),
        ({"logprobs": False, "min_new_tokens": 3}, False),
        ({"logprobs": False, "sampling": replace(PLAIN, is_seed_given=True)}, False),
        ({"logprobs": False, "sampling": replace(PLAIN, min_p=0.1)}, False),
        ({"logprobs": False, "sampling": replace(PLAIN, top_k=257)}, False),
        ({"logprobs": False, "sampling": SamplingParams(repetition_penalty=1.1)}, False),
        ({"logprobs": False, "sampling": SamplingParams(logit_bias=[(3, 1.0)])}, False),
        ({"logprobs": False, "prompt_logprobs": True}, True),  # after the prompt
    ],
)
def test_a_hybrid_step_returns_ids_where_the_device_can_choose_every_token(options, returns_ids):
    driven = Driven(batch_size=2, sampling="hybrid")
    driven.arrive(Generate(1, [1, 2], 8, **options), Generate(2, [3, 9], 8, logprobs=False))
    driven.step(2)
    driven.step()
    assert driven.model.returns_ids == returns_ids
    driven.run()
    assert driven.tokens[2] == greedy([3, 9], 8)
    tokens = [token for _peer, message in driven.wire.sent for token in message.tokens if token.id == 1]
    assert all((token.logprob is None) != options.get("logprobs", True) for token in tokens)


@pytest.mark.parametrize("more", [{"grammar": "a*"}, {"sampling": SamplingParams(presence_penalty=0.5)}], ids=str)
def test_a_request_with_a_grammar_or_a_penalty_needs_logits(more):
    for wanted, needs in ({"logprobs": False}, False), ({"logprobs": False} | more, True):
        request = request_of(Generate(1, [1, 2], 8, **wanted))
        assert needs_logits(request) == needs


def test_a_hybrid_step_takes_logits_for_the_log_probabilities_of_a_prompt():
    driven = Driven(batch_size=1, sampling="hybrid")
    driven.arrive(Generate(1, [1, 2, 5], 2, logprobs=False, prompt_logprobs=True))
    driven.step()
    assert not driven.model.returns_ids
    driven.run()
    (prompt,) = [prompt for _peer, message in driven.wire.sent for prompt in message.prompts]
    assert len(prompt.scores) == 2


def test_the_limit_of_a_step_follows_the_typical_duration():
    timer = StepTimer()
    assert timer.limit_s(4000) > 4000, "nothing is known of the device yet, and it may be slow"
    timer.record(0, 30.0)  # the first one takes long
    assert timer.limit_s(0) > 30.0
    for _ in range(50):
        timer.record(0, 0.02)
    assert timer.limit_s(0) == StepTimer.MINIMUM_S
    timer.record(100, 10.0)
    assert timer.limit_s(1000) == pytest.approx(2000, rel=0.01), "ten times the tokens may take ten times as long"


def test_a_step_has_time_for_as_many_prompt_tokens_as_take_150_ms_or_a_decode_step():
    timer = StepTimer()
    assert timer.prompt_budget == 32, "nothing is known of the device yet"
    timer.record(0, 0.02)
    timer.record(100, 0.02 + 0.1)
    assert timer.prompt_budget == pytest.approx(150, abs=1)
    timer.record(2, 0.03)
    assert timer.prompt_budget == pytest.approx(150, abs=1), "two tokens say little about the time of one"
    for _ in range(20):
        timer.record(0, 0.5)
        timer.record(100, 0.5 + 1.0)
    assert timer.prompt_budget == pytest.approx(50, abs=1), "a decode step takes longer than that here"
    for _ in range(20):
        timer.record(100, 0.5)
    assert timer.prompt_budget == 512
    for _ in range(20):
        timer.record(16, 60.0)
    assert timer.prompt_budget == 16
