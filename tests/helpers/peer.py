"""A web process' end of the worker's socket, for tests: synchronous, used by one thread at a time."""

import time

import msgspec
import zmq

from protocol import FromWorker, Hello, encode

WAIT_S = 60


class Peer:
    def __init__(self, address):
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(address)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self.send(Hello(ready=False))

    def send(self, message):
        self.send_bytes(encode(message))

    def send_bytes(self, *frames):
        self._dealer.send_multipart(frames)

    def next(self, kind=object, wait_s=WAIT_S):
        """The next message of one kind; the others are skipped."""
        deadline = time.monotonic() + wait_s
        while self._dealer.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = self._decoder.decode(self._dealer.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} came")

    def is_lost(self, wait_s=WAIT_S):
        """Whether the worker is gone, or goes meanwhile."""
        return bool(self._monitor.poll(wait_s * 1000))

    def close(self, linger_ms=0):
        if not self._context.closed:
            self._dealer.disable_monitor()
            self._context.destroy(linger_ms)
