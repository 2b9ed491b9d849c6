"""Rehearsals take their turns when they should, and neither they nor their failures change what is served."""

import contextlib
import time
from types import SimpleNamespace

import pytest
from fakes.model import FakeModel, next_logits
from served import wait_until

import rehearsal as rehearsal_module
from logits import Helper
from rehearsal import LEAD_S, LEAST_S, SLACK, Offstage, Rehearsal
from worker import Worker

NOWHERE = -1  # no processor is named


class Understudy:
    """Notes when it takes a turn."""

    def __init__(self, fails_in: int = -1):
        self.model, self.end = SimpleNamespace(batch_size=2), Offstage()
        self.turns: list[float] = []
        self._fails_in = fails_in

    def turn(self):
        self.turns.append(time.monotonic())
        if len(self.turns) == self._fails_in:
            raise RuntimeError("on purpose")


@pytest.fixture
def rehearse():
    made = []

    def make(understudy):
        made.append(Rehearsal(understudy))
        wait_until(lambda: understudy.turns)
        return made[-1]

    yield make
    for rehearsal in made:
        rehearsal.end()
        rehearsal._thread.join(20)
        assert not rehearsal._thread.is_alive()


def take_turns(rehearsal: Rehearsal, turns: int) -> float:
    """Until it has taken so many in all, and for when the last one was. A busy machine may make it leave some out."""
    at = 0.0
    while rehearsal.turns < turns:
        at = time.monotonic() + 0.1 + 3 * rehearsal._took_s
        rehearsal.expect(at, NOWHERE)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: rehearsal.turns >= turns, at + 0.1 - time.monotonic())
    return at


def test_a_turn_is_taken_for_each_step_not_long_before_its_end(rehearse):
    understudy = Understudy()
    rehearsal = rehearse(understudy)
    for turn in range(2, 5):
        took_s = rehearsal._took_s
        at = take_turns(rehearsal, turn)
        assert understudy.turns[-1] > at - LEAD_S - SLACK * took_s - 0.05, "it sleeps until then"


def test_a_step_that_is_short_or_over_is_not_rehearsed_for(rehearse):
    understudy = Understudy()
    rehearsal = rehearse(understudy)
    rehearsal.expect(time.monotonic() + LEAST_S / 2, NOWHERE)
    rehearsal._cues.put((time.monotonic() - 1, NOWHERE))  # as if the thread had come to it late
    rehearsal.end()
    assert len(understudy.turns) == 1


def test_the_longer_it_takes_the_earlier_it_begins(rehearse, monkeypatch):
    understudy = Understudy()
    rehearsal = rehearse(understudy)
    rehearsal._took_s = 0.2
    began_at, at = time.monotonic(), time.monotonic() + 60
    naps = []
    monkeypatch.setattr(rehearsal_module, "time", SimpleNamespace(sleep=naps.append, monotonic=time.monotonic))
    rehearsal.expect(at, NOWHERE)
    while len(understudy.turns) < 2:
        assert time.monotonic() < at
    assert naps[0] == pytest.approx(60 - 2 * 0.2, abs=time.monotonic() - began_at + LEAD_S)


def test_a_rehearsal_that_is_woken_late_does_not_take_place(rehearse, monkeypatch):
    understudy = Understudy()
    rehearsal = rehearse(understudy)
    naps = []

    def oversleep(seconds):
        naps.append(seconds)
        monkeypatch.setattr(rehearsal_module.time, "monotonic", lambda: at + 0.001)

    monkeypatch.setattr(rehearsal_module, "time", SimpleNamespace(sleep=oversleep, monotonic=time.monotonic))
    at = time.monotonic() + 60
    rehearsal.expect(at, NOWHERE)
    rehearsal.end()
    rehearsal._thread.join(20)
    assert len(naps) == 1 and len(understudy.turns) == 1


def test_a_step_that_was_over_early_is_not_rehearsed_for(rehearse, monkeypatch):
    understudy = Understudy()
    rehearsal = rehearse(understudy)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 1:  # the next step has begun meanwhile
            rehearsal.expect(time.monotonic() + 60, NOWHERE)

    monkeypatch.setattr(rehearsal_module, "time", SimpleNamespace(sleep=nap, monotonic=time.monotonic))
    rehearsal.expect(time.monotonic() + 30, NOWHERE)
    wait_until(lambda: len(understudy.turns) == 2)
    assert len(naps) == 2


def test_where_a_rehearsal_fails_there_are_no_more_and_somebody_says_so(rehearse, caplog):
    understudy = Understudy(fails_in=2)
    rehearsal = rehearse(understudy)
    while rehearsal._thread.is_alive():
        rehearsal.expect(time.monotonic() + 0.1, NOWHERE)
        rehearsal._thread.join(0.2)
    assert len(understudy.turns) == 2
    assert "there are no more rehearsals" in caplog.text


def test_an_understudy_is_a_whole_worker_whose_words_go_nowhere():
    model = FakeModel(batch_size=2, max_total_tokens=10**6)
    understudy = Worker(model, Offstage(), frozenset(), 2)
    rehearsal = Rehearsal(understudy)
    take_turns(rehearsal, 8)
    rehearsal.end()
    assert [request.generated for request in understudy.slots.requests] == [rehearsal.turns + 1] * 2
    assert understudy.slots.requests[0].sampler.is_greedy and not understudy.slots.requests[1].sampler.is_greedy
    likeliest = [int(next_logits(model.cache[0][:place], model.vocab_size).argmax()) for place in range(1, rehearsal.turns + 1)]
    assert model.cache[0] == [0, *likeliest]
    assert understudy.end._outbox.empty()


def test_a_model_with_one_slot_is_rehearsed_with_one_request():
    understudy = Worker(FakeModel(batch_size=1, max_total_tokens=10**6), Offstage(), frozenset(), 1)
    rehearsal = Rehearsal(understudy)
    wait_until(lambda: rehearsal.turns == 1)
    rehearsal.end()
    assert understudy.slots.busy == 1 and not understudy.queue


@pytest.mark.skipif(not Helper.can_help(), reason="with one processor there is none to rehearse on")
def test_what_is_served_is_the_same_with_rehearsals(serve, monkeypatch):
    served = serve()
    decode = served.model.decode

    def slow(*given):
        time.sleep(4 * LEAST_S)
        return decode(*given)

    monkeypatch.setattr(served.model, "decode", slow)
    served.get_ready()
    text = next(text for text in map(str, range(100)) if len(served.expected(text, 20)) == 20)
    answer = served.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 20, "details": True}}).json
    assert [token["id"] for token in answer["details"]["tokens"]] == served.expected(text, 20)
    assert served.worker._rehearsal.turns > 5
    served.assert_idle()
