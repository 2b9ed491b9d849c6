"""Admission control: the limit of running and waiting requests, and draining."""

from __future__ import annotations

import threading


class Admission:
    """Counts the admitted requests that have not ended. The socket's thread admits, the loop releases."""

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        self.is_draining = False
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        return self.count >= self.limit

    def admit(self, count: int) -> str | None:
        """None: all requests of an HTTP request are admitted. Else the reason of the `End` for each."""
        if self.is_draining:
            return "draining"
        with self._lock:
            if self.count + count > self.limit:
                return "overloaded"
            self.count += count
        return None

    def release(self) -> None:
        with self._lock:
            self.count -= 1

    def drain(self) -> None:
        """Stops admitting. May be called from a signal handler."""
        self.is_draining = True
