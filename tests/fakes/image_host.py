"""A host of images that says, byte for byte, what a test wants, and counts who connects."""

import contextlib
import itertools
import socket
import threading

PIECE = 65_536
OK = b"HTTP/1.1 200 OK\r\n"


def response(body=b"", *headers, status="200 OK"):
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def redirect(location, status="302 Found"):
    return response(b"", f"Location: {location}", status=status)


class ImageHost:
    """Answers each connection's request with `answers[path]`: bytes, or an iterable of bytes to send one after another.

    `requests` are the heads that arrived; `most` is how many connections were open at the same time. With `tls`, a server's
    SSLContext, it speaks TLS.
    """

    def __init__(self, address="127.0.0.1", tls=None):
        self.answers = {}
        self.requests = []
        self.connections = 0
        self.most = 0
        self._open = 0
        self._tls = tls
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=100)
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._count(1)
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _count(self, change):
        with self._lock:
            self._open += change
            self.connections += max(change, 0)
            self.most = max(self.most, self._open)

    def _serve(self, client):
        client.settimeout(20)
        with contextlib.closing(client), contextlib.suppress(OSError):
            if not self._tls:
                self._answer(client)
            else:
                with self._tls.wrap_socket(client, server_side=True) as secure:
                    self._answer(secure)
                    secure.unwrap()
        self._count(-1)

    def _answer(self, client):
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(PIECE)
            if not piece:
                return
            head += piece
        self.requests.append(head)
        answer = self.answers.get(head.split(b" ")[1].decode(), response(status="404 Not Found"))
        for piece in [answer] if isinstance(answer, bytes) else answer:
            client.sendall(piece)


class Endless:
    """`first`, then the same bytes until the client has had enough."""

    def __init__(self, first, piece):
        self._first = first
        self._piece = piece * (PIECE // len(piece))

    def __iter__(self):
        return itertools.chain([self._first], itertools.repeat(self._piece))


def slowly(first, piece, over, every_s=0.02):
    """`first`, then a piece every now and then until the event is set."""
    yield first
    while not over.wait(every_s):
        yield piece
