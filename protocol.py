"""How web processes and the worker communicate: the message types, their encoding, and the worker's end of the socket.

The worker binds one ROUTER in the private folder of this run; each web process connects one DEALER (engine_client.py). The
worker's socket is owned by a thread (ZeroMQ sockets must not be shared between threads); a second one, the output thread, turns
the outputs of a step into messages, while the next step runs. Messages are msgspec structs in msgpack, never pickle. This layer
does not know what the messages are for.

A request on the wire: `Generate` (in a `SubmitRequests`), then a `Prompt` and `Token`s inside the `Tokens` of each step, until
exactly one terminal message: a `Token` with a `finish_reason`, or an `End`. `Cancel` asks for an early end, with the same rule.
A web process that was taken over may send anything: decoding checks the ranges that the types give, and what one web process
sends is bounded, so that it can neither end the worker nor keep it from the others.
`IMMEDIATE` messages and refusals for lack of room are handled on the socket's thread: they never wait for a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

logger = logging.getLogger("protocol")

HEARTBEAT_S = 0.25
SILENCE_S = 20 * HEARTBEAT_S  # a worker that is silent for that long is not running
METRICS_S = 0.1  # between two times that the metrics are rendered, which takes about 20 ms
# Limits of what a web process can make the worker do.
MAX_MESSAGE_BYTES = 64_000_000  # ZeroMQ disconnects a web process that sends more
MAX_SEQUENCES = 10_000  # of an HTTP request
MAX_PER_ROUND = 100  # messages that are read before others are sent: about 1 ms
MAX_PER_STEP = 1_000  # messages that the loop takes between two steps: about 1 ms
MAX_WAITING = 10_000  # messages of a web process that the loop has not taken
MAX_UNREAD = 10_000  # messages to a web process that does not read: minutes of its tokens
MAX_PEERS = 1_000  # connected web processes
MAX_METRICS_REQUESTS = 10  # of a web process, that wait to be answered
MAX_LOGIT_BIAS = 1024  # tokens; more would take longer than a decode step
MAX_GRAMMAR = 500_000  # characters

Count = Annotated[int, Meta(ge=0)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 32)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Text = Annotated[str, Meta(max_length=200)]


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is sampled from the logits. `seed` None means greedy: the most likely token."""

    seed: Count | None = None
    temperature: Positive = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # 0: off
    top_p: Share = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # 0: off
    typical_p: Share = 1.0
    repetition_penalty: Positive = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    # (token id, value added to its logit)
    logit_bias: Annotated[list[tuple[Count, Bias]], Meta(max_length=MAX_LOGIT_BIAS)] = []


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's `Job` (validate.py) and its `Generate` share."""

    sampling: Sampling = Sampling()
    top_n_tokens: Count = 0
    min_new_tokens: Count = 0  # no end-of-sequence token before that many tokens
    ignore_eos: bool = False  # an end-of-sequence token does not end the completion
    logprobs: bool = True  # of generated tokens; never available where the device samples
    prompt_logprobs: bool = False
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""  # of the text (grammar.py); "": any text
    keep_eos: bool = False  # a text that its grammar completes still gets its end-of-sequence token


class Generate(GenerateOptions, frozen=True):
    """Continue `prompt`. `id` is random, 63 bits, unique among all web processes."""

    id: Count
    prompt: Annotated[list[Count], Meta(min_length=1)]
    max_new_tokens: Annotated[int, Meta(ge=1)]
    sent_at: float = 0.0  # CLOCK_MONOTONIC in seconds, the same for all processes; 0: unknown
    request_id: Text = ""  # of the HTTP request, for the log


class SubmitRequests(msgspec.Struct, tag="submit", frozen=True):
    """Web → worker: everything that one HTTP request asks for. All of it is accepted, or all of it is refused."""

    generates: Annotated[list[Generate], Meta(min_length=1, max_length=MAX_SEQUENCES)]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Web → worker: end this request. `reason` is for the log: a stop sequence, a client disconnect."""

    id: Count
    reason: Text


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Web → worker: a web process has started; `ready` once it accepts requests."""

    pid: int
    ready: bool


class RequestStats(msgspec.Struct, tag="request_stats", frozen=True):
    """Web → worker: a finished HTTP request, for the metrics.

    `outcome` is None for a route that generates no text, else "success" or the reason of the failure: overloaded, validation,
    incomplete, template, generation, dropped. `first_token_s` counts from the arrival of the HTTP request.
    """

    status: Annotated[int, Meta(ge=0, le=599)]  # HTTP; 499: client disconnect; 0: the web process is gone
    outcome: Text | None = None
    duration_s: Seconds = 0.0
    validation_s: Seconds = 0.0
    queue_s: Seconds = 0.0
    inference_s: Seconds = 0.0
    first_token_s: Seconds | None = None
    input_tokens: TokenCount = 0
    generated_tokens: TokenCount = 0
    max_new_tokens: TokenCount = 0


class MetricsRequest(msgspec.Struct, tag="metrics_request", frozen=True):
    """Web → worker: asks for `Metrics` with the same `id`."""

    id: Count


class Token(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One generated token. `logprob` is of the model's own distribution, None where it was not requested or the device samples;
    `top` holds (token id, logprob), most likely first."""

    id: int
    token: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    finish_reason: str | None = None  # "length" or "eos_token" on the last token


class Prompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The prompt of a request has been run, but for the `cached` tokens that a slot held. `logprobs` are of its tokens from the
    second on, if requested; `top` holds the `top_n_tokens` most likely (token id, logprob) at each of these positions."""

    id: int
    queued_s: float
    cached: int = 0
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """Worker → web: the outputs of one step for one web process; no token comes before its request's `Prompt`."""

    tokens: list[Token]
    prompts: list[Prompt] = []


class End(msgspec.Struct, tag="end", frozen=True):
    """Worker → web: the request `id` ends without a (further) token.

    `reason`: "cancelled", "overloaded" or "draining" (refused at once), or "failed" with a `message` that a client may read.
    """

    id: int
    reason: str
    message: str = ""


class Status(msgspec.Struct, tag="status", frozen=True):
    """Worker → web, every HEARTBEAT_S: the worker's state.

    `phase` is "ready" when requests are accepted, before that the phase of the boot. `due_at` is when the running step counts
    as stuck, in seconds of CLOCK_MONOTONIC (which on Linux stands still while the machine is suspended), or 0 when the device
    is idle. `full`: new requests are refused as overload.
    """

    phase: str
    steps: int = 0
    running: int = 0
    queued: int = 0
    due_at: float = 0.0
    full: bool = False


class ModelInfo(msgspec.Struct, tag="model_info", frozen=True):
    """Worker → web: the model that is served. Limits are in tokens."""

    model_name: str
    model_sha: str | None
    tokenizer_dir: str
    vocab_size: int
    eos_token_ids: list[int]
    batch_size: int
    max_input_tokens: int
    max_total_tokens: int
    device: str
    dtype: str
    model_dir: str = ""
    prompt_logprobs: bool = True  # whether log-probabilities of prompts are available
    sampling: str = "host"  # or "device": token ids only, no log-probabilities
    quantize: str | None = None  # or "int8", "int4"


class Metrics(msgspec.Struct, tag="metrics", frozen=True):
    """Worker → web: all metrics, in Prometheus' text format."""

    id: int
    text: bytes


FromWeb = SubmitRequests | Cancel | Hello | RequestStats | MetricsRequest
FromWorker = Tokens | End | Status | ModelInfo | Metrics
IMMEDIATE = (RequestStats, MetricsRequest)  # handled on the socket's thread, never by the loop


class PeerLost(msgspec.Struct, frozen=True):
    """Put into the worker's inbox when a web process is gone. Never sent."""


encode = msgspec.msgpack.Encoder().encode


def decode(decoder: msgspec.msgpack.Decoder, frames: list[bytes]):
    """The message in `frames`; None, with a log line, for anything else: it must not end the thread that reads."""
    try:
        (body,) = frames
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # from msgspec, from UTF-8, and for more frames than one
        logger.error("dropped a message that cannot be decoded: %s", error)
        return None


class WorkerEnd:
    """The worker's end of the socket. `send`, `publish` and `announce` may be called from any thread; `receive` from one.
    What is sent and published is sent in order.

    `on_immediate` is called on the socket's thread with each message of `IMMEDIATE` and must not block; what it returns is sent
    to that peer. `refuses` is called there with each SubmitRequests; the reason and the message that it returns end all of its
    requests at once, however long the step takes that is running.
    """

    def __init__(self, address: str, on_immediate: Callable[[FromWeb], FromWorker | None] = lambda _message: None):
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        # The loop hands outputs over right before it calls the device. Waking a thread through a queue costs it microseconds; a
        # write to the file that wakes the socket's thread would release the interpreter's lock, for milliseconds at worst.
        self._outputs: queue.SimpleQueue = queue.SimpleQueue()
        self._output_thread = threading.Thread(target=self._publish, name="worker-outputs", daemon=True)
        self._thread = threading.Thread(target=self._run, name="worker-socket", daemon=True)
        self._on_immediate = on_immediate
        self.refuses: Callable[[SubmitRequests], tuple[str, str] | None] = lambda _message: None
        self.status = Status("starting")
        self._model_info: ModelInfo | None = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._waiting: Counter[bytes] = Counter()  # messages of each peer in the inbox
        self._waiting_lock = threading.Lock()
        self._metrics_requests: list[tuple[bytes, MetricsRequest]] = []  # not answered yet
        self._peers: set[bytes] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.sndhwm = MAX_UNREAD
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.router_mandatory = True  # else a message to a peer that is gone is dropped without an error
        self._socket.linger = 1000
        self._socket.bind(address)
        self._thread.start()
        self._output_thread.start()

    def receive(self, block: bool, timeout: float | None = None) -> list[tuple[bytes, Any]]:
        """What arrived, as (peer, message) in order, MAX_PER_STEP messages at most; with `block`, waits until there is
        something or `timeout` is over."""
        received = []
        if block:
            with contextlib.suppress(queue.Empty):
                received.append(self._inbox.get(timeout=timeout))
        while not self._inbox.empty() and len(received) < MAX_PER_STEP:  # cheaper than an exception in the common case
            received.append(self._inbox.get())
        received = [item for item in received if item is not None]
        if received:
            with self._waiting_lock:
                self._waiting -= Counter(peer for peer, _message in received)
        return received

    def report(self, status: Status) -> None:
        """The status that every heartbeat carries from now on; a change of `phase` or `full` is sent at once."""
        changed = (status.phase, status.full) != (self.status.phase, self.status.full)
        self.status = status
        if changed:
            self._post((None, status))

    def interrupt(self, message: Any = None) -> None:
        """Makes a waiting `receive` return, with the message of this process if there is one. May be called from a signal
        handler."""
        self._inbox.put(message and (b"", message))

    def send(self, peer: bytes, message: FromWorker) -> None:
        self._outputs.put(lambda: [(peer, message)])

    def publish(self, make_messages: Callable[[], Iterable[tuple[bytes, FromWorker]]]) -> None:
        """Sends the (peer, message) pairs that `make_messages` returns; it is called on the output thread, in order."""
        self._outputs.put(make_messages)

    def announce(self, info: ModelInfo) -> None:
        """Sends `info` to every connected web process, and to each that connects later."""
        self._model_info = info
        self._post((None, info))

    def close(self) -> None:
        """Sends what is still in the outbox, then ends the thread. Idempotent."""
        self._outputs.put(None)
        self._output_thread.join(timeout=5)
        self._closing.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)

    def _publish(self) -> None:
        for make_messages in iter(self._outputs.get, None):
            try:
                for peer, message in make_messages():  # the first is sent before the last is made
                    self._post((peer, message))
            except Exception:
                logger.exception("the outputs of a step could not be published")

    def _post(self, item: tuple[bytes | None, FromWorker]) -> None:
        """Sends a message to one web process, or to all of them (None)."""
        self._outbox.put(item)
        os.eventfd_write(self._wake_fd, 1)

    def _drain_outbox(self) -> Iterable:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while not self._outbox.empty():  # this thread alone takes from it
            yield self._outbox.get()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._context.destroy(linger=1000)

    def _serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromWeb)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        next_beat = next_metrics = 0.0
        while True:
            next_turn = min(next_beat, next_metrics) if self._metrics_requests else next_beat
            poller.poll(max(0.0, next_turn - time.monotonic()) * 1000)
            closing = self._closing.is_set()
            for peer, message in self._drain_outbox():
                self._send(peer, message)
            if closing:
                break
            for _ in range(MAX_PER_ROUND):
                if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    break
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                if (message := decode(decoder, frames)) is not None:
                    self._handle(peer, message)
            if self._metrics_requests and time.monotonic() >= next_metrics:
                self._answer_metrics()
                next_metrics = time.monotonic() + METRICS_S
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                self._send(None, self.status)

    def _handle(self, peer: bytes, message: FromWeb) -> None:
        if peer not in self._peers:
            if len(self._peers) >= MAX_PEERS:
                return
            self._peers.add(peer)
            self._send(peer, self.status)
            if self._model_info is not None:
                self._send(peer, self._model_info)
        if isinstance(message, MetricsRequest):
            if sum(asker == peer for asker, _request in self._metrics_requests) < MAX_METRICS_REQUESTS:
                self._metrics_requests.append((peer, message))
        elif isinstance(message, IMMEDIATE):
            self._reply_to(message)
        elif self._waiting[peer] >= MAX_WAITING:
            logger.error("dropped a message of a web process that has sent %d which wait", MAX_WAITING)
        elif isinstance(message, SubmitRequests) and (refusal := self.refuses(message)):
            for generate in message.generates:
                self._send(peer, End(generate.id, *refusal))
        else:
            with self._waiting_lock:
                self._waiting[peer] += 1
            self._inbox.put((peer, message))

    def _reply_to(self, message: FromWeb) -> FromWorker | None:
        try:
            return self._on_immediate(message)
        except Exception:
            logger.exception("%s could not be handled", type(message).__name__)
            return None

    def _answer_metrics(self) -> None:
        """All requests that wait get the same metrics."""
        requests, self._metrics_requests = self._metrics_requests, []
        if reply := self._reply_to(requests[0][1]):
            for peer, request in requests:
                self._send(peer, msgspec.structs.replace(reply, id=request.id))

    def _send(self, peer: bytes | None, message: FromWorker) -> None:
        """To one web process, or to all of them (None)."""
        body = encode(message)
        for receiver in list(self._peers) if peer is None else [peer]:
            if receiver not in self._peers:
                continue
            try:
                self._socket.send_multipart((receiver, body), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # it is gone, or has not read MAX_UNREAD messages
                    raise
                self._peers.discard(receiver)
                self._inbox.put((receiver, PeerLost()))
