"""What a request needs before it may wait for a slot is made in a thread; what fails there ends one request."""

import gc
import queue
import threading
import time
import weakref

from engine_parts import request_of
from fakes.model import EOS, greedy
from grammars import grammars_of
from loop import Driven
from processes import wait_until
from tiny_tokenizers import byte_level

from engine import preparation
from engine.metrics import Metrics
from engine.preparation import Preparation
from engine.request import RequestState
from protocol import Cancel, Generate
from text.grammar import of_regex

WAIT_S = 60


def request(number, grammar):
    return request_of(Generate(number, [1], 1, grammar=grammar))


class Panic(BaseException):
    """As Rust's libraries raise it."""


class Panicking:
    def matcher(self, grammar):
        raise Panic


def test_a_panic_while_a_grammar_is_compiled_ends_the_request_that_waits_for_it():
    woken = threading.Event()
    panicking = Preparation(Panicking(), None, Metrics(""), woken.set)
    waiting = request(7, grammar="{}")
    panicking.add(waiting)
    assert woken.wait(WAIT_S)
    assert panicking.drain() == [(waiting, "the grammar cannot be compiled")]
    assert waiting.matcher is None
    waiting.state = RequestState.ENDED  # as the loop does
    assert panicking.drain() == []


class Compiling:
    """Each grammar is compiled at once."""

    def matcher(self, grammar):
        return grammar


def test_grammars_that_take_too_much_memory_together_are_compiled_when_others_have_ended(monkeypatch):
    monkeypatch.setattr(preparation, "MAX_COMPILED_CHARACTERS", 25)
    woken = queue.SimpleQueue()
    bounded = Preparation(Compiling(), None, Metrics(""), lambda: woken.put(True))
    requests = [request(n, grammar="x" * length) for n, length in enumerate((20, 20, 5, 30))]
    for each in requests:
        bounded.add(each)
    order = []
    for each in requests:
        assert woken.get(timeout=WAIT_S)
        ready = [prepared for prepared, _error in bounded.drain()]
        for prepared in ready:
            prepared.state = RequestState.WAITING  # as the scheduler does
        order += ready
        if each is requests[0]:
            assert order == requests[:1]
        each.state = RequestState.ENDED
        bounded.start()
    assert order == requests


class Held:
    """Grammars of which none is compiled before it may."""

    def __init__(self):
        tokenizer = byte_level()
        self.vocab_size = tokenizer.get_vocab_size()
        self.grammars = grammars_of(tokenizer, eos_token_ids=[EOS])
        self.may_compile = threading.Event()

    def matcher(self, grammar):
        assert self.may_compile.wait(WAIT_S)
        return self.grammars.matcher(grammar)


def test_a_compiled_grammar_is_freed_when_its_request_has_ended():
    grammars, made = Held(), []
    grammars.may_compile.set()
    matcher = grammars.matcher
    grammars.matcher = lambda grammar: [found := matcher(grammar), made.append(weakref.ref(found))][0]
    driven = Driven(grammars=grammars, vocab_size=grammars.vocab_size)
    driven.arrive(Generate(1, [3], 9, grammar=of_regex("a{3}")))
    driven.run()
    driven.worker._preparation.start()  # as before the loop waits
    gc.collect()
    assert driven.ends == {1: "eos_token"} and [each() for each in made] == [None]


def test_a_request_in_preparation_counts_as_waiting():
    grammars = Held()
    driven = Driven(grammars=grammars, vocab_size=grammars.vocab_size, batch_size=1)
    driven.arrive(Generate(1, [3], 9, grammar=of_regex("a{3}")), Generate(2, [4], 9), Generate(3, [5], 9))
    driven.step()
    assert driven.worker.load()["queue_size"] == 2
    grammars.may_compile.set()
    wait_until(lambda: driven.wire.arrivals, "the compiled grammar")
    driven.run()
    assert driven.worker.load()["queue_size"] == 0


def test_the_age_of_the_last_step_does_not_count_the_preparation_of_a_request(monkeypatch):
    now, ages = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    grammars = Held()
    driven = Driven(grammars=grammars, vocab_size=grammars.vocab_size)
    driven.each_call(lambda _chunks: ages.append(driven.worker.load()["last_step_age_seconds"]))
    driven.arrive(Generate(1, [3], 9, grammar=of_regex("a{3}")))
    driven.step()
    now[0] += 40
    grammars.may_compile.set()
    driven.run()
    assert set(ages) == {0.0}


def test_a_request_that_cannot_be_run_ends_alone_also_if_it_would_be_prepared():
    driven = Driven(grammars=Compiling())
    driven.arrive(Generate(1, [], 9, grammar="a"), Generate(2, [4], 9))
    driven.run()
    assert driven.ends == {1: "failed", 2: driven.ends[2]}
    assert driven.tokens[2] == greedy([4], 9)


def test_a_request_that_waits_too_long_for_its_preparation_is_refused_and_takes_no_slot():
    grammars = Held()
    driven = Driven(grammars=grammars, vocab_size=grammars.vocab_size, max_queue_time=1e-9)
    driven.arrive(Generate(1, [3], 9, grammar=of_regex("a{3}")), Generate(2, [4], 9))
    driven.step()
    grammars.may_compile.set()
    driven.run()
    assert driven.ends == {1: "overloaded", 2: driven.ends[2]}


def test_the_states_of_a_request_follow_each_other():
    grammars = Held()
    driven = Driven(grammars=grammars, vocab_size=grammars.vocab_size, batch_size=1, prefill_chunk=4)
    seen = []
    driven.each_call(lambda _chunks: seen.append([each.state.name for each in driven.worker.requests]))
    driven.arrive(Generate(1, list(range(1, 9)), 2, ignore_eos=True), Generate(2, [4], 9, grammar=of_regex("a{3}")))
    driven.step(3)
    grammars.may_compile.set()
    wait_until(lambda: driven.wire.arrivals, "the compiled grammar")
    driven.arrive(Cancel(9, "unknown"))
    driven.run()
    of_first, of_second = [states[0] for states in seen[:3]], [states[-1] for states in seen]
    assert of_first == ["PREFILLING", "PREFILLING", "RUNNING"]
    assert list(dict.fromkeys(of_second)) == ["PREPARING", "PREFILLING", "RUNNING"]
