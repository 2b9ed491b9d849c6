"""The worker's end of the socket to the API server processes.

The worker binds one ROUTER in the private folder of this run; each API server process connects one DEALER
(api/http/engine_client.py). The socket is owned by a thread, because ZeroMQ sockets must not be shared
between threads. That thread handles what must not wait for a step: metrics, and the admission of requests.
Everything else goes to the loop's inbox.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque

import msgspec
import zmq

from engine.admission import Admission
from engine.metrics import Metrics
from models.errors import progress
from protocol import (
    HEARTBEAT_S,
    AdapterChange,
    Cancel,
    End,
    FromWeb,
    FromWorker,
    Hello,
    MetricsRequest,
    MetricsText,
    ModelInfo,
    RequestStats,
    Status,
    SubmitRequests,
    encode,
)

logger = logging.getLogger("protocol")

METRICS_SHARE = 0.05  # of a processor, for rendering the metrics: it holds the interpreter's lock
MAX_METRICS_PAUSE_S = 1.0  # between two times; an API server process waits for 2 s (METRICS_TIMEOUT_S)


class PeerLost(msgspec.Struct, frozen=True):
    """Put into the inbox when an API server process has ended. Never sent."""


ForLoop = SubmitRequests | Cancel | AdapterChange | Hello | PeerLost


_decode_message = msgspec.msgpack.Decoder(FromWeb).decode


class Link:
    """The worker's end of the socket. The constructor binds it at `address` and starts its thread. `metrics`
    and `admission` are used on that thread.

    `send`, `announce`, `report` and `interrupt` may be called from any thread, `receive` from one thread
    only. None but `receive` waits. Messages are sent in the order of the calls.
    """

    def __init__(self, address: str, metrics: Metrics, admission: Admission):
        self._phase = "starting"  # as last reported
        self._left_s = math.inf  # until the running step is late
        self._last_news: tuple[str, bool] | None = None  # the phase and `full` that were sent last
        self._metrics = metrics
        self._admission = admission
        self.info: ModelInfo | None = None  # as last announced
        self._inbox: queue.SimpleQueue[tuple[bytes, ForLoop] | None] = queue.SimpleQueue()
        self._outbox: deque[tuple[bytes | None, FromWorker]] = deque()
        self._metrics_requests: list[tuple[bytes, MetricsRequest]] = []  # not answered yet
        self._peers: set[bytes] = set()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Unlimited: an API server process that is stopped for a while misses nothing. Its queue is bounded by
        # what its requests may generate, and gunicorn ends a process that stays stopped.
        self._socket.sndhwm = 0
        # Without this a message to a disconnected peer is dropped without an error.
        self._socket.router_mandatory = True
        self._socket.bind(address)
        self.thread = threading.Thread(target=self._run, name="worker-socket", daemon=True)
        self.thread.start()

    def receive(self, block: bool) -> list[tuple[bytes, ForLoop]]:
        """Returns the messages that have arrived, in order, each with the API server process that sent it.

        With `block`, waits for a message or for `interrupt`, without a limit; the list may then be empty.
        """
        received = [self._inbox.get()] if block else []
        while not self._inbox.empty():  # cheaper than an exception in the common case
            received.append(self._inbox.get())
        return [item for item in received if item is not None]

    def interrupt(self) -> None:
        """Makes a waiting `receive` return, or else the next one. Any thread and any signal handler may call
        it."""
        self._inbox.put(None)

    def report(self, phase: str, limit_s: float = math.inf) -> None:
        """Sets the phase that every `Status` carries from now on; a new phase is sent at once.

        A status is late when the heartbeats since this call make up more than `limit_s` seconds. Heartbeats
        are counted, not time, because a machine that stands still sends none.
        """
        is_news = phase != self._phase
        self._phase = phase
        self._left_s = limit_s
        if is_news:
            os.eventfd_write(self._wake_fd, 1)

    def send(self, peer: bytes | None, message: FromWorker) -> None:
        """Hands a message to the socket's thread, for one API server process, or for all from which a message
        has come (None). A message to a process that has disconnected is dropped, and the loop gets one
        `PeerLost` for this process."""
        self._outbox.append((peer, message))
        os.eventfd_write(self._wake_fd, 1)

    def announce(self, info: ModelInfo) -> None:
        """Sends `info` to every connected API server process, and to each that connects later."""
        self.info = info
        self.send(None, info)

    def close(self) -> None:
        """Sends what is still in the outbox, then ends the thread, and waits for that up to 5 s.
        Idempotent."""
        self._closing = True
        os.eventfd_write(self._wake_fd, 1)
        self.thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._context.destroy(linger=1000)

    def _serve(self) -> None:
        """Sends, receives and answers until `close`. The socket's thread runs it.

        Status goes to all API server processes every HEARTBEAT_S, and at once if its phase or `full` changes.
        Requested metrics are rendered for METRICS_SHARE of the time at most, but not later than
        MAX_METRICS_PAUSE_S after the last time.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        next_beat = next_metrics = 0.0
        while True:
            next_at = min(next_beat, next_metrics) if self._metrics_requests else next_beat
            poller.poll(max(0.0, next_at - time.monotonic()) * 1000)
            closing = self._closing
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            while self._outbox:  # this thread alone takes from it
                # First: a client may send its next request as soon as it has its response.
                self._send_changed_status()
                self._send(*self._outbox.popleft())
            self._send_changed_status()
            if closing:
                break
            while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._read()
            if self._metrics_requests and time.monotonic() >= next_metrics:
                began_s = time.thread_time()
                self._answer_metrics()
                pause_s = (time.thread_time() - began_s) / METRICS_SHARE
                next_metrics = time.monotonic() + min(pause_s, MAX_METRICS_PAUSE_S)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                self._left_s -= HEARTBEAT_S
                self._send(None, self._status_now())

    def _read(self) -> None:
        """Receives and handles one message; raises zmq.Again if there is none. If it cannot be decoded, the
        log says so, and its requests end. An API server process whose first message this is gets the status
        and the model's information."""
        peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        body = b"".join(frames)
        is_new = peer not in self._peers
        self._peers.add(peer)
        try:
            message = _decode_message(body)
        except ValueError as error:
            logger.error("a message from an API server process cannot be decoded: %s", error)
            self._reject_undecodable(peer, body)
        else:
            self._handle(peer, message)
        if is_new:  # after the message: `PeerLost` has to follow a process's last one
            self._send(peer, self._status_now())
            if self.info is not None:
                self._send(peer, self.info)

    def _reject_undecodable(self, peer: bytes, body: bytes) -> None:
        """Ends the requests of a message that `_decode_message` rejects: no client waits for a request that
        never runs. A request whose id cannot be read either gets no message, nor do those after it."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            for generate in msgspec.msgpack.decode(body)["generates"]:
                self._send(peer, End(generate["id"], "failed", "the worker cannot read the request"))

    def _handle(self, peer: bytes, message: FromWeb) -> None:
        """Counts statistics and admits requests on this thread, and hands all other messages to the loop.
        Metrics are answered later (`_answer_metrics`)."""
        match message:
            case MetricsRequest():
                self._metrics_requests.append((peer, message))
            case RequestStats():
                self._metrics.record(message)
            case SubmitRequests():
                self._admit(peer, message)
            case _:
                self._inbox.put((peer, message))

    def _admit(self, peer: bytes, message: SubmitRequests) -> None:
        """Hands the requests of a message to the loop, or ends all of them at once if `Admission.admit`
        rejects them. If the limit is reached, all API server processes get the status."""
        pixel_bytes = sum(len(image.pixels) for image in message.images)
        if reason := self._admission.admit(len(message.generates), pixel_bytes):
            for generate in message.generates:
                self._send(peer, End(generate.id, reason))
            return
        self._inbox.put((peer, message))
        self._send_changed_status()

    def _status_now(self) -> Status:
        """Returns the worker's status: the phase as last reported, with the present `full`, `late` and
        `progress`."""
        return Status(
            phase=self._phase,
            full=self._admission.is_full,
            late=self._left_s < 0,
            progress=progress.text,
        )

    def _send_changed_status(self) -> None:
        """Sends the status if its phase or `full` is not what was sent last."""
        status = self._status_now()
        news = (status.phase, status.full)
        if news != self._last_news:
            self._last_news = news
            self._send(None, status)

    def _answer_metrics(self) -> None:
        """Renders the metrics, and sends the same text to all who have asked for it: rendering it for each
        would keep this thread from its work."""
        requests, self._metrics_requests = self._metrics_requests, []
        text = self._metrics.render()
        for peer, request in requests:
            self._send(peer, MetricsText(request.id, text))

    def _send(self, peer: bytes | None, message: FromWorker) -> None:
        """Sends a message now, to one API server process, or to all of them (None); without waiting. A
        process that has disconnected is forgotten, and the loop gets a `PeerLost`. Raises zmq.ZMQError for
        any other failure."""
        body = encode(message)
        for receiver in list(self._peers) if peer is None else [peer]:
            if receiver not in self._peers:
                continue
            try:
                self._socket.send_multipart((receiver, body), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._peers.discard(receiver)
                self._inbox.put((receiver, PeerLost()))
