"""What must be ready before a request may wait for a slot: its grammar and the embeddings of its images.

    request   add ─► PREPARING ─ its grammar and its images are ready ─► `drain` returns it
                               └ one of them fails                    ─► `drain` returns it with the error
    grammar   waits for memory ─► `_compiler` compiles it ─► `matcher`, or an error
    image     waits for memory ─► `ImageThread` encodes it ─► the encoder cache, or an error

A request counts as waiting until it is ready: for the limit of requests, its waiting time and the metrics.
Memory is given in the order of arrival. A request takes it until it ends, wherever it is by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.image_encoding import ImageThread
from engine.metrics import Metrics
from engine.request import Request, RequestState
from text.grammar import GrammarError, Grammars

logger = logging.getLogger("worker")

# Address space: llguidance uses 3 kB of stack per rule, and the longest (MAX_GRAMMAR) has 50,000 rules.
STACK_BYTES = 256 << 20
# Limit of the grammars of all waiting and running requests. A compiled character takes about 120 bytes, so
# 480 MB.
MAX_COMPILED_CHARACTERS = 4_000_000


class Preparation:
    """Prepares requests: their grammars in one thread, in the order of arrival, their images in another,
    round-robin. Only the loop's thread calls the methods, which do not wait.

    `wake` is called when `drain` has something. `grammars` is None with on-device sampling. `images` is None
    for a model that reads text only. The caller adds the images of a request to `images` before the request.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        images: ImageThread | None,
        metrics: Metrics,
        wake: Callable[[], None],
    ):
        self._grammars = grammars
        self.images = images
        self._metrics = metrics
        self._wake = wake
        self._requests: list[Request] = []  # in the order of arrival, until they end
        self._compiler = ThreadPoolExecutor(1, "worker-preparation")
        before = threading.stack_size(STACK_BYTES)
        self._compiler.submit(int).result()  # starts the thread
        threading.stack_size(before)

    def add(self, request: Request) -> None:
        """Takes a request, which is PREPARING until the caller moves it on. Begins to prepare it once there
        is memory."""
        self._requests.append(request)
        self.start()

    def start(self) -> None:
        """Begins to prepare as many requests as there is memory for. Forgets requests that have ended, frees
        their memory, and cancels the encoding of images that only they wanted.

        The loop calls this method before it waits for messages.
        """
        self._requests = [request for request in self._requests if request.state is not RequestState.ENDED]
        if self.images:
            self.images.retain({key for request in self._requests for key in request.images})
        for request in self._fitting():
            if request.preparations is None:
                self._prepare(request)

    def drain(self) -> list[tuple[Request, str]]:
        """Returns the requests whose preparation has ended, each with the reason why it failed, for the
        client, or "". They are in the order of arrival.

        The caller adds each of these requests to the scheduler, or ends it; otherwise the next call returns
        the request again.
        """
        prepared = []
        for request in self._requests:
            jobs = request.preparations
            if request.state is RequestState.PREPARING and jobs is not None:
                results = [job.result() for job in jobs if job.done()]
                error = next(filter(None, results), "")
                if error or len(results) == len(jobs):
                    prepared.append((request, error))
        return prepared

    def close(self) -> None:
        """Cancels what waits for the threads, which end after what they make now. Does not wait for them."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self.images:
            self.images.close()

    def _fitting(self) -> list[Request]:
        """Returns the requests that there is memory for: in the order of arrival, up to the first that does
        not fit. A request alone always fits.

        Requests that are prepared count until they end. Example: with grammars of 3, 2 and 1 million
        characters, only the first fits until it has ended; then the other two do.
        """
        fitting = []
        characters = 0
        images: dict[int, int] = {}
        for request in self._requests:
            characters += len(request.generate.grammar)
            if fitting and characters > MAX_COMPILED_CHARACTERS:
                break
            if request.images:
                together = {**images, **request.images}
                if images and not self.images.fit(together):
                    break
                images = together
            fitting.append(request)
        return fitting

    def _prepare(self, request: Request) -> None:
        """Begins to compile the grammar and to encode the images, and sets the request's `preparations`.
        Wakes the loop at the end of each, at once for an image that is encoded already."""
        jobs = self.images.start(request.images) if request.images else []
        if request.generate.grammar:
            jobs.append(self._compiler.submit(self._compile, request))
        request.preparations = jobs
        for job in jobs:
            job.add_done_callback(lambda _job: self._wake())

    def _compile(self, request: Request) -> str:
        """Compiles the request's grammar into its `matcher`, in the thread. Returns why that failed, for the
        client; "" if the grammar is compiled, or the request has ended. Raises nothing."""
        if request.state is RequestState.ENDED:  # do not delay the others
            return ""
        started_at = time.monotonic()
        try:
            request.matcher = self._grammars.matcher(request.generate.grammar)
        except GrammarError as reason:
            return f"the grammar {reason}"
        except BaseException:  # panics of llguidance are no Exceptions
            logger.exception("the grammar of request %s cannot be compiled", request.generate.request_id)
            return "the grammar cannot be compiled"
        finally:
            self._metrics.series("grammar_compile_duration").observe(time.monotonic() - started_at)
        return ""
