"""The worker's end of the socket to the web processes.

The worker binds one ROUTER in the private folder of this run; each web process connects one DEALER (api/engine_client.py). The
socket is owned by a thread (ZeroMQ sockets must not be shared between threads); a second one, the output thread, turns
the outputs of a step into messages, while the next step runs. It does not know what the messages are for.
`IMMEDIATE` messages and refusals for lack of room are handled on the socket's thread: they never wait for a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from protocol import (
    HEARTBEAT_S,
    IMMEDIATE,
    MAX_MESSAGE_BYTES,
    End,
    FromWeb,
    FromWorker,
    MetricsRequest,
    ModelInfo,
    Status,
    SubmitRequests,
    decode,
    encode,
)

logger = logging.getLogger("protocol")

METRICS_S = 0.1
MAX_PER_ROUND = 100
MAX_PER_STEP = 1_000
MAX_WAITING = 10_000
MAX_UNREAD = 10_000
MAX_PEERS = 1_000
MAX_METRICS_REQUESTS = 10


class PeerLost(msgspec.Struct, frozen=True):
    """Put into the worker's inbox when a web process is gone. Never sent."""


class WorkerEnd:
    """The worker's end of the socket. `send`, `publish` and `announce` may be called from any thread; `receive` from one.
    What is sent and published is sent in order.

    `on_immediate` is called on the socket's thread with each message of `IMMEDIATE` and must not block; what it returns is sent
    to that peer. `refuses` is called there with each SubmitRequests; the reason and the message that it returns end all of its
    requests at once, however long the step takes that is running.
    """

    def __init__(
        self, address: str, on_immediate: Callable[[FromWeb], FromWorker | None] = lambda _message: None
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
        self._socket.router_mandatory = (
            True  # else a message to a peer that is gone is dropped without an error
        )
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
        while (
            not self._inbox.empty() and len(received) < MAX_PER_STEP
        ):  # cheaper than an exception in the common case
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
                if error.errno not in (
                    zmq.EHOSTUNREACH,
                    zmq.EAGAIN,
                ):  # it is gone, or has not read MAX_UNREAD messages
                    raise
                self._peers.discard(receiver)
                self._inbox.put((receiver, PeerLost()))
