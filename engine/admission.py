"""Admission control: the limits of running and waiting requests and of their images, and draining."""

from __future__ import annotations

import threading

MAX_WAITING_PIXEL_BYTES = 512 << 20  # of images that wait for the encoder


class Admission:
    """Counts the admitted requests that have not ended. The socket's thread admits, the loop releases."""

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        self.pixel_bytes = 0
        self.is_draining = False
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        return self.count >= self.limit

    def admit(self, count: int, pixel_bytes: int) -> str | None:
        """Admits `count` requests of one HTTP request and their images, all or none. Returns None if they are
        admitted. Called on the socket's thread. pixel_bytes: how many bytes the pixels of all these images
        have.

        Otherwise returns the reason for the `End` of each request: "draining" or "overloaded". The images of
        one HTTP request are admitted whatever their size if no other images wait.
        """
        if self.is_draining:
            return "draining"
        with self._lock:
            if self.count + count > self.limit:
                return "overloaded"
            waiting = self.pixel_bytes
            if pixel_bytes and waiting and waiting + pixel_bytes > MAX_WAITING_PIXEL_BYTES:
                return "overloaded"
            self.count += count
            self.pixel_bytes += pixel_bytes
        return None

    def release(self) -> None:
        with self._lock:
            self.count -= 1

    def release_pixels(self, pixel_bytes: int) -> None:
        with self._lock:
            self.pixel_bytes -= pixel_bytes

    def drain(self) -> None:
        """Admits no request from now on. Signal handlers may call it."""
        self.is_draining = True
