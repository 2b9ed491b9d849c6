"""The process that owns the device: boot, and the loop receive → schedule → forward → sample → publish.

Requests arrive as token ids and leave as token ids; text and HTTP never reach this layer. `scheduler.py` decides what each step
runs, the model runs it, `sampling.py` chooses tokens. The outputs of a step (`outputs.py`) are plain data: the output thread
makes messages of them, counts and logs them while the next step runs. Every request gets exactly one terminal message.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np

import config as configuration
import logs
import models
from config import Config
from engine import sampling
from engine.link import PeerLost, WorkerEnd
from engine.masks import Compiled, GrammarThreads, Masks
from engine.metrics import Metrics
from engine.outputs import ActiveRequest, StepOutput, last_rows, messages_of, rows_of, wrong_with
from engine.profiling import MakeMessages, Profiler
from engine.sampling import RowSampler, SamplingBatch, SamplingError
from engine.scheduler import Request, Scheduler, Step
from models.base import DeviceLost, ModelError, StaticBatchModel
from models.tokenizer import check_tokenizer
from protocol import (
    Cancel,
    End,
    Generate,
    Hello,
    ModelInfo,
    RequestStats,
    Sampling,
    Status,
    SubmitRequests,
    Tokens,
)
from run import ConfigError, die_with_parent, explained, run_dir, socket_address
from text.grammar import GrammarError, Grammars

logger = logging.getLogger("worker")

MAX_UNPUBLISHED = 2  # steps whose outputs wait for the output thread; each holds its logits


class StepTimer:
    """How long a step may take before the device counts as stuck, learned from the steps so far."""

    FACTOR = 20  # times the typical duration
    MINIMUM_S = 5.0  # a busy machine delays any step by that much now and then
    FIRST_S = 100.0  # for the first step of a kind, plus a second for each of its tokens
    WINDOW = 9  # durations that the typical one, their median, is taken from

    def __init__(self):
        self._decode_s: deque[float] = deque(maxlen=self.WINDOW)
        self._prompt_token_s: deque[float] = deque(maxlen=self.WINDOW)

    def limit_s(self, prompt_tokens: int) -> float:
        """The limit of a step with so many prompt tokens; 0: a decode step."""
        recent = self._prompt_token_s if prompt_tokens else self._decode_s
        if not recent:
            return self.FIRST_S + prompt_tokens
        return max(self.MINIMUM_S, self.FACTOR * sorted(recent)[len(recent) // 2] * max(1, prompt_tokens))

    def record(self, prompt_tokens: int, seconds: float) -> None:
        recent = self._prompt_token_s if prompt_tokens else self._decode_s
        recent.append(seconds / max(1, prompt_tokens))


class Sampled(NamedTuple):
    """The results of a step's sampling."""

    tokens: list[int | None]  # one a chunk
    logits: np.ndarray | None  # that log-probabilities are computed from
    complete: list[int]  # chunks whose grammar has ended their text
    mask_s: float | None


class Worker:
    """The loop around one model. `end` is where requests come from and outputs go to."""

    def __init__(
        self,
        model: StaticBatchModel,
        end: WorkerEnd,
        eos_token_ids: frozenset[int],
        scheduler: Scheduler,
        max_concurrent_requests: int,
        metrics: Metrics | None = None,
        web_processes: int = 0,  # how many to wait for before logging "Connected"
        grammars: Grammars | None = None,  # None where the device samples
        make_messages: MakeMessages = messages_of,
    ):
        self.model, self.end, self.scheduler = model, end, scheduler
        self.metrics = metrics or Metrics()
        self.steps, self._messages_of = 0, make_messages
        self.draining = False  # new requests are refused
        self.stopping = False  # running requests are ended, too
        self._eos_token_ids = eos_token_ids
        self.max_concurrent_requests = max_concurrent_requests
        self._web_processes, self._ready_web_processes = web_processes, set()
        self._requests: dict[int, ActiveRequest] = {}
        self._admitted = 0  # requests accepted and not over, including those still in the inbox
        self._admitted_lock = threading.Lock()
        self._batch: tuple[list[Request], SamplingBatch] = [], SamplingBatch([])  # of the last step
        self._unpublished: list[StepOutput] = []
        self._finished: list[dict] = []  # log fields of requests that are over
        self._publishing = threading.Semaphore(MAX_UNPUBLISHED)
        self._timer = StepTimer()
        self._grammars = GrammarThreads(grammars, model.vocab_size, end.interrupt) if grammars else None
        self._progress_at = 0.0  # when the device last finished a step, or was given one after being idle
        self._tokens_at = 0.0  # when running requests last gained a token
        end.refuses = self.refuses
        self.metrics.set_limits(model.batch_size, model.max_input_tokens, model.max_total_tokens)
        gauge = self.metrics.series  # read on the socket's thread when /metrics is scraped
        gauge("queue_size").set_function(lambda: len(scheduler.waiting))
        gauge("slots_busy").set_function(lambda: scheduler.busy)
        gauge("batch_current_size").set_function(lambda: scheduler.busy)
        gauge("batch_current_max_tokens").set_function(lambda: scheduler.max_tokens)
        gauge("last_step_age_seconds").set_function(
            lambda: time.monotonic() - self._progress_at if scheduler.busy else 0.0
        )

    @property
    def is_idle(self) -> bool:
        """Nothing is known of any request: all slots are free, the queue is empty, all outputs were handed on."""
        return not (
            self._requests
            or self._admitted
            or self._unpublished
            or self.scheduler.busy
            or self.scheduler.waiting
        )

    def run(self) -> None:
        """Serves until `stop`, or until everything is done after `drain`."""
        self._report()
        while not self.stopping and (self._requests or not self.draining):
            self.step()
        self.draining = True
        while self._admitted > len(self._requests):  # what arrived meanwhile is refused
            self.receive()
        for request in list(self._requests.values()):
            self._end(request, "draining")
        self.flush_outputs()

    def step(self) -> None:
        self.receive()
        now = time.monotonic()
        step = self.scheduler.next(now)  # first: a request that gets a slot now has not waited too long
        for request in self.scheduler.expired(now):
            self._end(request, "overloaded", log_reason="waited too long")
        if step:
            self.run_step(step)

    def drain(self) -> None:
        """Refuses new requests; the loop ends with the last running one. May be called from a signal handler."""
        self.draining = True
        self.end.interrupt()

    def stop(self) -> None:
        """Ends the loop after the running step. May be called from a signal handler."""
        self.stopping = True
        self.end.interrupt()

    def receive(self) -> None:
        """Handles what arrived; waits for it when there is nothing else to do."""
        has_nothing_to_run = not self.scheduler.busy and not self.scheduler.waiting
        if has_nothing_to_run:
            self._report()  # first: a client may send its next request as soon as it has its answer
            self.flush_outputs()
        waits = has_nothing_to_run and not self.stopping and (bool(self._requests) or not self.draining)
        for peer, message in self.end.receive(
            block=waits
        ):  # requests that do not run: their grammars are being compiled
            if isinstance(message, SubmitRequests):
                self._add(peer, message.generates)
            elif isinstance(message, Cancel):
                request = self._requests.get(message.id)  # None: it is over already
                if request and request.peer == peer:
                    self._end(request, "cancelled", log_reason=message.reason)
            elif isinstance(message, PeerLost):
                self._cancel_all_of(peer)
            elif isinstance(message, Hello):
                self._greet(message)
            elif isinstance(message, Compiled):
                request = self._requests.get(message.generate.id)
                if request and request.generate is message.generate:  # else it was cancelled meanwhile
                    self._take_grammar(request, message)
        for request in [request for request in self._requests.values() if request.publish_failed]:
            self._end(request, "failed", "the next token could not be published")

    def run_step(self, step: Step) -> None:
        """One call of the model, with everything around it that the device waits for."""
        prompt_tokens = sum(len(chunk.tokens) for chunk in step.chunks[step.rows :])
        for chunk, request in zip(step.chunks[step.rows :], step.requests[step.rows :]):
            if chunk.begin == request.cached:
                self._begin(chunk.slot, request)
        running = len(self.scheduler.running)
        self._report(self._timer.limit_s(prompt_tokens))
        self.flush_outputs()  # of the step before, while this one runs
        masks = self._grammars and self._grammars.start([step.requests[i].matcher for i in step.samples])
        started_at = time.monotonic()
        try:
            for slot, tokens, source in step.copies:
                self.model.copy_prefix(source, slot, tokens)
        except Exception as error:  # requests that have no chunk in this step rely on the copies, too
            raise DeviceLost(f"a prefix cannot be copied: {error}") from error
        try:
            output = self.model.forward(step.chunks)
        except Exception as error:
            logger.exception("a step of %d slots failed", len(step.chunks))
            self.metrics.failed_step(step)
            for request in step.requests:
                self._end(request, "failed", "a step on the device failed")
            if isinstance(error, DeviceLost):
                raise
            return
        ran_at = time.monotonic()
        self._timer.record(prompt_tokens, ran_at - started_at)
        tokens, logits, complete, mask_s = self._sample(step, output, masks)
        sampled_at = time.monotonic()
        finish_reasons = self.scheduler.update(step, tokens, complete)
        for request, reason in zip(step.requests, finish_reasons):
            if request.generated == 1:
                request.prefilled_at = sampled_at
                _log("first token", request)
            if reason:
                self._forget(request, reason)
        self._progress_at = time.monotonic()
        interval_s = None
        if step.rows:
            self.steps += 1
            interval_s, self._tokens_at = self._progress_at - self._tokens_at, self._progress_at
        elif not running:  # the first tokens follow none
            self._tokens_at = self._progress_at
        times = started_at, ran_at, sampled_at, self._progress_at
        self._unpublished.append(
            StepOutput(
                step,
                tokens,
                finish_reasons,
                logits,
                self._batch[1].maxima,
                *times,
                running,
                mask_s,
                interval_s,
            )
        )

    def _begin(self, slot: int, request: ActiveRequest) -> None:
        _log("prompt begins", request, slot=slot, cached=request.cached)
        parameters = request.generate.sampling
        if self.model.sampling == "device":
            greedy = 1, 1.0, 1.0
            sampled = parameters.top_k, parameters.top_p, parameters.temperature
            self.model.set_sampling(slot, *(greedy if parameters.seed is None else sampled))

    def _sample(self, step: Step, output, future: Future[Masks] | None) -> Sampled:
        """Ends the requests whose row fails; an error of all rows ends them all, and not the loop."""
        tokens: list[int | None] = [None] * len(step.chunks)
        requests, logits = [step.requests[i] for i in step.samples], None
        masks, complete = Masks(sampling.NO_MASK, {}, None), []
        try:
            masks = future.result() if future else masks
            if self.model.sampling == "device":
                unknown = SamplingError("the device chose a token that does not exist")
                chosen = [
                    id if 0 <= id < self.model.vocab_size else unknown
                    for id in output.ids[step.samples].tolist()
                ]
            else:
                logits = output if any(r.generate.logprobs or r.keep_all for r in step.requests) else None
                if requests != self._batch[0]:
                    self._batch = requests, SamplingBatch([request.sampler for request in requests])
                last = last_rows(step)
                rows = [last[i] for i in step.samples]
                chosen = sampling.sample(rows_of(output, rows), self._batch[1], masks.mask) if rows else []
        except Exception as error:
            logits, chosen = None, [error] * len(requests)
        for place, (i, request, token) in enumerate(zip(step.samples, requests, chosen)):
            if request.matcher and not isinstance(token, Exception):
                token = masks.errors.get(place) or self._consume(request, token, i, complete)
            if not isinstance(token, Exception):
                tokens[i] = token
                continue
            message = f"the grammar {token}" if isinstance(token, GrammarError) else str(token)
            if not isinstance(token, (SamplingError, GrammarError)):  # not to be shown to a client
                logger.error("no token for request %s", request.generate.request_id, exc_info=token)
                message = "the next token could not be sampled"
            self._end(request, "failed", message)
        return Sampled(tokens, logits, complete, masks.seconds)

    def _consume(
        self, request: ActiveRequest, token: int, index: int, complete: list[int]
    ) -> int | Exception:
        """Moves the request's matcher on; adds the chunk's index to `complete` if only the end may follow and is not wanted."""
        try:
            request.matcher.consume(token)
        except Exception as error:
            return error
        if request.matcher.is_complete:
            request.sampler.banned_for = 0  # of the tokens that end the text, which alone are left
            if not request.generate.keep_eos:
                complete.append(index)
        return token

    def flush_outputs(self) -> None:
        """Hands the outputs of finished steps to the output thread; waits while that is MAX_UNPUBLISHED calls behind."""
        outputs, finished = self._unpublished, self._finished
        if outputs or finished:
            self._unpublished, self._finished = [], []
            self._publishing.acquire()
            self.end.publish(functools.partial(self._publish, outputs, finished))

    def _publish(
        self, outputs: list[StepOutput], finished: list[dict]
    ) -> Iterator[tuple[bytes, Tokens | End]]:
        try:
            for output in outputs:
                yield from self._messages_of(output)
                self.metrics.step(output)
            for fields in finished:
                logger.info("request finished", extra={"fields": fields})
        finally:
            self._publishing.release()

    def _report(self, limit_s: float | None = None) -> None:
        """The status for the web processes; `limit_s`: how long the step that starts now may take."""
        now = time.monotonic()
        with self._admitted_lock:
            self.end.report(
                Status(
                    phase="draining" if self.draining else "ready",
                    steps=self.steps,
                    running=self.scheduler.busy,
                    queued=len(self.scheduler.waiting),
                    due_at=0.0 if limit_s is None else now + limit_s,
                    full=self._admitted >= self.max_concurrent_requests,
                )
            )

    def refuses(self, message: SubmitRequests) -> tuple[str, str] | None:
        """The reason for refusing an HTTP request's requests and a message, or None: then all of them are admitted.

        Called on the socket's thread, so that a refusal does not wait for a step.
        """
        if self.draining:
            return "draining", ""
        for generate in message.generates:
            if wrong := wrong_with(generate, self.model):
                logger.error("request %s cannot be run: %s", generate.request_id, wrong)
                return "failed", f"the request cannot be run: {wrong}"
        with self._admitted_lock:
            if self._admitted + len(message.generates) > self.max_concurrent_requests:
                return "overloaded", ""
            self._admitted += len(message.generates)
            if self._admitted >= self.max_concurrent_requests:
                self.end.report(msgspec.structs.replace(self.end.status, full=True))
        return None

    def _release_admission(self) -> None:
        with self._admitted_lock:
            self._admitted -= 1

    def _add(self, peer: bytes, generates: list[Generate]) -> None:
        for generate in generates:
            known = self._requests.get(generate.id)
            if (
                known and known.peer == peer
            ):  # an id gets one terminal message, which two requests cannot share
                logger.error("dropped a second request with the id of a running one: %s", generate.request_id)
            elif known:
                self.end.send(peer, End(generate.id, "failed", "the request's id is in use"))
            elif self.draining:
                self.end.send(peer, End(generate.id, "draining"))
            else:
                try:
                    request = self._request(peer, generate, generates[0].id)
                except (
                    Exception
                ):  # everything was checked, but nothing that a web process sends may end the loop
                    logger.exception("request %s cannot be run", generate.request_id)
                    self.end.send(peer, End(generate.id, "failed", "the request cannot be run"))
                else:
                    if not self._requests:
                        self._progress_at = time.monotonic()
                    self._requests[generate.id] = request
                    _log("request queued", request)
                    self._queue(request)
                    continue
            self._release_admission()

    def _queue(self, request: ActiveRequest) -> None:
        """Adds the request to the scheduler; one with a grammar when that is compiled."""
        if not request.generate.grammar:
            self.scheduler.add(request)
        elif compiled := self._grammars.compile(request.generate):
            self._take_grammar(request, compiled)

    def _take_grammar(self, request: ActiveRequest, compiled: Compiled) -> None:
        self.metrics.series("grammar_compile_duration").observe(compiled.seconds)
        if compiled.matcher is None:
            self._end(request, "failed", compiled.error)
        else:
            request.matcher = compiled.matcher
            self.scheduler.add(request)

    def _request(self, peer: bytes, generate: Generate, group: int) -> ActiveRequest:
        eos, prompt, now = self._eos_token_ids, generate.prompt, time.monotonic()
        sampler = RowSampler(generate.sampling, prompt, banned=eos, banned_for=generate.min_new_tokens)
        if self.model.sampling == "host":
            SamplingBatch([sampler])  # parameters that would fail among others fail here
        return ActiveRequest(
            prompt=prompt,
            max_new_tokens=min(generate.max_new_tokens, self.model.max_total_tokens - len(prompt)),
            arrived_at=generate.sent_at if 0 < generate.sent_at <= now else now,
            group=group,
            eos_token_ids=frozenset() if generate.ignore_eos else eos,
            keep_all=generate.prompt_logprobs,
            peer=peer,
            generate=generate,
            sampler=sampler,
        )

    def _cancel_all_of(self, peer: bytes) -> None:
        """Cancels the requests of a web process that is gone, and counts them, since it no longer can."""
        lost = [request for request in self._requests.values() if request.peer == peer]
        for _ in {request.group for request in lost}:
            self.metrics.handle(RequestStats(0, "dropped"))
        for request in lost:
            self._end(request, "cancelled", log_reason="web process gone")

    def _end(
        self, request: ActiveRequest, reason: str, message: str = "", log_reason: str | None = None
    ) -> None:
        """Ends a request with a message instead of a token; tokens that it has gained are published first."""
        if self._unpublished:
            self.flush_outputs()
        self.end.send(request.peer, End(request.generate.id, reason, message))
        self.scheduler.remove(request)
        self._forget(request, log_reason or reason)

    def _forget(self, request: ActiveRequest, reason: str) -> None:
        """Drops a request that has left the scheduler."""
        del self._requests[request.generate.id]
        self._release_admission()
        now = time.monotonic()
        started_at = request.started_at or now
        prefilled_at = request.prefilled_at or now
        self._finished.append(
            {
                "request_id": request.generate.request_id,
                "input_tokens": len(request.prompt),
                "cached_tokens": request.cached,
                "generated_tokens": request.generated,
                "queue_ms": round((started_at - request.arrived_at) * 1000, 1),
                "prefill_ms": round((prefilled_at - started_at) * 1000, 1),
                "decode_ms": round((now - prefilled_at) * 1000, 1),
                "finish_reason": reason.replace(" ", "_"),
            }
        )

    def _greet(self, hello: Hello) -> None:
        if hello.ready and self._web_processes:
            self._ready_web_processes.add(hello.pid)
            if len(self._ready_web_processes) >= self._web_processes:
                self._web_processes = 0
                (run_dir() / "ready").touch()
                logger.info("Connected")


def _log(event: str, request: ActiveRequest, **fields) -> None:
    logger.debug(event, extra={"fields": {"request_id": request.generate.request_id, **fields}})


def boot(config: Config, end: WorkerEnd, metrics: Metrics) -> Worker:
    """Fetches and loads the model, reporting each phase. Raises ConfigError or ModelError for what cannot be served."""
    with ThreadPoolExecutor(2) as aside:
        with boot_phase(
            end, metrics, "downloading" if not config.is_local else "checking", config.model_name
        ):
            prepared = models.prepare(config)
            config, folder = prepared.config, prepared.folder
            metrics.set_limits(config.max_batch_size or 0, config.max_input_tokens, config.max_total_tokens)
        profiler = Profiler.of(config, prepared.device)
        dtypes = ["float32", "bfloat16"] if prepared.device == "neuron" else ["float32"]
        compiling = (
            aside.submit(sampling.compile_loops, dtypes, Sampling()) if config.sampling != "device" else None
        )
        tokenizer_check = aside.submit(check_tokenizer, config, folder, run_dir())
        if not config.is_local:
            with boot_phase(end, metrics, "downloading", f"the weights of {config.model_name}"):
                prepared.fetch_weights()
        with boot_phase(end, metrics, "loading", "weights"):
            model = prepared.load(lambda phase: end.report(Status(phase)))
        if compiling:
            with boot_phase(end, metrics, "compiling", "the sampling loops"):
                try:
                    compiling.result()
                except OSError as error:
                    what = f"no room for compiled loops in {os.environ.get('NUMBA_CACHE_DIR')} ({error})"
                    raise ConfigError(f"{what}; NUMBA_CACHE_DIR names another folder") from error
        tokenizer = tokenizer_check.result()
    if tokenizer.largest_id >= model.vocab_size:
        what = f"the tokenizer in {tokenizer.folder} makes the token {tokenizer.largest_id} of ordinary text"
        raise ConfigError(
            f"{what}, and the vocabulary of the model has the tokens 0 to {model.vocab_size - 1}"
        )
    eos_token_ids = known_eos_ids([*prepared.eos_token_ids, *tokenizer.eos_token_ids], model.vocab_size)
    end.announce(
        ModelInfo(
            model_name=config.model_name,
            model_sha=prepared.sha,
            tokenizer_dir=str(tokenizer.folder),
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
    what = f"{config.model_name} on {model.device} ({model.engine}) in {model.dtype}"
    size = (
        f"{model.batch_size} slots of {model.max_total_tokens} tokens, prompts up to {model.max_input_tokens}"
    )
    logger.info("%s: %s, EOS ids %s", what, size, eos_token_ids)
    if model.mixes and (
        config.waiting_served_ratio or config.max_waiting_tokens != Config.max_waiting_tokens
    ):
        logger.info(
            "--waiting-served-ratio and --max-waiting-tokens have no effect here: prompts run beside decode steps"
        )
    per_step = config.max_batch_prefill_tokens or 0
    if not model.mixes and model.prefill_chunk and per_step > model.prefill_chunk:
        what = "--max-batch-prefill-tokens %d: that many tokens of prompts run between two decode steps, in chunks of %d"
        logger.info(what, per_step, model.prefill_chunk)
    scheduler = Scheduler(
        slots=model.batch_size,
        mixes=model.mixes,
        prefill_chunk=model.prefill_chunk,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens or model.prompt_budget,
        max_queue_time_s=config.max_queue_time or float("inf"),
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        queue_threshold_s=None if config.queue_threshold_ms is None else config.queue_threshold_ms / 1000,
        prefix_step=model.prefix_step if config.prefix_reuse else None,
        copies_prefixes=model.copies_prefixes,
    )
    eos = frozenset(eos_token_ids)
    grammars = (
        Grammars.load(tokenizer.folder, model.vocab_size, eos_token_ids) if model.sampling == "host" else None
    )
    make = profiler.attach(model) if profiler else messages_of
    return Worker(
        model,
        end,
        eos,
        scheduler,
        config.max_concurrent_requests,
        metrics,
        config.web_concurrency,
        grammars,
        make,
    )


def known_eos_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Without those that the model does not have: some checkpoints name them."""
    known = {i: 0 <= i < vocab_size for i in ids}
    if not all(known.values()):
        unknown = ", ".join(f"{i}"[:30] for i, is_known in known.items() if not is_known)
        logger.warning(
            "EOS ids that are ignored, as the vocabulary has the tokens 0 to %d: %.200s",
            vocab_size - 1,
            unknown,
        )
    return [i for i, is_known in known.items() if is_known]


@contextlib.contextmanager
def boot_phase(end: WorkerEnd, metrics: Metrics, phase: str, what: str) -> Iterator[None]:
    """Reports a phase to the web processes, and logs it with its duration."""
    started_at = time.monotonic()
    end.report(Status(phase))
    logger.info("%s %s", phase.capitalize(), what)
    yield
    seconds = time.monotonic() - started_at
    metrics.series("boot_phase_seconds", phase).inc(seconds)  # a phase may come twice
    logger.info("Done %s %s in %.1f s", phase, what, seconds)


def end_process(failure: threading.ExceptHookArgs) -> None:
    """After an error that ends a thread, without which nothing works."""
    logger.critical("a thread of the worker failed: %r", failure.exc_value, exc_info=failure.exc_value)
    os._exit(1)  # the main thread may be waiting for the device


def main() -> int:
    die_with_parent()
    config = configuration.load()
    logs.set_up(config.log_level, config.json_output)
    if config.is_demo:
        logger.info(
            "No model is named: serving the built-in demonstration model. Name one with --model-id or MODEL_ID."
        )
    metrics = Metrics()
    end = WorkerEnd(socket_address(), metrics.handle)
    threading.excepthook = end_process
    try:
        worker = boot(config, end, metrics)
        gc.freeze()  # a full collection over everything imported so far takes up to 150 ms, in which no token is generated
        signal.signal(signal.SIGTERM, lambda *_: worker.stop() if worker.draining else worker.drain())
        worker.run()
    except (ConfigError, ModelError) as error:
        logger.error("%s", error)
        return 2
    except DeviceLost as error:
        logger.error("unrecoverable device error; restart the process: %s", error)
        return 1
    except (OSError, MemoryError) as error:
        if not (reason := explained(error)):
            raise
        logger.error("%s", reason)
        return 1
    finally:
        end.close()
        gc.freeze()  # saves the interpreter most of a second at its end
    return 0


if __name__ == "__main__":
    sys.exit(main())
