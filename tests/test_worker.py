"""The worker's loop on a fake model: who gets which slot, who gets which tokens, that everybody gets one end; and what
Prometheus is told of it."""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from fakes.model import EOS, FakeModel, greedy, next_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import sampling as sampling_module
import worker as worker_module
from config import HERE
from metrics import Metrics
from protocol import (
    Answered,
    AskMetrics,
    Cancel,
    End,
    Generate,
    GenerateAll,
    Gone,
    Hello,
    Sampling,
    Status,
    Token,
    Tokens,
    WebEnd,
    WorkerEnd,
)
from protocol import Metrics as MetricsText
from worker import HELD_UP, LEAST_ALONG, Pace, Prompting, Request, Worker

WAIT_S = 20


class Wire:
    """Stands where the socket is: what arrives is put in by the test, what is sent is kept."""

    def __init__(self):
        self.arrivals = []
        self.sent = []
        self.status = Status("ready", 0.0)

    def receive(self, block):
        assert self.arrivals or not block, "the worker would wait for ever"
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def send(self, peer, message):
        self.sent.append((peer, message))

    def send_made(self, make):
        self.sent += make()

    def report(self, status):
        self.status = status

    def interrupt(self):
        pass

    def give_way(self):
        pass


class Bench:
    """A worker on a fake model, driven turn by turn."""

    def __init__(self, max_concurrent_requests=100, **model):
        self.wire = Wire()
        self.model = FakeModel(**model)
        self.worker = Worker(self.model, self.wire, frozenset([EOS]), max_concurrent_requests)

    def arrive(self, message, peer=b"web"):
        if isinstance(message, Generate):
            message = GenerateAll([message])
        if isinstance(message, GenerateAll) and (reason := self.wire.refuses(message)):
            self.wire.sent += [(peer, End(generate.id, reason)) for generate in message.generates]
            return
        self.wire.arrivals.append((peer, message))

    def turn(self):
        self.worker.receive()
        self.worker.admit()
        self.worker.turn_away()
        self.worker.decode()
        self.worker.tell()

    def run(self, most=500):
        """Turns until nothing is known any more."""
        for _ in range(most):
            if self.wire.arrivals:
                self.worker.receive()
            if not self.worker._known:
                break
            self.worker.admit()
            self.worker.decode()
            self.worker.tell()
        self.worker.tell()
        assert not self.worker._known, "requests are left over"
        self.assert_idle()

    def assert_idle(self):
        assert self.worker.slots.busy == 0
        assert not self.worker.queue
        assert not self.worker._untold
        assert self.worker._places_taken == 0
        assert (self.wire.status.running, self.wire.status.queued) == (0, 0)

    @property
    def tokens(self):
        """Request id → the token ids that were sent for it."""
        tokens = defaultdict(list)
        for _peer, message in self.wire.sent:
            for token in getattr(message, "tokens", []):
                tokens[token.id].append(token.token)
        return tokens

    @property
    def prompts(self):
        """Request id → its `Prompt`; fails when there are two, or when a token came before it."""
        prompts, begun = {}, set()
        for _peer, message in self.wire.sent:
            for prompt in getattr(message, "prompts", []):
                assert prompt.id not in prompts | dict.fromkeys(begun)
                prompts[prompt.id] = prompt
            begun |= {token.id for token in getattr(message, "tokens", [])}
            assert begun <= set(prompts), "a token before its prompt"
        return prompts

    @property
    def ends(self):
        """Request id → how it ended; fails when something comes after an end."""
        ends = {}
        for _peer, message in self.wire.sent:
            for word in message.tokens if isinstance(message, Tokens) else [message]:
                assert word.id not in ends, "a word after the last one"
                if isinstance(word, End):
                    ends[word.id] = word.reason
                elif word.finish_reason:
                    ends[word.id] = word.finish_reason
        return ends


def test_a_request_gets_its_tokens_and_one_end():
    bench = Bench()
    bench.arrive(Generate(1, [5, 6, 7], 4))
    bench.run()
    assert bench.tokens[1] == greedy([5, 6, 7], 4)
    assert bench.ends == {1: "length"}


def test_an_eos_token_ends_a_request_and_is_delivered():
    prompt = next([a, b] for a in range(50) for b in range(50) if greedy([a, b], 12)[-1] == EOS and len(greedy([a, b], 12)) > 2)
    bench = Bench()
    bench.arrive(Generate(1, prompt, 12))
    bench.run()
    assert bench.tokens[1] == greedy(prompt, 12)
    assert bench.ends == {1: "eos_token"}


def test_eos_as_the_last_allowed_token_is_an_eos():
    prompt = next([a, b] for a in range(50) for b in range(50) if greedy([a, b], 3)[-1] == EOS and len(greedy([a, b], 3)) == 3)
    bench = Bench()
    bench.arrive(Generate(1, prompt, 3))
    bench.run()
    assert bench.ends == {1: "eos_token"}


def test_the_window_ends_a_request_that_asks_for_more():
    bench = Bench(max_total_tokens=8)
    prompt = next([a, 1, 2, 3] for a in range(50) if EOS not in greedy([a, 1, 2, 3], 4))
    bench.arrive(Generate(1, prompt, 100))
    bench.run()
    assert bench.tokens[1] == greedy(prompt, 4)
    assert bench.ends == {1: "length"}


def test_a_newcomer_joins_while_others_run_and_disturbs_nobody():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 10))
    bench.turn()
    bench.turn()
    bench.arrive(Generate(2, [3], 10))
    bench.turn()
    bench.arrive(Generate(3, [4, 5, 6, 7], 10))
    bench.run()
    assert [bench.tokens[i] for i in (1, 2, 3)] == [greedy(p, 10) for p in ([1, 2], [3], [4, 5, 6, 7])]


def test_first_come_first_served_and_the_lowest_free_slot_first():
    bench = Bench(batch_size=2)
    bench.worker.max_batch_prefill_tokens = 1
    for i in range(4):
        bench.arrive(Generate(i, [10 + i], 3))
    bench.turn()
    assert [r.generate.id for r in bench.worker.slots.requests if r] == [0]
    bench.turn()
    assert [r.generate.id for r in bench.worker.queue] == [2, 3]
    bench.run()
    assert list(bench.ends) == sorted(bench.ends)


def test_every_step_names_every_live_slot():
    bench = Bench()
    for i in range(3):
        bench.arrive(Generate(i, [20 + i, 1], 6 + i))
    bench.turn()
    bench.turn()
    bench.turn()
    live = [slot for slot, _request in bench.worker.slots.live()]
    bench.worker.decode()
    assert bench.model.decoded_slots[-1] == live


def test_one_message_a_step_for_each_web_process():
    bench = Bench(batch_size=4)
    for i, peer in enumerate([b"a", b"b", b"a", b"b"]):
        bench.arrive(Generate(i, [30, i], 30), peer)
    for _ in range(4):
        bench.turn()
    live_peers = {request.peer for _slot, request in bench.worker.slots.live()}
    assert live_peers == {b"a", b"b"}
    bench.wire.sent.clear()
    bench.turn()
    assert Counter(peer for peer, _message in bench.wire.sent) == dict.fromkeys(live_peers, 1)


def test_a_first_token_does_not_wait_for_the_step_of_the_others():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.worker.receive()
    bench.worker.admit()
    bench.worker.tell()
    assert bench.tokens[1] == greedy([1, 2], 1)


def test_the_limit_of_concurrent_requests_is_exact():
    bench = Bench(max_concurrent_requests=3)
    for i in range(5):
        bench.arrive(Generate(i, [i + 1], 2))
    bench.run()
    assert [i for i, reason in bench.ends.items() if reason == "overloaded"] == [3, 4]


@pytest.mark.parametrize("turns", [0, 1, 3], ids=["waiting", "just prefilled", "decoding"])
def test_a_cancelled_request_frees_its_place_at_once(turns):
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 30))
    if turns == 0:
        bench.arrive(Generate(2, [3], 30))
        bench.turn()
        bench.arrive(Cancel(2, "client hung up"))
    else:
        for _ in range(turns):
            bench.turn()
        bench.arrive(Cancel(1, "client hung up"))
    bench.worker.receive()
    assert bench.worker.slots.busy == (1 if turns == 0 else 0)
    assert not bench.worker.queue
    assert list(bench.ends.values()) == ["cancelled"]


def test_cancelling_twice_or_what_is_unknown_is_no_error_and_no_answer():
    bench = Bench()
    bench.arrive(Cancel(99, "never was"))
    bench.arrive(Generate(1, [1], 5))
    bench.arrive(Cancel(1, "first"))
    bench.arrive(Cancel(1, "second"))
    bench.turn()
    assert bench.ends == {1: "cancelled"}
    bench.assert_idle()


def test_requests_of_a_web_process_that_is_gone_end_and_the_others_do_not_notice():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8), b"gone")
    bench.arrive(Generate(2, [3, 4], 8), b"here")
    bench.turn()
    bench.turn()
    bench.arrive(Gone(), b"gone")
    bench.run()
    assert bench.ends[1] == "cancelled"
    assert bench.tokens[2] == greedy([3, 4], 8)


def test_a_failed_prefill_ends_that_request_alone():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.turn()
    bench.model.fail_next_prefill = True
    bench.arrive(Generate(2, [3], 8))
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_a_row_that_is_not_a_number_ends_that_request_alone():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8))
    bench.turn()
    bench.turn()
    bench.model.nan_slots = {1}
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_an_exception_in_one_sampler_ends_that_request_alone(monkeypatch):
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8, Sampling(seed=7, typical_p=0.9), ignore_eos=True))
    bench.turn()
    bench.turn()
    broken = bench.worker._known[2].sampler
    monkeypatch.setattr(broken, "choose", lambda *_: 1 // 0)
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_a_request_that_cannot_be_planned_for_ends_alone():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8, Sampling(seed=7, temperature="hot")))
    bench.run()
    assert bench.ends[2] == "failed" and not bench.tokens[2]
    assert bench.tokens[1] == greedy([1, 2], 8)


@pytest.mark.parametrize("failing_at", range(1, 9))  # the last is the token with which it is forgotten
def test_a_token_that_cannot_be_told_ends_that_request_alone_and_once(failing_at, monkeypatch):
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8, top_n_tokens=1, ignore_eos=True))
    left = [failing_at]

    def describe(blocks, tokens, top_n):
        described = sampling_module.describe(blocks, tokens, top_n)
        if 1 in top_n:
            left[0] -= 1
            if left[0] == 0:
                described[top_n.index(1)] = RuntimeError("on purpose")
        return described

    monkeypatch.setattr(worker_module, "describe", describe)
    bench.run()
    assert bench.ends[2] == "failed"
    assert len(bench.tokens[2]) == failing_at - 1
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_who_wants_no_log_probabilities_gets_none_and_nobody_else_notices():
    def logprobs(*generates):
        bench = Bench()
        for generate in generates:
            bench.arrive(generate)
        bench.run()
        told = {}
        for _peer, message in bench.wire.sent:
            for token in message.tokens:
                told.setdefault(token.id, []).append((token.logprob, token.top))
        return told

    plain = Generate(1, [1, 2], 8, top_n_tokens=2)
    spared = Generate(2, [3], 8, logprobs=False)
    together = logprobs(plain, spared)
    assert together[1] == logprobs(plain)[1]
    assert set(map(str, together[2])) == set(map(str, logprobs(spared)[2])) == {"(None, [])"}


def test_the_device_does_not_run_ahead_of_what_can_be_told():
    bench = Bench(batch_size=1)
    makes = queue.SimpleQueue()
    bench.wire.send_made = makes.put
    bench.assert_idle = lambda: None  # not all is told by then
    bench.arrive(Generate(1, [1, 2], 8))
    running = threading.Thread(target=bench.run, daemon=True)
    running.start()
    waiting = [makes.get(timeout=WAIT_S)]
    with contextlib.suppress(queue.Empty):  # some of them only tell how the worker is doing
        while True:
            waiting.append(makes.get(timeout=0.2))
    assert running.is_alive()
    bench.wire.sent += [message for make in waiting for message in make()]
    assert bench.tokens[1] == greedy([1, 2], worker_module.MOST_UNTOLD)
    while running.is_alive() or not makes.empty():
        with contextlib.suppress(queue.Empty):
            bench.wire.sent += makes.get(timeout=0.01)()
    assert bench.tokens[1] == greedy([1, 2], 8)


class FakeHelper:
    made: ClassVar[list["FakeHelper"]] = []
    words, cpu = np.empty(0, np.int64), 3

    def __init__(self):
        self.made.append(self)
        self.looks, self.has_ended = [], False

    @staticmethod
    def can_help():
        return True

    def expect(self, logits, at):
        self.looks.append((logits, at))

    def end(self):
        self.has_ended = True


class FakeRehearsal:
    def __init__(self):
        self.expected = []

    def expect(self, at, cpu):
        self.expected.append((at, cpu))


def test_the_helper_is_told_when_to_expect_the_logits_of_each_prompt_and_step():
    bench = Bench(batch_size=3)
    bench.worker._helper = helper = FakeHelper()
    bench.worker._rehearsal = rehearsal = FakeRehearsal()
    for id, tokens in (1, 5), (2, 3):
        bench.arrive(Generate(id, [id], tokens, ignore_eos=True))
    began_at = time.monotonic()
    bench.worker.receive()
    while bench.worker._known:
        bench.worker.admit()
        bench.worker.decode()
    vocab = bench.model.vocab_size
    assert [logits for logits, _at in helper.looks] == [vocab] * 2 + [2 * vocab] * 2 + [vocab] * 2
    assert all(began_at < at < time.monotonic() + 1 for _logits, at in helper.looks)
    assert rehearsal.expected == [(at, helper.cpu) for _logits, at in helper.looks]


def test_a_prompt_is_expected_to_take_what_others_of_about_its_length_took(monkeypatch):
    bench, clock = Bench(batch_size=1, max_total_tokens=100), [0.0]
    bench.worker._helper, bench.worker._rehearsal = helper, _ = FakeHelper(), FakeRehearsal()
    prefill = bench.model.prefill

    def slow(slot, prompt):
        clock[0] += 1.0 if len(prompt) <= 32 else 2.0
        return prefill(slot, prompt)

    monkeypatch.setattr(bench.model, "prefill", slow)
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    expected_s = []
    for id, length in enumerate([20, 30, 17, 32, 40, 64, 33, 16]):
        bench.arrive(Generate(id, [1] * length, 1))
        bench.worker.receive()
        began_at = clock[0]
        bench.worker.admit()
        expected_s.append(helper.looks[-1][1] - began_at)
    assert expected_s == [0, 1, 1, 1, 0, 2, 2, 0], "of the first of a length nothing is known"


@pytest.mark.parametrize(
    ("device", "sampling", "helpers"), [("neuron", "host", 1), ("neuron", "device", 0), ("cpu", "host", 0)]
)
def test_there_is_a_helper_as_long_as_the_loop_runs_where_the_host_chooses_for_a_device(device, sampling, helpers, monkeypatch):
    monkeypatch.setattr(worker_module, "Helper", FakeHelper)
    monkeypatch.setattr(FakeHelper, "made", [])
    monkeypatch.setattr(FakeModel, "device", device)
    bench = Bench(sampling=sampling)
    bench.worker.drain()
    bench.worker.run()
    assert [helper.has_ended for helper in FakeHelper.made] == [True] * helpers


def test_tokens_that_only_a_whole_row_could_tell_are_counted():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8, Sampling(seed=7, typical_p=0.9), ignore_eos=True))
    bench.run()
    assert samples(bench.worker.metrics)["tgi_generated_tokens_in_full",] == 8


def test_a_device_that_samples_is_told_how_before_each_prompt_and_gives_no_log_probabilities():
    bench = Bench(batch_size=2, sampling="device")
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8, Sampling(seed=7, top_k=5, top_p=0.5, temperature=2.0)))
    bench.turn()
    bench.turn()
    assert bench.model.lines == {0: (1, 1.0, 1.0), 1: (5, 0.5, 2.0)}
    bench.arrive(Generate(3, [4, 5], 8))
    bench.run()
    assert bench.tokens[1] == greedy([1, 2], 8)
    assert bench.tokens[3] == greedy([4, 5], 8)
    logprobs = {token.logprob for _peer, message in bench.wire.sent for token in getattr(message, "tokens", [])}
    assert logprobs == {None}


def test_an_id_that_is_none_from_the_device_ends_that_request_alone():
    bench = Bench(sampling="device")
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8))
    bench.turn()
    bench.turn()
    bench.model.nan_slots = {1}
    bench.run()
    failed = next(message for _peer, message in bench.wire.sent if isinstance(message, End))
    assert (failed.id, failed.message) == (2, "the device chose a token that does not exist")
    assert bench.tokens[1] == greedy([1, 2], 8)


def test_an_exception_in_one_slots_bookkeeping_ends_that_request_alone(monkeypatch):
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.arrive(Generate(2, [3], 8))
    bench.turn()
    bench.turn()
    choose, second = worker_module.choose, bench.worker._known[2].sampler

    def choose_no_token_for_the_second(output, plan, helper):
        chosen, logits = choose(output, plan, helper)
        return [[] if sampler is second else token for sampler, token in zip(plan.samplers, chosen)], logits

    monkeypatch.setattr(worker_module, "choose", choose_no_token_for_the_second)
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


@pytest.mark.parametrize("what", ["choose", "describe"])
def test_when_no_token_can_be_chosen_or_told_what_runs_ends_and_the_loop_goes_on(what, monkeypatch):
    bench = Bench(batch_size=2)
    for i in (1, 2, 3):
        bench.arrive(Generate(i, [i], 8))
    bench.turn()
    bench.turn()

    def out_of_memory(*_):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(worker_module, what, out_of_memory)
    bench.run()
    assert [bench.ends[1], bench.ends[2]] == ["failed", "failed"]
    assert bench.tokens[3] == greedy([3], 8)


def test_who_has_waited_too_long_is_turned_away_and_nobody_else():
    bench = Bench(batch_size=1)
    bench.worker.max_queue_time_s = 10.0
    bench.arrive(GenerateAll([Generate(i, [i], 8, sent_at=time.monotonic() - 11) for i in (1, 2)]))
    bench.turn()  # the first of the two has a slot, so both may stay
    bench.arrive(Generate(3, [3], 8, sent_at=time.monotonic() - 11))
    bench.arrive(Generate(4, [4], 8, sent_at=time.monotonic() - 9))
    bench.worker.receive()
    bench.worker.turn_away()
    assert bench.ends == {3: "overloaded"}
    bench.run()
    for i in (1, 2, 4):
        assert bench.tokens[i] == greedy([i], 8)


def test_it_is_told_when_progress_is_due_and_that_none_is_when_there_is_nothing_to_do(monkeypatch):
    bench = Bench()
    due = []
    prefill = bench.model.prefill
    monkeypatch.setattr(bench.model, "prefill", lambda *a: due.append(bench.wire.status.due_at) or prefill(*a))
    bench.arrive(Generate(1, [1, 2], 3))
    bench.turn()
    assert due[0] > time.monotonic() + Pace.FIRST_S / 2
    assert bench.wire.status.due_at > time.monotonic()
    bench.run()
    assert bench.wire.status.due_at == 0


def test_patience_follows_the_pace_of_the_device():
    pace = Pace()
    assert pace.patience_s("prefill", 4000) > 4000, "nothing is known of a device yet, and it may be slow"
    pace.learn("decode", 30.0)  # the first takes long
    assert pace.patience_s("decode") > 30.0
    for _ in range(50):
        pace.learn("decode", 0.02)
    assert pace.patience_s("decode") == Pace.LEAST_S
    pace.learn("prefill", 10.0, tokens=100)
    assert pace.patience_s("prefill", 1000) == pytest.approx(2000), "a long prompt may take as much longer"


def test_a_long_prompt_is_run_in_parts_and_the_others_gain_a_token_after_each():
    bench = Bench()
    bench.model.prompt_part = 4
    bench.arrive(Generate(1, [1, 2], 20))
    bench.turn()
    bench.arrive(Generate(2, list(range(1, 11)), 5))
    gained = [len(bench.tokens[1])]
    while not bench.tokens[2]:
        bench.turn()
        gained.append(len(bench.tokens[1]))
    assert gained == [gained[0] + n for n in range(4)]  # 10 tokens are three parts
    bench.run()
    assert bench.tokens[1] == greedy([1, 2], 20)
    assert bench.tokens[2] == greedy(list(range(1, 11)), 5)


def test_a_long_prompt_goes_along_with_the_steps_of_others():
    bench = Bench()
    bench.model.prompt_part, bench.model.most_along = 8, 12
    bench.arrive(Generate(1, [1, 2], 20))
    bench.turn()
    long = list(range(1, 34))
    bench.arrive(Generate(2, long, 5))
    gained = [len(bench.tokens[1])]
    bench.turn()
    gained.append(len(bench.tokens[1]))
    bench.arrive(Generate(3, [7, 8, 9], 5))  # it waits for the long one
    while not bench.tokens[2]:
        bench.turn()
        gained.append(len(bench.tokens[1]))
    assert gained == list(range(gained[0], gained[0] + len(gained))), "each turn is a step"
    assert sum(bench.model.along) == len(long) and max(bench.model.along) <= 8
    bench.run()
    for i, prompt, tokens in (1, [1, 2], 20), (2, long, 5), (3, [7, 8, 9], 5):
        assert bench.tokens[i] == greedy(prompt, tokens)


def test_no_prompt_goes_along_where_nobody_runs_or_its_tokens_are_limited_or_told_of():
    bench = Bench()
    bench.model.prompt_part, bench.model.most_along = 4, 12
    long = list(range(1, 20))
    bench.arrive(Generate(1, long, 20, ignore_eos=True))
    while not bench.tokens[1]:
        bench.turn()
    bench.arrive(Generate(2, long, 20, prompt_logprobs=True, ignore_eos=True))
    bench.turn()
    bench.worker.max_batch_prefill_tokens = 4
    bench.arrive(Generate(3, long, 5))
    bench.run()
    assert bench.model.along == []


def test_where_next_to_nothing_of_a_prompt_could_go_along_none_does():
    bench = Bench()
    bench.model.prompt_part, bench.model.most_along = 4, LEAST_ALONG - 1
    bench.arrive(Generate(1, [1], 20, ignore_eos=True))
    bench.turn()
    bench.arrive(Generate(2, list(range(1, 20)), 5))
    bench.run()
    assert bench.model.along == []


def test_when_those_who_ran_have_ended_the_rest_of_a_prompt_is_run_alone():
    bench = Bench()
    bench.model.prompt_part, bench.model.most_along = 8, 12
    bench.arrive(Generate(1, [1, 2], 3))
    bench.turn()
    long = list(range(1, 39))
    bench.arrive(Generate(2, long, 2))
    bench.run()
    assert 0 < sum(bench.model.along) < len(long)
    assert bench.tokens[2] == greedy(long, 2)


def test_a_step_that_fails_with_a_prompt_along_ends_them_all():
    bench = Bench()
    bench.model.prompt_part, bench.model.most_along = 4, 12
    bench.arrive(Generate(1, [1], 8))
    bench.turn()
    bench.arrive(Generate(2, list(range(1, 20)), 8))
    bench.model.fail_next_decode = True
    bench.run()
    assert bench.ends[1] == bench.ends[2] == "failed"


def test_no_more_of_a_prompt_goes_along_than_those_who_run_can_wait_for():
    bench = Bench()
    bench.model.prompt_part, bench.model.most_along = 128, 100
    prompting = Prompting(0, Request(b"", 0, Generate(1, [1] * 1000, 5), 0.0, None, None, 5), True)
    assert bench.worker._end_of_part_along(prompting) == LEAST_ALONG, "nothing is known yet"
    for _ in range(50):
        bench.worker._pace.learn("decode", 0.020)
        bench.worker._pace.learn("prefill", 0.100, 100)
    assert bench.worker._end_of_part_along(prompting) == pytest.approx(HELD_UP * 20, abs=1)
    bench.worker._pace.learn("along", 0.100, 20)  # it is further from its beginning, and each token takes longer
    assert bench.worker._end_of_part_along(prompting) == LEAST_ALONG
    prompting.begin = 1000 - LEAST_ALONG - 1
    assert bench.worker._end_of_part_along(prompting) == 998, "no token is left over"


@pytest.mark.parametrize("goes", ["cancel", "gone"])
def test_who_goes_in_the_middle_of_his_prompt_leaves_nothing_behind(goes):
    bench = Bench(batch_size=1)
    bench.model.prompt_part = 2
    bench.arrive(Generate(1, [1, 2, 3, 4, 5], 5))
    bench.turn()
    assert bench.worker.slots.busy == 1 and not bench.tokens[1]
    bench.arrive(Cancel(1, "hung up") if goes == "cancel" else Gone())
    bench.arrive(Generate(2, [6, 7, 8], 5), peer=b"other")
    bench.run()
    assert bench.tokens[2] == greedy([6, 7, 8], 5)


def test_a_part_that_fails_ends_that_request_alone():
    bench = Bench()
    bench.model.prompt_part = 2
    bench.arrive(Generate(1, [1], 8))
    bench.turn()
    bench.model.fail_next_prefill = True  # the fake meets it in the last part
    bench.arrive(Generate(2, [1, 2, 3], 8))
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1], 8)


def prompts_of_turn(bench):
    """How many prompts one turn runs."""
    before = len(bench.worker.queue)
    bench.turn()
    return before - len(bench.worker.queue)


@pytest.mark.parametrize(("most", "of_turns"), [(1, [1, 1, 1]), (5, [2, 1]), (100, [3])])
def test_as_many_tokens_of_prompts_are_run_between_two_steps_as_are_allowed(most, of_turns):
    bench = Bench()
    bench.worker.max_batch_prefill_tokens = most
    for i in (1, 2, 3):
        bench.arrive(Generate(i, [i, i], 30))
    bench.worker.receive()
    assert [prompts_of_turn(bench) for _ in of_turns] == of_turns
    bench.run()


@pytest.mark.parametrize(
    ("running", "waiting", "free", "prompts"),
    [(0, 8, 8, 7), (1, 1, 7, 1), (1, 7, 7, 6), (3, 5, 5, 4), (4, 1, 4, 1), (8, 2, 8, 1), (8, 4, 8, 2), (8, 4, 1, 1)],
)
def test_those_who_run_are_held_up_while_many_wait_for_free_slots(running, waiting, free, prompts):
    """Until they are no more than three for ten who run; nobody is held up for whom there is no slot."""
    bench = Bench(batch_size=running + free)
    for i in range(running):
        bench.arrive(Generate(i + 1, [1], 40))
        bench.turn()
    for i in range(waiting):
        bench.arrive(Generate(100 + i, [1, 2], 30))
    bench.worker.receive()
    assert prompts_of_turn(bench) == prompts
    bench.run()


def test_they_are_held_up_for_no_more_than_so_many_tokens(monkeypatch):
    monkeypatch.setattr(worker_module, "MOST_PROMPT_TOKENS", 10)
    bench = Bench(batch_size=16)
    for i in range(12):
        bench.arrive(Generate(i + 1, [1, 2, 3, 4], 30))
    bench.worker.receive()
    assert [prompts_of_turn(bench) for _ in range(5)] == [2, 2, 2, 2, 2]
    bench.run()


def test_a_prompt_in_parts_holds_nobody_up_for_more_than_one():
    bench = Bench(batch_size=4, max_total_tokens=64)
    bench.model.prompt_part = 2
    bench.arrive(Generate(1, [1], 30))
    bench.turn()
    for i in (2, 3, 4):
        bench.arrive(Generate(i, [1, 2, 3, 4, 5], 30))
    bench.worker.receive()
    steps = bench.worker.steps
    while bench.worker.queue or bench.worker._prompting:
        bench.turn()
    assert bench.worker.steps - steps >= 6, "a step after every part but those that end a prompt"
    bench.run()


def test_who_hangs_up_while_prompts_are_run_is_gone_before_the_next_one():
    bench = Bench(batch_size=4)
    prefill = bench.model.prefill

    def hang_up(slot, prompt):
        bench.arrive(Cancel(2, "client hung up"))
        return prefill(slot, prompt)

    bench.model.prefill = hang_up
    for i in (1, 2, 3):
        bench.arrive(Generate(i, [i], 30))
    bench.worker.receive()
    bench.worker.admit()
    assert bench.ends == {2: "cancelled"}
    assert [request.generate.id for _, request in bench.worker.slots.live()] == [1, 3]
    bench.run()


def test_a_prompt_that_is_longer_than_what_is_allowed_is_run_all_the_same():
    bench = Bench()
    bench.worker.max_batch_prefill_tokens = 2
    bench.arrive(Generate(1, [1, 2, 3, 4, 5], 5))
    bench.run()
    assert bench.tokens[1] == greedy([1, 2, 3, 4, 5], 5)


def test_those_that_run_are_held_up_only_for_enough_prompts_or_after_enough_steps():
    bench = Bench(batch_size=4)
    bench.worker.waiting_served_ratio, bench.worker.max_waiting_tokens = 1.0, 3
    bench.worker.max_batch_prefill_tokens = 1
    bench.arrive(GenerateAll([Generate(1, [1], 30), Generate(2, [2], 30)]))
    bench.turn()  # nothing runs: the first is taken at once
    assert bench.worker.slots.busy == 1
    bench.turn()  # one waits for one that runs: enough
    assert bench.worker.slots.busy == 2
    bench.arrive(Generate(3, [3], 30))
    steps = bench.worker.steps
    while bench.worker.slots.busy == 2:
        bench.turn()
    assert bench.worker.steps - steps == 3
    bench.run()


def test_a_failed_step_ends_what_runs_and_the_loop_goes_on():
    bench = Bench(batch_size=2)
    for i in (1, 2, 3):
        bench.arrive(Generate(i, [i], 8))
    bench.turn()
    bench.turn()
    bench.model.fail_next_decode = True
    bench.run()
    assert [bench.ends[1], bench.ends[2]] == ["failed", "failed"]
    assert bench.tokens[3] == greedy([3], 8)


def test_what_a_request_gained_goes_out_before_the_word_that_ends_it():
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 8))
    bench.worker.receive()
    bench.worker.admit()
    bench.model.fail_next_decode = True
    bench.worker.decode()
    bench.worker.tell()
    kinds = [type(message) for _peer, message in bench.wire.sent]
    assert kinds == [Tokens, End]


def test_stopping_ends_every_open_request():
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 30))
    bench.arrive(Generate(2, [3], 30))
    bench.turn()
    bench.worker.stop()
    bench.worker.run()
    assert set(bench.ends) == {1, 2}
    assert bench.worker.slots.busy == 0


def test_draining_finishes_what_is_known_and_refuses_what_is_new():
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 6))
    bench.arrive(Generate(2, [3], 6))
    bench.turn()
    bench.worker.drain()
    bench.arrive(Generate(3, [4], 6))
    bench.worker.run()
    assert bench.ends[3] == "draining"
    assert [bench.tokens[1], bench.tokens[2]] == [greedy([1, 2], 6), greedy([3], 6)]
    assert bench.wire.status.phase == "draining"


def test_sampled_tokens_do_not_depend_on_the_company():
    sampling = Sampling(seed=11, temperature=1.3, top_k=20)
    alone, crowded = Bench(), Bench()
    alone.arrive(Generate(1, [9, 9], 12, sampling))
    alone.run()
    for i in (2, 3):
        crowded.arrive(Generate(i, [i], 30, Sampling(seed=i)))
    crowded.turn()
    crowded.turn()
    crowded.arrive(Generate(1, [9, 9], 12, sampling))
    crowded.run()
    assert alone.tokens[1] == crowded.tokens[1]


def test_connected_is_said_when_every_web_process_is_ready(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_module.configuration, "run_dir", lambda: tmp_path)
    caplog.set_level("INFO")
    bench = Bench()
    bench.worker.web_processes = 2
    for hello in (Hello(1, False), Hello(1, True), Hello(1, True)):
        bench.arrive(hello)
    bench.turn()
    assert not (tmp_path / "ready").exists()
    bench.arrive(Hello(2, True))
    bench.turn()
    assert (tmp_path / "ready").exists()
    assert "Connected" in caplog.messages


arrivals = st.tuples(
    st.integers(0, 12),  # the turn it comes in
    st.lists(st.integers(1, 49), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([b"a", b"b"]),
    st.one_of(st.none(), st.integers(0, 20)),  # the turn it is cancelled in
)
troubles = st.dictionaries(st.integers(0, 25), st.sampled_from(["prefill", "decode", "a is gone"]), max_size=3)


@settings(max_examples=200)
@given(st.lists(arrivals, max_size=10), troubles, st.sampled_from([(None, 0), (3, 0), (3, LEAST_ALONG), (8, 12)]))
def test_whatever_happens_everyone_gets_exactly_one_end_and_nothing_leaks(schedule, trouble, parts):
    bench = Bench(max_concurrent_requests=6, max_total_tokens=24)
    bench.model.prompt_part, bench.model.most_along = parts
    for turn in range(30):
        for i, (arrives, prompt, most, peer, cancelled) in enumerate(schedule):
            if arrives == turn:
                bench.arrive(Generate(i, prompt, most), peer)
            if cancelled is not None and cancelled == turn:
                bench.arrive(Cancel(i, "test"), peer)
        bench.model.fail_next_prefill |= trouble.get(turn) == "prefill"
        bench.model.fail_next_decode |= trouble.get(turn) == "decode"
        if trouble.get(turn) == "a is gone":
            bench.arrive(Gone(), b"a")
        bench.arrive(Cancel(10**9, "keeps the loop from waiting"))
        bench.turn()
    bench.model.fail_next_prefill = bench.model.fail_next_decode = False
    bench.run()
    assert set(bench.ends) == set(range(len(schedule)))
    assert set(bench.tokens) <= set(bench.prompts)
    for i, (_arrives, prompt, most, _peer, _cancelled) in enumerate(schedule):
        expected = greedy(prompt, min(most, 24 - len(prompt)))
        assert bench.tokens[i] == expected[: len(bench.tokens[i])]
        if bench.ends[i] in ("length", "eos_token"):
            assert bench.tokens[i] == expected


def test_a_token_says_what_its_logits_say():
    bench = Bench()
    bench.arrive(Generate(1, [1, 2, 3], 1, top_n_tokens=3))
    bench.run()
    (message,) = [m for _p, m in bench.wire.sent if isinstance(m, Tokens)]
    (token,) = message.tokens
    assert isinstance(token, Token)
    assert token.top[0] == (token.token, token.logprob)
    assert [lp for _i, lp in token.top] == sorted((lp for _i, lp in token.top), reverse=True)


def test_every_prompt_that_was_run_is_told_before_its_first_token_with_how_long_it_waited(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now[0])
    bench = Bench(batch_size=1)
    bench.arrive(Generate(1, [1, 2], 2))
    bench.arrive(Generate(2, [3], 2))
    bench.worker.receive()
    now[0] = 101.5
    bench.run()
    assert [(prompt.id, prompt.queued_s, prompt.logprobs, prompt.top) for prompt in bench.prompts.values()] == [
        (1, 1.5, [], []),
        (2, 1.5, [], []),
    ]


def test_log_probabilities_of_a_prompt_come_with_it_and_its_tokens_stay_the_same():
    prompt = [5, 6, 7, 8, 9]
    bench = Bench()
    bench.arrive(Generate(1, prompt, 4, top_n_tokens=2, prompt_logprobs=True))
    bench.arrive(Generate(2, prompt, 4, top_n_tokens=2))
    bench.run()
    assert bench.tokens[1] == bench.tokens[2] == greedy(prompt, 4)
    expected = [torch.log_softmax(next_logits(prompt[: n + 1]), -1) for n in range(4)]
    told = bench.prompts[1]
    assert told.logprobs == pytest.approx([row[token].item() for row, token in zip(expected, prompt[1:])], abs=1e-5)
    assert [[token for token, _ in place] for place in told.top] == [row.topk(2).indices.tolist() for row in expected]
    assert (bench.prompts[2].logprobs, bench.prompts[2].top) == ([], [])


@pytest.mark.parametrize("failure", ["prefill", "not a number"])
def test_a_failure_while_a_prompt_is_scored_ends_that_request_alone(failure, monkeypatch):
    bench = Bench()
    bench.arrive(Generate(1, [1, 2], 8))
    bench.turn()
    if failure == "prefill":
        bench.model.fail_next_prefill = True
    else:
        monkeypatch.setattr(bench.model, "score", lambda slot, prompt: iter([torch.full((len(prompt), 50), float("nan"))]))
    bench.arrive(Generate(2, [3, 4, 5], 8, prompt_logprobs=True))
    bench.run()
    assert bench.ends[2] == "failed"
    assert bench.tokens[1] == greedy([1, 2], 8)


@pytest.fixture(scope="module")
def early_end():
    """A prompt whose third token is an EOS, of at most 8."""
    return next([a, b] for a in range(50) for b in range(50) if len(t := greedy([a, b], 8)) == 3 and t[-1] == EOS)


def test_no_eos_before_min_new_tokens(early_end):
    bench = Bench()
    bench.arrive(Generate(1, early_end, 8, min_new_tokens=5))
    bench.run()
    assert EOS not in bench.tokens[1][:5]
    assert len(bench.tokens[1]) >= 5
    assert bench.tokens[1][:2] == greedy(early_end, 2)


def test_an_eos_that_is_ignored_does_not_end_a_request(early_end):
    bench = Bench()
    bench.arrive(Generate(1, early_end, 8, ignore_eos=True))
    bench.run()
    assert bench.tokens[1][2] == EOS
    assert len(bench.tokens[1]) == 8
    assert bench.ends == {1: "length"}


def samples(metrics):
    """(name, labels) → value, as Prometheus' own parser reads it; counters by the name they are written with."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name = re.match(r"\w+", line)[0]
            ((parsed,),) = (family.samples for family in text_string_to_metric_families(line + "\n"))
            key = (name, *(f"{k}={v}" for k, v in sorted(parsed.labels.items())))
            assert key not in found
            found[key] = parsed.value
    return found


def types(metrics):
    lines = metrics.render().decode().splitlines()
    return dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))


def bounds(metrics, name):
    """The upper bounds of a histogram's buckets, the same for each label."""
    return list(dict.fromkeys(float(key[1].removeprefix("le=")) for key in samples(metrics) if key[0] == f"{name}_bucket"))


def with_limits():
    metrics = Metrics()
    metrics.set_limits(4, 200, 400)
    return metrics


TGI = {
    "counter": "request_count request_success request_failure batch_inference_count batch_inference_success "
    "batch_inference_failure batch_concat",
    "gauge": "queue_size batch_current_size batch_current_max_tokens batch_max_total_tokens",
    "summary": "request_skipped_tokens",
    "histogram": "request_duration request_validation_duration request_queue_duration request_inference_duration "
    "request_mean_time_per_token_duration request_generated_tokens request_input_length request_max_new_tokens "
    "batch_next_size batch_inference_duration batch_forward_duration batch_decode_duration batch_filter_duration "
    "batch_concat_duration",
}


def test_the_metrics_of_tgi_are_there_by_name_and_type():
    found = types(with_limits())
    expected = {f"tgi_{name}": kind for kind, names in TGI.items() for name in names.split()}
    assert expected.items() <= found.items()
    assert all(name.startswith("tgi_") for name in found)


def test_the_text_is_what_prometheus_reads():
    metrics = with_limits()
    families = list(text_string_to_metric_families(metrics.render().decode()))
    assert {family.name: family.type for family in families} == types(metrics)
    assert all(family.documentation for family in families)


def test_every_series_is_there_from_the_start_and_counters_have_no_suffix():
    found = samples(with_limits())
    for err in ("overloaded", "validation", "incomplete", "template", "generation", "dropped"):
        assert found["tgi_request_failure", f"err={err}"] == 0
    for method in ("prefill", "decode"):
        for name in ("inference_count", "inference_success", "inference_failure", "forward_duration_count"):
            assert found[f"tgi_batch_{name}", f"method={method}"] == 0
    for reason in ("backpressure", "wait_exceeded"):
        assert found["tgi_batch_concat", f"reason={reason}"] == 0
    assert found["tgi_request_count",] == found["tgi_steps",] == found["tgi_request_skipped_tokens_sum",] == 0
    assert {value for key, value in found.items() if key[0] not in ("tgi_slots_total", "tgi_batch_max_total_tokens")} == {0}
    assert (found["tgi_slots_total",], found["tgi_batch_max_total_tokens",]) == (4, 1600)
    suffixed = {key[0] for key in found if key[0].endswith(("_total", "_created"))}
    assert suffixed == {"tgi_slots_total"}


def test_buckets_are_tgis():
    metrics = with_limits()
    infinity = [float("inf")]
    durations = [0.0001 * 1.5**k for k in range(1, 36)]
    for name in [name for name in types(metrics) if name.endswith("duration")]:
        assert bounds(metrics, name) == pytest.approx(durations + infinity)
    assert ("tgi_batch_forward_duration_bucket", "le=0.00015000000000000001", "method=decode") in samples(metrics)
    assert bounds(metrics, "tgi_batch_next_size") == [*range(1, 1025), *infinity]
    assert bounds(metrics, "tgi_request_input_length") == pytest.approx([2 * n for n in range(1, 101)] + infinity)
    for name in ("tgi_request_generated_tokens", "tgi_request_max_new_tokens"):
        assert bounds(metrics, name) == pytest.approx([4 * n for n in range(1, 101)] + infinity)


def test_before_the_limits_are_known_everything_else_is_there():
    missing = set(types(with_limits())) - set(types(Metrics()))
    assert missing == {"tgi_request_input_length", "tgi_request_generated_tokens", "tgi_request_max_new_tokens"}


SUCCESS = Answered(
    status=200,
    outcome="success",
    duration_s=4.0,
    validation_s=0.25,
    queue_s=0.5,
    inference_s=3.0,
    first_token_s=1.0,
    input_tokens=10,
    generated_tokens=6,
    max_new_tokens=20,
)


def changed(metrics, *answered):
    """The series that these answers change, buckets apart → by how much."""
    before = samples(metrics)
    for message in answered:
        assert metrics.aside(message) is None
    after = samples(metrics)
    names = [key for key in after if "_bucket" not in key[0] and after[key] != before.get(key, 0)]
    return {" ".join(key).removeprefix("tgi_"): after[key] - before.get(key, 0) for key in names}


def test_a_request_that_ends_well_is_counted_once_with_all_its_times():
    assert changed(with_limits(), SUCCESS) == {
        "request_count": 1,
        "request_success": 1,
        "request_duration_count": 1,
        "request_duration_sum": 4.0,
        "request_validation_duration_count": 1,
        "request_validation_duration_sum": 0.25,
        "request_queue_duration_count": 1,
        "request_queue_duration_sum": 0.5,
        "request_inference_duration_count": 1,
        "request_inference_duration_sum": 3.0,
        "request_mean_time_per_token_duration_count": 1,
        "request_mean_time_per_token_duration_sum": 0.5,
        "request_time_to_first_token_duration_count": 1,
        "request_time_to_first_token_duration_sum": 1.0,
        "request_generated_tokens_count": 1,
        "request_generated_tokens_sum": 6,
        "request_input_length_count": 1,
        "request_input_length_sum": 10,
        "request_max_new_tokens_count": 1,
        "request_max_new_tokens_sum": 20,
    }


def test_a_success_without_a_token_divides_by_nothing():
    found = changed(with_limits(), Answered(200, "success"))
    assert found["request_success"] == 1
    assert "request_mean_time_per_token_duration_count" not in found


@pytest.mark.parametrize(
    ("answered", "found"),
    [
        (Answered(422, "validation"), {"request_count": 1, "request_failure err=validation": 1, "http_errors status=422": 1}),
        (Answered(500, "other"), {"request_count": 1, "request_failure err=generation": 1, "http_errors status=500": 1}),
        (Answered(499, "dropped"), {"request_count": 1, "request_failure err=dropped": 1, "client_hang_ups": 1}),
        (Answered(0, "dropped"), {"request_count": 1, "request_failure err=dropped": 1}),
        (Answered(404), {"http_errors status=404": 1}),
        (Answered(418), {"http_errors status=418": 1}),
        (Answered(200), {}),
    ],
    ids=str,
)
def test_what_does_not_end_well_is_counted_by_its_reason(answered, found):
    assert changed(with_limits(), answered) == found


def test_a_refused_request_counts_its_prompt_where_it_was_counted():
    found = changed(with_limits(), Answered(429, "overloaded", input_tokens=10, max_new_tokens=20))
    assert (found["request_input_length_sum"], found["request_max_new_tokens_sum"]) == (10, 20)
    assert "request_duration_count" not in found


def test_a_request_whose_web_process_died_counts_as_dropped_once():
    bench = Bench()
    bench.arrive(GenerateAll([Generate(1, [1, 2], 8), Generate(2, [1, 2], 8)]), b"gone")
    bench.arrive(Generate(3, [3, 4], 2), b"here")
    bench.turn()
    bench.arrive(Gone(), b"gone")
    bench.run()
    found = samples(bench.worker.metrics)
    assert found["tgi_request_count",] == found["tgi_request_failure", "err=dropped"] == 1
    assert found["tgi_client_hang_ups",] == 0, "no client did"


def test_prefills_and_steps_are_counted_and_timed_and_so_are_their_failures():
    bench = Bench(batch_size=2)
    bench.worker.max_batch_prefill_tokens = 1
    prompts = [[a, 9] for a in range(50) if EOS not in greedy([a, 9], 4)][:3]
    for i, prompt in enumerate(prompts):
        bench.arrive(Generate(i, prompt, 4))
    bench.run()  # two join one after the other, the third when the first is done, beside the second
    bench.model.fail_next_prefill = True
    bench.arrive(Generate(3, prompts[0], 4))
    bench.run()
    bench.model.fail_next_decode = True
    bench.arrive(Generate(4, prompts[0], 4))
    bench.run()
    found = samples(bench.worker.metrics)
    steps = bench.worker.steps
    by_method = {
        (name, method): found[f"tgi_batch_inference_{name}", f"method={method}"]
        for name in ("count", "success", "failure")
        for method in ("prefill", "decode")
    }
    assert by_method == {
        ("count", "prefill"): 5,
        ("count", "decode"): steps + 1,
        ("success", "prefill"): 4,
        ("success", "decode"): steps,
        ("failure", "prefill"): 1,
        ("failure", "decode"): 1,
    }
    for name in ("inference", "forward", "decode", "filter"):
        assert found[f"tgi_batch_{name}_duration_count", "method=prefill"] == 4
        assert found[f"tgi_batch_{name}_duration_count", "method=decode"] == steps
    assert found["tgi_batch_concat", "reason=backpressure"] == 2
    assert found["tgi_batch_concat_duration_count", "method=decode"] == 2
    assert found["tgi_batch_next_size_sum",] == found["tgi_batch_next_size_count",] == 5
    assert found["tgi_steps",] == found["tgi_inter_token_latency_duration_count",] == steps > 0
    assert found["tgi_generated_tokens",] == 3 * 4 + 1


def test_the_time_between_tokens_counts_what_others_held_up_but_not_the_time_when_nothing_ran(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now[0])
    bench = Bench()

    def slow(run, seconds):
        def slowly(*arguments):
            now[0] += seconds
            return run(*arguments)

        return slowly

    monkeypatch.setattr(bench.model, "prefill", slow(bench.model.prefill, 2.0))
    monkeypatch.setattr(bench.model, "decode", slow(bench.model.decode, 0.5))
    prompt = next([a, 9] for a in range(50) if EOS not in greedy([a, 9], 9))
    bench.arrive(Generate(1, prompt, 9))
    bench.turn()  # 2 s until the first token, which follows none; then 0.5 s
    bench.turn()  # 0.5 s
    bench.arrive(Generate(2, prompt, 2))
    bench.turn()  # 2.5 s: a prompt joined
    found = samples(bench.worker.metrics)
    assert found["tgi_inter_token_latency_duration_sum",] == 0.5 + 0.5 + 2.5
    assert found["tgi_batch_concat_duration_sum", "method=decode"] == 2.0
    assert found["tgi_batch_forward_duration_sum", "method=prefill"] == 4.0
    assert found["tgi_batch_forward_duration_sum", "method=decode"] == 1.5
    bench.run()
    before = samples(bench.worker.metrics)["tgi_inter_token_latency_duration_sum",]
    now[0] += 1000
    bench.arrive(Generate(3, prompt, 2))
    bench.run()
    assert samples(bench.worker.metrics)["tgi_inter_token_latency_duration_sum",] == before + 0.5


def test_the_gauges_say_how_it_is_at_the_moment(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now[0])
    bench = Bench(batch_size=1, max_total_tokens=40)

    def gauges():
        names = ["queue_size", "slots_busy", "batch_current_size", "batch_current_max_tokens", "last_step_age_seconds"]
        found = samples(bench.worker.metrics)
        return [found[f"tgi_{name}",] for name in names]

    assert gauges() == [0, 0, 0, 0, 0]
    now[0] = 500.0
    prompt = next([a, 9] for a in range(50) if EOS not in greedy([a, 9], 30))
    bench.arrive(Generate(1, prompt, 30))
    bench.arrive(Generate(2, prompt, 100))
    bench.turn()
    assert gauges() == [1, 1, 1, 32, 0]
    now[0] = 507.0
    assert gauges() == [1, 1, 1, 32, 7]
    bench.turn()
    assert gauges() == [1, 1, 1, 32, 0]
    bench.arrive(Cancel(1, "test"))
    bench.turn()
    assert gauges() == [0, 1, 1, 40, 0]
    bench.run()
    now[0] = 600.0
    assert gauges() == [0, 0, 0, 0, 0]


def test_the_age_of_the_last_step_grows_while_the_first_prompt_hangs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now[0])
    bench, ages = Bench(), []

    def hang(slot, prompt):
        now[0] += 30
        ages.append(samples(bench.worker.metrics)["tgi_last_step_age_seconds",])
        return next_logits(prompt)

    monkeypatch.setattr(bench.model, "prefill", hang)
    bench.arrive(Generate(1, [1], 1))
    bench.run()
    assert ages == [30]


def test_a_phase_of_the_boot_tells_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now[0])
    metrics, wire = Metrics(), Wire()
    with worker_module._phase(wire, metrics, "loading", "weights"):
        now[0] = 112.5
    assert wire.status == Status("loading", 100.0)
    assert samples(metrics)["tgi_boot_phase_seconds", "phase=loading"] == 12.5


def test_labels_and_help_cannot_break_the_text():
    metrics = with_limits()
    nasty = 'a"b\\c\nd{}'
    metrics.series("boot_phase_seconds", nasty).set(1.5)
    (family,) = [f for f in text_string_to_metric_families(metrics.render().decode()) if f.name == "tgi_boot_phase_seconds"]
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"phase": nasty}, 1.5)]


class Served:
    """A worker that runs on a thread behind a real socket, and a web process' end that keeps what it gets."""

    def __init__(self, folder):
        metrics = Metrics()
        self.end = WorkerEnd(f"ipc://{folder}/worker.sock", on_aside=metrics.aside)
        self.model = FakeModel()
        self.worker = Worker(self.model, self.end, frozenset([EOS]), 10, metrics=metrics)
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        self.got = queue.SimpleQueue()
        self.web = WebEnd(f"ipc://{folder}/worker.sock", self.got.put, lambda: None)

    def next(self, kind):
        while not isinstance(message := self.got.get(timeout=WAIT_S), kind):
            pass
        return message

    def close(self):
        self.model.may_decode.set()
        self.worker.stop()
        self.thread.join(WAIT_S)
        self.web.close()
        self.end.close()


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path)
    yield served
    served.close()


def test_metrics_are_answered_while_the_device_hangs_in_a_step(served):
    served.model.may_decode.clear()
    served.web.send(GenerateAll([Generate(1, [1, 2], 8)]))
    assert served.next(Tokens).prompts[0].id == 1  # the first token is there: what follows is the step
    served.web.send(SUCCESS)
    served.web.send(AskMetrics(7))
    answer = served.next(MetricsText)
    assert answer.id == 7
    assert b"\ntgi_slots_busy 1.0\n" in answer.text
    assert b"\ntgi_request_count 1.0\n" in answer.text
    assert not served.model.may_decode.is_set()


def queries(dashboard):
    panels = dashboard["panels"] + [inner for panel in dashboard["panels"] for inner in panel.get("panels", [])]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_nothing_that_is_not_there():
    dashboard = json.loads((HERE / "deploy" / "grafana-dashboard.json").read_text())
    metrics = with_limits()
    metrics.series("boot_phase_seconds", "loading").set(1)
    exposed = {key[0] for key in samples(metrics)}
    asked = {name for query in queries(dashboard) for name in re.findall(r"tgi_\w+", query)}
    assert asked <= exposed
    assert {"tgi_request_time_to_first_token_duration_bucket", "tgi_slots_busy", "tgi_last_step_age_seconds"} <= asked


def test_what_one_http_request_asks_for_is_taken_as_a_whole_or_not_at_all():
    bench = Bench(max_concurrent_requests=4)
    bench.arrive(Generate(1, [1], 3))
    bench.arrive(GenerateAll([Generate(i, [1], 3) for i in (2, 3, 4, 5)]))
    bench.arrive(GenerateAll([Generate(i, [1], 3) for i in (6, 7, 8)]))
    bench.run()
    assert {i for i, end in bench.ends.items() if end == "overloaded"} == {2, 3, 4, 5}
    assert set(bench.tokens) == {1, 6, 7, 8}


def test_a_request_that_cannot_be_sampled_for_ends_alone():
    bench = Bench()
    impossible = Generate(1, [1], 3, Sampling(logit_bias=[(2**64 - 1, 1.0)]))
    bench.arrive(GenerateAll([impossible, Generate(2, [1], 2)]))
    bench.run()
    assert bench.ends[1] == "failed"
    assert len(bench.tokens[2]) == 2


def test_what_a_process_aside_has_compiled_is_not_compiled_again(tmp_path):
    code = """
import sys, torch, logits, sampling, worker
print(sampling.are_kept())
if sys.argv[1:]:
    print([process.wait() for process in worker._compile_aside([torch.float32])])
sampling.compile_loops([torch.float32])
loops = {**vars(logits), **vars(sampling)}
print({name for name, loop in loops.items() if hasattr(loop, "stats") and loop.stats.cache_misses} - {"_uniform"} or "none")
"""
    told = []
    for first in (["aside"], []):
        command = [sys.executable, "-c", code, *first]
        ran = subprocess.run(
            command, cwd=HERE, env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        told.append(ran.stdout.split("\n"))
    assert told == [["False", "[0]", "none", ""], ["True", "none", ""]]
