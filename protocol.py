"""How web processes and the worker communicate: the message types, their encoding, and the worker's end of the socket.

The worker binds one ROUTER in the private folder of this run; each web process connects one DEALER (engine_client.py). The
worker's socket is owned by a thread (ZeroMQ sockets must not be shared between threads); a second one, the output thread, turns
the outputs of a step into messages, while the next step runs. Messages are msgspec structs in msgpack, never pickle. This layer
does not know what the messages are for.

A request on the wire: `Generate` (in a `SubmitRequests`), then a `Prompt` and `Token`s inside the `Tokens` of each step, until
exactly one terminal message: a `Token` with a `finish_reason`, or an `End`. `Cancel` asks for an early end, with the same rule.
`IMMEDIATE` messages and refusals for lack of room are handled on the socket's thread: they never wait for a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

logger = logging.getLogger("protocol")

HEARTBEAT_S = 0.25
SILENCE_S = 20 * HEARTBEAT_S  # a worker that is silent for that long is not running


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is sampled from the logits. `seed` None means greedy: the most likely token."""

    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []  # (token id, value added to its logit)


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's `Job` (validate.py) and its `Generate` share."""

    sampling: Sampling = Sampling()
    top_n_tokens: int = 0
    min_new_tokens: int = 0  # no end-of-sequence token before that many tokens
    ignore_eos: bool = False  # an end-of-sequence token does not end the completion
    logprobs: bool = True  # of generated tokens; never available where the device samples
    prompt_logprobs: bool = False
    grammar: str = ""  # of the text (grammar.py); "": any text
    keep_eos: bool = False  # a text that its grammar completes still gets its end-of-sequence token


class Generate(GenerateOptions, frozen=True):
    """Continue `prompt`. `id` is random, 63 bits, unique among all web processes."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    sent_at: float = 0.0  # CLOCK_MONOTONIC in seconds, the same for all processes; 0: unknown
    request_id: str = ""  # of the HTTP request, for the log


class SubmitRequests(msgspec.Struct, tag="submit", frozen=True):
    """Web → worker: everything that one HTTP request asks for. All of it is accepted, or all of it is refused."""

    generates: list[Generate]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Web → worker: end this request. `reason` is for the log: a stop sequence, a client disconnect."""

    id: int
    reason: str


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Web → worker: a web process has started; `ready` once it accepts requests."""

    pid: int
    ready: bool


class RequestStats(msgspec.Struct, tag="request_stats", frozen=True):
    """Web → worker: a finished HTTP request, for the metrics.

    `outcome` is None for a route that generates no text, else "success" or the reason of the failure: overloaded, validation,
    incomplete, template, generation, dropped. `first_token_s` counts from the arrival of the HTTP request.
    """

    status: int  # HTTP; 499: client disconnect; 0: the web process is gone
    outcome: str | None = None
    duration_s: float = 0.0
    validation_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    first_token_s: float | None = None
    input_tokens: int = 0
    generated_tokens: int = 0
    max_new_tokens: int = 0


class MetricsRequest(msgspec.Struct, tag="metrics_request", frozen=True):
    """Web → worker: asks for `Metrics` with the same `id`."""

    id: int


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
    except (ValueError, RecursionError):  # from msgspec, from UTF-8, and for more frames than one
        logger.exception("dropped a message that cannot be decoded")
        return None


class WorkerEnd:
    """The worker's end of the socket. `send`, `publish` and `announce` may be called from any thread; `receive` from one.
    What is sent and published is sent in order.

    `on_immediate` is called on the socket's thread with each message of `IMMEDIATE` and must not block; what it returns is sent
    to that peer. `refuses` is called there with each SubmitRequests; a reason that it returns ends all of its requests at once,
    however long the step takes that is running. `on_failure` is called when the thread ends by an unexpected error: without
    it the worker could neither receive nor send.
    """

    def __init__(
        self,
        address: str,
        on_immediate: Callable[[FromWeb], FromWorker | None] = lambda _message: None,
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        # The loop hands outputs over right before it calls the device. Waking a thread through a queue costs it microseconds; a
        # write to the file that wakes the socket's thread would release the interpreter's lock, for milliseconds at worst.
        self._outputs: queue.SimpleQueue = queue.SimpleQueue()
        self._output_thread = threading.Thread(target=self._publish, name="worker-outputs", daemon=True)
        self._thread = threading.Thread(target=self._run, name="worker-socket", daemon=True)
        self._on_immediate = on_immediate
        self._on_failure = on_failure
        self.refuses: Callable[[SubmitRequests], str | None] = lambda _message: None
        self.status = Status("starting")
        self._model_info: ModelInfo | None = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._peers: set[bytes] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.router_mandatory = True  # else a message to a peer that is gone is dropped without an error
        self._socket.linger = 1000
        self._socket.bind(address)
        self._thread.start()
        self._output_thread.start()

    def receive(self, block: bool, timeout: float | None = None) -> list[tuple[bytes, Any]]:
        """What arrived, as (peer, message) in order; with `block`, waits until there is something or `timeout` is over."""
        received = []
        if block:
            with contextlib.suppress(queue.Empty):
                received.append(self._inbox.get(timeout=timeout))
        while not self._inbox.empty():  # cheaper than an exception in the common case
            received.append(self._inbox.get())
        return [item for item in received if item is not None]

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
        except BaseException as error:
            if self._on_failure is None:
                raise
            self._on_failure(error)
        finally:
            self._context.destroy(linger=1000)

    def _serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromWeb)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        next_beat = 0.0
        while True:
            poller.poll(max(0.0, next_beat - time.monotonic()) * 1000)
            closing = self._closing.is_set()
            for peer, message in self._drain_outbox():
                self._send(peer, message)
            if closing:
                break
            while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                if (message := decode(decoder, frames)) is not None:
                    self._handle(peer, message)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                self._send(None, self.status)

    def _handle(self, peer: bytes, message: FromWeb) -> None:
        if peer not in self._peers:
            self._peers.add(peer)
            self._send(peer, self.status)
            if self._model_info is not None:
                self._send(peer, self._model_info)
        if isinstance(message, IMMEDIATE):
            try:
                reply = self._on_immediate(message)
            except Exception:
                logger.exception("%s could not be handled", type(message).__name__)
            else:
                if reply is not None:
                    self._send(peer, reply)
        elif isinstance(message, SubmitRequests) and (reason := self.refuses(message)):
            for generate in message.generates:
                self._send(peer, End(generate.id, reason))
        else:
            self._inbox.put((peer, message))

    def _send(self, peer: bytes | None, message: FromWorker) -> None:
        """To one web process, or to all of them (None)."""
        body = encode(message)
        for receiver in list(self._peers) if peer is None else [peer]:
            if receiver not in self._peers:
                continue
            try:
                self._socket.send_multipart((receiver, body))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._peers.discard(receiver)
                self._inbox.put((receiver, PeerLost()))
