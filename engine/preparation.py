"""What must be ready before a request may wait for a slot: its grammar, which a thread compiles.

A request in preparation counts as waiting: for the limit of requests, its waiting time and the metrics.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from engine.request import Request, State
from text.grammar import GrammarError, Grammars

logger = logging.getLogger("worker")

# Address space: llguidance uses 3 kB of stack per rule, and the longest (MAX_GRAMMAR) has 50,000 rules.
STACK_BYTES = 256 << 20
# Limit of the grammars of all waiting and running requests. A compiled character takes about 120 bytes, so
# 480 MB.
MAX_COMPILED_CHARACTERS = 4_000_000


class Prepared(NamedTuple):
    """The end of a preparation: the request is ready, or fails with `error`."""

    request: Request
    error: str
    seconds: float


class Preparation:
    """Prepares requests in a thread, in the order of arrival. `wake` is called there when `drain` has
    something."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None]):
        self._grammars = grammars
        self._wake = wake
        self._waiting: deque[Request] = deque()  # for memory for their grammars
        self._held: list[Request] = []  # requests whose grammars take memory, until they end
        self._prepared: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "worker-preparation")
        before = threading.stack_size(STACK_BYTES)
        self._thread.submit(int).result()  # starts it
        threading.stack_size(before)

    @property
    def requests(self) -> list[Request]:
        """The requests that are not ready yet."""
        return [request for request in (*self._held, *self._waiting) if request.state is State.PREPARING]

    def add(self, request: Request) -> None:
        request.state = State.PREPARING
        self._waiting.append(request)
        self.start()

    def start(self) -> None:
        """Prepares as many requests as there is memory for. To be called before the loop waits for
        messages."""
        self._held = [request for request in self._held if request.state is not State.ENDED]
        characters = sum(len(request.generate.grammar) for request in self._held)
        while self._waiting:
            characters += len(self._waiting[0].generate.grammar)
            if self._held and characters > MAX_COMPILED_CHARACTERS:
                return
            request = self._waiting.popleft()
            self._held.append(request)
            self._thread.submit(self._prepare, request)

    def drain(self) -> list[Prepared]:
        """What has been prepared since the last call, without requests that ended meanwhile."""
        prepared = []
        while not self._prepared.empty():
            prepared.append(self._prepared.get())
        return [each for each in prepared if each.request.state is State.PREPARING]

    def _prepare(self, request: Request) -> None:
        if request.state is State.ENDED:  # do not delay the others
            return
        started_at = time.monotonic()
        error = ""
        try:
            request.matcher = self._grammars.matcher(request.generate.grammar)
        except GrammarError as reason:
            error = f"the grammar {reason}"
        except BaseException:  # panics of llguidance are no Exceptions
            logger.exception("the grammar of request %s cannot be compiled", request.generate.request_id)
            error = "the grammar cannot be compiled"
        self._prepared.put(Prepared(request, error, time.monotonic() - started_at))
        self._wake()
