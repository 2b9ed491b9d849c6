"""The worker as an API server process sees it: submit, stream, cancel, metrics, health.

An `EngineClient` owns the API server's end of the socket. Its greenlets receive messages and put them into
the queue of the request that they belong to; the request's own greenlet takes them out
(api/generation/stream.py). Everything runs on the one thread of the event loop, so nothing here takes a lock.
This layer is independent of HTTP, text and torch.
"""

from __future__ import annotations

import functools
import logging
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import gevent
import msgspec
import zmq.green as zmq
from gevent.event import Event
from gevent.queue import Empty, SimpleQueue
from gunicorn.arbiter import Arbiter

import protocol
from protocol import (
    HEARTBEAT_S,
    SILENCE_S,
    AdapterChange,
    AdapterChanged,
    End,
    Generate,
    Image,
    MetricsText,
    ModelInfo,
    PromptDone,
    Status,
    Token,
)

logger = logging.getLogger("engine_client")

METRICS_TIMEOUT_S = 2.0
ADAPTER_TIMEOUT_S = 300.0  # for a download, or for the requests that run with an adapter
FIRST_MESSAGE_S = 1.0  # a running worker answers a new process within milliseconds
LOADING_S = 30.0  # the largest tokenizers load in about two seconds
SPREAD_S = 0.1  # the worker's news reaches all API server processes within a few milliseconds
# The limit for one HTTP request without the pixels of its images: both processes hold it in memory.
MAX_MESSAGE_BYTES = 64_000_000
ANSWERS = (End, MetricsText, AdapterChanged)  # messages after which none follows with the same id
UNREADABLE = "the worker's message cannot be read"


class EngineError(Exception):
    """The worker does not answer. The message is `EngineClient.phase`, or "busy" if that is "ready"."""


class EngineBusy(EngineError):
    """The worker is ready, but does not answer in time."""


class TooLarge(Exception):
    """The requests do not fit into a message to the worker."""


def attempt(function: Callable[[], Any]) -> Any:
    """What `function()` returns, or the exception that `function()` raises, as a result. gevent would print
    the traceback of an exception that leaves its thread."""
    try:
        return function()
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        return error


def settled(result: Any) -> Any:
    """Returns a result of `attempt`, or raises it if it is an exception."""
    try:
        if isinstance(result, BaseException):
            raise result
        return result
    finally:
        del result  # else it would keep this frame, and all that led to it, until garbage is collected


class EngineClient:
    """The worker's state, and the requests that this process has sent to the worker. To be made after the
    fork: connects to the worker, tells it of this process, and starts greenlets, which `close` ends. No
    request is accepted before `text` is set.

    load_text: called once, with the worker's first ModelInfo, in a thread, because a large file is read. The
    result is the attribute `text`; then `has_text` is set. If `load_text` raises, the process ends. on_stuck:
    called once, when the worker has been stuck for `stuck_timeout_s` without a break.
    """

    def __init__(
        self,
        address: str,
        load_text: Callable[[ModelInfo], Any],
        stuck_timeout_s: float = float("inf"),
        on_stuck: Callable[[], None] = lambda: None,
    ):
        self.info: ModelInfo | None = None
        self.text: Any = None
        self.progress = ""  # of a worker that is not ready: what takes long, and how far it is
        self._load_text = load_text
        self._stuck_timeout_s = stuck_timeout_s
        self._on_stuck = on_stuck
        self._status: Status | None = None
        self._lost: str | None = None  # "dead" or "stuck" once the worker is given up
        self._silent_s = 0.0  # since the last message, of the time that this process itself has run
        self._stuck_s = 0.0
        self._reported_ready = False
        self._has_status = Event()
        self._has_been_ready = Event()  # the worker
        self.has_text = Event()
        self._decoder = msgspec.msgpack.Decoder(protocol.FromWorker)
        # By request id; None: cancelled, but the worker has not confirmed it yet.
        self._queues: dict[int, SimpleQueue | None] = {}
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set_hwm(0)
        self._dealer.linger = 0
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(address)
        self._greenlets = [
            gevent.spawn(run) for run in (self._receive, self._wait_for_disconnect, self._watch_for_stuck)
        ]
        self._send(protocol.Hello(ready=False))

    @property
    def phase(self) -> str:
        """ "ready" when requests are accepted, else the first reason why not that holds.

        The reasons are: "dead" or "stuck": the worker was given up, unless it was draining; "starting": no
        status has arrived; a phase of the worker other than "ready"; "loading": `text` is not there; "stuck".
        """
        if self._status is None:
            return self._lost or "starting"
        if self._lost and self._status.phase != "draining":
            return self._lost
        if self._status.phase != "ready":
            return self._status.phase
        if self.text is None:
            return "loading"
        return "stuck" if self._is_stuck else "ready"

    @property
    def is_full(self) -> bool:
        """Whether the worker is ready, but would reject any request now, by its last status."""
        return self.phase == "ready" and self._status.full

    @property
    def _is_stuck(self) -> bool:
        """Whether a step takes many times longer than usual, or the worker has sent nothing for SILENCE_S.
        False during startup, which may take long. While this process itself does not run, messages of the
        worker wait: such time does not count."""
        if self._status is None or self._status.phase not in ("ready", "draining"):
            return False  # a startup may take long, and be silent
        return self._status.late or self._silent_s > SILENCE_S

    def wait_while_loading(self) -> None:
        """Waits up to SPREAD_S for the news that the worker is ready: a client may have that news already
        from another process. If the worker is or has been ready, then waits up to LOADING_S for the
        tokenizer. Returns nothing: `phase` says what has come."""
        if self._has_been_ready.wait(SPREAD_S):
            self.has_text.wait(LOADING_S)

    def wait_until_known(self) -> None:
        """Waits up to FIRST_MESSAGE_S for the worker's first status, then as `wait_while_loading` does.

        A process that replaces another process would otherwise reject requests that the others accept. A
        worker that is still starting, or silent, is not waited for any longer.
        """
        self._has_status.wait(FIRST_MESSAGE_S)
        self.wait_while_loading()

    def submit(self, generates: list[Generate], messages: SimpleQueue, images: Sequence[Image] = ()) -> None:
        """Sends requests, and the images of their prompts. The worker accepts all of the requests or none.
        Does not wait for the worker. If the worker is lost, each request gets its End at once.

        messages: gets the worker's messages about these requests in lists, those of one step as one list. The
        last message about a request is an End, or a Token with a `finish_reason`. Raises TooLarge without
        sending anything if the message without its pixels has more than MAX_MESSAGE_BYTES.
        """
        body = protocol.encode(protocol.SubmitRequests(generates, list(images)))
        if len(body) - sum(len(image.pixels) for image in images) > MAX_MESSAGE_BYTES:
            raise TooLarge
        for generate in generates:
            self._queues[generate.id] = messages
        self._send_bytes(body)

    def cancel(self, request_id: int, reason: str) -> None:
        """Ends a request early: its queue gets no more messages, also no End, and the worker is told. Does
        nothing if the request has ended already. reason: what the worker's log says."""
        if self._queues.get(request_id) is not None:
            self._queues[request_id] = None
            self._send(protocol.Cancel(request_id, reason))

    def record(self, stats: protocol.RequestStats) -> None:
        """Adds an HTTP request to the metrics, which the worker keeps for all API server processes. Does
        nothing once the worker is lost."""
        self._send(stats)

    def metrics(self) -> bytes:
        """Returns all metrics in Prometheus' text format. A worker that is not ready may answer, too. If no
        answer comes in METRICS_TIMEOUT_S, or the worker is lost, raises EngineBusy if the worker is ready,
        else EngineError."""
        return self._ask(protocol.MetricsRequest(secrets.randbits(63)), METRICS_TIMEOUT_S).text

    def change_adapter(self, name: str, source: str = "", in_place: bool = False) -> AdapterChanged:
        """Loads the LoRA adapter `name` from `source`, or unloads the adapter if `source` is "". Waits for
        the worker's answer, and returns it; its `error` says whether and why that failed.

        If no answer comes within ADAPTER_TIMEOUT_S, or the worker is lost, raises EngineBusy if the worker is
        ready, else EngineError; the change may still be made. in_place: a loaded adapter of this name is
        replaced.
        """
        change = AdapterChange(secrets.randbits(63), name, source, in_place)
        return self._ask(change, ADAPTER_TIMEOUT_S)

    def _ask(
        self, question: protocol.MetricsRequest | AdapterChange, timeout_s: float
    ) -> MetricsText | AdapterChanged:
        """Sends a question, and returns the worker's answer. If none comes within `timeout_s`, or the worker
        is lost, or sends an unreadable message, raises EngineBusy (the worker is ready) or EngineError. A
        later answer is dropped."""
        replies = SimpleQueue()
        self._queues[question.id] = replies
        try:
            self._send(question)
            (reply,) = replies.get(timeout=timeout_s)
            if not isinstance(reply, End):
                return reply
        except Empty:
            pass
        finally:
            self._queues.pop(question.id, None)
        raise EngineBusy("busy") if self.phase == "ready" else EngineError(self.phase)

    def close(self) -> None:
        """Ends the greenlets and closes the socket. Requests that run get no End."""
        gevent.killall(self._greenlets)
        self._dealer.disable_monitor()
        self._context.destroy(linger=0)

    def _send(self, message: protocol.FromWeb) -> None:
        self._send_bytes(protocol.encode(message))

    def _send_bytes(self, body: bytes) -> None:
        """Sends a message without waiting. Once the worker is lost, ends all requests instead: nobody would
        answer them."""
        if self._lost:
            self._end_all(self._lost)
            return
        # Without a high-water mark this never blocks. A green socket looks for arrived messages after each
        # send, which could have hidden their signal.
        self._dealer.send(body, zmq.NOBLOCK)

    def _receive(self) -> None:
        while True:
            self._read()

    def _read(self, flags: int = 0) -> None:
        """Waits for one message, and handles it; the worker counts as alive then. Raises zmq.Again if
        `flags`, those of zmq's `recv`, have NOBLOCK and no message is there. If the message cannot be decoded
        or handled, that is logged, and all requests end, here and in the worker: it may have been for any of
        them."""
        body = self._dealer.recv(flags)
        self._silent_s = 0.0
        try:
            self._handle(self._decoder.decode(body))
        except Exception:
            logger.exception(UNREADABLE)
            for request_id in self._queues:
                self._send(protocol.Cancel(request_id, "unreadable"))
            self._end_all("failed", UNREADABLE)

    def _wait_for_disconnect(self) -> None:
        """Runs as a greenlet. Gives the worker up when it disconnects, after its last messages. A worker is
        never restarted in a run."""
        self._monitor.recv_multipart()
        while self._dealer.get(zmq.EVENTS) & zmq.POLLIN:  # what it sent before
            self._read(zmq.NOBLOCK)
        self._lose()

    def _handle(self, message: protocol.FromWorker) -> None:
        """Takes in one message of the worker, and wakes what waits for it. A Status may make this process
        report that it is ready. The first ModelInfo starts the loading of `text`, later ones replace
        `info`."""
        if isinstance(message, protocol.Tokens):
            self._deliver([*message.prompts, *message.tokens])
        elif isinstance(message, ANSWERS):
            self._deliver([message])
        elif isinstance(message, Status):
            self._status = message
            self.progress = message.progress
            self._has_status.set()
            if message.phase == "ready":
                self._has_been_ready.set()
            self._report_ready()
        elif isinstance(message, ModelInfo):
            is_first = self.info is None
            self.info = message
            if is_first:
                gevent.spawn(self._load)

    def _deliver(self, messages: list[PromptDone | Token | End | MetricsText | AdapterChanged]) -> None:
        """Puts messages into the queues of their requests; each queue gets its messages as one list. Messages
        about cancelled or unknown requests are dropped. After the last message about a request, the request
        is forgotten."""
        by_queue: dict[SimpleQueue, list] = defaultdict(list)
        for message in messages:
            is_last = isinstance(message, ANSWERS) or getattr(message, "finish_reason", None)
            queue = self._queues.pop(message.id, None) if is_last else self._queues.get(message.id)
            if queue is not None:
                by_queue[queue].append(message)
        for queue, its_messages in by_queue.items():
            queue.put(its_messages)

    def _load(self) -> None:
        """Runs as a greenlet, once. Loads and sets `text`, then `has_text`, and tells the worker if this
        process accepts requests now. If `load_text` raises, logs why and ends this process, and gunicorn with
        it: another process could not load the text either."""
        load = functools.partial(self._load_text, self.info)
        text = gevent.get_hub().threadpool.apply(attempt, (load,))
        if isinstance(text, BaseException):
            why = str(text) or repr(text)
            logger.critical("the tokenizer in %s cannot be loaded: %s", self.info.tokenizer_dir, why)
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
        self.text = text
        self.has_text.set()
        self._report_ready()

    def _report_ready(self) -> None:
        """Tells the worker that this process accepts requests, once, as soon as `phase` is "ready". Does
        nothing before."""
        if not self._reported_ready and self.phase == "ready":
            self._reported_ready = True
            self._send(protocol.Hello(ready=True))

    def _watch_for_stuck(self) -> None:
        """Runs as a greenlet until the worker is lost. Measures, every HEARTBEAT_S, for how long the worker
        has been silent and stuck; sends nothing. Time in which this process itself was stopped hardly counts.

        Logs when the worker becomes stuck and when it goes on. After `stuck_timeout_s` of being stuck, gives
        the worker up: all requests end, and `on_stuck` is called.
        """
        beat_at = time.monotonic()
        while not self._lost:
            gevent.sleep(HEARTBEAT_S)
            now = time.monotonic()
            # At most two beats are counted: when this process itself was stopped, the worker may be well.
            passed_s = min(now - beat_at, 2 * HEARTBEAT_S)
            beat_at = now
            self._silent_s += passed_s
            was_stuck = self._stuck_s > 0
            is_stuck = self._is_stuck
            self._stuck_s = self._stuck_s + passed_s if is_stuck else 0.0
            if is_stuck != was_stuck:
                logger.warning("the worker %s", "makes no progress" if is_stuck else "makes progress again")
            if self._stuck_s >= self._stuck_timeout_s:
                self._lose()
                self._on_stuck()

    def _lose(self) -> None:
        """Gives the worker up for good, as "stuck" or "dead", and ends all requests."""
        self._lost = self._lost or ("stuck" if self._stuck_s else "dead")
        self._end_all(self._lost)

    def _end_all(self, reason: str, message: str = "") -> None:
        """Ends all requests and questions with an End of this process's own. Sends nothing to the worker."""
        self._deliver([End(request_id, reason, message) for request_id in self._queues])
