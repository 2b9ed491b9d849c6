"""Grammars are compiled and masks computed on threads; what fails there ends one request."""

import queue
import threading

from engine import masks
from engine.masks import GrammarThreads
from engine.request import Request
from protocol import Generate

WAIT_S = 20


def request(number, grammar):
    return Request(generate=Generate(number, [1], 1, grammar=grammar), max_new_tokens=1, arrived_at=0.0)


class Panic(BaseException):
    """As Rust's libraries raise it."""


class Panicking:
    def matcher(self, grammar):
        raise Panic


def test_a_panic_while_a_grammar_is_compiled_ends_the_request_that_waits_for_it():
    woken = threading.Event()
    threads = GrammarThreads(Panicking(), 10, woken.set)
    waiting = request(7, grammar="{}")
    threads.compile(waiting)
    assert woken.wait(WAIT_S)
    (compiled,) = threads.take_compiled()
    assert (compiled.request, compiled.matcher, compiled.error) == (waiting, None, "the grammar cannot be compiled")
    assert threads.take_compiled() == []


class Compiling:
    """Each grammar is compiled at once."""

    def matcher(self, grammar):
        return grammar


def test_grammars_that_take_too_much_memory_together_are_compiled_when_others_have_ended(monkeypatch):
    monkeypatch.setattr(masks, "MAX_COMPILED_CHARACTERS", 25)
    woken = queue.SimpleQueue()
    threads = GrammarThreads(Compiling(), 10, lambda: woken.put(True))
    requests = [request(n, grammar="x" * length) for n, length in enumerate((20, 20, 5, 30))]
    for each in requests:
        threads.compile(each)
    order = []
    for each in requests:
        assert woken.get(timeout=WAIT_S)
        order += [compiled.request for compiled in threads.take_compiled()]
        if each is requests[0]:
            assert order == requests[:1]
        each.is_over = True
        threads.start_compiling()
    assert order == requests


class Broken:
    """A matcher whose mask cannot be computed."""

    def fill(self, address, size):
        raise RuntimeError("on purpose")


def test_a_mask_that_cannot_be_computed_is_the_error_of_its_row_alone():
    found = GrammarThreads(Panicking(), 40, lambda: None).start([None, Broken()]).result(WAIT_S)
    assert list(found.errors) == [1] and (found.mask == 0xFFFFFFFF).all() and found.mask.shape == (2, 2)
