"""The outputs of steps as messages for the API server processes.

A `Publisher` makes and sends them on a thread of its own, in order, while the next step runs:
log-probabilities over a vocabulary of 128,256 tokens take a quarter of a millisecond a row, which the device
would otherwise wait for. All terminal messages of admitted requests are sent there, so each gets exactly one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Executor, ThreadPoolExecutor

from engine.link import Link
from engine.metrics import Metrics
from engine.profiling import Profiler
from engine.request import Request
from engine.sampling import sampling
from engine.sampling.sampling import RowLogprobs
from engine.step import StepOutput, rows_of, sampled_rows
from protocol import End, PromptDone, Token, Tokens

logger = logging.getLogger("worker")

MAX_UNPUBLISHED = 2  # steps whose outputs wait for the output thread; each holds its logits


class Publisher:
    """Sends step outputs to the API server processes, and counts them. One thread, that of the loop, calls
    the methods.

    executor: runs one call at a time, in the order of the calls; None: a thread of the publisher's own.
    """

    def __init__(
        self,
        link: Link,
        metrics: Metrics,
        profiler: Profiler | None = None,
        executor: Executor | None = None,
    ):
        self._link = link
        self._metrics = metrics
        self._profiler = profiler
        self._executor = executor or ThreadPoolExecutor(1, "worker-outputs")
        self._unpublished = threading.Semaphore(MAX_UNPUBLISHED)
        self._held: StepOutput | None = None
        self.failed: deque[Request] = deque()  # their tokens could not be published; the loop takes them out

    def publish(self, output: StepOutput) -> None:
        """Holds the output of a step, and sends nothing: `flush` does, which must come before the next
        call."""
        self._held = output

    def flush(self) -> None:
        """Hands the held output to the output thread. Waits while MAX_UNPUBLISHED earlier outputs are not
        published.

        To be called right before the device runs, or when there is nothing to run: earlier, the output thread
        would hold the interpreter's lock while the next step is prepared.
        """
        if self._held:
            self._unpublished.acquire()
            self._executor.submit(self._publish, self._held)
            self._held = None

    def end(self, request: Request, reason: str, message: str) -> None:
        """Sends an `End` after the tokens of a request; nothing if the request already has its terminal
        message. Flushes the held output first, which may wait."""
        self.flush()
        self._executor.submit(self._end, request, reason, message)

    def close(self) -> None:
        """Publishes what is left, waits for that, ends the output thread, and writes the profile unless it is
        written already."""
        self.flush()
        self._executor.shutdown()
        if self._profiler:
            self._profiler.close()

    def _publish(self, output: StepOutput) -> None:
        """Sends and counts the outputs of one step, on the output thread. If that fails, each request of the
        step without a terminal message gets an `End`. All requests of the step go into `failed`, from which
        the loop ends them. The error is logged, and not raised. Lets `flush` hand over another step."""
        begin = time.monotonic()
        try:
            self._send(output)
        except Exception:
            logger.exception("the outputs of a step could not be published")
            for request in output.step.requests:
                self._fail(request)
        try:
            self._metrics.count_step(output)
            if self._profiler and not output.failure:
                self._profiler.record(output, begin, time.monotonic())
        except Exception:
            logger.exception("a step could not be counted")
        finally:
            self._unpublished.release()

    def _send(self, output: StepOutput) -> None:
        """Sends one message per API server process: the new tokens of its requests, with log-probabilities if
        requested, and `PromptDone` for prompts that are complete. Nothing more is sent for a request that has
        ended.

        A request whose log-probabilities fail gets an `End`. `has_ended` becomes true once a request's last
        token is sent.
        """
        logprobs, failed = score(output)
        for i, error in failed.items():
            request = output.step.requests[i]
            logger.error("no log-probabilities for request %s", request.generate.request_id, exc_info=error)
            self._fail(request)
        messages: defaultdict[bytes, Tokens] = defaultdict(lambda: Tokens([]))
        for i, (request, tokens) in enumerate(zip(output.step.requests, output.tokens)):
            if request.has_ended or not tokens:
                continue
            message = messages[request.peer]
            if i >= output.step.num_decodes:
                queued_s = request.started_at - request.arrived_at
                done = PromptDone(request.id, queued_s, request.cached, request.prompt_scores)
                message.prompts.append(done)
            rows = logprobs.get(i) or [(None, [])] * len(tokens)
            reasons = [None] * (len(tokens) - 1) + [output.finish_reasons[i]]
            for number, (token, row, reason) in enumerate(zip(tokens, rows, reasons)):
                message.tokens.append(Token(request.id, token, *row, reason, from_draft=number > 0))
        for peer, message in messages.items():
            self._link.send(peer, message)
        for request, reason in zip(output.step.requests, output.finish_reasons):
            request.has_ended |= reason is not None

    def _fail(self, request: Request) -> None:
        """Ends a request whose tokens cannot be published, and adds it to `failed`, from which the loop takes
        it. Runs on the output thread."""
        self._end(request, "failed", "internal error while sending the next token")
        self.failed.append(request)

    def _end(self, request: Request, reason: str, message: str) -> None:
        """Sends an `End`, unless the request already has its terminal message. Runs on the output thread."""
        if not request.has_ended:
            request.has_ended = True
            self._link.send(request.peer, End(request.id, reason, message))


def score(output: StepOutput) -> tuple[dict[int, list[RowLogprobs]], dict[int, Exception]]:
    """Returns the log-probabilities of a step's new tokens, and the errors, both by the index of the chunk.
    The log-probabilities of prompt tokens are added to their requests instead.

    A chunk has log-probabilities, one entry for each new token, if its request wants them and there are
    logits. A row that fails, as with NaN logits, has no entry, but an error; a chunk keeps the error of its
    last such row.
    """
    found: defaultdict[int, list[RowLogprobs]] = defaultdict(list)
    failed: dict[int, Exception] = {}
    step = output.step
    places = []  # chunk, row of the logits, token, whether it is a prompt's
    for i, (chunk, request, rows) in enumerate(zip(step.chunks, step.requests, sampled_rows(step))):
        if chunk.all_logits:
            followers = request.prompt[chunk.begin + 1 : chunk.begin + 1 + len(chunk.tokens)]
            first = rows.stop - len(chunk.tokens)
            places += [(i, row, token, True) for row, token in enumerate(followers, first)]
        if request.generate.logprobs:
            places += [(i, row, token, False) for row, token in zip(rows, output.tokens[i])]
    if output.logits is None or not places:
        return found, failed
    chunks, rows, tokens, are_prompts = map(list, zip(*places))
    top_n = [step.requests[i].generate.top_n_tokens for i in chunks]
    scores = sampling.logprobs(rows_of(output.logits, rows), tokens, top_n)
    for i, is_prompt, scored in zip(chunks, are_prompts, scores):
        if isinstance(scored, Exception):
            failed[i] = scored
        elif is_prompt:
            step.requests[i].prompt_scores.append(scored)
        else:
            found[i].append(scored)
    return found, failed
