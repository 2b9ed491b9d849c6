"""Connections: from accepting one to a request that has wholly arrived, and from its answer to the close.

gunicorn's thread worker gives a thread to a connection before its request is there, so clients that are slow or silent use
up the threads. Here the main loop of each web process keeps every connection that has no request running, reads what arrives
without waiting, and gives a thread only to a complete request. What a client sends too slowly ends after a time, what it
reads too slowly too; and when there are too many connections, the one that has waited longest makes room.

Probes have threads of their own, which do not wait behind requests that run long. When every other thread has a request, a
new one is refused right here, and so is one that takes a place when there is none, or when all web processes together have
begun as many as they may: everything that has arrived is looked at, and the surplus refused, before any thread is set to work
on what it may keep, so that a crowd does not wait for its refusals. What a request means, and how it is answered or refused,
this layer does not know; its framing is gunicorn's parser's to judge, and only guessed ahead here.

An `Outlet` is the way past gunicorn for the parts of an answer that follow its first: whoever has one writes it to the client
without waking the thread that the request has.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import re
import resource
import selectors
import socket
import struct
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from gunicorn import util
from gunicorn.http.parser import RequestParser
from gunicorn.workers.gthread import TConn, ThreadWorker

PROBE_THREADS = 8
HEAD_LIMIT = 65536  # bytes of a request line with its headers; gunicorn's own limits are per line
HELD_LIMIT = 64_000_000  # bytes of unfinished requests in a web process
READ_BYTES = 65536
EXPIRY_S = 0.25  # how often deadlines are looked at
ADMITTED_A_TURN = 2  # threads that are set to work before this one looks again at what has arrived: they keep it waiting
NOTIFY_S = 0.5  # how often gunicorn's master is told, by a system call, that this process lives
LINGER_S = 2.0  # for a client to take its last answer and close
STOP_LINGER_S = 0.3
SPARE_FDS = 200  # for what is no connection

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked[ \t]*\r\n", re.IGNORECASE)
_EXPECTS = re.compile(rb"\r\nexpect:[ \t]*100-continue[ \t]*\r\n", re.IGNORECASE)
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


@dataclass(frozen=True)
class Limits:
    """What a client may take. `probes` are the paths that are answered whatever else runs."""

    payload_bytes: int
    client_timeout_s: float
    probes: frozenset[str]
    most_begun: int  # by all web processes together, of the requests that take a place


class Arrival:
    """The bytes of a request as they come, and whether they suffice.

    `is_complete`: the parser has all that it will ask for; where the request is malformed, it has enough to say so.
    `is_cut`: more belongs to the request than we take, so its connection cannot be used again. `refusal` is what is wrong
    with it when it cannot even be parsed: (status, reason, message).
    """

    def __init__(self, payload_bytes: int):
        self.data = bytearray()
        self.is_complete = False
        self.is_cut = False
        self.refusal: tuple[int, str, str] | None = None
        self.wants_continue = False  # the client waits for a word before it sends the body
        self._most = payload_bytes + 1  # one more than is allowed, for the app to see that it is too much
        self._need = 0  # length at which it is complete; 0: the head has not ended
        self._chunks_at: int | None = None  # where the next size of a chunk begins
        self._decoded = 0  # bytes that the chunks before it carry

    def feed(self, data: bytes) -> None:
        searched = max(0, len(self.data) - 3)
        self.data += data
        if not self._need and self._chunks_at is None:
            self._end_head(searched)
        if self._chunks_at is not None:
            self._end_chunks()
        elif self._need and len(self.data) >= self._need:
            self.is_complete = True

    def _end_head(self, searched: int) -> None:
        end = self.data.find(b"\r\n\r\n", searched)
        if end < 0:
            if self.data.count(b"\n") != self.data.count(b"\r\n"):
                self.is_complete = self.is_cut = True  # the parser refuses it
            elif len(self.data) > HEAD_LIMIT:
                self.refusal = (431, "Request Header Fields Too Large", f"more than {HEAD_LIMIT} bytes of headers")
            return
        head = bytes(self.data[: end + 2])
        length, chunked = _LENGTH.search(head), _CHUNKED.search(head)
        body_at = self._need = end + 4
        if chunked and not length:  # with both, the parser refuses it
            self._need, self._chunks_at = 0, body_at
        elif length and not chunked:
            if len(length[1]) > 18 or int(length[1]) > self._most:
                self.is_cut = True
            else:
                self._need += int(length[1])
        self.wants_continue = not self.is_cut and bool(_EXPECTS.search(head))

    def _end_chunks(self) -> None:
        """Goes through the chunks as far as they have come."""
        while (end := self.data.find(b"\r\n", self._chunks_at)) >= 0:
            size = _CHUNK_SIZE.match(self.data, self._chunks_at)
            if not size:
                self.is_complete = self.is_cut = True
                return
            if not int(size[0], 16):
                ended = self.data.startswith(b"\r\n", end + 2) or self.data.find(b"\r\n\r\n", end + 2) >= 0
                self.is_complete = self.is_complete or ended
                break
            if self._decoded + min(int(size[0], 16), len(self.data) - end - 2) >= self._most:
                self.is_complete = self.is_cut = True
                return
            next_at = end + 4 + int(size[0], 16)
            if len(self.data) < next_at:
                break
            if not self.data.startswith(b"\r\n", next_at - 2):
                self.is_complete = self.is_cut = True
                return
            self._decoded += int(size[0], 16)
            self._chunks_at = next_at
        if not self.is_complete and len(self.data) > 2 * (self._decoded + self._most) + HEAD_LIMIT:
            self.refusal = (413, "Content Too Large", "the body takes more bytes for its chunks than for what is in them")
        elif self._chunks_at > HEAD_LIMIT + 2 * self._decoded:
            self.refusal = (400, "Bad Request", "the chunks of the body are too small")


class Connection(TConn):
    """A connection, which is in one of three states: waiting for (the rest of) a request, running one, or lingering."""

    def __init__(self, cfg, sock: socket.socket, client, server, limits: Limits):
        super().__init__(cfg, sock, client, server)
        self.initialized = True  # so that gunicorn neither waits nor makes a parser of its own
        self.limits = limits
        self.is_refused = False  # its request, by the loop
        self.is_watched = False  # by the loop's poller
        self.lingers = False  # it has had its last answer
        self.told_to_continue = False
        self.takes_place = False
        self.await_request()

    def await_request(self) -> None:
        self.arrival = Arrival(self.limits.payload_bytes)
        self.told_to_continue = False


class Begun:
    """How many requests that take a place each web process has begun to answer, in memory that all of them share."""

    def __init__(self, processes: int):
        self._free = list(range(2 * processes + 8))
        self._counts = memoryview(mmap.mmap(-1, 8 * len(self._free))).cast("q")

    def __call__(self) -> int:
        return sum(self._counts)

    def join(self, process: ConnectionWorker) -> None:
        """In the process that forks, which is one: so no two ever have the same count."""
        process.own_count = self._free.pop()

    def leave(self, process: ConnectionWorker) -> None:
        self._counts[process.own_count] = 0
        self._free.append(process.own_count)

    def add(self, process: ConnectionWorker, number: int) -> None:
        self._counts[process.own_count] += number


class _Sender:
    """The socket of an answer as gunicorn writes to it: the head waits for what follows, to go out with it in one packet."""

    def __init__(self, sock: socket.socket, is_refusal: bool):
        self.is_refusal = is_refusal
        self._sock = sock
        self._head: bytes | None = None

    def sendall(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
        else:
            head, self._head = self._head, b""
            self._sock.sendall(head + data if head else data)

    def flush(self) -> None:
        """For an answer that is nothing but its head."""
        if self._head:
            self._sock.sendall(self._head)

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


class Outlet:
    """Where the next parts of an answer can go past gunicorn, framed as it would frame them, once its first part has gone.

    `write` may be called from any thread, but by one at a time; it never waits. `flush` does, and belongs to the answer's own
    thread. Both raise OSError when the client is gone.
    """

    def __init__(self, environ: dict):
        self._sock: socket.socket = environ["gunicorn.socket"]
        self._is_chunked = environ["SERVER_PROTOCOL"] != "HTTP/1.0"
        self._left = b""

    def write(self, part: bytes) -> bool:
        """Whether the client has taken all of `part`. If not, nothing else may be written before a `flush`."""
        if self._is_chunked:
            part = b"%X\r\n%b\r\n" % (len(part), part)
        try:
            sent = self._sock.send(part, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._left = part[sent:]
        return not self._left

    def flush(self) -> None:
        """Sends what a client did not take at once."""
        left, self._left = self._left, b""
        if left:
            self._sock.sendall(left)


def prepare(listener: socket.socket, limits: Limits) -> int:
    """Bounds how long what is written to clients of `listener` may wait for them, at no cost a write: kernel's business,
    inherited by each connection. Returns how many connections this process can have."""
    seconds, rest = divmod(limits.client_timeout_s, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.client_timeout_s * 1000))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(SPARE_FDS, most - SPARE_FDS)


class ConnectionWorker(ThreadWorker):
    """gunicorn's thread worker with the loop around its connections replaced. It runs on one thread, but for `handle`.

    The app has three attributes for it: its `limits`, what is `begun`, and `refusal`, a WSGI application for requests that find
    every thread taken, and for those that take a place (`refusal.takes_place(method, path)`) when there is none
    (`refusal.is_full`). All are called by the loop itself and so must not wait for anything.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.limits: Limits = self.app.limits
        self._probes: ThreadPoolExecutor | None = None
        self._running = 0  # requests that have one of the threads, or are about to
        self._admitted: deque[Connection] = deque()  # those that are about to
        self._waiting: dict[Connection, None] = {}  # without a request that runs; who waits longest is first
        self._held = 0  # bytes of unfinished requests
        self._expiry_at = self._notify_at = 0.0

    def init_process(self) -> None:
        self._probes = ThreadPoolExecutor(PROBE_THREADS)
        super().init_process()

    def load_wsgi(self) -> None:
        super().load_wsgi()
        app, refusal = self.wsgi, self.app.refusal

        def app_or_refusal(environ, start_response):
            return (refusal if environ["gunicorn.socket"].is_refusal else app)(environ, start_response)

        self.wsgi = app_or_refusal

    def run(self) -> None:
        self.poller.register(self.method_queue.fileno(), selectors.EVENT_READ, self.method_queue.run_callbacks)
        while self.alive and self.is_parent_alive():
            self.set_accept_enabled(self.nr_conns < self.worker_connections or bool(self._waiting))
            self._turn()
        self.set_accept_enabled(False)
        stop_at = time.monotonic() + self.cfg.graceful_timeout
        for connection in [c for c in self._waiting if not c.lingers]:
            self._drop(connection)
        for connection in self._waiting:
            connection.timeout = min(connection.timeout, time.monotonic() + STOP_LINGER_S)
        while self.nr_conns and time.monotonic() < stop_at:
            self._turn()
        for connection in list(self._waiting):
            self._drop(connection)
        for pool in (self.tpool, self._probes):
            pool.shutdown(wait=False)
        self.poller.close()
        self.method_queue.close()
        for listener in self.sockets:
            listener.close()

    def notify(self) -> None:
        now = time.monotonic()
        if now >= self._notify_at:
            self._notify_at = now + NOTIFY_S
            super().notify()

    def _turn(self) -> None:
        self.notify()
        self.wait_for_and_dispatch_events(0 if self._admitted else EXPIRY_S if self._waiting else 1.0)
        now = time.monotonic()
        if now >= self._expiry_at:
            self._expiry_at = now + EXPIRY_S
            for connection in [c for c in self._waiting if c.timeout <= now]:
                self._expire(connection)
        begun = 0
        while self._admitted and begun < ADMITTED_A_TURN:
            connection = self._admitted.popleft()
            if connection.takes_place and self.app.refusal.is_full:
                self._begin(connection, -1)
                self._refuse_crowd(connection)
            else:
                begun += 1
                self._run_on(self.tpool, connection)

    def accept(self, listener) -> None:
        if self.nr_conns >= self.worker_connections and self._waiting:
            self._drop(next(iter(self._waiting)))
        try:
            sock, client = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._waiting:
                self._drop(next(iter(self._waiting)))
            return
        self.nr_conns += 1
        connection = Connection(self.cfg, sock, client, listener.getsockname(), self.limits)
        self._queue(connection, self.limits.client_timeout_s)
        self._read(connection, sock)  # most have sent their request by now, and need not be watched
        if connection in self._waiting:
            self._watch(connection)

    def _wait_for(self, connection: Connection, seconds: float) -> None:
        self._queue(connection, seconds)
        self._watch(connection)

    def _queue(self, connection: Connection, seconds: float) -> None:
        connection.timeout = time.monotonic() + seconds
        self._waiting.pop(connection, None)
        self._waiting[connection] = None  # it is the last one now

    def _watch(self, connection: Connection) -> None:
        if not connection.is_watched:
            connection.is_watched = True
            self.poller.register(connection.sock, selectors.EVENT_READ, partial(self._read, connection))

    def _leave(self, connection: Connection) -> None:
        """It no longer waits."""
        del self._waiting[connection]
        self._let_go(connection)
        if connection.is_watched:
            connection.is_watched = False
            self.poller.unregister(connection.sock)

    def _let_go(self, connection: Connection) -> None:
        """What has arrived is no longer needed."""
        self._held -= len(connection.arrival.data)
        connection.arrival.data.clear()

    def _drop(self, connection: Connection) -> None:
        self._leave(connection)
        self.nr_conns -= 1
        connection.close()

    def _read(self, connection: Connection, _sock) -> None:
        if connection not in self._waiting:
            return  # dropped by what came before it in the same turn
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
        elif not connection.lingers:  # what a client still sends after its last answer is of no interest
            if not connection.arrival.data:
                connection.timeout = time.monotonic() + self.limits.client_timeout_s
            self._held += len(data)
            connection.arrival.feed(data)
            self._go_on(connection)

    def _go_on(self, connection: Connection) -> None:
        """Gives a request that has arrived to a thread. Does nothing while there is none."""
        if connection not in self._waiting:
            return
        arrival = connection.arrival
        if arrival.refusal:
            self._refuse(connection, *arrival.refusal)
        elif arrival.is_complete:
            self.enqueue_req(connection)
        elif self._held > HELD_LIMIT:
            self._refuse(connection, 503, "Service Unavailable", "too many requests are still arriving")
        elif arrival.wants_continue and not connection.told_to_continue:
            connection.told_to_continue = True
            with contextlib.suppress(OSError):
                connection.sock.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def enqueue_req(self, connection: Connection) -> None:
        connection.parser = RequestParser(self.cfg, iter((bytes(connection.arrival.data),)), connection.client)
        method, _, rest = bytes(connection.arrival.data[:64]).decode("latin-1").partition(" ")
        path = rest.split(" ", 1)[0].split("?", 1)[0]
        connection.takes_place = self.app.refusal.takes_place(method, path)
        if method in ("GET", "HEAD") and path in self.limits.probes:
            self._leave(connection)
            self._run_on(self._probes, connection)
        elif self._running < self.cfg.threads and not self._is_in_vain(connection):
            self._leave(connection)
            self._begin(connection, 1)
            self._admitted.append(connection)
        else:
            self._refuse_crowd(connection)

    def _is_in_vain(self, connection: Connection) -> bool:
        return connection.takes_place and (self.app.refusal.is_full or self.app.begun() >= self.limits.most_begun)

    def _begin(self, connection: Connection, number: int) -> None:
        """One request more that has one of the threads, or one less."""
        self._running += number
        if connection.takes_place:
            self.app.begun.add(self, number)

    def _run_on(self, pool: ThreadPoolExecutor, connection: Connection) -> None:
        future = pool.submit(self.handle, connection)
        future.add_done_callback(lambda done: self.method_queue.defer(self._finish, connection, pool, done))

    def _finish(self, connection: Connection, pool: ThreadPoolExecutor, future: Future) -> None:
        """The request has had its answer."""
        if pool is self.tpool:
            self._begin(connection, -1)
        self._await_next(connection, not future.cancelled() and future.exception() is None and future.result())

    def _refuse_crowd(self, connection: Connection) -> None:
        """Lets the app refuse the request, as `handle` lets it answer one, without waiting for the client to read."""
        self._let_go(connection)
        request, goes_on = None, False
        connection.is_refused = True
        try:
            request = next(connection.parser)
            goes_on = self._keepalive_after(connection, self.handle_request(request, connection))
        except (OSError, StopIteration):
            pass
        except Exception as error:
            self.handle_error(request, connection.sock, connection.client, error)
        connection.is_refused = False
        self._await_next(connection, goes_on)

    def _await_next(self, connection: Connection, goes_on: bool) -> None:
        """A request has had its answer: waits for the next one on its connection, or for the client to close."""
        if connection.sock.fileno() < 0:  # gunicorn closes what broke in the middle of an answer by itself
            self.nr_conns -= 1
            if connection in self._waiting:
                self._leave(connection)
            return
        if connection.sock.gettimeout() != 0:
            connection.sock.setblocking(False)
        if not (goes_on and self.alive):
            self._linger(connection)
            return
        read_ahead = connection.parser.unreader.take_buffered()
        connection.await_request()
        self._wait_for(connection, self.limits.client_timeout_s if read_ahead else self.cfg.keepalive)
        if read_ahead:
            self._held += len(read_ahead)
            connection.arrival.feed(read_ahead)
            self.method_queue.defer(self._go_on, connection)  # others have their turn before

    def _linger(self, connection: Connection) -> None:
        """Closes our end, then leaves the client time to read: to close while it still sends would take the answer back."""
        connection.lingers = True
        connection.await_request()
        self._wait_for(connection, LINGER_S if self.alive else STOP_LINGER_S)
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(connection)

    def _refuse(self, connection: Connection, status: int, reason: str, message: str) -> None:
        with contextlib.suppress(OSError):
            util.write_error(connection.sock, status, reason, message)
        self._let_go(connection)
        self._linger(connection)

    def _expire(self, connection: Connection) -> None:
        """Its time is over, unless more has come that we were too busy to read."""
        self._read(connection, None)
        if connection not in self._waiting or connection.timeout > time.monotonic():
            return
        if connection.arrival.data and not connection.lingers:
            limit = f"the request did not arrive within --client-timeout (CLIENT_TIMEOUT) {self.limits.client_timeout_s:g} s"
            self._refuse(connection, 408, "Request Timeout", limit)
        else:
            self._drop(connection)

    def handle_request(self, req, conn: Connection):
        """On one of the threads, or on the loop's own when it refuses."""
        if conn.arrival.is_cut:
            req.force_close()
        req._expected_100_continue = False  # it has been told
        sock = conn.sock
        conn.sock = sender = _Sender(sock, conn.is_refused)
        try:
            goes_on = super().handle_request(req, conn)
            sender.flush()
            return goes_on
        except (BlockingIOError, TimeoutError) as error:  # the client does not read: as good as gone
            raise ConnectionResetError(errno.ECONNRESET, str(error)) from error
        finally:
            conn.sock = sock
