"""One HTTP request whose sequences are being generated: from the worker's tokens to text.

A `Generation` sends the request's prompts to the worker, turns the tokens that come back into text, and ends sequences
early: after a stop string, at a deadline, when the client disconnects. How text becomes a response is
answers.py's business, how it is written web.py's.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import gevent
from gevent.monkey import get_original

from api import errors
from api.answer import Sequence
from api.engine_client import EngineClient, InFlightRequest, TooLarge
from api.errors import ApiError
from api.fields import Job
from protocol import End, Generate, GenerateOptions, Prompt, RequestStats, Token
from text.stream import Piece

logger = logging.getLogger("web")

WATCH_S = 0.1  # how often all requests are looked after
KEEP_ALIVE_S = 15.0  # a stream without an event for this long carries a comment, so that proxies keep it open
HANG_UP = 499  # the status of a response to a client that has disconnected
Batch = list[tuple[Sequence, list[Piece]]]  # what became certain together


class Generation:
    """The sequences that are generated for one HTTP request, as text. Times are CLOCK_MONOTONIC, in seconds.

    Iterating yields a Batch whenever text has become certain, each sequence once, until all have finished; an empty Batch
    means that KEEP_ALIVE_S passed without a token. Raises ApiError when the worker refuses or fails, and ClientGone when the
    client has disconnected. What is unfinished at `deadline_at` ends there. `settle` frees everything.

    `in_progress` holds it from its start until it is settled, and `watch` looks after all that are there. The end of the
    client's input counts as a disconnect unless `input_may_end`: then only a broken connection does. `on_settled` is called
    once.
    """

    def __init__(
        self,
        engine: EngineClient,
        jobs: list[Job],
        prompts: list[tuple[list[int], int]],  # of each job: token ids, max_new_tokens
        in_progress: set[Generation],
        request_id: str,
        started_at: float,
        deadline_at: float = float("inf"),
        client: socket.socket | None = None,
        input_may_end: bool = False,
        on_settled: Callable[[RequestStats, Generation], None] | None = None,
    ):
        self.request_id = request_id
        self.model_name = engine.info.model_name
        self.started_at = started_at
        self.sent_at = self._received_at = time.monotonic()
        self.streams_at: float | None = None  # when its stream began
        self.is_settled = False
        self.sequences: list[Sequence] = []
        self._engine = engine
        self._on_settled = on_settled
        self._deadline_at = deadline_at
        self._unfinished: dict[int, Sequence] = {}
        generates = []
        for job, (prompt, max_new_tokens) in zip(jobs, prompts):
            options = {name: getattr(job, name) for name in GenerateOptions.__struct_fields__}
            for number in range(job.sequences):
                sequence = Sequence(
                    engine.text.tokenizer, job, prompt, max_new_tokens, number, len(self.sequences)
                )
                generate = Generate(
                    secrets.randbits(63),
                    prompt,
                    max_new_tokens,
                    sent_at=self.sent_at,
                    request_id=request_id,
                    **options | {"sampling": sequence.sampling},
                )
                generates.append(generate)
                self.sequences.append(sequence)
                self._unfinished[generate.id] = sequence
        self._connection = get_original(
            "select", "poll"
        )()  # asked without waiting; gevent's cannot see the end of the input
        if client is not None:
            events = select.POLLHUP | select.POLLERR | (0 if input_may_end else select.POLLRDHUP)
            self._connection.register(client, events)
        self._log(
            "sent to the worker",
            sequences=len(generates),
            prompt_tokens=sum(len(prompt) for prompt, _ in prompts),
        )
        try:
            self._request = InFlightRequest(engine, generates)
        except TooLarge:
            tokens = sum(len(generate.prompt) for generate in generates)
            what = f"the request asks for {len(generates)} sequences whose prompts have {tokens} tokens altogether"
            raise errors.invalid(
                None, f"{what}, too many to be sent at once; send several requests"
            ) from None
        self._in_progress = in_progress
        in_progress.add(self)

    def __iter__(self) -> Iterator[Batch]:
        while self._unfinished:
            messages = self._request.receive()
            self._received_at = time.monotonic()
            batch: dict[Sequence, list[Piece]] = defaultdict(list)
            for message in messages:
                if sequence := self._unfinished.get(
                    message.id
                ):  # None: a token that arrives after a stop string
                    self._take(message, sequence, batch)
            if self._unfinished and self._received_at >= self._deadline_at:
                self._cut(batch)
            if batch or not messages:  # a prompt that has been run is no reason yet to begin an answer
                yield list(batch.items())

    @property
    def first_token_at(self) -> float | None:
        return min(
            (sequence.first_token_at for sequence in self.sequences if sequence.first_token_at), default=None
        )

    def look(self) -> None:
        """Wakes the request when its client has disconnected, at its deadline, and when it is time for a sign of life."""
        if self._connection.poll(0):
            self._request.hang_up()
        elif time.monotonic() >= min(self._received_at + KEEP_ALIVE_S, self._deadline_at):
            self._request.wake()

    def settle(self, outcome: str, status: int = 200) -> None:
        """Cancels what still runs, and adds the request to the metrics; only the first outcome counts."""
        self._request.close()
        self._in_progress.discard(self)
        if self.is_settled:
            return
        self.is_settled = True
        duration_s = time.monotonic() - self.started_at
        validation_s = self.sent_at - self.started_at
        queue_s = max(sequence.queue_s for sequence in self.sequences)
        stats = RequestStats(
            status=HANG_UP if outcome == "dropped" else status,
            outcome=outcome,
            duration_s=duration_s,
            validation_s=validation_s,
            queue_s=queue_s,
            inference_s=max(0.0, duration_s - validation_s - queue_s),
            first_token_s=None if self.first_token_at is None else self.first_token_at - self.started_at,
            input_tokens=sum(len(sequence.prompt) for sequence in self.sequences if sequence.number == 0),
            generated_tokens=sum(sequence.tokens for sequence in self.sequences),
            max_new_tokens=sum(sequence.max_new_tokens for sequence in self.sequences),
        )
        self._engine.record(stats)
        if self._on_settled:
            self._on_settled(stats, self)
        self._log("generation ends", outcome=outcome, generated_tokens=stats.generated_tokens)

    def _log(self, event: str, **fields) -> None:
        logger.debug(event, extra={"fields": {"request_id": self.request_id, **fields}})

    def _take(
        self, message: Prompt | Token | End, sequence: Sequence, batch: dict[Sequence, list[Piece]]
    ) -> None:
        if isinstance(message, End):
            raise end_error(message.reason, message.message)
        if isinstance(message, Prompt):
            sequence.ran = message
            return
        batch[sequence] += sequence.take(message)
        if sequence.finish_reason is not None:
            del self._unfinished[message.id]
            if message.finish_reason is None:
                self._engine.cancel(message.id, "stop sequence")

    def _cut(self, batch: dict[Sequence, list[Piece]]) -> None:
        if self.first_token_at is None:
            raise errors.overloaded()  # it has only waited; a later attempt may be served
        for sequence in self._unfinished.values():
            batch[sequence] += sequence.cut()
        self._unfinished.clear()
        self._request.close("deadline")


def watch(in_progress: set[Generation]) -> None:
    """Looks after all requests of this process; never returns."""
    while True:
        gevent.sleep(WATCH_S)
        for generation in list(in_progress):
            generation.look()


def end_error(reason: str, message: str = "") -> ApiError:
    if reason == "overloaded":
        return errors.overloaded()
    if reason == "failed":
        return ApiError(424, "generation", f"Request failed during generation: {message}")
    if reason == "cancelled":
        return ApiError(500, "incomplete_generation", "Incomplete generation")
    return errors.not_ready(reason)
