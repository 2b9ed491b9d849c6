"""How web processes and the worker talk: the message types and both ends of the socket.

The worker binds one ROUTER in the private folder of this run; each web process connects one DEALER. Each end is a thread
that owns its socket (ZeroMQ sockets must not be shared) and hands messages over in memory, so neither a step on the device
nor a request in HTTP waits for the other. Messages are msgspec structs in msgpack, never pickle. This layer does not know
what the messages are for.

A request's life on the wire: `Generate` (in a `GenerateAll`), then a `Prompt` and `Token`s inside the `Tokens` of each step,
until exactly one terminal word: a `Token` with a `finish_reason`, or an `End`. `Cancel` asks for the end early; it is answered
by the same rule.
What has nothing to do with the loop (`ASIDE`) goes past it, and so does the refusal of what finds no place: a step may take
long, these may not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import zmq

logger = logging.getLogger("protocol")

HEARTBEAT_S = 0.25
SILENCE_S = 20 * HEARTBEAT_S  # a worker that was not heard of for that long is not running


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen from the logits. `seed` None means greedily: the likeliest token."""

    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []  # (token id, what is added to its logit)


class Generate(msgspec.Struct, frozen=True):
    """Continue `prompt`. `id` is random, 63 bits, unique among all web processes."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    top_n_tokens: int = 0
    min_new_tokens: int = 0  # no end-of-sequence token before that many
    ignore_eos: bool = False  # an end-of-sequence token does not end the answer
    logprobs: bool = True  # of its tokens; a device that samples has none anyway
    prompt_logprobs: bool = False
    sent_at: float = 0.0  # CLOCK_MONOTONIC in seconds, one for all processes; 0: not told


class GenerateAll(msgspec.Struct, tag="generate", frozen=True):
    """Web → worker: what one HTTP request asks for. All of it is taken, or all of it is refused."""

    generates: list[Generate]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Web → worker: nobody wants the rest. `reason` is for the log: a stop sequence, a client that hung up."""

    id: int
    reason: str


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Web → worker: a web process is there; `ready` once it can take requests."""

    pid: int
    ready: bool


class Answered(msgspec.Struct, tag="answered", frozen=True):
    """Web → worker: an HTTP request is over, or several that were refused alike; for the metrics.

    `outcome` is None for a route that generates no text, else "success" or why not: overloaded, validation, incomplete,
    template, generation, dropped. `first_token_s` counts from the arrival of the HTTP request.
    """

    status: int  # HTTP; 499: the client hung up; 0: there was nobody to answer
    outcome: str | None = None
    duration_s: float = 0.0
    validation_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    first_token_s: float | None = None
    input_tokens: int = 0
    generated_tokens: int = 0
    max_new_tokens: int = 0
    times: int = 1  # as many requests went like that


class AskMetrics(msgspec.Struct, tag="ask_metrics", frozen=True):
    """Web → worker: asks for `Metrics` with the same `id`."""

    id: int


class Token(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One generated token. `logprob` is of the model's own distribution, None where the device does not tell it; `top` holds
    (token id, logprob), likeliest first."""

    id: int
    token: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    finish_reason: str | None = None  # "length" or "eos_token" on the last token


class Prompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The prompt of a request has been run. `logprobs` are of its tokens from the second on, if they were asked for; `top`
    holds the `top_n_tokens` likeliest (token id, logprob) at each of these places."""

    id: int
    queued_s: float
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """Worker → web: everything that one step brought for one web process; no token comes before its request's `Prompt`."""

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
    """Worker → web, every HEARTBEAT_S: what the worker does.

    `phase` is "ready" when requests are taken, before that what is going on. `progress_at` is CLOCK_MONOTONIC, in seconds,
    of the last step or change of phase; `due_at` is when the next progress must have come at the latest, for all that is known
    of this device, or 0 when it has nothing to do. (On Linux that clock stands still while the machine is suspended.) `full`:
    whatever comes now is refused as too much.
    """

    phase: str
    progress_at: float
    steps: int = 0
    running: int = 0
    queued: int = 0
    due_at: float = 0.0
    full: bool = False


class Facts(msgspec.Struct, tag="facts", frozen=True):
    """Worker → web: what is served, so that the web side never guesses. Limits are in tokens."""

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
    prompt_logprobs: bool = True  # whether this device can give log-probabilities of a prompt
    sampling: str = "host"  # or "device": it tells ids, and no log-probabilities
    quantize: str | None = None  # or "int8"


class Metrics(msgspec.Struct, tag="metrics", frozen=True):
    """Worker → web: all metrics, in Prometheus' text format."""

    id: int
    text: bytes


FromWeb = GenerateAll | Cancel | Hello | Answered | AskMetrics
FromWorker = Tokens | End | Status | Facts | Metrics
ASIDE = (Answered, AskMetrics)  # handled on the socket's thread, never by the loop


class Gone(msgspec.Struct, frozen=True):
    """Put into the worker's inbox when a web process is no longer there. Never sent."""


_encode = msgspec.msgpack.Encoder().encode


def _decoded(decoder: msgspec.msgpack.Decoder, frames: list[bytes]):
    """The message in `frames`; None, and a word in the log, for what is none of ours: it must not end who listens."""
    try:
        (body,) = frames
        return decoder.decode(body)
    except (ValueError, RecursionError):  # of msgspec, of UTF-8, and of more frames than one
        logger.exception("a message that is none of ours is dropped")
        return None


def _made(make: Callable[[], Iterable]) -> Iterator:
    """One by one: the first can go out before the last is made."""
    try:
        yield from make()
    except Exception:  # without this thread nobody would hear from the worker again
        logger.exception("a message could not be made")


class _SocketThread:
    """A thread that owns a socket: wakes for what arrives, for what others want to send, and every HEARTBEAT_S."""

    def __init__(self, name: str):
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _post(self, item) -> None:
        self._outbox.put(item)
        os.eventfd_write(self._wake_fd, 1)

    def _drain_outbox(self) -> Iterable:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        while True:
            try:
                yield self._outbox.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """Sends what is still in the outbox, then ends the thread. Idempotent."""
        self._closing.set()
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        raise NotImplementedError


class WorkerEnd(_SocketThread):
    """The worker's end. `send` and `announce` may be called from any thread; `receive` from one.

    `on_aside` is called on the socket's thread with each message of `ASIDE`, and must not block. What it returns is sent to
    that peer. Without it they are dropped. `refuses` is asked there about each GenerateAll; all of one for which it gives a
    reason ends with that at once, whatever the loop is busy with.
    """

    def __init__(self, address: str, on_aside: Callable[[FromWeb], FromWorker | None] | None = None):
        super().__init__("worker-socket")
        self._on_aside = on_aside
        self.refuses: Callable[[GenerateAll], str | None] = lambda _message: None
        self.status = Status(phase="starting", progress_at=time.monotonic())
        self._facts: Facts | None = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.router_mandatory = True  # else a message to a peer that is gone vanishes without a sound
        self._socket.linger = 1000
        self._context = context
        self._socket.bind(address)
        self._thread.start()

    def receive(self, block: bool, timeout: float | None = None) -> list[tuple[bytes, FromWeb | Gone]]:
        """What arrived, as (peer, message) in order; with `block`, waits until there is something or `timeout` is over."""
        received = []
        if block:
            with contextlib.suppress(queue.Empty):
                received.append(self._inbox.get(timeout=timeout))
        while not self._inbox.empty():  # as a rule it is, and an exception would take longer than to ask
            received.append(self._inbox.get())
        return [item for item in received if item is not None]

    def report(self, status: Status) -> None:
        """What every heartbeat says from now on; a change of `phase` or `full` is told at once."""
        changed = (status.phase, status.full) != (self.status.phase, self.status.full)
        self.status = status
        if changed:
            self._post((None, status))

    def interrupt(self) -> None:
        """Makes a waiting `receive` return. May be called from a signal handler."""
        self._inbox.put(None)

    def send(self, peer: bytes, message: FromWorker) -> None:
        self._post((peer, message))

    def send_made(self, make: Callable[[], Iterable[tuple[bytes, FromWorker]]]) -> None:
        """Sends what `make` gives, which is called on the socket's thread when its turn has come."""
        self._post(make)

    def give_way(self) -> None:
        """Has the socket's thread wait for a processor rather than take that of the thread that wakes it. Linux lets who has
        slept long interrupt who runs, even where another processor is idle; the worker's loop lost milliseconds by that."""
        with contextlib.suppress(OSError):  # where that is forbidden, all works as well, a little later
            os.sched_setscheduler(self._thread.native_id, os.SCHED_BATCH, os.sched_param(0))

    def announce(self, facts: Facts) -> None:
        """Tells `facts` to every web process that is there, and to each that says hello later."""
        self._facts = facts
        self._post((None, facts))

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromWeb)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        peers: set[bytes] = set()
        next_beat = 0.0
        while True:
            poller.poll(max(0.0, next_beat - time.monotonic()) * 1000)
            closing = self._closing.is_set()
            for item in self._drain_outbox():
                self._send_all(_made(item) if callable(item) else [item], peers)
            if closing:
                break
            while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                message = _decoded(decoder, frames)
                if message is None:
                    continue
                if peer not in peers:
                    peers.add(peer)
                    self._send_to(peer, self.status, peers)
                    if self._facts is not None:
                        self._send_to(peer, self._facts, peers)
                if isinstance(message, ASIDE):
                    self._answer_aside(peer, message, peers)
                elif isinstance(message, GenerateAll) and (reason := self.refuses(message)):
                    for generate in message.generates:
                        self._send_to(peer, End(generate.id, reason), peers)
                else:
                    self._inbox.put((peer, message))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                for peer in list(peers):
                    self._send_to(peer, self.status, peers)
        self._context.destroy(linger=1000)

    def _answer_aside(self, peer: bytes, message: FromWeb, peers: set[bytes]) -> None:
        if self._on_aside is None:
            return
        try:
            reply = self._on_aside(message)
        except Exception:  # without this thread nobody would hear from the worker again
            logger.exception("%s could not be handled", type(message).__name__)
            return
        if reply is not None:
            self._send_to(peer, reply, peers)

    def _send_all(self, messages: Iterable[tuple[bytes | None, FromWorker]], peers: set[bytes]) -> None:
        for peer, message in messages:
            for receiver in list(peers) if peer is None else [peer]:
                self._send_to(receiver, message, peers)

    def _send_to(self, peer: bytes, message: FromWorker, peers: set[bytes]) -> None:
        if peer not in peers:
            return
        body = _encode(message)
        try:
            self._socket.send(peer, zmq.SNDMORE)
            self._socket.send(body)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            peers.discard(peer)
            self._inbox.put((peer, Gone()))


class WebEnd(_SocketThread):
    """A web process' end. All callbacks are called on its thread and must not block.

    To be made after fork. `on_lost` is called once, when the worker is gone for good; `on_beat` about every HEARTBEAT_S, after
    what has arrived by then.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[FromWorker], None],
        on_lost: Callable[[], None],
        on_beat: Callable[[], None] = lambda: None,
    ):
        super().__init__("web-socket")
        self._address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._thread.start()

    def send(self, message: FromWeb) -> None:
        """Raises what msgspec raises for a message that cannot be encoded: here, where it harms nobody else."""
        self._post(_encode(message))

    def _run(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.linger = 0
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(self._address)
        decoder = msgspec.msgpack.Decoder(FromWorker)
        poller = zmq.Poller()
        for source in (dealer, monitor, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        next_beat = 0.0
        while not self._closing.is_set():
            ready = dict(poller.poll(HEARTBEAT_S * 1000))
            if self._wake_fd in ready:
                for body in self._drain_outbox():
                    dealer.send(body)
            if dealer in ready:
                self._read(dealer, decoder)
            if monitor in ready:  # a worker is never started twice in a run: gone once is gone for good
                self._read(dealer, decoder)
                self._on_lost()
                break
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                self._on_beat()
        dealer.disable_monitor()
        context.destroy(linger=0)

    def _read(self, dealer: zmq.Socket, decoder: msgspec.msgpack.Decoder) -> None:
        while dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # cheaper than an exception for each message
            message = _decoded(decoder, dealer.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                self._on_message(message)
