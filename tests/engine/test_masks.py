"""Grammars are compiled and masks computed on threads; what fails there ends one request."""

import threading

from engine.masks import GrammarThreads
from engine.requests import Request
from protocol import Generate

WAIT_S = 20


class Panic(BaseException):
    """As Rust's libraries raise it."""


class Panicking:
    def knows(self, grammar):
        return False

    def matcher(self, grammar):
        raise Panic


def test_a_panic_while_a_grammar_is_compiled_ends_the_request_that_waits_for_it():
    woken = threading.Event()
    threads = GrammarThreads(Panicking(), 10, woken.set)
    request = Request(generate=Generate(7, [1], 1, grammar="{}"), max_new_tokens=1, arrived_at=0.0)
    assert threads.compile(request) is None
    assert woken.wait(WAIT_S)
    (compiled,) = threads.take_compiled()
    assert (compiled.request, compiled.matcher, compiled.error) == (request, None, "the grammar cannot be compiled")
    assert threads.take_compiled() == []


class Broken:
    """A matcher whose mask cannot be computed."""

    def fill(self, address, size):
        raise RuntimeError("on purpose")


def test_a_mask_that_cannot_be_computed_is_the_error_of_its_row_alone():
    masks = GrammarThreads(Panicking(), 40, lambda: None).start([None, Broken()]).result(WAIT_S)
    assert list(masks.errors) == [1] and (masks.mask == 0xFFFFFFFF).all() and masks.mask.shape == (2, 2)
