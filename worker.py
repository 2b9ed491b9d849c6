"""The engine worker, owner of the device: startup, and the loop receive → next step → run → update → publish.

Requests arrive as token ids and leave as token ids; text and HTTP never reach this process. The parts are in
engine/: what runs next (scheduler.py), one step of the device (step.py), a request's life (lifecycle.py),
messages (outputs.py), the socket (link.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import config as configuration
import models
from config import Config
from engine.adapter_changes import AdapterChanges
from engine.admission import Admission
from engine.defaults import sampling_defaults
from engine.image_encoding import ImageThread
from engine.lifecycle import Requests
from engine.link import ForLoop, Link, PeerLost
from engine.metrics import Metrics
from engine.outputs import Publisher
from engine.preparation import Preparation
from engine.profiling import Profiler
from engine.request import Request, RequestGroup
from engine.sampling import sampling
from engine.sampling.ngram_proposer import NgramProposer
from engine.sampling.sampling import SamplerState
from engine.scheduler import Scheduler, Step, tokens_per_decode
from engine.step import StepOutput, StepRunner, StepTimer
from models.base import Engine, StaticBatchModel
from models.checkpoint.source import load_updates
from models.checkpoint.tokenizer import TokenizerFacts, check_tokenizer, find_tokenizer
from models.errors import DeviceLost, ModelError
from models.machine import resident_memory
from protocol import AdapterChange, Cancel, Hello, ModelInfo, RequestStats, SubmitRequests
from run import ConfigError, die_with_parent, explained, run_dir, socket_address, trim_memory
from text.grammar import Grammars

logger = logging.getLogger("worker")


@dataclass(kw_only=True, eq=False)
class Worker:
    """The loop around one model. One thread calls the methods, but for `drain`, `stop`, `load` and
    `adapters_in_use`."""

    model: StaticBatchModel
    config: Config
    eos_token_ids: frozenset[int]
    link: Link
    admission: Admission
    metrics: Metrics
    outputs: Publisher
    grammars: Grammars | None  # None with on-device sampling
    adapter_changes: AdapterChanges | None  # None: adapters stay as they are

    def __post_init__(self):
        """Makes what the loop runs: scheduler, requests, step runner and the threads for grammars and images.
        From now on /metrics reads this worker."""
        model = self.model
        self.scheduler = Scheduler(model, self.config)
        self.requests = Requests(model, self.eos_token_ids, self.scheduler, self.outputs, self.admission)
        self.stopping = False  # running requests are ended, too
        images = ImageThread(model, self.admission, self.metrics) if model.encoder_cache else None
        self._preparation = Preparation(self.grammars, images, self.metrics, self.link.interrupt)
        self._runner = StepRunner(model)
        self._timer = StepTimer()
        self._progress_at = 0.0  # when the device last finished a step, or was given one after being idle
        self._ready_web_processes = 0
        self.metrics.describe_model(
            model.batch_size,
            model.max_input_tokens,
            model.max_total_tokens,
            model.kv_cache_dtype,
            self.scheduler.prefix_granularity,
        )
        self.metrics.watch(self.load)
        if model.adapters:
            self.metrics.watch_adapters(model.batch_size, self.adapters_in_use)

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected."""
        return self.admission.is_draining

    @property
    def is_done(self) -> bool:
        """Whether the loop is to end: after `stop`, or after `drain` once all requests have ended."""
        return self.stopping or (self.draining and not self.requests)

    def run(self) -> None:
        """Serves until `stop`, or after `drain` until all requests have ended. Then ends all other requests,
        also those that arrived meanwhile, with "draining", and sends what is left.

        Raises DeviceLost if a step loses the device; requests beside those of that step then get no terminal
        message. In any case waits for the output thread, and closes the threads for preparation and adapters
        without waiting.
        """
        try:
            while not self.is_done:
                self.step()
            self.admission.drain()
            self._report()
            while self.admission.count > len(self.requests):  # what arrived meanwhile is rejected
                self.receive()
            for request in self.requests:
                self.requests.end(request, "draining")
        finally:
            self._preparation.close()
            if self.adapter_changes:
                self.adapter_changes.close()
            self.outputs.close()

    def step(self) -> None:
        """Runs the loop once. Waits for a message if there is nothing to run. Raises DeviceLost after a step
        that has lost the device, whose requests have ended."""
        self.receive()
        step = self.next()
        if step:
            output = self.run_step(step)
            self.update(output)
            self.outputs.publish(output)
            if isinstance(output.failure, DeviceLost):
                raise output.failure

    def receive(self) -> None:
        """Handles the messages that have arrived; waits for a message when there is nothing else to do, but
        not once the loop is to end.

        Requests that are prepared go to the scheduler, and preparations begin for which there is memory.
        Requests end if their preparation or the sending of their tokens failed. A loaded or unloaded adapter
        is taken over, and the next change of adapters begins. Without anything to run, the last outputs are
        sent and the status is reported. A message that cannot be handled is logged.
        """
        if self.adapter_changes:
            self.adapter_changes.apply(self.requests)
        has_nothing_to_run = not (self.scheduler.busy or self.scheduler.waiting)
        if has_nothing_to_run:
            self._report()
            self.outputs.flush()
        self._preparation.start()
        # There may be requests and nothing to run: they are being prepared.
        for peer, message in self.link.receive(block=has_nothing_to_run and not self.is_done):
            try:
                self._handle(peer, message)
            except Exception:  # as in `_add`
                logger.exception("a message from an API server process cannot be handled")
        for request, error in self._preparation.drain():
            if error:
                self.requests.end(request, "failed", error)
            else:
                self.scheduler.add(request)
        while self.outputs.failed:
            self.requests.end(self.outputs.failed.popleft(), "failed")

    def next(self) -> Step | None:
        """Gives waiting requests free slots, and returns the next step; None: there is nothing to run.
        Overdue requests, also those in preparation, are rejected after the step is scheduled: a request that
        gets a slot now is not overdue."""
        now = time.monotonic()
        if not self.scheduler.busy:
            self._progress_at = now
        step = self.scheduler.next(now, self._timer.prompt_budget)
        for request in self.requests:
            if self.scheduler.is_overdue(request, now):
                self.requests.end(request, "overloaded", log_reason="waited too long")
        return step

    def run_step(self, step: Step) -> StepOutput:
        """Runs a step on the device, and returns its output, also if it failed: no exception leaves this
        method for a failed step. The outputs of the last step are sent meanwhile; the step waits while too
        many are unsent (`Publisher.flush`).

        The API server processes learn how long the step may take. The time of a step that succeeded changes
        that limit, and the prompt tokens of later steps.
        """
        for request in step.started:
            adapter = {"adapter": request.generate.adapter} if request.adapter else {}
            request.log("prompt begins", slot=request.slot, cached=request.cached, **adapter)
        self._report(self._timer.limit_s(step.prompt_tokens))
        self.outputs.flush()  # outputs of the last step, while this one runs
        output = self._runner.run(step)
        if not output.failure:
            self._timer.record(step.prompt_tokens, output.ran_at - output.started_at)
        return output

    def update(self, output: StepOutput) -> None:
        """Applies a step's output to its requests: records their tokens, the time of the first one and the
        progress of prompts, removes tokens after the one that ends a request from `output.tokens`, and sets
        `finish_reasons` and `done_at` of `output`.

        A request whose row failed gets its `End` here. The slots of ended requests become free, and the
        worker forgets these requests. `Publisher.publish` must come after: it sends the tokens.
        """
        step = output.step
        for i, message in output.errors.items():
            self.requests.end(step.requests[i], "failed", message)
        output.finish_reasons = self.scheduler.update(step, output.tokens)
        for request, tokens, reason in zip(step.requests, output.tokens, output.finish_reasons):
            if tokens and not request.first_token_at:
                request.first_token_at = output.sampled_at
                request.log("first token")
            if reason:
                self.requests.finish(request, reason)
        output.done_at = self._progress_at = time.monotonic()

    def drain(self) -> None:
        """Rejects new requests from now on; the loop ends once all other requests have ended. Signal handlers
        may call it."""
        self.admission.drain()
        self.link.interrupt()

    def stop(self) -> None:
        """Ends the loop after the running step, and with it all requests ("draining"). Signal handlers may
        call it."""
        self.stopping = True
        self.link.interrupt()

    def load(self) -> dict[str, float]:
        """Returns the gauges of /metrics, by the names that `Metrics.series` takes. Called on the socket's
        thread."""
        busy = self.scheduler.busy
        queued = max(0, len(self.requests) - busy)  # waiting, or in preparation
        with_slot = [request for request in self.requests if request.has_slot]
        held_tokens = sum(request.prefilled + request.generated for request in with_slot)
        return {
            "ready": float(not self.draining),
            "queue_size": queued,
            "slots_busy": busy,
            "batch_current_size": busy,
            "batch_current_max_tokens": sum(
                len(request.prompt) + request.max_new_tokens for request in with_slot
            ),
            "last_step_age_seconds": time.monotonic() - self._progress_at if busy else 0.0,
            "encoder_cache_bytes": self.model.encoder_cache.nbytes if self.model.encoder_cache else 0,
            "state_snapshots": self.model.states.kept if self.model.states else 0,
            "vllm:num_requests_running": busy,
            "vllm:num_requests_waiting": queued,
            "vllm:kv_cache_usage_perc": held_tokens / (self.model.batch_size * self.model.max_total_tokens),
        }

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Returns the names of the LoRA adapters of running requests, and those of waiting ones. Called on
        the socket's thread."""
        running = set()
        waiting = set()
        for request in self.requests:
            if request.adapter:
                (running if request.has_slot else waiting).add(request.generate.adapter)
        return running, waiting

    def _report(self, limit_s: float = math.inf) -> None:
        """Reports the worker's phase to the API server processes. limit_s: how many seconds the step that
        starts now may take; without a limit, no step starts."""
        self.link.report("draining" if self.draining else "ready", limit_s)

    def _handle(self, peer: bytes, message: ForLoop) -> None:
        """Handles a message of the API server process `peer`. New requests are queued or ended. A `Cancel`
        ends its request, and has no effect if the request has ended already; a `PeerLost` ends all requests
        of the process. An `AdapterChange` begins. A `Hello` counts if it says `ready`."""
        match message:
            case SubmitRequests():
                self._add(peer, message)
            case Cancel():
                if request := self.requests.by_id.get(message.id):  # None: it is over already
                    self.requests.end(request, "cancelled", log_reason=message.reason)
            case AdapterChange():
                self.adapter_changes.begin(peer, message)
            case PeerLost():
                self._cancel_all_of(peer)
            case Hello(ready=True):
                self._count_ready()

    def _add(self, peer: bytes, message: SubmitRequests) -> None:
        """Takes the requests of one HTTP request, which the socket's thread has admitted. Each request is
        queued, or ended: "unknown_adapter" if its adapter was unloaded meanwhile, or "failed" after a line in
        the log."""
        group = RequestGroup()
        adapters = self.model.adapters.numbers if self.model.adapters else {}
        if message.images:
            self._preparation.images.add(message.images)
        images = {image.key: image.tokens for image in message.images}
        for generate in message.generates:
            request = self.requests.add(peer, generate, group, images)
            request.adapter = adapters.get(generate.adapter, 0)
            if generate.adapter and not request.adapter:
                what = f"The LoRA adapter {generate.adapter!r} has been unloaded"
                self.requests.end(request, "unknown_adapter", what)
                continue
            try:
                self._queue(request)
            except Exception:  # API server processes check everything; what they miss must not end the loop
                logger.exception("request %s cannot be run", generate.request_id)
                self.requests.end(request, "failed", "the request cannot be run")

    def _queue(self, request: Request) -> None:
        """Gives the request its sampler, unless the device samples, and its draft proposer, if drafts are
        verified, and adds it to the scheduler. A request with a grammar or images goes to the preparation
        first; `receive` adds it to the scheduler once these are ready."""
        generate = request.generate
        assert len(generate.prompt) > 0 and request.max_new_tokens > 0
        if self.model.sampling != "device":
            request.sampler = SamplerState(
                generate.sampling, generate.prompt, self.eos_token_ids, generate.min_new_tokens
            )
        if self.scheduler.verify_length > 1:
            request.proposer = NgramProposer(generate.prompt, generate.prediction, request.max_new_tokens)
        if generate.grammar or request.images:
            self._preparation.add(request)
        else:
            self.scheduler.add(request)

    def _cancel_all_of(self, peer: bytes) -> None:
        """Ends the requests of an API server process that has ended, whose slots become free. The metrics
        count each HTTP request once, as `dropped`."""
        lost = [request for request in self.requests if request.peer == peer]
        for _ in {request.group for request in lost}:
            self.metrics.record(RequestStats(0, "dropped"))
        for request in lost:
            self.requests.end(request, "cancelled", log_reason="server process lost")

    def _count_ready(self) -> None:
        """Counts an API server process that accepts requests; each says so once. With the last one, the log
        says so, and a file `ready` is made in the run's folder. Processes that replace others later change
        nothing."""
        self._ready_web_processes += 1
        if self._ready_web_processes == self.config.web_concurrency:
            (run_dir() / "ready").touch()
            logger.info("Connected")
            logger.info("Listening on %s (API and web UI)", self.config.address)


@dataclass
class Startup:
    """Makes a worker, and reports each phase of that to the API server processes."""

    config: Config
    link: Link
    admission: Admission
    metrics: Metrics

    def run(self) -> Worker:
        """Fetches and loads the model, announces it to the API server processes, and returns its worker,
        which does not run yet. This may take minutes; meanwhile threads compile the sampling loops, unless
        the device samples, and check the tokenizer.

        Raises ConfigError or ModelError for what cannot be served; other errors, such as OSError for a full
        disk, pass through. The two threads may then still run, and a normal exit would wait for them.
        """
        with self.phase("checking" if self.config.is_local else "downloading", self.config.model_name):
            prepared = models.prepare(self.config)
            config = prepared.config
            find_tokenizer(prepared.folder)  # before weights are downloaded or converted
        profiler = Profiler.of(config)
        # Without `with`, which would wait for these threads if the model cannot be loaded.
        background = ThreadPoolExecutor(2)
        compiling = None
        if config.sampling != "device":
            compiling = background.submit(sampling.compile_loops, prepared.logits_dtypes)
        tokenizer_check = background.submit(check_tokenizer, config, prepared.folder)
        model = self._load(prepared)
        if compiling:
            self._wait_for_loops(compiling)
        tokenizer = tokenizer_check.result()
        background.shutdown()
        if tokenizer.largest_id >= model.vocab_size:
            raise ConfigError(
                f"the tokenizer in {tokenizer.folder} encodes ordinary text as token {tokenizer.largest_id}, "
                f"but the model's vocabulary has the tokens 0 to {model.vocab_size - 1}"
            )
        named = [*prepared.manifest.eos_token_ids, *tokenizer.eos_token_ids]
        eos_token_ids = known_eos_ids(named, model.vocab_size)
        info = self._info(prepared, tokenizer, model, eos_token_ids)
        self.link.announce(info)
        self._log_model(model, info)
        grammars = None
        if model.sampling != "device":
            grammars = Grammars(tokenizer.folder, model.vocab_size, eos_token_ids)
        adapter_changes = None
        if config.lora_folder:
            read = functools.partial(load_updates, config)
            adapter_changes = AdapterChanges(model.adapters, read, self.link, config)
        log_scheduling(config, model)
        return Worker(
            model=model,
            config=config,
            eos_token_ids=frozenset(eos_token_ids),
            link=self.link,
            admission=self.admission,
            metrics=self.metrics,
            outputs=Publisher(self.link, self.metrics, profiler),
            grammars=grammars,
            adapter_changes=adapter_changes,
        )

    @contextlib.contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        """Reports a phase to the API server processes, and logs its beginning and, unless the body raises,
        its duration, which the metrics count, too. what: the object of the phase, as in "loading weights"."""
        started_at = time.monotonic()
        self.link.report(name)
        logger.info("%s %s", name.capitalize(), what)
        yield
        seconds = time.monotonic() - started_at
        self.metrics.series("startup_phase_seconds", name).inc(seconds)  # a phase may come twice
        logger.info("Done %s %s in %.1f s", name, what, seconds)

    def _load(self, prepared: Engine) -> StaticBatchModel:
        """Downloads the weights of a model on the hub, and loads the model. Each phase is reported. Raises
        ConfigError or ModelError for what cannot be served."""
        if not prepared.config.is_local:
            with self.phase("downloading", f"the weights of {prepared.config.model_name}"):
                prepared.fetch_weights()
        with self.phase("loading", "weights"):
            return models.load(prepared, self.link.report)

    def _wait_for_loops(self, compiling: Future[None]) -> None:
        """Waits until the sampling loops are compiled. Raises ConfigError if they cannot be written into
        numba's cache, such as on a full disk."""
        with self.phase("compiling", "the sampling loops"):
            try:
                compiling.result()
            except OSError as error:
                what = f"compiled loops cannot be kept in {os.environ.get('NUMBA_CACHE_DIR')} ({error})"
                raise ConfigError(f"{what}; set NUMBA_CACHE_DIR to another folder") from error

    def _info(
        self,
        prepared: Engine,
        tokenizer: TokenizerFacts,
        model: StaticBatchModel,
        eos_token_ids: list[int],
    ) -> ModelInfo:
        """Returns what the API server processes learn of the model. The worker's memory is measured now. Logs
        the sampling defaults of generation_config.json, unless the settings disable them."""
        has_defaults = self.config.generation_config != "none"
        memory = resident_memory()
        return ModelInfo(
            model_name=prepared.config.model_name,
            model_sha=prepared.sha,
            tokenizer_dir=str(tokenizer.folder),
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
            batch_size=model.batch_size,
            max_input_tokens=model.max_input_tokens,
            max_total_tokens=model.max_total_tokens,
            device=prepared.device,
            dtype=model.dtype,
            model_dir=str(prepared.folder),
            prompt_logprobs=model.supports_prompt_logits,
            sampling=model.sampling,
            quantize=model.quantize,
            reads_images=model.encoder_cache is not None,
            kv_cache_dtype=model.kv_cache_dtype,
            kv_bytes_per_token=model.kv_bytes_per_token,
            anonymous_bytes=memory.get("Anon", 0),
            mapped_bytes=memory.get("File", 0),
            state_bytes=model.state_bytes,
            max_snapshots=model.states.snapshots if model.states else 0,
            neuron_versions=prepared.versions,
            sampling_defaults=sampling_defaults(prepared.manifest, model.sampling) if has_defaults else {},
            stop_strings=prepared.manifest.stop_strings if has_defaults else [],
            adapters=self.config.adapters,
        )

    def _log_model(self, model: StaticBatchModel, info: ModelInfo) -> None:
        """Logs what is served and the memory that it takes, and that --allowed-media-domains has no effect on
        a model without images."""
        logger.info(
            "%s on %s (%s), weights in %s: %d slots of %d tokens, prompts up to %d, EOS ids %s",
            info.model_name,
            info.device,
            model.engine,
            info.quantize or info.dtype,
            info.batch_size,
            info.max_total_tokens,
            info.max_input_tokens,
            info.eos_token_ids,
        )
        logger.info(
            "Memory of the worker: %.2f GB anonymous, %.2f GB of mapped files, without KV cache and grammars",
            info.anonymous_bytes / 1e9,
            info.mapped_bytes / 1e9,
        )
        if model.adapters:
            names = ", ".join(model.adapters.numbers) or "none yet"
            logger.info("LoRA adapters: %s; %.1f MB", names, model.adapters.nbytes / 1e6)
        if model.states:
            logger.info(
                "Recurrent states: %.1f MB per slot; up to %d snapshots (--max-snapshot-memory)",
                info.state_bytes / 1e6,
                info.max_snapshots,
            )
        if model.encoder_cache:
            mib = model.encoder_cache.limit_bytes >> 20
            logger.info("Image input is supported; encoder cache: up to %d MiB", mib)
        elif self.config.allowed_media_domains:
            logger.info("--allowed-media-domains has no effect here: this model is served without images")


def log_scheduling(config: Config, model: StaticBatchModel) -> None:
    """Logs the settings of the scheduler that have no effect, or an unexpected one, on this model. Changes no
    setting."""
    if model.supports_chunked_prefill:
        if config.waiting_served_ratio or config.max_waiting_tokens != Config.max_waiting_tokens:
            logger.info(
                "--waiting-served-ratio and --max-waiting-tokens have no effect here: "
                "prompts run in the same steps as decodes (chunked prefill)"
            )
        most = StepTimer.MOST_TOKENS
        default = f"as many as take {1000 * StepTimer.PROMPTS_S:.0f} ms, at most {most}"
    else:
        most = tokens_per_decode(model)
        default = str(most)
    if (config.max_batch_prefill_tokens or 0) > most:
        logger.warning(
            "--max-batch-prefill-tokens %d (MAX_BATCH_PREFILL_TOKENS): running requests may wait for "
            "that many prompt tokens before each of their own. Values made for TGI are too large here; leave "
            "it unset (%s) unless time to first token matters more than inter-token latency",
            config.max_batch_prefill_tokens,
            default,
        )


def known_eos_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Returns the ids that are in the vocabulary, 0 to `vocab_size` - 1, each once, in their order. Some
    checkpoints name other ids, which are logged."""
    named = list(dict.fromkeys(ids))
    known = [i for i in named if 0 <= i < vocab_size]
    if known != named:
        logger.warning(
            "Ignoring EOS ids outside of the vocabulary (0 to %d): %.200s",
            vocab_size - 1,
            ", ".join(str(i) for i in named if i not in known),
        )
    return known


def log_thread_failure(link: Link, failure: threading.ExceptHookArgs) -> None:
    """Logs the error that ended a thread. If it is the socket's thread, the process ends at once with exit
    code 1. Without any other thread, such as a library's, requests are still served."""
    is_needed = failure.thread is link.thread
    level = logging.CRITICAL if is_needed else logging.ERROR
    error = failure.exc_value
    logger.log(level, "the thread %s failed: %r", failure.thread.name, error, exc_info=error)
    if is_needed:
        os._exit(1)  # the main thread may be waiting for the device


def main() -> NoReturn:
    """Runs the worker until SIGTERM, which drains; a second one stops. During startup SIGTERM kills the
    process. After the worker, the process ends at once, without waiting for its threads: with 0, or with the
    code of the failure, 1 or 2 (`log_failure`). The messages that are left are sent before."""
    die_with_parent()
    config = configuration.resolved()
    config.set_up_log()
    if config.is_demo:
        logger.info(
            "No model is named: serving the built-in demonstration model. "
            "Name one with --model-id or MODEL_ID."
        )
    metrics = Metrics(config.model_name)
    admission = Admission(config.max_concurrent_requests)
    link = Link(socket_address(), metrics, admission)
    threading.excepthook = functools.partial(log_thread_failure, link)
    try:
        worker = Startup(config, link, admission, metrics).run()
        trim_memory()
        # A full collection over what was imported takes up to 150 ms, in which no token is generated.
        gc.freeze()
        signal.signal(signal.SIGTERM, lambda *_: worker.stop() if worker.draining else worker.drain())
        worker.run()
        code = 0
    except Exception as error:
        code = log_failure(error)
    finally:
        link.close()
    # A normal exit would wait for the threads of a failed startup, or of the download of an adapter, and take
    # most of a second to free every object.
    os._exit(code)


def log_failure(error: Exception) -> int:
    """Logs why the worker ends, in one line where the reason is known. Returns the exit code: 2 if a setting
    or the model cannot be used, else 1."""
    if isinstance(error, (ConfigError, ModelError)):
        logger.error("%s", error)
        return 2
    if isinstance(error, DeviceLost):
        logger.error("unrecoverable device error; restart the process: %s", error)
    elif isinstance(error, (OSError, MemoryError)) and (reason := explained(error)):
        logger.error("%s", reason)
    else:
        logger.critical("the worker failed: %r", error, exc_info=error)
    return 1


if __name__ == "__main__":
    main()
