"""Which request gets which slot, and which tokens the next step runs: queue, slots, token budgets, expiry.

The worker adds requests, runs each `Step` on the model and hands the sampled tokens back. Everything here is synchronous:
no threads, no tensors, no clock (times come as arguments, in seconds). The scheduler knows neither sockets nor text nor
how tokens are sampled. Of the model it knows the number of slots, whether chunks of several tokens may share a step with
others (`mixes`), and the longest prompt chunk (`prefill_chunk`). `slots.py` knows what a slot can be reused for.

Waiting requests take free slots first in, first out, unless `queue_threshold_s` lets shorter prompts go first. Several
prompts are in progress at a time, so a short prompt does not wait for a long one to finish. A waiting request with a free slot
gets prompt tokens within this many steps:
- mixed steps: ceil(slots / pairs of tokens for prompts beside running requests); `slots` for a request with `keep_all`;
- else 2 * slots, counted from the step at which `waiting_served_ratio` and `max_waiting_tokens` let it start.
"""

from __future__ import annotations

import contextlib
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.slots import Placement, Slots
from models.base import Chunk

# Prompt tokens of a mixed step. A larger budget lowers the prompt's time to first token and raises the inter-token latency
# of the running requests.
PROMPT_TOKENS_BESIDE = 32  # while requests run
PROMPT_TOKENS_ALONE = 256
# Prompt tokens between two decode steps, where the model cannot mix them.
PROMPT_TOKENS_BETWEEN = 128  # while requests run
PROMPT_TOKENS_BETWEEN_MANY = (
    2048  # of whole prompts, while more of them have or can have a slot than requests run
)
KEEP_ALL_TOKENS = 64  # of a mixed step: the logits after each of them are held in memory


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. Times are in seconds, of the clock that the caller uses for `now`."""

    prompt: Sequence[int]
    max_new_tokens: int  # within the context length
    arrived_at: float
    group: int = 0  # the same for all sequences of one HTTP request
    eos_token_ids: Collection[int] = ()
    keep_all: bool = False  # logits after every prompt token are wanted
    # Kept by the scheduler:
    slot: int | None = None  # None: waiting or ended
    cached: int = 0  # prompt tokens that its slot, or another one, held already
    prefilled: int = 0  # prompt tokens that have been run, or were held
    generated: int = 0
    last_token: int = 0
    started_at: float = 0.0  # when its first prompt chunk was scheduled
    exceeded_wait: bool = False  # it started because of `max_waiting_tokens`, while too few requests waited


class Step(NamedTuple):
    """What `forward` runs next."""

    chunks: list[Chunk]  # rows of running requests first, slots ascending; then prompt chunks
    requests: list[Request]  # one a chunk
    samples: list[int]  # indices of the chunks whose last token's logits give a new token
    rows: int  # how many chunks, from the first on, are rows of running requests
    copies: list[Placement]  # held prompt tokens to copy to another slot first, in this order


class Scheduler:
    """Owns the queue and the slots. Callers may read `waiting`, `prefilling`, `running`, `busy` and `max_tokens`."""

    def __init__(
        self,
        *,
        slots: int,
        mixes: bool,
        prefill_chunk: int | None,
        max_batch_prefill_tokens: int | None = None,
        max_queue_time_s: float = math.inf,
        waiting_served_ratio: float = 0.0,
        max_waiting_tokens: int = 20,
        queue_threshold_s: float | None = None,
        prefix_step: int | None = None,
        copies_prefixes: bool = False,
    ):
        assert prefill_chunk is None or prefill_chunk > 2  # else chunks of one token cannot be avoided
        self.waiting: deque[Request] = deque()
        self.prefilling: list[
            Request
        ] = []  # prompts in progress; the one that has waited longest for tokens comes first
        self.running: list[Request] = []  # requests that generate, slots ascending
        self.max_tokens = 0  # of the requests in slots: prompts and max_new_tokens
        self._slots, self._count = Slots(slots, prefix_step, copies_prefixes), slots
        self._copies: list[Placement] = []  # of the next step
        self._mixes, self._prefill_chunk = mixes, prefill_chunk or math.inf
        beside, alone = PROMPT_TOKENS_BESIDE, PROMPT_TOKENS_ALONE
        if not mixes:
            beside, alone = min(PROMPT_TOKENS_BETWEEN, self._prefill_chunk), PROMPT_TOKENS_BETWEEN_MANY
        self._budget_beside = max_batch_prefill_tokens or beside
        self._budget_alone = max(alone, self._budget_beside)
        self._max_queue_time_s = max_queue_time_s
        self._queue_threshold_s = queue_threshold_s
        self._waiting_served_ratio, self._max_waiting_tokens = waiting_served_ratio, max_waiting_tokens
        self._prompt_tokens = 0  # since the last decode step
        self._steps_since_prompt = 0  # decode steps since the last prompt was finished

    @property
    def busy(self) -> int:
        """Occupied slots."""
        return self._count - len(self._slots.free)

    def add(self, request: Request) -> None:
        assert len(request.prompt) > 0 and request.max_new_tokens > 0
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a cancelled or failed request out of its slot or of the queue. Does nothing if it has ended already."""
        if request.slot is not None:
            self._release(request)
        else:
            with contextlib.suppress(ValueError):
                self.waiting.remove(request)

    def expired(self, now: float) -> list[Request]:
        """Takes the requests that have waited longer than `max_queue_time_s` out of the queue and returns them. A request
        stays if another one of its group has a slot: one HTTP request is served whole or not at all."""
        overdue = [request for request in self.waiting if now - request.arrived_at > self._max_queue_time_s]
        if overdue:
            started = {request.group for request in (*self.running, *self.prefilling)}
            overdue = [request for request in overdue if request.group not in started]
            for request in overdue:
                self.waiting.remove(request)
        return overdue

    def next(self, now: float) -> Step | None:
        """The next step, or None if there is nothing to run. `update` follows with the step's tokens."""
        self._assign_slots(now)
        prompts = self._shared_budget() if self._mixes else self._next_prompt()
        rows = self.running if self._mixes or not prompts else []
        if not rows and not prompts:
            return None
        if not prompts:
            self._prompt_tokens = 0
            self._steps_since_prompt += 1
        chunks = [Chunk(row.slot, (row.last_token,), len(row.prompt) + row.generated - 1) for row in rows]
        copies, self._copies = self._copies, []
        step = Step(chunks, list(rows), list(range(len(rows))), len(rows), copies)
        for request, tokens in prompts:
            begin, end = request.prefilled, request.prefilled + tokens
            if begin == request.cached:
                request.started_at = now
            if end == len(request.prompt):
                step.samples.append(len(chunks))
            chunks.append(Chunk(request.slot, request.prompt[begin:end], begin, request.keep_all))
            step.requests.append(request)
        return step

    def update(
        self, step: Step, tokens: Sequence[int | None], complete: Collection[int] = ()
    ) -> list[str | None]:
        """Records the tokens of `step`, one a chunk: None where the chunk samples nothing or its row failed. Returns one
        finish reason a chunk: "eos_token", "length", or None. The slot of a finished request is free for the next step.
        complete: indices of chunks whose texts are complete without an EOS token.

        Tokens of a request that was removed meanwhile are ignored. The caller must remove a request whose row failed: until
        then the same chunk is scheduled again.
        """
        reasons: list[str | None] = [None] * len(step.chunks)
        for index, (chunk, request, token) in enumerate(zip(step.chunks, step.requests, tokens)):
            if request.slot is None:
                continue
            end = chunk.begin + len(chunk.tokens)
            if index >= step.rows and not chunk.keep_all:  # such chunks may be cut elsewhere
                self._slots.extend(request.slot, chunk.tokens, chunk.begin)
            if end < len(request.prompt):
                request.prefilled = end
                continue
            if token is None:
                continue
            if index >= step.rows:
                request.prefilled = end
                self.prefilling.remove(request)
                insort(self.running, request, key=lambda row: row.slot)
                self._steps_since_prompt = 0
            request.generated += 1
            request.last_token = token
            if token in request.eos_token_ids or index in complete:
                reasons[index] = "eos_token"
            elif request.generated >= request.max_new_tokens:
                reasons[index] = "length"
            if reasons[index]:
                self._release(request)
        return reasons

    def _assign_slots(self, now: float) -> None:
        """Assigns free slots to the requests that have waited longest."""
        too_few_wait = not self._mixes and len(self.waiting) < int(
            len(self.running) * self._waiting_served_ratio
        )
        if too_few_wait and self._steps_since_prompt < self._max_waiting_tokens:
            return
        while self.waiting and self._slots.free:
            request = self._next_waiting(now)
            request.exceeded_wait = too_few_wait
            placement = self._slots.take(request.prompt, reuse=not request.keep_all)
            request.slot = placement.slot
            request.cached = request.prefilled = placement.cached
            if placement.source != placement.slot:
                self._copies.append(placement)
            self.max_tokens += len(request.prompt) + request.max_new_tokens
            self.prefilling.append(request)

    def _next_waiting(self, now: float) -> Request:
        """Takes a request out of the queue: the first one; with `queue_threshold_s` the one that has waited longest, if that is
        longer than this, else the shortest prompt."""
        first = self.waiting[0]
        if self._queue_threshold_s is not None:
            first = min(self.waiting, key=lambda request: request.arrived_at)
            if now - first.arrived_at <= self._queue_threshold_s:
                first = min(self.waiting, key=lambda request: len(request.prompt))
        self.waiting.remove(first)
        return first

    def _release(self, request: Request) -> None:
        self._slots.release(request.slot)
        request.slot = None
        self.max_tokens -= len(request.prompt) + request.max_new_tokens
        (self.running if request.generated else self.prefilling).remove(request)

    def _shared_budget(self) -> list[tuple[Request, int]]:
        """The prompts of a mixed step and how many tokens of each: an even share of the budget, and what shorter ones leave.

        With more prompts than pairs of tokens, those that have waited longest for tokens get two each. No chunk of a longer
        prompt has one token: the model would round it as in a decode step. So a step may exceed its budget by one token a
        prompt. A step holds one prompt with `keep_all` at most.
        """
        if not self.prefilling:
            return []
        budget = max(2, self._budget_beside if self.running else self._budget_alone)
        chosen: list[Request] = []
        skipped: list[Request] = []
        one_keeps_all = False
        for request in self.prefilling:
            if len(chosen) == budget // 2 or (request.keep_all and one_keeps_all):
                skipped.append(request)
            else:
                chosen.append(request)
                one_keeps_all |= request.keep_all
        self.prefilling = skipped + chosen
        # Rounding up and the second sort key keep requests of the same length first come, first served.
        limits = []
        for request in chosen:
            left = len(request.prompt) - request.prefilled
            limit = min(left, self._prefill_chunk, KEEP_ALL_TOKENS if request.keep_all else left)
            limits.append((limit, left, request))
        limits.sort(key=lambda entry: entry[:2])
        if len(chosen) == budget // 2:
            budget = 0
        shares = []
        for served, (limit, left, request) in enumerate(limits):
            tokens = min(limit, max(2, math.ceil(budget / (len(limits) - served))))
            if left - tokens == 1:
                tokens = left if left == limit else tokens - 1
            shares.append((request, tokens))
            budget -= tokens
        return shares

    def _next_prompt(self) -> list[tuple[Request, int]]:
        """The one prompt of a step without running requests, and how many tokens of it; [] if a decode step comes first.

        Chunks begin and end at fixed positions of the prompt, whatever else runs: other boundaries would round the logits
        differently. So would a chunk of one token, which the model computes as a decode step.
        """
        if not self.prefilling:
            return []
        request = self.prefilling[0]
        left = len(request.prompt) - request.prefilled
        tokens = min(left, self._prefill_chunk)
        if left - tokens == 1:
            tokens -= 1
        startable = len(self.prefilling) + min(len(self.waiting), len(self._slots.free))
        fills_slots = (
            startable > len(self.running) and self._prefill_chunk == math.inf
        )  # idle slots cost more than the pause
        budget = self._budget_alone if fills_slots else self._budget_beside
        if self.running and self._prompt_tokens and self._prompt_tokens + tokens > budget:
            return []
        self._prompt_tokens += tokens
        self.prefilling.append(self.prefilling.pop(0))
        return [(request, tokens)]
