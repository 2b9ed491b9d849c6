"""The worker's side of grammars: the threads that compile them and compute token masks.

A grammar is compiled before its request takes a slot. The masks of a step are computed while the device runs
it, for the logits that it will return.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from engine.request import Request
from text.grammar import GrammarError, Grammars, Matcher

logger = logging.getLogger("worker")

# Address space: llguidance recurses 3 kB deep a rule, and the longest grammar (MAX_GRAMMAR) has 50,000 rules.
STACK_BYTES = 256 << 20
# Of grammars that are compiled at a time, waiting or running. A character takes about 120 bytes, so 480 MB.
MAX_COMPILED_CHARACTERS = 4_000_000


class Compiled(NamedTuple):
    """A request's grammar is compiled, or cannot be."""

    request: Request
    matcher: Matcher | None
    error: str
    seconds: float


class Masks(NamedTuple):
    """Which tokens may follow in the rows of a step."""

    mask: np.ndarray  # uint32 [rows, ceil(vocab / 32)] as in sampling.py: sample
    errors: dict[int, Exception]  # by row, where there is none
    seconds: float | None


class GrammarThreads:
    """One thread compiles, one fills masks. `wake` is called, on the first one, when `take_compiled` has
    something."""

    def __init__(self, grammars: Grammars, vocab_size: int, wake: Callable[[], None]):
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._wake = wake
        self._waiting: deque[Request] = deque()  # until there is memory for their grammars
        self._held: list[Request] = []  # those whose grammars take it, until they end
        self._compiled: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._compiler = ThreadPoolExecutor(1, "worker-grammars")
        before = threading.stack_size(STACK_BYTES)
        self._compiler.submit(int).result()  # starts the thread
        threading.stack_size(before)
        self._filler = ThreadPoolExecutor(1, "worker-masks")

    def compile(self, request: Request) -> None:
        """`take_compiled` will have its matcher."""
        self._waiting.append(request)
        self.start_compiling()

    def start_compiling(self) -> None:
        """Has as many grammars compiled as there is memory for, in the order of arrival. To be called before
        the loop waits for messages."""
        self._held = [request for request in self._held if not request.is_over]
        characters = sum(len(request.generate.grammar) for request in self._held)
        while self._waiting:
            characters += len(self._waiting[0].generate.grammar)
            if self._held and characters > MAX_COMPILED_CHARACTERS:
                return
            request = self._waiting.popleft()
            self._held.append(request)
            self._compiler.submit(self._compile, request)

    def take_compiled(self) -> list[Compiled]:
        """What has been compiled since the last call."""
        compiled = []
        while not self._compiled.empty():
            compiled.append(self._compiled.get())
        return compiled

    def _compile(self, request: Request) -> None:
        if request.is_over:  # others wait for their grammars
            return
        started_at = time.monotonic()
        matcher = None
        error = ""
        try:
            matcher = self._grammars.matcher(request.generate.grammar)
        except GrammarError as reason:
            error = f"the grammar {reason}"
        except BaseException:  # panics of llguidance are no Exceptions
            logger.exception("the grammar of request %s cannot be compiled", request.generate.request_id)
            error = "the grammar cannot be compiled"
        self._compiled.put(Compiled(request, matcher, error, time.monotonic() - started_at))
        self._wake()

    def start(self, matchers: Sequence[Matcher | None]) -> Future[Masks] | None:
        """Begins to compute the masks of a step's rows, None where any token may follow; nothing to do
        without matchers."""
        return self._filler.submit(self._masks, matchers) if any(matchers) else None

    def _masks(self, matchers: Sequence[Matcher | None]) -> Masks:
        started_at = time.monotonic()
        errors = {}
        mask = np.full((len(matchers), -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for row, matcher in enumerate(matchers):
            try:
                if matcher:
                    matcher.fill(mask[row].ctypes.data, mask[row].nbytes)
            except Exception as error:  # one row must not stop the others
                errors[row] = error
                mask[row] = 0xFFFFFFFF
        return Masks(mask, errors, time.monotonic() - started_at)
