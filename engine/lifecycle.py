"""The life of a request in the worker, from its arrival to its end.

Every request ends in one place, `Requests.end` or, with its last token, `Requests.finish`. Its terminal
message is sent by outputs.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.admission import Admission
from engine.outputs import Publisher
from engine.request import Request, RequestGroup, RequestState
from engine.scheduler import Scheduler
from models.base import StaticBatchModel
from protocol import Generate

logger = logging.getLogger("worker")


@dataclass(eq=False)
class Requests:
    """The admitted requests that have not ended, in the order of arrival. A request may end while they are
    iterated."""

    model: StaticBatchModel
    eos_token_ids: frozenset[int]
    scheduler: Scheduler
    outputs: Publisher
    admission: Admission
    by_id: dict[int, Request] = field(default_factory=dict)  # of their messages

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self):
        return iter(list(self.by_id.values()))

    def add(self, peer: bytes, generate: Generate, group: RequestGroup, images: Mapping[int, int]) -> Request:
        """Makes a request of its message, which Admission has counted, and keeps it in `by_id`. The caller
        adds the request to the scheduler, or ends it.

        `max_new_tokens` is lowered to what the context length leaves. group: the same for all requests of one
        HTTP request. images: of the HTTP request, key → tokens.
        """
        now = time.monotonic()
        request = Request(
            generate=generate,
            max_new_tokens=min(generate.max_new_tokens, self.model.max_total_tokens - len(generate.prompt)),
            arrived_at=generate.sent_at or now,
            peer=peer,
            group=group,
            images=images,
            eos_token_ids=() if generate.ignore_eos else self.eos_token_ids,
        )
        self.by_id[generate.id] = request
        request.log("request queued")
        return request

    def end(self, request: Request, reason: str, message: str = "", log_reason: str | None = None) -> None:
        """Ends a request without a (further) token: sends its `End` after its tokens, takes it out of the
        scheduler, so that its slot is free, and forgets it (`finish`). Does nothing if the request has ended
        already. May wait for the output thread (`Publisher.flush`).

        reason, message: what the `End` says. log_reason: what the log says, if it differs from `reason`.
        """
        if request.id not in self.by_id:
            return
        self.outputs.end(request, reason, message)
        self.scheduler.remove(request)
        self.finish(request, log_reason or reason)

    def finish(self, request: Request, reason: str) -> None:
        """Forgets a request that has left the scheduler, sets its state, makes room for another one in
        Admission, and logs it. Sends nothing. To be called once for a request. reason: what the log says."""
        del self.by_id[request.id]
        request.state = RequestState.ENDED
        self.admission.release()
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
        logger.info("request finished", extra={"fields": fields})
