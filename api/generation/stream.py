"""A request while it is generated: from the worker's tokens to text, and to the body of its response, whole
or as events.

An `ActiveRequest` sends the prompts of a request to the worker, turns the tokens that come back into text,
and ends sequences early: after a stop string, at a deadline, when the client disconnects.
`ActiveRequest.close` is the one place where a request ends.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gevent
from gevent.monkey import get_original
from gevent.queue import SimpleQueue
from werkzeug.exceptions import ClientDisconnected

from api.generation.prepared_request import TokenizedPrompt, with_image_ids
from api.generation.response_writer import GeneratedSequence, ResponseWriter
from api.generation.tracing import RequestTrace
from api.http import errors
from api.http.engine_client import EngineClient, TooLarge
from api.http.errors import CLIENT_CLOSED_REQUEST, ApiError
from protocol import End, Generate, GenerateOptions, PromptDone, RequestStats, Token
from text.stream import Piece

logger = logging.getLogger("web")

WATCH_S = 0.1  # how often all requests are polled
KEEP_ALIVE_S = 15.0  # a stream without an event for this long carries a comment, so that proxies keep it open
Batch = dict[GeneratedSequence, list[Piece]]  # what became certain together


class Connection:
    """The connection to a client. The end of the client's input counts as a disconnect unless
    `input_may_end`: then only a broken connection does. To ask `is_lost` never waits. client: None for a
    connection that is never lost."""

    def __init__(self, client: socket.socket | None, input_may_end: bool):
        # Not gevent's, which cannot see the end of the input; this one is called without waiting.
        self._poll = get_original("select", "poll")()
        if client is not None:
            events = select.POLLHUP | select.POLLERR
            if not input_may_end:
                events |= select.POLLRDHUP
            self._poll.register(client, events)

    @property
    def is_lost(self) -> bool:
        return bool(self._poll.poll(0))


@dataclass(frozen=True)
class Arrival:
    """An HTTP request as it arrived. Times are CLOCK_MONOTONIC, in seconds."""

    request_id: str
    at: float
    connection: Connection
    trace: RequestTrace | None = None


class ConnectionMonitor:
    """Polls the requests in `active` every WATCH_S, for disconnects, deadlines and due keep-alives. The
    constructor starts the greenlet that does so, which never ends. Requests add themselves, and remove
    themselves when they are closed."""

    def __init__(self):
        self.active: set[ActiveRequest] = set()
        gevent.spawn(self._run)

    def _run(self) -> None:
        while True:
            gevent.sleep(WATCH_S)
            for request in list(self.active):
                request.poll()


class ActiveRequest:
    """The sequences that are generated for one HTTP request, as text. Times are CLOCK_MONOTONIC, in seconds.

    The constructor sends the prompts to the worker, without waiting for an answer, and has `monitor` poll the
    request. It raises ApiError if the prompts are too large to be sent. Iterating yields a Batch whenever
    tokens have arrived, until all sequences have finished; a sequence in it has no pieces if no text has
    become certain. An empty Batch means that KEEP_ALIVE_S passed without a token. Iterating raises ApiError
    when the worker rejects or fails a sequence, and ClientDisconnected; the other sequences go on in the
    worker until `close`. Sequences that are unfinished at `deadline_at` end there; if none has a token by
    then, iterating raises ApiError (429).

    As a context manager the request is closed at the end of the block, with the outcome of the block.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompts: list[TokenizedPrompt],
        arrival: Arrival,
        monitor: ConnectionMonitor,
        deadline_at: float,
    ):
        self.arrival = arrival
        self._adapter = prompts[0].prepared.adapter
        self.sent_at = time.monotonic()
        self.streams_at: float | None = None  # when its stream began
        self.sequences: list[GeneratedSequence] = []
        self._engine = engine
        self._monitor = monitor
        self._deadline_at = deadline_at
        self._received_at = self.sent_at
        self._is_closed = False
        self._outcome = "dropped"  # unless it comes to its end
        self._status = CLIENT_CLOSED_REQUEST
        self._messages = SimpleQueue()  # lists of the worker's messages; None: the client has disconnected
        self._unfinished: dict[int, GeneratedSequence] = {}  # by the id in the worker
        generates = [generate for prompt in prompts for generate in self._messages_for(prompt)]
        images = {image.key: image for prompt in prompts for image in prompt.images}
        try:
            engine.submit(generates, self._messages, list(images.values()))
        except TooLarge:
            tokens = sum(len(generate.prompt) for generate in generates)
            what = f"the request asks for {len(generates)} sequences whose prompts have {tokens} tokens "
            what += "altogether, too many to be sent at once; send several requests"
            raise errors.invalid(None, what) from None
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        adapter = {"adapter": self._adapter} if self._adapter else {}
        self._log("sent to the worker", sequences=len(generates), prompt_tokens=self.prompt_tokens, **adapter)
        monitor.active.add(self)

    def __enter__(self) -> ActiveRequest:
        return self

    def __exit__(self, _kind, error: BaseException | None, _trace) -> None:
        if error is None:
            self.succeed()
        else:
            self.fail(error)
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        while self._unfinished:
            messages = self._receive()
            self._received_at = time.monotonic()
            batch: Batch = defaultdict(list)
            ends: list[End] = []
            for message in messages:
                if isinstance(message, End):
                    ends.append(message)
                elif sequence := self._unfinished.get(message.id):  # None: a token after a stop string
                    self._apply(message, sequence, batch)
            if self._unfinished and not ends and self._received_at >= self._deadline_at:
                self._truncate(batch)
            if batch or not messages:  # a prefilled prompt does not yet begin the response
                yield batch
            for end in ends:
                if end.id in self._unfinished:
                    raise end_error(end.reason, end.message)

    @property
    def first_token_at(self) -> float | None:
        """When the first token of any sequence arrived; None: none has arrived."""
        times = [sequence.first_token_at for sequence in self.sequences if sequence.first_token_at]
        return min(times, default=None)

    def run(self) -> None:
        """Waits until all sequences have finished, for a response that is not streamed. `pieces` of each
        sequence gets its pieces. Raises ApiError and ClientDisconnected, as iterating does. Does not close
        the request."""
        for batch in self:
            for sequence, pieces in batch.items():
                sequence.pieces += pieces

    def poll(self) -> None:
        """Wakes the greenlet that iterates if there is a reason, without waiting. That greenlet gets
        ClientDisconnected if the client has disconnected, and no messages at the deadline or when
        KEEP_ALIVE_S have passed since it was last woken. The ConnectionMonitor calls this method."""
        if self.arrival.connection.is_lost:
            self._messages.put(None)
        elif time.monotonic() >= min(self._received_at + KEEP_ALIVE_S, self._deadline_at):
            self._messages.put([])

    def succeed(self) -> None:
        """Sets the outcome and the status (200) that `close` reports."""
        self._outcome = "success"
        self._status = 200

    def fail(self, error: BaseException, status: int | None = None) -> None:
        """Sets the outcome and the status that `close` reports. status: that of the response, if it has been
        sent already; it counts before that of the error. After ClientDisconnected the outcome stays
        "dropped". Does not close the request."""
        if isinstance(error, ApiError):
            self._outcome = error.outcome
            self._status = status or error.status
        elif not isinstance(error, ClientDisconnected):
            self._outcome = "generation"
            self._status = status or 500

    def close(self) -> None:
        """Ends the request, without waiting: cancels its unfinished sequences in the worker, sends its
        figures to the metrics, ends its trace and logs its end. It is no longer polled. The outcome is
        "dropped" unless `succeed` or `fail` has set another one. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._monitor.active.discard(self)
        reason = "client disconnected" if self._outcome == "dropped" else self._outcome
        for request_id in self._unfinished:
            self._engine.cancel(request_id, reason)
        stats = self._stats()
        self._engine.record(stats)
        if self.arrival.trace:
            model_name = self._adapter or self._engine.info.model_name
            self.arrival.trace.end(stats, model_name, self.sequences, self.streams_at)
        self._log("generation ends", outcome=stats.outcome, generated_tokens=stats.generated_tokens)

    def _stats(self) -> RequestStats:
        """Returns what the metrics count of this request: outcome, status, times until now, tokens, finish
        reason and adapter. While no prompt has run, the wait counts as inference."""
        duration_s = time.monotonic() - self.arrival.at
        validation_s = self.sent_at - self.arrival.at
        queue_s = max(sequence.prompt_done.queued_s for sequence in self.sequences)
        first_token_s = None if self.first_token_at is None else self.first_token_at - self.arrival.at
        return RequestStats(
            status=self._status,
            outcome=self._outcome,
            duration_s=duration_s,
            validation_s=validation_s,
            queue_s=queue_s,
            inference_s=max(0.0, duration_s - validation_s - queue_s),
            first_token_s=first_token_s,
            input_tokens=self.prompt_tokens,
            generated_tokens=sum(sequence.tokens for sequence in self.sequences),
            accepted_draft_tokens=sum(sequence.accepted_draft_tokens for sequence in self.sequences),
            max_new_tokens=sum(sequence.max_new_tokens for sequence in self.sequences),
            longest_sequence=max(sequence.tokens for sequence in self.sequences),
            finish_reason="length" if any(sequence.is_truncated for sequence in self.sequences) else "stop",
            adapter=self._adapter,
        )

    def _messages_for(self, prompt: TokenizedPrompt) -> Iterator[Generate]:
        """Yields the messages to the worker for one prompt, one for each sequence, each with a new random id.
        Adds these sequences to `sequences` and, by that id, to those that are unfinished."""
        prepared = prompt.prepared
        ids = prompt.ids
        if prompt.images:
            ids = with_image_ids(ids, prompt.images, self._engine.text.images.token_id)
        options = {name: getattr(prepared, name) for name in GenerateOptions.__struct_fields__}
        for number in range(prepared.sequences):
            sequence = GeneratedSequence(self._engine.text.tokenizer, prompt, number, len(self.sequences))
            options["sampling"] = sequence.sampling
            generate = Generate(
                secrets.randbits(63),
                ids,
                prompt.max_new_tokens,
                prompt.borders,
                sent_at=self.sent_at,
                request_id=self.arrival.request_id,
                **options,
            )
            self.sequences.append(sequence)
            self._unfinished[generate.id] = sequence
            yield generate

    def _receive(self) -> list[PromptDone | Token | End]:
        """Returns the worker's messages since the last call. Waits for the first one; [] if `poll` has woken
        this greenlet. Raises ClientDisconnected if the client has disconnected, whatever else has arrived."""
        arrived = [self._messages.get()]
        while not self._messages.empty():
            arrived.append(self._messages.get())
        if None in arrived:
            raise ClientDisconnected
        return [message for messages in arrived for message in messages]

    def _apply(self, message: PromptDone | Token, sequence: GeneratedSequence, batch: Batch) -> None:
        """Applies a message to its sequence. A PromptDone becomes the sequence's `prompt_done`. A Token adds
        the pieces that it makes certain to the batch; without any, the batch gets an empty list. If the
        sequence ends before the worker ends it, as at a stop string, it is cancelled in the worker."""
        if isinstance(message, PromptDone):
            sequence.prompt_done = message
            return
        batch[sequence] += sequence.take(message)
        if sequence.finish_reason is not None:
            del self._unfinished[message.id]
            if message.finish_reason is None:
                self._engine.cancel(message.id, "stop sequence")

    def _truncate(self, batch: Batch) -> None:
        """Ends the unfinished sequences at the deadline, and cancels them in the worker. Adds the text that
        they held back to the batch. Raises ApiError (429) if no sequence has a token."""
        if self.first_token_at is None:
            raise errors.overloaded()  # it has only waited in the queue; a retry may be served
        for request_id, sequence in self._unfinished.items():
            batch[sequence] += sequence.truncate()
            self._engine.cancel(request_id, "deadline")
        self._unfinished.clear()

    def _log(self, event: str, **fields) -> None:
        logger.debug(event, extra={"fields": {"request_id": self.arrival.request_id, **fields}})


def event_stream(
    writer: ResponseWriter,
    generation: ActiveRequest,
    run: Callable[[Callable[[], bytes], bool], bytes],
) -> Iterator[bytes]:
    """Yields b"" once the status is certain: with the first token, or after KEEP_ALIVE_S without one. Then
    yields the body of a streamed response: the events of a Batch as one item, `keep_alive` after KEEP_ALIVE_S
    without any, and the `stream_end`; nothing that is empty. Sets the outcome and `streams_at` of the
    generation; the caller has to close it at the end of the response.

    Before the first item, ApiError and ClientDisconnected are raised, after closing the generation. A later
    error is what `writer.failure` makes of it: the last event or, in plain text, a ConnectionResetError. An
    error that is not an ApiError is logged, and the client gets an internal error. If the client has
    disconnected, the events just end. run: calls the function that writes a Batch, in a thread if the second
    argument is true.
    """
    batches = iter(generation)
    try:
        first = next(batches)
    except BaseException as error:
        generation.fail(error)
        generation.close()
        raise
    yield b""
    generation.streams_at = time.monotonic()
    written_at = generation.arrival.at
    try:
        for batch in itertools.chain([first], batches):
            data = run(functools.partial(_written, writer, batch), writer.lists_prompts)
            now = time.monotonic()
            if not data and now - written_at >= KEEP_ALIVE_S:
                data = writer.keep_alive
            if data:
                written_at = now
                yield data
        generation.succeed()
        if end := writer.stream_end(generation.sequences):
            yield end
    except ClientDisconnected:
        pass
    except Exception as error:
        generation.fail(error, status=200)
        if not isinstance(error, ApiError):
            request_id = generation.arrival.request_id
            logger.exception("a stream failed", extra={"fields": {"request_id": request_id}})
            error = errors.internal()
        yield writer.failure(error)


def _written(writer: ResponseWriter, batch: Batch) -> bytes:
    return b"".join(writer.events(sequence, pieces) for sequence, pieces in batch.items())


def timing_headers(generation: ActiveRequest) -> dict[str, str | int]:
    """Returns those of TGI's headers of a response that is not streamed that are known at its end, by name;
    all sequences must have finished. Times are in whole milliseconds, and sums over all sequences, with two
    exceptions: `x-compute-time` is in seconds, from the arrival of the request until now; `x-time-per-token`
    is `x-inference-time`, which has neither validation nor queue, divided by the generated tokens. A prompt
    of several sequences counts once in `x-prompt-tokens`."""
    sequences = generation.sequences
    arrived_at = generation.arrival.at
    total_s = sum(sequence.finished_at - arrived_at for sequence in sequences)
    validation_s = (generation.sent_at - arrived_at) * len(sequences)
    queue_s = sum(sequence.prompt_done.queued_s for sequence in sequences)
    inference_s = max(0.0, total_s - validation_s - queue_s)
    generated = sum(sequence.tokens for sequence in sequences)
    return {
        "x-compute-time": f"{time.monotonic() - arrived_at:.6f}",
        "x-prompt-tokens": generation.prompt_tokens,
        "x-generated-tokens": generated,
        "x-total-time": int(total_s * 1000),
        "x-validation-time": int(validation_s * 1000),
        "x-queue-time": int(queue_s * 1000),
        "x-inference-time": int(inference_s * 1000),
        "x-time-per-token": int(inference_s / max(1, generated) * 1000),
    }


def end_error(reason: str, message: str) -> ApiError:
    """Returns the error of a request that the worker has ended early. Its status is 429 for the reason
    `overloaded`, 404 for `unknown_adapter`, 424 for `failed` and 500 for `cancelled`. Any other reason is a
    phase in which the worker is not ready: 503. message: the worker's, which the errors of `unknown_adapter`
    and `failed` have."""
    if reason == "overloaded":
        return errors.overloaded()
    if reason == "unknown_adapter":
        return errors.unknown_model(message)
    if reason == "failed":
        return ApiError(424, "generation", f"Request failed during generation: {message}")
    if reason == "cancelled":
        return ApiError(500, "incomplete_generation", "Incomplete generation")
    return errors.not_ready(reason)
