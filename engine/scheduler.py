"""Which request gets which slot, and which tokens the next step runs: queue, slots, token budgets, expiry.

The worker adds requests, runs each `Step` on the model and hands the sampled tokens back. Everything here is
synchronous: no threads, no tensors, no clock (times come as arguments, in seconds). What a slot can be reused
for is in slots.py.

Waiting requests take free slots first in, first out, unless `queue_threshold_ms` lets shorter prompts go
first. Several prompts are in progress at a time, so a short prompt does not wait for a long one to finish.
Which of them run next, and with which decodes, is a policy: `ChunkedPrefill` or `AlternatingPrefill`.
- Chunked prefill: each step runs tokens of the prompt that came first, and of the shortest.
- Else a waiting request with a free slot gets prompt tokens within 2 * slots steps, counted from the step at
  which `waiting_served_ratio` and `max_waiting_tokens` let it start.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from config import Config
from engine.request import Request, RequestState
from engine.slots import SlotAssignment, Slots
from models.base import Chunk, StaticBatchModel
from models.images.encoder_cache import cuts_image

# Prompt tokens of a step with chunked prefill. A larger budget lowers the prompts' time to first token and
# raises the inter-token latency of the running requests.
PREFILL_TOKENS_WITH_DECODE = 32  # while requests run, until the time of a step is known
PREFILL_TOKENS_ALONE = 256
# Prompt tokens between two decode steps, without chunked prefill.
PREFILL_TOKENS_PER_DECODE = 128  # while requests run
# The same while more whole prompts have or can have a slot than requests run.
MAX_PREFILL_TOKENS_PER_DECODE = 2048
# Between snapshots of recurrent states in a prompt without messages.
SNAPSHOT_INTERVAL = 2048
ALL_LOGITS_TOKENS = 64  # in one step: the logits after each of them are held in memory


class Step(NamedTuple):
    """What `forward` runs next."""

    chunks: list[Chunk]  # rows of running requests first, slots ascending; then prompt chunks
    requests: list[Request]  # one a chunk
    sample_indices: list[int]  # of the chunks whose last token's logits give a new token
    num_decodes: int  # how many chunks, from the first on, are decodes of running requests
    copies: list[SlotAssignment]  # cached prompt tokens to copy to another slot first, in this order
    running: int  # requests that generate, in this step or waiting for it

    @property
    def prompt_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks[self.num_decodes :])

    @property
    def started(self) -> list[Request]:
        """The requests whose first prompt tokens, after the cached ones, run in this step."""
        prompts = zip(self.chunks[self.num_decodes :], self.requests[self.num_decodes :])
        return [request for chunk, request in prompts if chunk.begin == request.cached]


class Scheduler:
    """Owns the queue and the slots. Callers may read `waiting`, `prefilling`, `running` and `busy`.

    The scheduler reads from the model what a call may hold, and from the settings the limits of the operator.
    """

    def __init__(self, model: StaticBatchModel, config: Config):
        self.waiting: list[Request] = []
        # Prompts in progress, in the order of arrival; without chunked prefill the one comes first that has
        # waited longest for tokens.
        self.prefilling: list[Request] = []
        self.running: list[Request] = []  # requests that generate, slots ascending
        self.verify_length = model.verify_length  # tokens of a row with draft tokens
        if config.speculate is not None:
            self.verify_length = min(self.verify_length, config.speculate + 1)
        self.prefix_granularity = model.prefix_granularity if config.prefix_reuse else None
        self._model = model
        self._config = config
        policy = ChunkedPrefill if model.supports_chunked_prefill else AlternatingPrefill
        self._policy = policy(model, config)
        self._slots = Slots(model, self.prefix_granularity)
        self._copies: list[SlotAssignment] = []  # of the next step
        self._steps_since_prompt = 0  # steps without prompts since the last prompt was finished

    @property
    def busy(self) -> int:
        """How many slots requests have."""
        return self._model.prefix_slots - len(self._slots.free)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue. It has a prompt, and may generate at least one token."""
        request.state = RequestState.WAITING
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a cancelled or failed request out of its slot or of the queue, if it is there. The slot is
        free for the next step. Sends nothing."""
        if request.has_slot:
            self._release(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)

    def is_overdue(self, request: Request, now: float) -> bool:
        """Whether a request has waited longer than `max_queue_time` for a slot. A request of a group that has
        had a slot is never overdue."""
        longest_s = self._config.max_queue_time or math.inf
        return now - request.arrived_at > longest_s and not request.group.has_started

    def next(self, now: float, prompt_budget: int = PREFILL_TOKENS_WITH_DECODE) -> Step | None:
        """Gives waiting requests free slots, and returns the next step; None: there is nothing to run.
        `update` must follow with the step's tokens before the next call. Sets `started_at` of requests whose
        prompts begin.

        now: CLOCK_MONOTONIC, in seconds. prompt_budget: the prompt tokens that a step has time for beside
        running requests. It has no effect without chunked prefill, or with `max_batch_prefill_tokens`.
        """
        self._assign_slots(now)
        startable = len(self.prefilling) + min(len(self.waiting), self._model.batch_size - self.busy)
        rows, prompts = self._policy.next(self.running, self.prefilling, startable, prompt_budget)
        if not rows and not prompts:
            return None
        draft_tokens = []
        if not prompts:
            self._steps_since_prompt += 1
            draft_tokens = self._propose_drafts(rows)
        chunks = [_decode_chunk(row, draft) for row, draft in zip_longest(rows, draft_tokens, fillvalue=())]
        requests = list(rows)
        sample_indices = list(range(len(rows)))
        for request, tokens in prompts:
            chunk = self._prompt_chunk(request, tokens)
            if chunk.begin == request.cached:
                request.started_at = now
            if chunk.begin + len(chunk.tokens) == len(request.prompt):
                sample_indices.append(len(chunks))
            chunks.append(chunk)
            requests.append(request)
        copies, self._copies = self._copies, []
        return Step(chunks, requests, sample_indices, len(rows), copies, len(self.running))

    def _prompt_chunk(self, request: Request, tokens: int) -> Chunk:
        """Returns the next chunk of a prompt: `tokens` tokens, more of them for a whole image, or fewer up to
        a snapshot. The chunk's `keep` is set if a snapshot is due at its end. Changes nothing."""
        begin = request.prefilled
        end = self._past_image(request.prompt, begin + tokens)
        keep = ""
        if (border := self._snapshot_position(request, begin, end)) is not None:
            end = border
            keep = "border" if request.generate.borders else "interval"
        tokens = request.prompt[begin:end]
        return Chunk(request.slot, tokens, begin, request.all_logits, adapter=request.adapter, keep=keep)

    def _past_image(self, prompt: Sequence[int], end: int) -> int:
        """Returns where a chunk ends that should end at `end`: later, if the chunk would cut an image that
        must run in one call. If fewer than two tokens would be left, the chunk ends with the prompt."""
        step = max(self._model.chunk_granularity, self.prefix_granularity or 1)
        while self._model.whole_images and end < len(prompt) and cuts_image(prompt, end):
            end += step
            if end >= len(prompt) - 1:  # no chunk of one token is left
                return len(prompt)
        return end

    def _snapshot_position(self, request: Request, begin: int, end: int) -> int | None:
        """Returns where a chunk from `begin` to `end` ends instead, so that the state there is kept, at the
        latest at `end`; None: no snapshot is due.

        Snapshots are due at the borders of the request, or every SNAPSHOT_INTERVAL tokens if it has none,
        each rounded down to a multiple of `prefix_granularity`. The first one within the chunk counts. A
        snapshot that would leave a chunk of one token on either side is left out. None is due if the model
        has no states, if prefixes are not reused, or if the request wants all logits.
        """
        step = self.prefix_granularity
        if self._model.states is None or not step or request.all_logits:
            return None
        prompt = request.prompt
        for border in request.generate.borders or range(SNAPSHOT_INTERVAL, len(prompt), SNAPSHOT_INTERVAL):
            border -= border % step
            if begin + 1 < border <= min(end, len(prompt) - 2):
                return border
        return None

    def _propose_drafts(self, rows: list[Request]) -> list[list[int]]:
        """Returns the draft tokens of each row; [] if no row gets any. All rows together have at most the
        model's `max_draft_rows` tokens, and none goes beyond what its request may still generate.

        If half of the rows or more have no draft tokens, no row gets any: rows without draft tokens would
        wait for the others. rows: at least one.
        """
        most = min(self._model.max_draft_rows // len(rows), self.verify_length) - 1
        if most < 1:
            return []
        found = [row.proposer.propose(min(most, row.max_new_tokens - row.generated - 1)) for row in rows]
        return [] if 2 * found.count([]) >= len(rows) else found

    def update(self, step: Step, tokens: Sequence[list[int]]) -> list[str | None]:
        """Records the tokens of `step`, a list for each chunk: empty where the chunk samples nothing or its
        row failed. Returns one finish reason a chunk: "eos_token", "length", or None. The slot of a finished
        request is free for the next step. Sends nothing.

        If a token ends a request, the tokens after it are removed from the chunk's list. Tokens of a request
        that was removed meanwhile are ignored. The caller must remove a request whose row failed: until then
        the same chunk is scheduled again.
        """
        reasons: list[str | None] = [None] * len(step.chunks)
        for index, (chunk, request) in enumerate(zip(step.chunks, step.requests)):
            if not request.has_slot:
                continue
            if index >= step.num_decodes:
                self._update_prompt(request, chunk, is_done=bool(tokens[index]))
            if chunk.verify and tokens[index]:
                request.proposer.record_acceptance(len(chunk.tokens) - 1, len(tokens[index]) - 1)
            reasons[index] = self._add_tokens(request, tokens[index])
            if reasons[index]:
                self._release(request)
        return reasons

    def _update_prompt(self, request: Request, chunk: Chunk, is_done: bool) -> None:
        """Records that a chunk of a prompt has run: the next chunk follows, and the tokens may count as
        cached (`Slots.mark_cached`). A request runs once its last chunk gave a token (`is_done`). Without the
        token, the last chunk is scheduled again."""
        end = chunk.begin + len(chunk.tokens)
        if not chunk.all_logits:  # such chunks may have other boundaries
            self._slots.mark_cached(request.slot, chunk.tokens, chunk.begin)
        if end < len(request.prompt):
            request.prefilled = end
        elif is_done:
            request.prefilled = end
            self.prefilling.remove(request)
            request.state = RequestState.RUNNING
            insort(self.running, request, key=lambda row: row.slot)
            self._steps_since_prompt = 0

    def _add_tokens(self, request: Request, tokens: list[int]) -> str | None:
        """Adds tokens to a request and to its draft proposer. Returns why the request ends: "eos_token",
        "length", or None. Removes the tokens after the one that ends the request from the list. Frees no
        slot.

        A request whose grammar is complete ends with the last of the tokens.
        """
        if request.proposer:
            request.proposer.add(tokens)
        for number, token in enumerate(tokens, 1):
            request.generated += 1
            request.last_token = token
            if token in request.eos_token_ids or (request.is_complete and number == len(tokens)):
                reason = "eos_token"
            elif request.generated >= request.max_new_tokens:
                reason = "length"
            else:
                continue
            del tokens[number:]
            return reason
        return None

    def _assign_slots(self, now: float) -> None:
        """Assigns free slots to waiting requests, in the order of `_next_waiting`, as long as fewer than
        `batch_size` requests have one. The next step copies the cached prefixes that are in other slots.

        Without chunked prefill no request gets a slot while few wait, by `waiting_served_ratio`, until
        `max_waiting_tokens` steps have run without prompts. Example: with a ratio of 0.5 and 8 running
        requests, 4 have to wait.
        """
        config = self._config
        interrupts = not self._model.supports_chunked_prefill  # prompts interrupt decoding
        too_few_wait = interrupts and len(self.waiting) < int(len(self.running) * config.waiting_served_ratio)
        if too_few_wait and self._steps_since_prompt < config.max_waiting_tokens:
            return
        while self.waiting and self.busy < self._model.batch_size:
            request = self._next_waiting(now)
            request.exceeded_wait = too_few_wait
            request.group.has_started = True
            placement = self._slots.allocate(
                request.prompt, reuse=not request.all_logits, adapter=request.adapter
            )
            request.slot = placement.slot
            request.cached = request.prefilled = placement.cached
            if placement.source != placement.slot:
                self._copies.append(placement)
            request.state = RequestState.PREFILLING
            self.prefilling.append(request)

    def _next_waiting(self, now: float) -> Request:
        """Takes a request out of the queue, which is not empty, and returns it: the first one, or another one
        by `queue_threshold_ms`.

        With that setting the request counts that has waited longest, if its wait exceeds the threshold,
        otherwise the request with the shortest prompt.
        """
        first = self.waiting[0]
        threshold_ms = self._config.queue_threshold_ms
        if threshold_ms is not None:
            first = min(self.waiting, key=lambda request: request.arrived_at)
            if (now - first.arrived_at) * 1000 <= threshold_ms:
                first = min(self.waiting, key=lambda request: len(request.prompt))
        self.waiting.remove(first)
        return first

    def _release(self, request: Request) -> None:
        """Takes a request out of its slot. The slot becomes free, and keeps its contents for prefix
        caching."""
        self._slots.release(request.slot)
        request.slot = None
        (self.running if request.state is RequestState.RUNNING else self.prefilling).remove(request)


def _decode_chunk(request: Request, draft_tokens: Sequence[int]) -> Chunk:
    tokens = (request.last_token, *draft_tokens)
    begin = len(request.prompt) + request.generated - 1
    return Chunk(request.slot, tokens, begin, verify=len(tokens) > 1, adapter=request.adapter)


def tokens_per_decode(model: StaticBatchModel) -> int:
    """Returns how many prompt tokens may run between two decode steps without chunked prefill, by default."""
    return min(PREFILL_TOKENS_PER_DECODE, model.prefill_chunk or PREFILL_TOKENS_PER_DECODE)


def chunk_tokens(model: StaticBatchModel, request: Request, most: int) -> int:
    """Returns how many tokens of a prompt's next chunk run: as many of `most` as the model allows, but at
    least 2, and rounded up to the model's granularity; or what is left of the prompt. With chunked prefill a
    prompt with `all_logits` runs at most ALL_LOGITS_TOKENS.

    No chunk of a longer prompt has one token: the model would round it as in a decode step. So no chunk
    leaves one token. It runs with the tokens before it, or, where the chunk would be too long then, one
    multiple of the granularity fewer runs. Example, with a `prefill_chunk` of 512: of 513 tokens 511 run,
    then 2. A chunk of one multiple takes the last token, however long it is then.
    """
    granularity = model.chunk_granularity
    left = len(request.prompt) - request.prefilled
    limit = min(left, model.prefill_chunk or left)
    if request.all_logits and model.supports_chunked_prefill:
        limit = min(limit, ALL_LOGITS_TOKENS)
    tokens = min(limit, math.ceil(max(2, most) / granularity) * granularity)
    if left - tokens == 1:
        tokens = left if tokens < limit or tokens == granularity else tokens - granularity
    return tokens


Prompts = list[tuple[Request, int]]  # and how many tokens of each run


class ChunkedPrefill:
    """Each step runs the rows of all running requests and shares a budget of tokens among the prompts."""

    def __init__(self, model: StaticBatchModel, config: Config):
        self._model = model
        self._budget = config.max_batch_prefill_tokens

    def next(
        self, running: list[Request], prefilling: list[Request], _startable: int, prompt_budget: int
    ) -> tuple[list[Request], Prompts]:
        """Returns `running` itself, all running requests, and the prompts that run with them, each with the
        number of its tokens. Changes nothing. Without running requests the budget is at least
        PREFILL_TOKENS_ALONE.

        prompt_budget: the prompt tokens of the step, unless `max_batch_prefill_tokens` says how many.
        """
        budget = self._budget or prompt_budget
        if not running:
            budget = max(PREFILL_TOKENS_ALONE, budget)
        # Where chunks are long, a second prompt has room beside the first one.
        least = max(2, self._model.chunk_granularity * min(2, len(prefilling)))
        return running, self._share(max(least, budget), prefilling)

    def _share(self, budget: int, prefilling: list[Request]) -> Prompts:
        """Returns the prompts that run in this step, those with the fewest tokens left first, each with the
        number of its tokens. budget: tokens of all prompts; `chunk_tokens` says by how much a chunk may
        exceed it.

        At least half of the budget is for the first of `prefilling`, so that no prompt waits for ever. The
        rest goes to the prompts with the fewest tokens left. So prompts of the same length run one after the
        other, which brings most of them an earlier first token. Only one prompt with `all_logits` runs.

        Example: of a budget of 32, a prompt with 10 tokens left gets 10, and the first one, with 100 left,
        22.
        """
        if not prefilling:
            return []
        first = prefilling[0]
        reserved = chunk_tokens(self._model, first, budget // 2)
        has_all_logits = first.all_logits
        shares = []
        for request in sorted(prefilling, key=lambda each: len(each.prompt) - each.prefilled):
            if request is first:
                reserved = 0
            elif budget - reserved < 2 or (request.all_logits and has_all_logits):
                continue
            tokens = chunk_tokens(self._model, request, budget - reserved)
            shares.append((request, tokens))
            budget -= tokens
            has_all_logits |= request.all_logits
        return shares


class AlternatingPrefill:
    """One prompt, or a chunk of it, runs alone; between two decode steps as many as the budget allows."""

    def __init__(self, model: StaticBatchModel, config: Config):
        self._model = model
        self._budget = config.max_batch_prefill_tokens or tokens_per_decode(model)
        self._prompt_tokens = 0  # since the last decode step

    def next(
        self, running: list[Request], prefilling: list[Request], startable: int, _prompt_budget: int
    ) -> tuple[list[Request], Prompts]:
        """Returns either no rows and one prompt with the number of its tokens, or all running requests
        (`running` itself) and no prompt. The prompt that runs goes to the end of `prefilling`.

        startable: how many prompts have or could have a slot. While they are more than the running requests,
        whole prompts get a larger budget. One chunk always runs after a decode step, also beyond the budget,
        which has no effect without running requests.
        """
        budget = self._budget
        if startable > len(running) and self._model.prefill_chunk is None:
            budget = max(MAX_PREFILL_TOKENS_PER_DECODE, budget)  # idle slots cost more than the pause
        if prefilling:
            request = prefilling[0]
            # What else runs does not change the boundaries: others would round the logits differently.
            tokens = chunk_tokens(self._model, request, len(request.prompt))
            has_room = self._prompt_tokens + tokens <= budget
            if has_room or not self._prompt_tokens or not running:  # one chunk always runs
                self._prompt_tokens += tokens
                prefilling.append(prefilling.pop(0))
                return [], [(request, tokens)]
        if running:
            self._prompt_tokens = 0
        return running, []
