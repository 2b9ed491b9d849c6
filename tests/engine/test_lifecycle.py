"""A request from its arrival to its end: admission, cancelling, waiting too long."""

import time

import pytest
from fakes.model import greedy
from loop import ENGINES, Driven, on_every_engine

from engine.link import PeerLost
from protocol import Cancel, Generate, SamplingParams, SubmitRequests

LONG = list(range(1, 31))  # a prompt of several chunks


def test_there_is_room_for_a_new_request_before_the_answer_of_the_last_one_is_sent():
    driven, full = Driven(max_concurrent_requests=1), []
    send = driven.wire.send
    driven.wire.send = lambda *message: (full.append(driven.admission.is_full), send(*message))
    driven.arrive(Generate(1, [1], 3, ignore_eos=True))
    driven.run()
    assert full == [True, True, False] and driven.ends == {1: "length"}


def test_the_requests_of_an_http_request_are_accepted_together_up_to_the_limit_or_not_at_all():
    driven = Driven(max_concurrent_requests=4)
    driven.arrive(Generate(1, [1], 3))
    driven.arrive(SubmitRequests([Generate(i, [1], 3) for i in (2, 3, 4, 5)]))
    driven.arrive(SubmitRequests([Generate(i, [1], 3) for i in (6, 7, 8)]))
    driven.run()
    assert {i for i, end in driven.ends.items() if end == "overloaded"} == {2, 3, 4, 5}
    assert set(driven.tokens) == {1, 6, 7, 8}


@pytest.mark.parametrize(
    ("engine", "prompt", "turns"),
    [("whole", [1], 0), ("whole", [1], 1), ("whole", [1], 3), ("chunks", LONG, 2), ("supports_chunked_prefill", LONG, 2)],
    ids=["waiting", "after its prompt", "generating", "in its prompt", "in its prompt, mixed"],
)
@pytest.mark.parametrize("how", ["cancel", "web process gone"])
def test_a_cancelled_request_frees_its_slot_or_its_place_in_the_queue_at_once(engine, prompt, turns, how):
    driven = Driven(batch_size=2, max_batch_prefill_tokens=4, **ENGINES[engine])
    driven.arrive(Generate(1, [1, 2], 30, ignore_eos=True), peer=b"other")
    driven.step()
    driven.arrive(Generate(2, prompt, 30, ignore_eos=True))
    driven.step(turns)
    driven.arrive(Cancel(2, "client disconnected") if how == "cancel" else PeerLost())
    driven.arrive(Generate(3, [3, 4], 8), peer=b"other")
    driven.worker.receive()
    assert driven.worker.scheduler.busy == 1
    driven.run()
    assert driven.ends == {2: "cancelled", 1: "length", 3: driven.ends[3]}
    assert driven.tokens[3] == greedy([3, 4], 8)


def test_a_request_that_is_cancelled_during_a_step_is_not_in_the_next_one():
    driven = Driven(batch_size=4)
    driven.arrive(*(Generate(i, [i], 5) for i in (1, 2, 3)))
    driven.each_call(lambda _chunks: driven.arrive(Cancel(2, "client disconnected")))
    driven.run()
    assert driven.ends[2] == "cancelled" and not driven.tokens[2]
    assert [driven.tokens[i] for i in (1, 3)] == [greedy([i], 5) for i in (1, 3)]


def test_a_cancel_for_a_request_that_is_unknown_or_over_has_no_effect():
    driven = Driven()
    driven.arrive(Cancel(99, "never there"), Generate(1, [1], 5), Cancel(1, "first"), Cancel(1, "second"))
    driven.run()
    assert driven.ends == {1: "cancelled"}


@on_every_engine
def test_a_request_that_waited_longer_than_max_queue_time_is_refused_while_a_prompt_runs(engine, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    driven = Driven(batch_size=2, max_batch_prefill_tokens=2, max_queue_time=10, **engine)
    driven.arrive(Generate(1, [1], 30, ignore_eos=True))
    driven.step()
    same_http_request = SubmitRequests([Generate(2, LONG, 4), Generate(3, LONG, 4)])
    driven.arrive(same_http_request, Generate(4, [4], 4))
    driven.step()
    now[0] = 109.0
    driven.arrive(Generate(5, [5], 4))
    driven.step()
    now[0] = 111.0
    driven.step()
    assert driven.ends == {4: "overloaded"}
    driven.run()
    for i, prompt in (2, LONG), (3, LONG), (5, [5]):
        assert driven.tokens[i] == greedy(prompt, 4)


def test_a_request_that_cannot_be_run_ends_alone():
    driven = Driven()
    impossible = Generate(1, [1], 8, sampling=SamplingParams(seed=2**64))
    driven.arrive(SubmitRequests([impossible, Generate(2, [2], 8)]))
    driven.run()
    assert driven.ends[1] == "failed" and not driven.tokens[1]
    assert driven.tokens[2] == greedy([2], 8)
