"""A request in the worker: its type, how many are admitted, and its life from arrival to its end.

Every request ends in one place, `Requests.end` or, with its last token, `Requests.finish`. Its terminal
message is sent by outputs.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.lookup import Lookup
from engine.sampling import RowSampler
from models.base import StaticBatchModel
from protocol import Generate
from text.grammar import Matcher

if TYPE_CHECKING:  # both import Request
    from engine.outputs import Publisher
    from engine.scheduler import Scheduler

logger = logging.getLogger("worker")


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one HTTP request: they are served whole, or refused together."""

    has_started: bool = False  # one of them has had a slot


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence to generate, waiting or running. Times are CLOCK_MONOTONIC, in seconds."""

    generate: Generate
    max_new_tokens: int  # within the context length
    arrived_at: float
    peer: bytes = b""  # the web process that it came from
    group: Group = field(default_factory=Group)
    eos_token_ids: Collection[int] = ()
    sampler: RowSampler | None = None  # None where the device samples
    matcher: Matcher | None = None  # where the text has a grammar
    lookup: Lookup | None = None  # where steps verify guesses
    is_over: bool = False  # the loop has forgotten it
    # Kept by the scheduler:
    slot: int | None = None  # None: waiting or ended
    cached: int = 0  # prompt tokens that its slot, or another one, held already
    prefilled: int = 0  # prompt tokens that have been run, or were held
    generated: int = 0
    last_token: int = 0
    started_at: float = 0.0  # when its first prompt chunk was scheduled
    exceeded_wait: bool = False  # it started because of `max_waiting_tokens`, while too few requests waited
    # Kept by the step:
    is_complete: bool = False  # its grammar allows nothing but the end
    first_token_at: float = 0.0
    # Kept by the output thread:
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)
    has_ended: bool = False  # its terminal message has been sent

    @property
    def id(self) -> int:
        return self.generate.id

    @property
    def prompt(self) -> Sequence[int]:
        return self.generate.prompt

    @property
    def keep_all(self) -> bool:
        """The logits after every prompt token are wanted."""
        return self.generate.prompt_logprobs

    def log(self, event: str, **fields) -> None:
        logger.debug(event, extra={"fields": {"request_id": self.generate.request_id, **fields}})


class Admission:
    """How many requests are admitted and not over. The socket's thread admits, the loop releases."""

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
        """Admits nothing any more. May be called from a signal handler."""
        self.is_draining = True


class Requests:
    """The requests that are admitted and not over."""

    def __init__(
        self,
        model: StaticBatchModel,
        eos_token_ids: frozenset[int],
        scheduler: Scheduler,
        outputs: Publisher,
        admission: Admission,
    ):
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._scheduler = scheduler
        self._outputs = outputs
        self._admission = admission
        self._by_id: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self):
        return iter(list(self._by_id.values()))

    def get(self, request_id: int) -> Request | None:
        """None for a request that is over."""
        return self._by_id.get(request_id)

    def of_peer(self, peer: bytes) -> list[Request]:
        return [request for request in self if request.peer == peer]

    def add(self, peer: bytes, generate: Generate, group: Group) -> Request:
        """A new request, which the caller adds to the scheduler."""
        now = time.monotonic()
        request = Request(
            generate=generate,
            max_new_tokens=min(generate.max_new_tokens, self._model.max_total_tokens - len(generate.prompt)),
            arrived_at=generate.sent_at or now,
            peer=peer,
            group=group,
            eos_token_ids=() if generate.ignore_eos else self._eos_token_ids,
        )
        self._by_id[generate.id] = request
        request.log("request queued")
        return request

    def end(self, request: Request, reason: str, message: str = "", log_reason: str | None = None) -> None:
        """Ends a request with a message instead of a token. Does nothing if it is over."""
        if request.id not in self._by_id:
            return
        self._outputs.end(request, reason, message)
        self._scheduler.remove(request)
        self.finish(request, log_reason or reason)

    def finish(self, request: Request, reason: str) -> None:
        """Forgets a request that has left the scheduler, and logs it."""
        del self._by_id[request.id]
        request.is_over = True
        self._admission.release()
        now = time.monotonic()
        started_at = request.started_at or now
        first_token_at = request.first_token_at or now
        fields = {
            "request_id": request.generate.request_id,
            "input_tokens": len(request.prompt),
            "cached_tokens": request.cached,
            "generated_tokens": request.generated,
            "queue_ms": round((started_at - request.arrived_at) * 1000, 1),
            "prefill_ms": round((first_token_at - started_at) * 1000, 1),
            "decode_ms": round((now - first_token_at) * 1000, 1),
            "finish_reason": reason.replace(" ", "_"),
        }
        self._outputs.log_finished(fields)
