"""The one process that owns the device: the queue, the slots, the prefill/decode loop, and the word on how it is doing.

Requests arrive as token ids and leave as token ids; text and HTTP never reach this layer. Each turn of the loop takes what
arrived, prefills a waiting prompt (a part of it, or several) into a free slot, and runs one decode step for every busy slot,
with which a part of a long prompt may go along. Every request gets exactly one terminal word, whatever happens to it.

Between two calls to the device is done what the device waits for: the next tokens are chosen. What a call gave is told while
the next one runs: log-probabilities, messages, metrics, the log.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

import config as configuration
from config import HERE, Config, ConfigError, Manifest
from logits import Helper, Logits
from metrics import Metrics
from model import DeviceLost, ModelError, Part, StaticBatchModel, choose_device, fetch, fetch_weights, parts_of
from protocol import (
    Answered,
    Cancel,
    End,
    Facts,
    Generate,
    GenerateAll,
    Gone,
    Hello,
    Prompt,
    Status,
    Token,
    Tokens,
    WorkerEnd,
)
from rehearsal import Offstage, Rehearsal
from sampling import (
    Plan,
    Sampler,
    SamplingError,
    are_kept,
    choose,
    compile_loops,
    describe,
    device_parameters,
    drawn,
    prompt_logprobs,
)

logger = logging.getLogger("worker")

MOST_PROMPT_TOKENS = 2048  # that those who run are held up for while many wait
MANY_WAITING = 0.3  # of those who run
HELD_UP = 1.0  # times as long as it takes alone may a step take longer because of a prompt that goes along
LEAST_ALONG = 8  # tokens
LOGITS = {"neuron": (torch.float32, torch.bfloat16), "cuda": (torch.float32,), "cpu": (torch.float32,)}  # as they come
MOST_UNTOLD = 2  # calls to the device whose gains wait to be told; the next one waits for the telling then


@dataclass(slots=True, eq=False)
class Request:
    """A request that the worker knows: waiting, or running in a slot. Times are CLOCK_MONOTONIC, in seconds."""

    peer: bytes
    call: int  # the same for all that one HTTP request asked for
    generate: Generate
    arrived_at: float
    sampler: Sampler  # not asked where the device samples
    plan: Plan  # of it alone: for the token that its prompt gives
    most_new_tokens: int  # that it may generate, the window considered
    started_at: float = 0.0  # taken from the queue
    prefilled_at: float = 0.0
    generated: int = 0
    last_token: int = 0
    is_broken: bool = False  # one of its tokens could not be told

    @property
    def position(self) -> int:
        """Where the last token stands, which the next step runs on."""
        return len(self.generate.prompt) - 1 + self.generated

    @property
    def most_tokens(self) -> int:
        """How long prompt and answer may become."""
        return len(self.generate.prompt) + self.most_new_tokens


@dataclass(slots=True)
class Slots:
    """Which request runs in which row of the batch. The lowest free slot is given first: a step costs by its highest."""

    requests: list[Request | None]

    def free(self) -> int | None:
        return next((slot for slot, request in enumerate(self.requests) if request is None), None)

    def live(self) -> Iterator[tuple[int, Request]]:
        """Those whose prompt has been run."""
        return ((slot, request) for slot, request in enumerate(self.requests) if request is not None and request.generated)

    @property
    def busy(self) -> int:
        return sum(request is not None for request in self.requests)


class Pace:
    """How long the device may take before it must be thought stuck, learned from how long it takes."""

    MANY_TIMES = 20
    LEAST_S = 5.0  # a busy machine delays everything by that much now and then
    FIRST_S = 100.0  # the first of a kind, of which nothing is known, and a second for each of its tokens
    REMEMBERED = 9  # times of a kind, of which the middle one is typical: a few may be disturbed

    def __init__(self):
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.REMEMBERED))  # a token, by kind of work
        self._typical_s: dict[str, float] = {}

    def patience_s(self, kind: str, tokens: int = 1) -> float:
        if kind not in self._typical_s:
            return self.FIRST_S + tokens
        return max(self.LEAST_S, self.MANY_TIMES * self._typical_s[kind] * tokens)

    def typical_s(self, kind: str) -> float:
        """Of a token; 0 as long as nothing is known."""
        return self._typical_s.get(kind, 0.0)

    def learn(self, kind: str, seconds: float, tokens: int = 1) -> None:
        times = self._seconds[kind]
        times.append(seconds / tokens)
        self._typical_s[kind] = sorted(times)[len(times) // 2]


@dataclass(slots=True)
class Gain:
    """What a call to the device gave to the requests that it was for. Times are CLOCK_MONOTONIC, in seconds."""

    method: str  # "prefill" or "decode"
    requests: Sequence[Request]
    tokens: list[int | None]  # None for a request that has failed
    finish_reasons: list[str | None]
    logits: Logits | torch.Tensor | None  # what `describe` needs; None where the device chooses
    prompt: Prompt | None  # of a prefill
    started_at: float
    ran_at: float
    chosen_at: float
    done_at: float
    interval_s: float | None  # since those who run had their last token; of a step


class StepInput:
    """What a step of so many slots is given, in tensors that are filled anew for each: to make them takes torch longer."""

    def __init__(self, slots: int):
        self._numbers = np.empty((3, slots), np.int64)
        self.tensors = torch.from_numpy(self._numbers).unbind()  # tokens, positions and slots: int64 [n] each
        self._positions: list[int] = []
        self._write = struct.Struct(f"{2 * slots}q").pack_into  # numpy is quick once it is in the caches, but this is smaller

    def fill(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        self._positions = [request.position for request in requests]
        self._numbers[:] = [request.last_token for request in requests], self._positions, slots

    def go_on(self, tokens: Sequence[int]) -> None:
        """For the next step of the same requests, which gained these tokens."""
        self._positions = [position + 1 for position in self._positions]
        self._write(self._numbers, 0, *tokens, *self._positions)


class Running(NamedTuple):
    """What a step is made of; good for the next ones as long as the same requests run."""

    requests: tuple[Request, ...]
    plan: Plan
    given: StepInput


@dataclass
class Prompting:
    """The prompt that is being run, in parts where the model can."""

    slot: int
    request: Request
    joins: bool  # others run meanwhile
    begin: int = 0  # tokens of it that have been run
    ran_s: float = 0.0  # without what came between its parts


@dataclass
class Worker:
    """The loop around one model. `end` is where requests come from and tokens go to."""

    model: StaticBatchModel
    end: WorkerEnd
    eos_token_ids: frozenset[int]
    max_concurrent_requests: int
    max_queue_time_s: float = float("inf")
    max_batch_prefill_tokens: int | None = None  # between two steps; None: as `_most_prompt_tokens` decides
    waiting_served_ratio: float = 0.0
    max_waiting_tokens: int = 20
    web_processes: int = 0  # how many to wait for before saying "Connected"
    queue: deque[Request] = field(default_factory=deque)
    steps: int = 0
    draining: bool = False  # nothing new is taken
    stopping: bool = False  # what runs is given up, too
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self):
        self.slots = Slots([None] * self.model.batch_size)
        self._known: dict[int, Request] = {}
        self._places_taken = 0  # by those that are known, and by what has arrived since the loop looked
        self._places_lock = threading.Lock()
        self.end.refuses = self.refuses
        self._prompting: Prompting | None = None
        self._steps_since_prompt = 0
        self._ready_web_processes: set[int] = set()
        self._inputs = [StepInput(slots) for slots in range(self.model.batch_size + 1)]
        self._running: Running | None = None  # in the last step; None: they are others now
        self._untold: list[Gain] = []
        self._unlogged: list[dict] = []  # of requests that ended
        self._tells_aside = self.model.device != "cpu"  # else the next call would share its processor with the telling
        if self._tells_aside:
            self.end.give_way()
        self._helper: Helper | None = None
        self._rehearsal: Rehearsal | None = None
        self._tellings: queue.SimpleQueue[None] = queue.SimpleQueue()  # a semaphore: threading's takes ten times as long
        for _ in range(MOST_UNTOLD):  # each holds the logits of a step
            self._tellings.put(None)
        self._broken: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._pace = Pace()
        self._progress_at = 0.0  # when the device last finished something, or was given something after it had nothing
        self._tokens_at = 0.0  # when tokens last went to those that run
        self.metrics.set_limits(self.model.batch_size, self.model.max_input_tokens, self.model.max_total_tokens)
        # Read when they are asked for, on the socket's thread: so they are true while a step takes long, and cost it nothing.
        for name, read in (
            ("queue_size", lambda: len(self.queue)),
            ("slots_busy", lambda: self.slots.busy),
            ("batch_current_size", lambda: self.slots.busy),
            ("batch_current_max_tokens", self._most_tokens),
            ("last_step_age_seconds", lambda: time.monotonic() - self._progress_at if self.slots.busy else 0.0),
        ):
            self.metrics.series(name).set_function(read)

    @torch.inference_mode()  # for all that models do here: to enter it for each step takes time while the device waits
    def run(self) -> None:
        """Serves until `stop`, or until everything is done after `drain`."""
        # Where the device is the CPU, all processors work for it, and none is left to help with the choice.
        if self.model.device != "cpu" and self.model.sampling == "host" and Helper.can_help():
            self._helper = Helper()
            if understudy := self.model.understudy():
                self._rehearsal = Rehearsal(Worker(understudy, Offstage(), frozenset(), understudy.batch_size))
        try:
            self._report()
            while not self.stopping and (self._known or not self.draining):
                self.turn()
            self.draining = True
            self.receive()  # what came meanwhile is refused, not left
            for request in list(self._known.values()):
                self._end(request, "draining")
            self.tell()
        finally:
            if self._rehearsal:
                self._rehearsal.end()
            if self._helper:
                self._helper.end()

    def turn(self) -> None:
        self.receive()
        self.admit()
        self.turn_away()
        self.decode()

    def drain(self) -> None:
        """Refuses what is new; the loop ends with the last request. May be called from a signal handler."""
        self.draining = True
        self.end.interrupt()

    def stop(self) -> None:
        """Ends the loop after the step that is running. May be called from a signal handler."""
        self.stopping = True
        self.end.interrupt()

    def receive(self) -> None:
        """Takes in what arrived; waits for it when there is nothing else to do."""
        if not self._known:
            self.tell()
        while not self._broken.empty():
            request = self._broken.get()
            if request.generate.id in self._known:
                self._end(request, "failed", "the next token could not be told")
        for peer, message in self.end.receive(block=not self._known and not self.draining and not self.stopping):
            if isinstance(message, GenerateAll):
                self._enqueue(peer, message.generates)
            elif isinstance(message, Cancel):
                if message.id in self._known:  # else it has ended already
                    self._end(self._known[message.id], "cancelled", log_reason=message.reason)
            elif isinstance(message, Gone):
                lost = [request for request in self._known.values() if request.peer == peer]
                for _ in {request.call for request in lost}:
                    self.metrics.aside(Answered(0, "dropped"))  # nobody else can say so any more
                for request in lost:
                    self._end(request, "cancelled", log_reason="web process gone")
            elif isinstance(message, Hello):
                self._greet(message)

    def turn_away(self) -> None:
        """Refuses who has waited too long for a slot. An HTTP request of which something runs already is not torn apart."""
        waited_since = time.monotonic() - self.max_queue_time_s
        if not self.queue or self.queue[0].arrived_at > waited_since or self.slots.free() is not None:
            return
        begun = {request.call for _slot, request in self.slots.live()}
        for request in list(self.queue):
            if request.arrived_at <= waited_since and request.call not in begun:
                self._end(request, "overloaded", log_reason="waited too long")

    def admit(self) -> None:
        """Runs waiting prompts into free slots, or a part of one: as many tokens as may come between two steps."""
        if not self._prompting and not self.queue:
            return
        ran = 0
        while ran < self._most_prompt_tokens() and (self._prompting or self._take_up(ran)):
            if self._goes_along(self._prompting):
                return
            ran += self._run_prompt(self._prompting)
            if self._known:
                self.receive()  # for who hangs up meanwhile

    def _most_prompt_tokens(self) -> int:
        """How many tokens of prompts may come between two steps; a prompt, or a part of it, always may.

        Unless it was set, no more than that, so that those who run wait least; but more while so many wait for a slot that is
        free that the free slots cost more than those who run would lose.
        """
        if self.max_batch_prefill_tokens:
            return self.max_batch_prefill_tokens
        if self._prompting:  # it is long
            return 1
        running = sum(1 for _ in self.slots.live())
        waiting = min(len(self.queue), self.model.batch_size - running)
        return MOST_PROMPT_TOKENS if waiting > MANY_WAITING * running > 0 else 1

    def _take_up(self, ran: int) -> bool:
        """Gives a free slot to the request that has waited longest, if those that run can be held up for it. `ran`: for how
        many tokens they have been in this turn."""
        slot, running = self.slots.free(), self.slots.busy
        if slot is None or not self.queue:
            return False
        if ran and ran + len(self.queue[0].generate.prompt) > self._most_prompt_tokens():
            return False
        enough_wait = len(self.queue) >= int(running * self.waiting_served_ratio)
        if running and not enough_wait and self._steps_since_prompt < self.max_waiting_tokens:
            return False
        request = self.queue.popleft()
        request.started_at = time.monotonic()
        if not running:
            self._progress_at = request.started_at
        self.slots.requests[slot] = request
        self._prompting = Prompting(slot, request, joins=running > 0)
        self.metrics.series("batch_next_size").observe(1)
        self.metrics.series("batch_inference_count", "prefill").inc()
        return True

    def _goes_along(self, prompting: Prompting) -> bool:
        """Whether a prompt is run along with the steps of others, not between them: each weight is read once for both, and
        those who run wait less. A short one is sooner through on its own."""
        can_go = self.model.most_along >= LEAST_ALONG and not prompting.request.generate.prompt_logprobs
        if not can_go or self.max_batch_prefill_tokens:
            return False
        length = len(prompting.request.generate.prompt)
        return length > self.model.prompt_part and length - prompting.begin > 1 and any(self.slots.live())

    def _end_of_part_along(self, prompting: Prompting) -> int:
        """Up to where the next step takes a prompt along: as far as those who run are not held up for too long."""
        a_token_s = self._pace.typical_s("along") or self._pace.typical_s("prefill")
        most = int(HELD_UP * self._pace.typical_s("decode") / a_token_s) if a_token_s else 0
        most = max(LEAST_ALONG, min(most, self.model.prompt_part, self.model.most_along))
        return next(parts_of(prompting.request.generate.prompt, most, prompting.begin))[1]

    def _run_prompt(self, prompting: Prompting) -> int:
        """Runs the prompt, or the next part of it. Returns how many tokens that were."""
        slot, request, generate = prompting.slot, prompting.request, prompting.request.generate
        in_parts = self.model.prompt_part is not None and not generate.prompt_logprobs
        begin, end = next(parts_of(generate.prompt, self.model.prompt_part if in_parts else None, prompting.begin))
        tokens = end - begin
        began_at = time.monotonic()
        logprobs, top = [], []
        kind = "score" if generate.prompt_logprobs else "prefill"
        as_long = f"{kind} of {1 << (tokens - 1).bit_length()}"  # one program runs them all, as a rule
        self.tell(self._pace.patience_s(kind, tokens), look=(self.model.vocab_size, began_at + self._pace.typical_s(as_long)))
        try:
            if generate.prompt_logprobs:
                chunks = self.model.score(slot, generate.prompt)
                output, logprobs, top = prompt_logprobs(chunks, generate.prompt, generate.top_n_tokens)
            elif in_parts:
                output = self.model.prefill_part(Part(slot, generate.prompt, begin, end))
            else:
                if self.model.sampling == "device":
                    self.model.set_sampling(slot, *device_parameters(generate.sampling))
                output = self.model.prefill(slot, generate.prompt)
        except Exception as error:
            logger.exception("prefill of request %016x failed", generate.id)
            self.metrics.series("batch_inference_failure", "prefill").inc()
            readable = isinstance(error, SamplingError)
            self._end(request, "failed", str(error) if readable else "the prompt could not be run on the device")
            if isinstance(error, DeviceLost):
                raise
            return tokens
        self._progress_at = time.monotonic()
        self._pace.learn(kind, self._progress_at - began_at, tokens)
        self._pace.learn(as_long, self._progress_at - began_at)
        self._went_on(prompting, end, self._progress_at - began_at, output, logprobs, top)
        return tokens

    def _went_on(
        self,
        prompting: Prompting,
        end: int,
        ran_s: float,
        output: torch.Tensor,
        logprobs: list[float],
        top: list[list[tuple[int, float]]],
    ) -> None:
        """Notes how far a prompt has been run, and how long that took. After the last part of it there is its first token."""
        request, generate = prompting.request, prompting.request.generate
        prompting.begin = end
        prompting.ran_s += ran_s
        if end < len(generate.prompt):
            return
        self._prompting, self._running, self._steps_since_prompt = None, None, 0
        request.prefilled_at = time.monotonic()
        prompt = Prompt(generate.id, request.started_at - request.arrived_at, logprobs, top)
        self._gain([request], request.plan, output, request.prefilled_at - prompting.ran_s, prompt)
        if prompting.joins:
            self.metrics.series("batch_concat", "backpressure").inc()
            self.metrics.series("batch_concat_duration", "decode").observe(prompting.ran_s)
        else:
            self._tokens_at = self._progress_at

    def decode(self) -> None:
        """One step: every busy slot gains one token. A part of a long prompt may go along."""
        if self._running is None:
            live = list(self.slots.live())
            if not live:
                return self.tell()
            slots, requests = zip(*live)
            self._inputs[len(live)].fill(slots, requests)
            self._running = Running(requests, _plan(requests), self._inputs[len(live)])
        requests, plan, given = self._running
        along = self._prompting if self._prompting and self._goes_along(self._prompting) else None
        if along:
            end = self._end_of_part_along(along)
            self.tell(self._pace.patience_s("decode") + self._pace.patience_s("prefill", end - along.begin))
        else:
            self.tell(look=(len(requests) * self.model.vocab_size, time.monotonic() + self._pace.typical_s("decode")))
        started_at = time.monotonic()
        try:
            if along:
                part = Part(along.slot, along.request.generate.prompt, along.begin, end)
                output, of_prompt = self.model.decode_along(*given.tensors, part)
            else:
                output = self.model.decode(*given.tensors)
        except Exception as error:
            logger.exception("a step of %d slots failed", len(requests))
            self.metrics.series("batch_inference_count", "decode").inc()
            self.metrics.series("batch_inference_failure", "decode").inc()
            for request in (*requests, *([along.request] if along else ())):
                self._end(request, "failed", "a step on the device failed")
            if isinstance(error, DeviceLost):
                raise
            return
        self.steps += 1
        self._steps_since_prompt += 1
        gain = self._gain(requests, plan, output, started_at)
        if self._running:
            given.go_on(gain.tokens)
        ran_s = gain.ran_at - started_at
        if along:
            longer_s = max(0.0, ran_s - self._pace.typical_s("decode"))
            self._pace.learn("along", longer_s, end - along.begin)
            self._went_on(along, end, longer_s, of_prompt, [], [])
        else:
            self._pace.learn("decode", ran_s)

    def tell(self, patience_s: float | None = None, look: tuple[int, float] | None = None) -> None:
        """Tells what was gained, and how the worker is doing: the device may take `patience_s` for what it is given next, by
        default what a step may take. look: how many logits come of that, and when, for those who get ready for it."""
        gains, ended = self._untold, self._unlogged
        self._untold, self._unlogged = [], []
        if self._tells_aside:
            if gains:
                self._tellings.get()
            self.end.send_made(functools.partial(self._told_aside, gains, ended, patience_s, look))
        else:
            for peer, message in self._words(gains):
                self.end.send(peer, message)
            self._count(gains, ended)
            self._report(patience_s)

    def _report(self, patience_s: float | None = None) -> None:
        now, running = time.monotonic(), self.slots.busy
        if patience_s is None and running:
            patience_s = self._pace.patience_s("decode")
        with self._places_lock:
            self.end.report(
                Status(
                    phase="draining" if self.draining else "ready",
                    progress_at=now,
                    steps=self.steps,
                    running=running,
                    queued=len(self.queue),
                    due_at=0.0 if patience_s is None else now + patience_s,
                    full=self._places_taken >= self.max_concurrent_requests,
                )
            )

    def refuses(self, message: GenerateAll) -> str | None:
        """Why a request is not taken, or None: then its places are. All that it asks for is taken, or nothing of it.

        On the thread of the socket, so that nobody waits for a step to hear that there is no place.
        """
        if self.draining:
            return "draining"
        with self._places_lock:
            if self._places_taken + len(message.generates) > self.max_concurrent_requests:
                return "overloaded"
            self._places_taken += len(message.generates)
            if self._places_taken >= self.max_concurrent_requests:
                self.end.report(msgspec.structs.replace(self.end.status, full=True))
        return None

    def _give_place_back(self) -> None:
        with self._places_lock:
            self._places_taken -= 1

    def _enqueue(self, peer: bytes, generates: list[Generate]) -> None:
        for generate in generates:
            if generate.id in self._known:  # an id has one end, which two requests cannot share
                logger.error("a second request %016x is dropped while the first one is not over", generate.id)
                self._give_place_back()
                continue
            if self.draining:
                self.end.send(peer, End(generate.id, "draining"))
                self._give_place_back()
                continue
            try:
                sampler = Sampler(
                    generate.sampling,
                    generate.prompt,
                    generate.top_n_tokens,
                    banned=self.eos_token_ids,
                    banned_for=generate.min_new_tokens,
                )
                plan = Plan([sampler])  # what would raise among others raises here
            except Exception:  # the web side has checked everything, but nothing that a client sends may end the loop
                logger.exception("request %016x cannot be sampled for", generate.id)
                self.end.send(peer, End(generate.id, "failed", "the request cannot be run"))
                self._give_place_back()
                continue
            request = Request(
                peer=peer,
                call=generates[0].id,
                generate=generate,
                arrived_at=generate.sent_at or time.monotonic(),
                sampler=sampler,
                plan=plan,
                most_new_tokens=min(generate.max_new_tokens, self.model.max_total_tokens - len(generate.prompt)),
            )
            self._known[generate.id] = request
            self.queue.append(request)

    def _gain(
        self, requests: Sequence[Request], plan: Plan, output: torch.Tensor, started_at: float, prompt: Prompt | None = None
    ) -> Gain:
        """Chooses the next token of each request. output: the logits, [requests, vocab], or what the device chose:
        int64 [requests]. `prompt` is what a prefill tells besides."""
        ran_at = time.monotonic()
        logits = None
        try:
            if self.model.sampling == "device":
                chosen = drawn(output, self.model.vocab_size)
            else:
                chosen, logits = choose(output, plan, self._helper)
        except Exception as error:
            chosen = [error] * len(requests)
        chosen_at = time.monotonic()
        finish_reasons: list[str | None] = [None] * len(requests)
        for row, request in enumerate(requests):
            error = token = chosen[row]
            if not isinstance(error, Exception):
                try:
                    request.generated += 1
                    request.last_token = token
                    if token in self.eos_token_ids or request.generated >= request.most_new_tokens:
                        finish_reasons[row] = self._ending(request)
                    continue
                except Exception as trouble:
                    error = trouble
            chosen[row] = None
            readable = isinstance(error, SamplingError)
            if not readable:
                logger.error("no token for request %016x", request.generate.id, exc_info=error)
            self._end(request, "failed", str(error) if readable else "the next token could not be chosen")
        self._progress_at = time.monotonic()
        gain = Gain(
            method="prefill" if prompt else "decode",
            requests=requests,
            tokens=chosen,
            finish_reasons=finish_reasons,
            logits=logits,
            prompt=prompt,
            started_at=started_at,
            ran_at=ran_at,
            chosen_at=chosen_at,
            done_at=self._progress_at,
            interval_s=None if prompt else self._progress_at - self._tokens_at,
        )
        if not prompt:
            self._tokens_at = self._progress_at
        self._untold.append(gain)
        return gain

    def _ending(self, request: Request) -> str | None:
        """Frees the slot if the last token ends the request. Returns the reason then."""
        if request.last_token in self.eos_token_ids and not request.generate.ignore_eos:
            finish_reason = "eos_token"
        elif request.generated >= request.most_new_tokens:
            finish_reason = "length"
        else:
            return None
        self._forget(request, finish_reason)
        return finish_reason

    def _told_aside(
        self, gains: list[Gain], ended: list[dict], patience_s: float | None, look: tuple[int, float] | None
    ) -> Iterator[tuple[bytes, Tokens | End]]:
        """All that `tell` does, on the socket's thread: what web processes wait for first. It changes nothing of the loop's."""
        try:
            yield from self._words(gains)
            os.sched_yield()  # who carries it on may be waiting for this processor
            self._report(patience_s)
            if self._helper and look:
                self._helper.expect(*look)
                if self._rehearsal:
                    self._rehearsal.expect(look[1], self._helper.cpu)
            self._count(gains, ended)
        finally:
            if gains:
                self._tellings.put(None)

    def _count(self, gains: list[Gain], ended: list[dict]) -> None:
        """For the metrics and the log."""
        for gain in gains:
            self.metrics.step(gain.method, gain.started_at, gain.ran_at, gain.chosen_at, gain.done_at)
            self.metrics.series("generated_tokens").inc(sum(token is not None for token in gain.tokens))
            if gain.interval_s is not None:
                self.metrics.series("batch_inference_count", "decode").inc()
                self.metrics.series("steps").inc()
                self.metrics.series("inter_token_latency_duration").observe(gain.interval_s)
        for fields in ended:
            logger.info("request finished", extra={"fields": fields})

    def _words(self, gains: list[Gain]) -> Iterator[tuple[bytes, Tokens | End]]:
        """What web processes are to hear of gains."""
        for gain in gains:
            yield from self._words_of(gain)

    def _words_of(self, gain: Gain) -> Iterator[tuple[bytes, Tokens | End]]:
        told: list = [(None, [])] * len(gain.requests)
        if gain.logits is not None and any(request.generate.logprobs for request in gain.requests):
            top_n = [request.sampler.top_n_tokens for request in gain.requests]
            try:
                told = describe(gain.logits, [token or 0 for token in gain.tokens], top_n)
            except Exception as error:
                told = [error] * len(gain.requests)
        words: dict[bytes, Tokens] = {}
        for request, token, finish_reason, what in zip(gain.requests, gain.tokens, gain.finish_reasons, told):
            if token is None:
                continue
            generate = request.generate
            if not generate.logprobs:
                what = (None, [])
            if isinstance(what, Exception) and not request.is_broken:
                logger.error("a token of request %016x cannot be told", generate.id, exc_info=what)
                request.is_broken = True
                if not finish_reason:
                    self._broken.put(request)  # for the loop to end it
            if not request.is_broken:
                message = words.get(request.peer)
                if message is None:
                    message = words[request.peer] = Tokens([])
                if gain.prompt:
                    message.prompts.append(gain.prompt)
                message.tokens.append(Token(generate.id, token, *what, finish_reason))
            elif finish_reason:
                yield request.peer, End(generate.id, "failed", "the next token could not be told")
        yield from words.items()

    def _end(self, request: Request, reason: str, message: str = "", log_reason: str | None = None) -> None:
        """Ends a request with a word instead of a token; what it has gained goes out first."""
        self.tell()
        self.end.send(request.peer, End(request.generate.id, reason, message))
        self._forget(request, log_reason or reason)

    def _forget(self, request: Request, reason: str) -> None:
        """Frees everything that a request holds."""
        del self._known[request.generate.id]
        self._give_place_back()
        if self._prompting and self._prompting.request is request:
            self._prompting = None
        if request in self.slots.requests:
            self._running = None
            self.slots.requests[self.slots.requests.index(request)] = None
        else:
            self.queue.remove(request)
        now = time.monotonic()
        started_at = request.started_at or now
        prefilled_at = request.prefilled_at or now
        self._unlogged.append(
            {
                "id": f"{request.generate.id:016x}",
                "input_tokens": len(request.generate.prompt),
                "generated_tokens": request.generated,
                "queue_ms": round((started_at - request.arrived_at) * 1000, 1),
                "prefill_ms": round((prefilled_at - started_at) * 1000, 1),
                "decode_ms": round((now - prefilled_at) * 1000, 1),
                "finish_reason": reason.replace(" ", "_"),
            }
        )
        if request.sampler.in_full:
            self.metrics.series("generated_tokens_in_full").inc(request.sampler.in_full)

    def _most_tokens(self) -> int:
        return sum(request.most_tokens for _slot, request in self.slots.live())

    def _greet(self, hello: Hello) -> None:
        if hello.ready and self.web_processes:
            self._ready_web_processes.add(hello.pid)
            if len(self._ready_web_processes) >= self.web_processes:
                self.web_processes = 0
                (configuration.run_dir() / "ready").touch()
                logger.info("Connected")


def _plan(requests: Sequence[Request]) -> Plan:
    return Plan([request.sampler for request in requests])


def boot(config: Config, end: WorkerEnd, metrics: Metrics) -> Worker:
    """Fetches and loads the model, telling each phase. Raises ConfigError or ModelError for what cannot be served."""
    device = choose_device(config.device)
    with contextlib.ExitStack() as ended:
        compiling = _compile_aside(LOGITS[device]) if config.sampling != "device" and not are_kept() else []
        for process in compiling:
            ended.callback(process.kill)
        with _phase(end, metrics, "downloading" if not config.is_local else "checking", config.model_name):
            folder, sha = fetch(config)
            manifest = Manifest.read(folder)
            is_remote = not config.is_local
            config, fetch_rest, load = prepare(config, folder, manifest)
            metrics.set_limits(config.max_batch_size or 0, config.max_input_tokens, config.max_total_tokens)
        # The tokenizer is text's business and none of this process': it is looked after beside the weights.
        command = [sys.executable, str(HERE / "text.py"), str(folder), str(configuration.run_dir())]
        command += [config.tokenizer_config_path] if config.tokenizer_config_path else []
        preparing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        ended.callback(preparing.kill)
        if is_remote:
            with _phase(end, metrics, "downloading", f"the weights of {config.model_name}"):
                fetch_rest()
        with _phase(end, metrics, "loading", "weights"):
            model = load(lambda phase: end.report(Status(phase=phase, progress_at=time.monotonic())))
        if config.sampling != "device":  # as a compiled model may say by now
            with _phase(end, metrics, "compiling", "the choice of tokens"):
                for process in compiling:
                    process.wait()
                try:
                    compile_loops(LOGITS[device], with_helper=device != "cpu")
                except OSError as error:
                    raise ConfigError(
                        f"no room for what numba compiles ({error}); NUMBA_CACHE_DIR names another folder"
                    ) from error
        printed, complaint = preparing.communicate()
    if preparing.returncode:
        raise ConfigError((complaint.strip().splitlines() or [f"the tokenizer of {folder} cannot be used"])[-1])
    tokenizer = json.loads(printed)
    eos_token_ids = list(dict.fromkeys([*manifest.eos_token_ids, *tokenizer["eos_token_ids"]]))
    end.announce(
        Facts(
            model_name=config.model_name,
            model_sha=sha,
            tokenizer_dir=tokenizer["tokenizer_dir"],
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
            batch_size=model.batch_size,
            max_input_tokens=model.max_input_tokens,
            max_total_tokens=model.max_total_tokens,
            device=model.device,
            dtype=model.dtype,
            model_dir=str(folder),
            prompt_logprobs=model.gives_prompt_logits,
            sampling=model.sampling,
            quantize=model.quantize,
        )
    )
    logger.info(
        "%s on %s in %s: %d slots of %d tokens, prompts up to %d, ends on ids %s",
        config.model_name,
        model.device,
        model.dtype,
        model.batch_size,
        model.max_total_tokens,
        model.max_input_tokens,
        eos_token_ids,
    )
    return Worker(
        model=model,
        end=end,
        eos_token_ids=frozenset(eos_token_ids),
        max_concurrent_requests=config.max_concurrent_requests,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        max_queue_time_s=config.max_queue_time or float("inf"),
        web_processes=config.web_concurrency,
        metrics=metrics,
    )


def _compile_aside(dtypes: Sequence[torch.dtype]) -> list[subprocess.Popen]:
    """Has what choices of tokens run on compiled, in a process for each type of logits, while the model is loaded. It takes
    longer than all else here, and numba compiles one thing after another."""
    code = "import config; config.die_with_parent(); import sys, torch, sampling; "
    code += "sampling.compile_loops([getattr(torch, sys.argv[1])])"
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    aside = {"cwd": HERE, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return [subprocess.Popen([sys.executable, "-c", code, name], **aside) for name in names]


Load = Callable[[Callable[[str], None]], StaticBatchModel]


def prepare(config: Config, folder: Path, manifest: Manifest) -> tuple[Config, Callable[[], Path], Load]:
    """The configuration with all that was left open filled in, what downloads the weights, and what loads the model. That
    calls what it is given with the name of a phase that takes long.

    All three raise ConfigError or ModelError for what cannot be served, with the reason.
    """
    device = choose_device(config.device)
    if config.cuda_graphs and device != "cuda":
        raise ModelError(f"--cuda-graphs (CUDA_GRAPHS) is for CUDA GPUs, and this is served on {device}; leave it out")
    if device == "neuron":
        from neuron_model import Build, NeuronModel  # each needs its own version of transformers: only one can be imported

        build = Build.decide(config, folder, manifest)
        return build.config, build.checkpoint, lambda announce: NeuronModel(build, configuration.run_dir(), announce)
    from torch_model import TorchModel

    for name in ("quantize", "tp_degree", "prefill_buckets", "position_buckets", "compile_workers"):
        if getattr(config, name) and (name, device) != ("quantize", "cpu"):
            flag = "--" + name.replace("_", "-")
            raise ModelError(f"{flag} ({name.upper()}) is for Neuron, and this is served on {device}; leave it out")
    if config.sampling == "device":
        raise ModelError(f"--sampling device (SAMPLING) is for Neuron, and this is served on {device}; leave it out")
    if manifest.is_compiled:
        raise ModelError(f"{config.model_name} is compiled for Neuron and is to be served on {device}; give its checkpoint")
    config = config.with_manifest(manifest)
    return config, lambda: fetch_weights(config, folder), lambda _announce: TorchModel(config, folder, manifest, device)


class _phase:
    """A phase of the boot: told to the web processes, and logged with its time."""

    def __init__(self, end: WorkerEnd, metrics: Metrics, phase: str, what: str):
        self._taken = metrics.series("boot_phase_seconds", phase)
        self._what = f"{phase} {what}"
        end.report(Status(phase=phase, progress_at=time.monotonic()))

    def __enter__(self):
        self._started_at = time.monotonic()
        logger.info("%s", self._what[:1].upper() + self._what[1:])

    def __exit__(self, failed, *_):
        if not failed:
            self._taken.inc(time.monotonic() - self._started_at)  # some come twice
            logger.info("Done %s in %.1f s", self._what, time.monotonic() - self._started_at)


def main() -> int:
    configuration.die_with_parent()
    config = configuration.load()
    configuration.set_up_logging(config.json_output)
    if config.is_demo:
        logger.info("No model is named: serving the built-in demonstration model. Name one with --model-id or MODEL_ID.")
    metrics = Metrics()
    end = WorkerEnd(configuration.socket_address(), on_aside=metrics.aside)
    try:
        worker = boot(config, end, metrics)
        gc.freeze()  # else a full collection goes through all that torch has made: 150 ms in which nobody gains a token
        signal.signal(signal.SIGTERM, lambda *_: worker.stop() if worker.draining else worker.drain())
        worker.run()
    except (ConfigError, ModelError) as error:
        logger.error("%s", error)
        return 2
    except DeviceLost as error:
        logger.error("the device is lost, and only a new process can have it back: %s", error)
        return 1
    finally:
        end.close()
        gc.freeze()  # the interpreter would go through what is left before it ends: where the boot failed, most of a second
    return 0


if __name__ == "__main__":
    sys.exit(main())
