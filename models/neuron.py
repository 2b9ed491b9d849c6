"""Static-batch models on Inferentia2 and Trainium, through transformers-neuronx 0.13. Implements StaticBatchModel.

All shapes are fixed when the model is compiled: slots, prompt buckets, position buckets. `Build` decides them before a weight
is read: from the manifest of a compiled model, else from the settings and what fits on this machine. The library does not
check several of its own rules (every live slot in every step, prompts of one token, positions, dtypes); `NeuronModel.forward`
keeps them (source: the library's public code at 0.13.322). Knows no requests. Imports the library only to build a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config import DEVICE_TOP_K, Config
from manifest import Manifest, check_weights, read_json
from models import artifact, plan
from models.artifact import Artifact, Cache, Programs, buckets
from models.base import (
    Chunk,
    DeviceLost,
    Logits,
    ModelError,
    SampledIds,
    first_line,
    named,
    progress_logged,
    reported_as,
)
from models.checkpoint import check_values, legacy_config
from models.fetch import fetch_artifact, fetch_checkpoint, fetch_weights
from models.machine import Machine, detect, host_memory, usable_cores
from run import ConfigError

logger = logging.getLogger("model")

CORES_WAIT_S, CORES_RETRY_S = (
    60.0,
    2.0,
)  # for cores of another process: a container that is being replaced needs some time
LOGITS_DTYPES = ("float32", "bfloat16")  # that the host samples from; others are cast to float32
GREEDY = (1, 1.0, 1.0)  # top_k, top_p, temperature of a slot where the device samples
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 10000.0  # below is greedy; above makes no difference
AMP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Largest difference between the logits of a prompt run in chunks and run whole, as a share of their range.
CHUNK_TOLERANCE = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.05}


@dataclass(frozen=True)
class Family:
    """How the library serves one model type."""

    name: str  # of the library's class
    options: dict[str, Any] = field(default_factory=dict)  # of NeuronConfig


LLAMA = Family("LlamaForSampling", options={"attention_layout": "BSH", "fuse_qkv": True})
# Of compiled folders that name no class. It adds sliding attention, which the length of a slot never needs (plan.Shape.window).
MISTRAL = Family("MistralForSampling", options={"fuse_qkv": True})
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": Family("MixtralForSampling"),
}

DEVICE_ERROR = "nrt_|neuron runtime|neuron device|cores are held"  # an error that the compiler does not cause
NOT_ON_DEVICE = "cannot be loaded onto the device"
# What errors of the runtime, the compiler and the library mean, by a pattern in lower case; the first match is used.
MEANINGS = {
    "allocation fail|status=4": "the device has too little memory for this model; lower --max-batch-size or --max-total-tokens",
    "status=2": "a program is damaged (compile again), or this machine lacks this tp_degree (--tp-degree, TP_DEGREE)",
    "driver version": "there is no Neuron driver on this machine (aws-neuronx-dkms on the host)",
    "could not be initialized|no neuron device": "no Neuron device can be used here; in a container pass it with "
    "--device=/dev/neuron0",
    "terminated abruptly": "the compiler ran out of host memory; give --compile-workers 1, or a larger machine",
    "filenotfounderror": "a program of this model is missing; remove the folder and compile it again",
}


def explain(error: BaseException) -> str:
    """One line: what the library's error means, where that is known, and the error."""
    text = f"{type(error).__name__}: {error}".lower()
    meaning = next((meaning for pattern, meaning in MEANINGS.items() if re.search(pattern, text)), None)
    return f"{meaning} ({named(error)})" if meaning else named(error)


@dataclass(frozen=True)
class Build:
    """Everything that is decided before a weight is read."""

    config: Config  # with everything that was left open filled in
    programs: Programs
    family: Family
    legacy: dict[str, Any]  # the checkpoint's config.json as the library reads it
    folder: Path
    artifact: Artifact | None  # of a compiled model's folder; None: a plain checkpoint
    compile_workers: int

    @classmethod
    def decide(cls, config: Config, folder: Path, manifest: Manifest) -> Build:
        """For the model in `folder`; its weights may still have to be downloaded.

        Raises ConfigError or ModelError with the reason for what cannot be served.
        """
        library = _library()
        model_config = read_json(folder / "config.json", required=True)
        legacy, shape = legacy_config(model_config), plan.Shape.from_config(model_config)
        family, found = FAMILIES[shape.model_type], Artifact.read(folder)
        check_values(legacy, shape.model_type)
        compiler = str(importlib.import_module("neuronxcc").__version__)
        if found and found.optimum:
            config = artifact.with_optimum(config, found.optimum)
        if found and found.programs:
            programs = found.programs
            artifact.check_compiler(programs, compiler, config.model_name)
            config = artifact.with_programs(config, programs, config.model_name).with_manifest(manifest)
            if shape.model_type == "mistral" and not programs.model_class:
                family = MISTRAL
            if programs.model_class not in (None, family.name):
                reason = f"{config.model_name} was compiled for {programs.model_class}, not {family.name}"
                raise ModelError(f"{reason}; compile it again")
            shape.check_length(config.max_total_tokens)
            _machine(config)
        else:
            machine = _machine(config)
            sizing = plan.choose(shape, machine, config)
            logger.info("On %s with %d cores: %s", machine.instance or "this machine", machine.cores, sizing)
            if warning := shape.memory_warning(machine):
                logger.warning(warning)
            length, slots, dtype = sizing.length, sizing.batch_size, shape.served_in(config.dtype)
            config = dataclasses.replace(
                config, tp_degree=sizing.tp_degree, max_batch_size=slots, max_total_tokens=length, dtype=dtype
            ).with_manifest(manifest)
            programs = Programs(
                batch_size=slots,
                tp_degree=sizing.tp_degree,
                dtype=dtype,
                prefill_buckets=buckets(length, config.prefill_buckets, "--prefill-buckets"),
                position_buckets=buckets(length, config.position_buckets, "--position-buckets"),
                quantize=config.quantize,
                sampling=config.sampling or "host",
                prefill_chunk=sizing.chunk,
                model_class=family.name,
                compiler_version=compiler,
                transformers_neuronx_version=str(library.__version__),
                neuron_config=config.neuron_config or (),
            )
        workers = config.compile_workers or max(
            1, min(os.cpu_count() or 1, (host_memory() or 0) // plan.COMPILER_BYTES)
        )
        return cls(config, programs, family, legacy, folder, found, workers)

    def checkpoint(self) -> Path:
        """The folder with the weights, downloaded if necessary."""
        if self.artifact is None:
            return fetch_weights(self.config, self.folder)
        subfolders = (
            [artifact.COMPILED, artifact.CHECKPOINT] if self.artifact.programs else [artifact.CHECKPOINT]
        )
        fetch_artifact(self.config, self.folder, subfolders)
        if (self.folder / artifact.CHECKPOINT).is_dir():
            return self.folder / artifact.CHECKPOINT
        if not self.artifact.checkpoint_id:
            raise ModelError(
                f"{self.folder} has no folder `checkpoint` and names no checkpoint_id; compile it again"
            )
        return fetch_checkpoint(self.config, self.artifact.checkpoint_id, self.artifact.checkpoint_revision)

    def without_chunks(self) -> Build:
        return dataclasses.replace(self, programs=dataclasses.replace(self.programs, prefill_chunk=0))

    def compiled(self) -> Path | None:
        """The folder of the programs that came with the model. Raises ModelError for one that is not as it was saved."""
        if self.artifact is None or self.artifact.programs is None:
            return None
        folder = self.folder / artifact.COMPILED
        if damage := artifact.find_damage(folder, self.artifact.files or {}):
            raise ModelError(f"{damage}; copy {self.folder} again, or compile the model again")
        return folder


class NeuronModel:
    """A model on NeuronCores. One call at a time, from the thread that made it.

    Where `prefill_chunk` is set, a chunk at position 0 runs in the program of a whole prompt, and later ones in a program for
    one slot and `prefill_chunk` tokens, which the library has for speculation. Such a prompt, and what a free slot holds,
    survive the decode steps of other slots.
    """

    engine = device = "neuron"
    mixes, copies_prefixes, prompt_budget = False, False, None

    def __init__(self, build: Build, work_dir: Path, announce: Callable[[str], None] = lambda phase: None):
        """`work_dir` is a folder of this run, for the checkpoint as the library can read it. `announce` is called with
        "compiling" before anything is compiled.

        Raises ModelError with the reason for what cannot be served.
        """
        config = build.config
        self.batch_size = config.max_batch_size
        self.max_input_tokens, self.max_total_tokens = config.max_input_tokens, config.max_total_tokens
        self.vocab_size = build.legacy["vocab_size"]
        self.dtype, self.quantize = build.programs.dtype, build.programs.quantize
        self.sampling = build.programs.sampling
        self._position_buckets = build.programs.position_buckets
        self._held: dict[int, list[int]] = {}  # slot → the tokens in its KV cache
        self._slot_sampling = [GREEDY] * build.programs.batch_size
        if not os.environ.get(
            "NEURON_RT_VISIBLE_CORES"
        ):  # without either variable the runtime takes all cores
            os.environ.setdefault("NEURON_RT_NUM_CORES", str(build.programs.tp_degree))
        if compiled := build.compiled():
            self._model = _loaded(build, work_dir, compiled)
        elif cache := Cache.here(config.compile_cache_size):
            self._model, build = _cached(cache, build, work_dir, announce)
        else:  # only the compiler can look, at NEURON_COMPILE_CACHE_URL
            announce("compiling")
            self._model, build = make_compiled(build, work_dir, _to_device, f"the model {NOT_ON_DEVICE}")
        chunk = build.programs.prefill_chunk
        self.prefill_chunk = (
            chunk if chunk < self.max_input_tokens and config.prefill_chunk != 0 and chunk else None
        )
        if self.prefill_chunk and (problem := self._chunk_problem()):
            logger.warning("Prompts are not run in chunks (--prefill-chunk): %s", problem)
            self.prefill_chunk = None
        self._held.clear()
        self.prefix_step = self.prefill_chunk
        self.gives_prompt_logits = self.prefill_chunk is not None and self.sampling == "host"

    def _chunk_problem(self) -> str | None:
        """Runs a prompt in chunks and whole, each time with a decode step after it: how the results differ, if they do. In the
        highest slot, beside a decode step of slot 0. The tokens repeat, so that a language model is sure of the next one."""
        slot, length = self.batch_size - 1, min(self.prefill_chunk * 3 // 2 + 1, self.max_input_tokens)
        prompt = [(37 * (n % 50) + 5) % self.vocab_size for n in range(length)]

        def run(*begins: int) -> list[np.ndarray]:
            for begin, end in zip(begins, (*begins[1:], length)):
                output = self.forward([Chunk(slot, prompt[begin:end], begin)])
                if slot:
                    self.forward([Chunk(0, prompt[:2], 0)])
                    self.forward([Chunk(0, prompt[:1], 2)])
            return [_comparable(output), _comparable(self.forward([Chunk(slot, prompt[:1], length)]))]

        try:
            chunked = run(
                0, min(self.prefill_chunk, length - 2)
            )  # first, so that it finds nothing that the other one has left
        except DeviceLost as error:
            if re.search(DEVICE_ERROR, str(error).lower()):
                raise ModelError(
                    f"the program of prompt chunks fails ({error}); give --prefill-chunk 0"
                ) from None
            return str(error)
        for found, expected in zip(chunked, run(0)):
            if self.sampling == "device" and found != expected:
                return f"another token, {found} instead of {expected}, than for the same prompt run whole"
            if self.sampling == "host":
                difference = np.abs(found - expected).max() / np.ptp(expected)
                if not difference <= CHUNK_TOLERANCE[self.dtype]:  # NaN
                    return f"the logits differ from those of the same prompt run whole by {difference:.1%} of their range"
        return None

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        """See StaticBatchModel. Raises DeviceLost.

        The device samples in the model's own dtype, among DEVICE_TOP_K tokens at most. A filtered token gets a logit of -30000
        there, after the temperature: that bounds the temperature from below, and float16 from above.
        """
        assert self.sampling == "device" and 0 <= slot < self.batch_size
        most = min(DEVICE_TOP_K, self.vocab_size)
        parameters = (min(top_k or most, most), top_p, min(temperature, MAX_TEMPERATURE))
        if top_k == 1 or temperature < MIN_TEMPERATURE:
            parameters = GREEDY
        if parameters == self._slot_sampling[slot]:  # an update of the device takes time
            return
        self._slot_sampling[slot] = parameters
        try:
            self._model.update_generation_config(generation_config(self._slot_sampling, self.vocab_size))
        except Exception as error:
            raise DeviceLost(explain(error)) from error

    def forward(self, chunks: Sequence[Chunk]) -> Logits | SampledIds:
        """See StaticBatchModel. A prompt, or a chunk of one, comes alone; otherwise the chunks are one token of every live
        slot, in ascending order of the slots."""
        first = chunks[0]
        goes_back = first.begin < max(1, len(self._held.get(first.slot, ())))
        if len(first.tokens) > 1 or (len(chunks) == 1 and goes_back):
            (chunk,) = chunks
            output = self._run_prompt(*chunk)
        else:
            output = self._run_rows(chunks)
        if self.sampling == "device":
            return SampledIds(output[:, 0].long().numpy())
        is_bfloat16 = output.dtype == torch.bfloat16
        logits = output.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else output.numpy()
        return logits[:, : self.vocab_size]

    def _run_rows(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """A decode step: logits [len(chunks), vocab], or ids [len(chunks), 1]. The library allocates the logits of each call,
        as [vocab, rows]; what is returned is a view of them where it can be."""
        slots, begins = [chunk.slot for chunk in chunks], [chunk.begin for chunk in chunks]
        lengths = [len(self._held[slot]) if slot in self._held else None for slot in slots]
        assert sorted(set(slots)) == slots, f"slots {slots} are not ascending"
        assert begins == lengths, f"slots {slots} hold {lengths} positions, not {begins}"
        assert max(begins) < self.max_total_tokens, f"slots {slots} have no position {max(begins)}"
        assert all(len(chunk.tokens) == 1 for chunk in chunks), "a decode step has one token a slot"
        rows = {slot: (token, begin) for slot, (token,), begin, _ in chunks}
        if not self.prefill_chunk:
            # The library overwrites position 0 of each slot that is not named: it holds no sequence from here on.
            self._held = {slot: self._held[slot] for slot in slots}
        elif len(self._held) > len(slots):
            # A slot that only holds its tokens gets a filler behind them. One that is longer than the program of this step
            # gets its first token again at its own position: the same keys and values but for rounding, and a short program.
            bucket = next(size for size in self._position_buckets if size > max(begins))
            fillers = {
                slot: (held[0], len(held) if len(held) < bucket else 0) for slot, held in self._held.items()
            }
            rows = dict.fromkeys(range(self.batch_size), (0, 0)) | fillers | rows
        for slot, (token,), _, _ in chunks:
            self._held[slot].append(token)
        ids, positions = zip(*rows.values())
        output = self._call(
            self._model, [[token] for token in ids], [[position] for position in positions], list(rows)
        )
        return output[: len(slots)] if list(rows)[: len(slots)] == slots else output[slots]

    def _run_prompt(self, slot: int, tokens: Sequence[int], begin: int, keep_all: bool) -> torch.Tensor:
        """Logits [1, vocab] after the last token, with `keep_all` [len(tokens), vocab] after each; or ids [1, 1]."""
        held, chunk, end = self._held.get(slot, []), self.prefill_chunk or 0, begin + len(tokens)
        assert 0 <= slot < self.batch_size and len(tokens) >= 1 and end <= self.max_input_tokens
        assert begin == 0 or len(tokens) <= chunk, (
            f"{len(tokens)} tokens at position {begin}, in chunks of {chunk}"
        )
        assert begin <= len(held), f"slot {slot} holds {len(held)} positions, not {begin}"
        held = self._held[slot] = [*held[:begin], *tokens]
        if begin:
            return self._continue(slot, held, begin if keep_all else end - 1, begin)
        first = held[:1] if keep_all else held
        ids, positions = [first], [range(len(first))]
        if len(first) == 1:  # would run as a decode step, which damages every other slot
            ids, positions = [[*first, 0]], [[0, 0]]
        output = self._call(self._model, ids, positions, [slot])
        return torch.cat([output, self._continue(slot, held, 1, 1)]) if len(first) < len(held) else output

    def _continue(self, slot: int, held: list[int], first: int, begin: int) -> torch.Tensor:
        """Runs the tokens from position `begin` > 0 on: logits [len(held) - first, vocab] after those from `first` on; or ids.

        The program has a fixed number of tokens and gives logits after each. Fillers behind the last token write positions
        that are written again before anything attends to them. Near the end of the slot the program begins earlier, with
        tokens that the slot holds."""
        start = min(begin, self._position_buckets[-1] - self.prefill_chunk)
        stop = start + self.prefill_chunk
        ids = (held + [0] * self.prefill_chunk)[start:stop]
        forward = self._model.speculative_forward
        output = self._call(
            forward, [ids], [range(start, stop)], [slot], speculation_length=self.prefill_chunk
        )
        output = output.T if self.sampling == "device" else output[:, :, 0]
        return output[
            first - start : len(held) - start
        ].contiguous()  # not a view that keeps the logits of all tokens

    def _call(self, program: Callable, ids: Any, positions: Any, slots: Any, **options: int) -> torch.Tensor:
        """int64 [n, q], [n, q], [n] → what the library returns. After an error of the runtime nothing works until a
        restart."""
        arrays = [
            torch.from_numpy(np.array(rows)) for rows in (ids, positions, slots)
        ]  # much faster than torch.tensor
        try:
            return program(*arrays, **options)
        except Exception as error:
            raise DeviceLost(explain(error)) from error


def _comparable(output: Logits | SampledIds) -> np.ndarray | list[int]:
    """One row as float32, or the sampled id."""
    if isinstance(output, SampledIds):
        return output.ids.tolist()
    return (output[0].astype(np.uint32) << 16).view(np.float32) if output.dtype == np.uint16 else output[0]


def generation_config(slots: Sequence[tuple[int, float, float]], vocab_size: int):
    """What the device samples with: top_k, top_p and temperature of each slot. A new object each time, because the library
    writes into the one that it is given."""
    top_k, top_p, temperature = map(list, zip(*slots))
    options = {
        "do_sample": True,
        "dynamic": True,
        "per_batch_line": True,
        "global_top_k": min(DEVICE_TOP_K, vocab_size),
    }
    return _library().GenerationConfig(**options, top_k=top_k, top_p=top_p, temperature=temperature)


def make(build: Build, work_dir: Path) -> Any:
    """The library's model with its weights in host memory, not compiled and not on the device."""
    library, family, programs = _library(), build.family, build.programs
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = (
        "1"  # the library calls torch.load without it, and pickles may run code
    )
    checkpoint, view = build.checkpoint(), work_dir / "checkpoint"  # the same files with another config.json
    check_weights(plan.Shape.from_config(build.legacy).parameters, checkpoint)
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir(parents=True)
    for path in checkpoint.resolve().iterdir():
        if path.name != "config.json":
            (view / path.name).symlink_to(path)
    (view / "config.json").write_text(json.dumps(build.legacy, indent=1))
    options = dict(family.options)
    if programs.sampling == "device":
        options["on_device_generation"] = generation_config(
            [GREEDY] * programs.batch_size, build.legacy["vocab_size"]
        )
    options["continuous_batching"] = library.ContinuousBatchingConfig(
        batch_size_for_shared_caches=programs.batch_size
    )
    if programs.quantize == "int8":
        options["quant"] = library.QuantizationConfig(quant_dtype="s8", dequant_dtype=AMP[programs.dtype])
    # A cast of bfloat16 logits to float32 would take the host longer than sampling from them.
    for name, value in (option.split("=") for option in programs.neuron_config):
        options[name] = value == "true" or (int(value) if value.isdigit() else value)
    options["cast_logits_dtype"] = programs.dtype if programs.dtype in LOGITS_DTYPES else "float32"
    with reported_as(f"{build.config.model_name} cannot be built for Neuron", explain):
        model = getattr(library, family.name).from_pretrained(
            str(view),
            batch_size=programs.batch_size,
            tp_degree=programs.tp_degree,
            amp=AMP[programs.dtype],
            neuron_config=library.NeuronConfig(**options, compilation_worker_count=build.compile_workers),
            n_positions=list(programs.position_buckets),
            context_length_estimate=list(programs.prefill_buckets),
        )
        expected, found = build.legacy.get("rope_theta"), getattr(model.config, "rope_theta", None)
        if expected not in (None, found):
            raise ModelError(
                f"the library reads rope_theta {found} where config.json has {expected}; it needs transformers 4"
            )
    return model


def _enable_chunks(model: Any, chunk: int) -> None:
    """Adds the program that continues one slot by `chunk` tokens, for the position buckets that are longer than that."""
    lengths = [size for size in model.token_buckets if size > chunk]
    model.decoder_lm_head_for_speculation[chunk, 1] = model.decoder_param_set.init_speculative_decoder(
        unroll=model.unroll, buckets=lengths, model_obj=model, n_active_tokens=chunk, batch_size=1
    )


def make_compiled(
    build: Build, work_dir: Path, compile_: Callable[[Any], None], failure: str
) -> tuple[Any, Build]:
    """The library's model, compiled by `compile_`, and what was built: without the program of prompt chunks where the library
    or the compiler refuses it. Raises ModelError, `failure` with the reason."""
    model, chunk = make(build, work_dir), build.programs.prefill_chunk
    try:
        with compiling(build, failure):
            if chunk:
                _enable_chunks(model, chunk)
            compile_(model)
        return model, build
    except ModelError as error:
        if not chunk or re.search(DEVICE_ERROR, str(error).lower()):
            raise
        logger.warning(
            "Prompts are not run in chunks (--prefill-chunk), as compiling for them failed: %s", error
        )
    model = None
    gc.collect()  # its weights are on the device
    return make_compiled(build.without_chunks(), work_dir, compile_, failure)


def _cached(cache: Cache, build: Build, work_dir: Path, announce: Callable[[str], None]) -> tuple[Any, Build]:
    """As `make_compiled`, on the device; the programs are those of the cache, which keeps them if they have to be compiled."""
    key, wanted = artifact.model_key(build.legacy), build.programs
    with cache.locked(key, wanted, is_shared=True):  # several servers may load the same programs
        if kept := _kept(cache, key, build, work_dir):
            return kept
    with cache.locked(key, wanted, is_shared=False):  # one compiles them, and the others wait
        if kept := _kept(cache, key, build, work_dir):
            return kept
        logger.info("Compiling, because %s", cache.missing(key, wanted))
        announce("compiling")
        model, build = make_compiled(build, work_dir, _to_device, f"the model {NOT_ON_DEVICE}")
        try:
            entry = cache.add(key, wanted, model.save, refuses_chunks=build.programs != wanted)
            logger.info("Kept the compiled programs in %s for the next start", entry)
        except OSError as error:
            remedy = f"give that folder to user {os.getuid()} (chown), or another one with NEURON_COMPILE_CACHE_URL"
            logger.warning(
                "The compiled programs cannot be kept, so each start compiles them again: %s; %s",
                error,
                remedy,
            )
    return model, build


def _kept(cache: Cache, key: str, build: Build, work_dir: Path) -> tuple[Any, Build] | None:
    entry = cache.find(key, build.programs)
    if entry and cache.refuses_chunks(entry):
        build, reason = build.without_chunks(), "as compiling for them has failed"
        logger.warning(
            "Prompts are not run in chunks (--prefill-chunk), %s; remove %s to try again", reason, entry
        )
    if not entry:
        return None
    try:
        return _loaded(build, work_dir, entry), build
    except (
        ModelError
    ) as error:  # a version of this server or of the library that names its programs in another way made it
        if f"{NOT_ON_DEVICE}: {MEANINGS['filenotfounderror']}" not in str(error):
            raise
        logger.warning("%s: removing these programs from the cache, to compile them again", error)
    shutil.rmtree(entry, ignore_errors=True)
    gc.collect()  # the weights that were loaded
    return None


def _loaded(build: Build, work_dir: Path, compiled: Path) -> Any:
    """The library's model with the programs of a folder, on the device."""
    logger.info("Loading the compiled programs of %s", compiled)
    model = make(build, work_dir)
    with progress_logged("loading programs"), reported_as(f"{compiled} {NOT_ON_DEVICE}", explain):
        if build.programs.prefill_chunk:
            _enable_chunks(model, build.programs.prefill_chunk)
        model.load(str(compiled))
        _to_device(model)
    return model


def _to_device(model: Any) -> None:
    """Compiles or loads the programs; waits up to CORES_WAIT_S for cores that another process holds."""
    deadline = time.monotonic() + CORES_WAIT_S
    while True:
        try:
            return model.to_neuron()
        except RuntimeError as error:
            message = str(error).lower()
            # The exception does not always name the reason: on a machine with a device it is this one.
            if "not available" not in message and ("could not be initialized" not in message or not detect()):
                raise
            if time.monotonic() > deadline:
                held = f"the cores are held by another process, also after {CORES_WAIT_S:.0f} s ({first_line(error)})"
                raise ModelError(
                    f"{held}; stop it (neuron-ls), or set NEURON_RT_VISIBLE_CORES to others"
                ) from None
        logger.warning("The NeuronCores are held by another process; trying again")
        time.sleep(CORES_RETRY_S)


def _machine(config: Config) -> Machine:
    """This machine; without a device, where only `compile` works, one with the cores of --tp-degree."""
    machine = detect() or Machine(usable_cores(None, os.environ) or config.tp_degree or 1)
    degree, cores = config.tp_degree or 0, machine.cores
    if degree > cores:
        raise ConfigError(
            f"--tp-degree {degree} (TP_DEGREE) needs more cores than the {cores} that this process may use"
        )
    return machine


def _library():
    try:
        import transformers_neuronx
    except ImportError as error:
        raise ModelError(f"--device neuron needs transformers-neuronx ({error}); use the image") from None
    return transformers_neuronx


@contextlib.contextmanager
def compiling(build: Build, failure: str) -> Iterator[None]:
    """Logs what is compiled and how long it takes; reports errors as `failure`."""
    programs, started_at = build.programs, time.monotonic()
    lengths = max(programs.prefill_buckets), max(programs.position_buckets), build.compile_workers
    logger.info(
        "Compiling programs for prompts up to %d tokens and positions up to %d, %d at a time", *lengths
    )
    with progress_logged("compiling"), reported_as(failure, explain):
        yield
    logger.info("Compiled in %.0f s", time.monotonic() - started_at)
