"""How long a step may take before the device counts as stuck, and what a failed step says."""

import numpy as np
import pytest
from fakes.model import FakeModel, next_logits

from engine.requests import Request
from engine.sampling import RowSampler
from engine.scheduler import Limits, Scheduler
from engine.step import StepRunner, StepTimer
from models.base import DeviceLost
from protocol import Generate, Sampling


def scheduled(*prompts):
    """The next step of requests with these prompts, on a model that mixes."""
    scheduler = Scheduler(Limits(slots=3, mixes=True))
    for number, prompt in enumerate(prompts):
        generate = Generate(number, prompt, 5)
        sampler = RowSampler(Sampling(), prompt)
        scheduler.add(Request(generate=generate, max_new_tokens=5, arrived_at=0.0, sampler=sampler))
    return scheduler.next(0.0)


def test_a_step_gives_a_list_of_tokens_for_each_request():
    output = StepRunner(FakeModel(mixes=True)).run(scheduled([1, 2], [3, 9]))
    assert output.tokens == [[int(next_logits(prompt).argmax())] for prompt in ([1, 2], [3, 9])]
    assert output.started_at <= output.ran_at <= output.sampled_at
    assert (output.errors, output.failure) == ({}, None)


def test_a_row_that_fails_has_a_message_and_no_token():
    model = FakeModel(mixes=True)
    model.nan_slots = {1}
    output = StepRunner(model).run(scheduled([1, 2], [3, 9], [4, 8]))
    assert [len(tokens) for tokens in output.tokens] == [1, 0, 1]
    assert output.errors == {1: "the model's output is not a number"}


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), DeviceLost("gone")])
def test_a_step_that_fails_has_a_message_for_every_request(error):
    model = FakeModel(mixes=True)
    model.failures.append(error)
    output = StepRunner(model).run(scheduled([1, 2], [3, 9]))
    assert output.failure is error and output.tokens == [[], []]
    assert output.errors == dict.fromkeys((0, 1), "a step on the device failed")


def test_logits_are_kept_only_while_somebody_wants_log_probabilities():
    step = scheduled([1, 2], [3, 9])
    assert np.array_equal(StepRunner(FakeModel(mixes=True)).run(step).logits[1], next_logits([3, 9]))
    spared = [Request(generate=Generate(i, [1], 1, logprobs=False), max_new_tokens=1, arrived_at=0.0) for i in (1, 2)]
    for request, like in zip(spared, step.requests):
        request.sampler = like.sampler
    assert StepRunner(FakeModel(mixes=True)).run(step._replace(requests=spared)).logits is None


def test_the_limit_of_a_step_follows_the_typical_duration():
    timer = StepTimer()
    assert timer.limit_s(4000) > 4000, "nothing is known of the device yet, and it may be slow"
    timer.record(0, 30.0)  # the first one takes long
    assert timer.limit_s(0) > 30.0
    for _ in range(50):
        timer.record(0, 0.02)
    assert timer.limit_s(0) == StepTimer.MINIMUM_S
    timer.record(100, 10.0)
    assert timer.limit_s(1000) == pytest.approx(2000), "ten times the tokens may take ten times as long"
