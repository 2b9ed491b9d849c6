"""What is sent for a step: tokens, log-probabilities and prompts; what cannot be published ends its request, once."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
from fakes.model import greedy, next_logprobs
from loop import Driven, on_every_engine
from processes import wait_until

from engine import outputs
from engine.sampling import sampling
from protocol import Generate

LONG = list(range(1, 31))  # a prompt of several chunks


def test_a_step_has_one_message_for_each_web_process():
    driven = Driven(batch_size=4, supports_chunked_prefill=True)
    for i, peer in enumerate([b"a", b"b", b"a", b"b"]):
        driven.arrive(Generate(i, [30, i], 30, ignore_eos=True), peer=peer)
    driven.step(2)
    driven.wire.sent.clear()
    driven.step()
    assert Counter(peer for peer, _message in driven.wire.sent) == {b"a": 1, b"b": 1}
    assert [len(message.tokens) for _peer, message in driven.wire.sent] == [2, 2]


def test_outputs_are_handed_over_before_the_next_step_runs():
    driven, sent = Driven(), []
    driven.each_call(lambda _chunks: sent.append(len(driven.tokens[1])))
    driven.arrive(Generate(1, [1, 2], 8, ignore_eos=True))
    driven.step(4)
    assert sent == [0, 1, 2, 3]


def test_the_device_runs_no_more_than_max_unpublished_steps_ahead():
    driven = Driven(batch_size=1)
    driven.output_thread.lag = 1000
    driven.arrive(Generate(1, [1, 2], 8, ignore_eos=True))
    loop = threading.Thread(target=driven.step, args=(8,), daemon=True)
    loop.start()
    wait_until(lambda: len(driven.model.calls) > outputs.MAX_UNPUBLISHED, "steps whose outputs wait")
    loop.join(0.1)
    assert loop.is_alive() and len(driven.model.calls) == outputs.MAX_UNPUBLISHED + 1
    while loop.is_alive():
        driven.output_thread.catch_up()
    driven.output_thread.catch_up()
    assert len(driven.tokens[1]) == 8


def test_a_step_that_cannot_be_counted_is_published_nevertheless(monkeypatch, caplog):
    driven = Driven()
    monkeypatch.setattr(driven.worker.metrics, "count_step", lambda _output: 1 / 0)
    driven.arrive(Generate(1, [1, 2], 8, ignore_eos=True))
    driven.run()
    assert len(driven.tokens[1]) == 8 and "a step could not be counted" in caplog.text


def test_a_token_has_the_log_probability_and_the_most_likely_tokens_of_its_logits():
    driven = Driven()
    driven.arrive(Generate(1, [1, 2, 3], 1, top_n_tokens=3))
    driven.run()
    ((_peer, message),) = driven.wire.sent
    (token,) = message.tokens
    logprobs = next_logprobs([1, 2, 3])
    best = np.argsort(-logprobs)[:3]
    assert [i for i, _ in token.top] == best.tolist()
    assert [logprob for _, logprob in token.top] == pytest.approx(logprobs[best].tolist(), abs=1e-5)
    assert token.top[0] == (token.token, token.logprob)


def test_log_probabilities_that_nobody_wants_are_not_sent_and_those_of_others_stay_the_same():
    def logprobs(*generates):
        driven, found = Driven(supports_chunked_prefill=True), {}
        driven.arrive(*generates)
        driven.run()
        for _peer, message in driven.wire.sent:
            for token in message.tokens:
                found.setdefault(token.id, []).append((token.logprob, token.top))
        return found

    wanted, spared = Generate(1, [1, 2], 8, top_n_tokens=2), Generate(2, [3], 8, logprobs=False)
    together = logprobs(wanted, spared)
    assert together[1] == logprobs(wanted)[1]
    assert together[2] == logprobs(spared)[2] == [(None, [])] * len(together[2])


@on_every_engine
def test_log_probabilities_of_a_prompt_are_those_of_the_whole_prompt_however_it_is_cut(engine):
    driven = Driven(max_batch_prefill_tokens=7, **engine)
    driven.arrive(Generate(1, [1], 30, ignore_eos=True))
    driven.step()
    driven.arrive(Generate(2, LONG, 4, top_n_tokens=2, prompt_logprobs=True), Generate(3, LONG, 4, top_n_tokens=2))
    driven.run()
    assert driven.tokens[2] == driven.tokens[3] == greedy(LONG, 4)
    rows = np.stack([next_logprobs(LONG[:n]) for n in range(1, len(LONG))])
    prompt = driven.prompts[2]
    logprobs, tops = zip(*prompt.scores)
    assert list(logprobs) == pytest.approx([row[token] for row, token in zip(rows, LONG[1:])], abs=1e-5)
    assert [[token for token, _ in top] for top in tops] == np.argsort(-rows)[:, :2].tolist()
    assert driven.prompts[3].scores == []


def test_a_prompt_comes_with_the_time_that_it_waited_for_a_slot(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    driven = Driven(batch_size=1)
    driven.arrive(Generate(1, [1, 2], 2, sent_at=98.5))
    driven.run()
    assert driven.prompts[1].queued_s == 1.5


@pytest.mark.parametrize("failing_at", range(1, 9))  # the last is the token that ends the request
@pytest.mark.parametrize("lag", [0, 1])
def test_a_token_that_cannot_be_published_ends_that_request_alone_and_once(failing_at, lag, monkeypatch):
    driven, logprobs, calls = Driven(), sampling.logprobs, []
    driven.output_thread.lag = lag
    driven.arrive(Generate(1, [1, 2], 8), Generate(2, [3], 8, top_n_tokens=1, ignore_eos=True))

    def fails_once(logits, tokens, top_n):
        found = logprobs(logits, tokens, top_n)
        if 1 in top_n:
            calls.append(top_n)
            if len(calls) == failing_at:
                found[top_n.index(1)] = RuntimeError("on purpose")
        return found

    monkeypatch.setattr(sampling, "logprobs", fails_once)
    driven.run()
    assert driven.ends[2] == "failed"
    assert len(driven.tokens[2]) == failing_at - 1
    assert driven.tokens[1] == greedy([1, 2], 8)


def test_a_step_that_cannot_be_published_ends_each_of_its_requests_once_also_one_with_its_last_token(monkeypatch):
    driven, logprobs = Driven(), sampling.logprobs
    plain = Generate(1, [1, 2], 4, ignore_eos=True, logprobs=False)
    driven.arrive(plain, Generate(2, [3], 8, ignore_eos=True))
    while len(driven.tokens[1]) < 3 or not driven.tokens[2]:
        driven.step()
    malformed = [(0.0, [], "what no token has")]
    monkeypatch.setattr(sampling, "logprobs", lambda *a: malformed * len(logprobs(*a)))
    driven.run()
    assert driven.ends == {1: "failed", 2: "failed"}


@pytest.mark.parametrize("most", [1, 8])
@on_every_engine
def test_a_prompt_that_cannot_be_scored_ends_that_request_alone(engine, most, monkeypatch):
    driven, logprobs = Driven(max_batch_prefill_tokens=4, **engine), sampling.logprobs
    driven.arrive(Generate(1, [1, 2], 8, logprobs=False))
    driven.step()
    failed = RuntimeError("on purpose")
    monkeypatch.setattr(sampling, "logprobs", lambda *a: [failed] * len(logprobs(*a)))
    driven.arrive(Generate(2, LONG, most, prompt_logprobs=True))
    driven.run()
    assert driven.ends[2] == "failed" and not driven.tokens[2]
    assert driven.tokens[1] == greedy([1, 2], 8)
