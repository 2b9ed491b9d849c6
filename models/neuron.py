"""Static-batch models on Inferentia2 and Trainium, through transformers-neuronx 0.13. Implements StaticBatchModel.

All shapes are fixed when the model is compiled: slots, prompt buckets, position buckets. `Build` decides them before a weight
is read: from the manifest of a compiled model, else from the settings and what fits on this machine. The library does not
check several of its own rules (every live slot in every step, prompts of one token, positions, dtypes); `NeuronModel.forward`
keeps them (source: the library's public code at 0.13.322). Knows no requests. Imports the library only to build a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config import DEVICE_TOP_K, Config, ConfigError, Manifest, read_json
from models import artifact, plan
from models.artifact import Artifact, Cache, Programs, buckets
from models.base import Chunk, DeviceLost, Logits, ModelError, SampledIds, first_line, named, progress_logged, reported_as
from models.checkpoint import check_values, legacy_config
from models.fetch import fetch_artifact, fetch_checkpoint, fetch_weights
from models.machine import Machine, detect, host_memory, usable_cores

logger = logging.getLogger("model")

CORES_WAIT_S, CORES_RETRY_S = 60.0, 2.0  # for cores of another process: a container that is being replaced needs some time
LOGITS_DTYPES = ("float32", "bfloat16")  # that the host samples from; others are cast to float32
GREEDY = (1, 1.0, 1.0)  # top_k, top_p, temperature of a slot where the device samples
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 10000.0  # below is greedy; above makes no difference
LLAMA = "LlamaForSampling"  # the class that has the options of --neuron-config
AMP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Family:
    """How the library serves one model type. Those in `plan.ONE_SLOT` run one request at a time."""

    name: str  # of the library's class
    has_prefill: bool = True  # else a prompt runs token by token
    can_save: bool = True  # compiled programs can be saved and loaded
    samples_on_device: bool = False  # supports --sampling device
    options: dict[str, Any] = field(default_factory=dict)  # of NeuronConfig


FAMILIES = {
    "llama": Family("LlamaForSampling", samples_on_device=True, options={"attention_layout": "BSH", "fuse_qkv": True}),
    "mistral": Family("MistralForSampling", samples_on_device=True, options={"fuse_qkv": True}),
    "mixtral": Family("MixtralForSampling"),
    "gpt2": Family("GPT2ForSamplingWithContextBroadcasting"),
    "opt": Family("OPTForSampling"),
    "bloom": Family("BloomForSampling"),
    "gpt_neox": Family("GPTNeoXForSampling", has_prefill=False, can_save=False),
}

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
        _check(config, legacy, shape.model_type)
        compiler = str(importlib.import_module("neuronxcc").__version__)
        if found and found.optimum:
            config = artifact.with_optimum(config, found.optimum, shape.model_type in plan.CONTINUOUS_BATCHING)
        if found and found.programs:
            programs = found.programs
            artifact.check_compiler(programs, compiler, config.model_name)
            config = artifact.with_programs(config, programs, config.model_name).with_manifest(manifest)
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
                continuous_batching=shape.model_type in plan.CONTINUOUS_BATCHING,
                quantize=config.quantize,
                sampling=config.sampling or "host",
                compiler_version=compiler,
                transformers_neuronx_version=str(library.__version__),
                neuron_config=config.neuron_config or (),
            )
        if programs.neuron_config and family.name != LLAMA:
            raise ModelError(f"--neuron-config (NEURON_CONFIG) is for models of the library's class {LLAMA}, not {family.name}")
        workers = config.compile_workers or max(1, min(os.cpu_count() or 1, (host_memory() or 0) // plan.COMPILER_BYTES))
        return cls(config, programs, family, legacy, folder, found, workers)

    def checkpoint(self) -> Path:
        """The folder with the weights, downloaded if necessary."""
        if self.artifact is None:
            return fetch_weights(self.config, self.folder)
        subfolders = [artifact.COMPILED, artifact.CHECKPOINT] if self.artifact.programs else [artifact.CHECKPOINT]
        fetch_artifact(self.config, self.folder, subfolders)
        if (self.folder / artifact.CHECKPOINT).is_dir():
            return self.folder / artifact.CHECKPOINT
        if not self.artifact.checkpoint_id:
            raise ModelError(f"{self.folder} has no folder `checkpoint` and names no checkpoint_id; compile it again")
        return fetch_checkpoint(self.config, self.artifact.checkpoint_id, self.artifact.checkpoint_revision)

    def compiled(self) -> Path | None:
        """The folder of the programs that came with the model. Raises ModelError for one that is not as it was saved."""
        if self.artifact is None or self.artifact.programs is None:
            return None
        folder = self.folder / artifact.COMPILED
        if damage := artifact.find_damage(folder, self.artifact.files or {}):
            raise ModelError(f"{damage}; copy {self.folder} again, or compile the model again")
        return folder


class NeuronModel:
    """A model on NeuronCores. One call at a time, from the thread that made it."""

    engine = device = "neuron"
    gives_prompt_logits = mixes = False
    prefill_chunk = prompt_budget = None

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
        self._batches = build.programs.continuous_batching
        self._lengths: dict[int, int] = {}  # live slot → positions in its KV cache
        if not os.environ.get("NEURON_RT_VISIBLE_CORES"):  # without either variable the runtime takes all cores
            os.environ.setdefault("NEURON_RT_NUM_CORES", str(build.programs.tp_degree))
        self._model, self._slot_sampling = make(build, work_dir), [GREEDY] * build.programs.batch_size
        cache = Cache.here(config.compile_cache_size) if build.family.can_save else None
        key = artifact.model_key(build.legacy)
        if compiled := build.compiled():
            self._load(compiled)
        elif cache and (entry := cache.find(key, build.programs)):
            self._load(entry)
        else:
            if cache:  # else only the compiler can look, at NEURON_COMPILE_CACHE_URL
                logger.info("Compiling, because %s", cache.missing(key, build.programs))
            announce("compiling")
            with compiling(build, f"the model {NOT_ON_DEVICE}"):
                self._to_device()
            if cache:
                self._keep(cache, key, build.programs)

    def _load(self, compiled: Path) -> None:
        logger.info("Loading the compiled programs of %s", compiled)
        self._model.load(str(compiled))
        with progress_logged("loading programs"), reported_as(f"{compiled} {NOT_ON_DEVICE}", explain):
            self._to_device()

    def _keep(self, cache: Cache, key: str, programs: Programs) -> None:
        try:
            entry = cache.add(key, programs, self._model.save)
            logger.info("Kept the compiled programs in %s for the next start", entry)
        except OSError as error:
            remedy = f"give that folder to user {os.getuid()} (chown), or another one with NEURON_COMPILE_CACHE_URL"
            logger.warning("The compiled programs cannot be kept, so each start compiles them again: %s; %s", error, remedy)

    def _to_device(self) -> None:
        """Compiles or loads the programs; waits up to CORES_WAIT_S for cores that another process holds."""
        deadline = time.monotonic() + CORES_WAIT_S
        while True:
            try:
                return self._model.to_neuron()
            except RuntimeError as error:
                message = str(error).lower()
                # The exception does not always name the reason: on a machine with a device it is this one.
                if "not available" not in message and ("could not be initialized" not in message or not detect()):
                    raise
                if time.monotonic() > deadline:
                    held = f"the cores are held by another process, also after {CORES_WAIT_S:.0f} s ({first_line(error)})"
                    raise ModelError(f"{held}; stop it (neuron-ls), or set NEURON_RT_VISIBLE_CORES to others") from None
            logger.warning("The NeuronCores are held by another process; trying again")
            time.sleep(CORES_RETRY_S)

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
        """See StaticBatchModel. A chunk at position 0 is a whole prompt and comes alone; otherwise the chunks are one token of
        every live slot, in ascending order of the slots."""
        slots, begins = [chunk.slot for chunk in chunks], [chunk.begin for chunk in chunks]
        ids = [chunk.tokens for chunk in chunks]
        if begins == [0]:
            assert 0 <= slots[0] < self.batch_size and 1 <= len(ids[0]) <= self.max_input_tokens
            self._lengths[slots[0]] = len(ids[0])
            positions = [range(len(ids[0]))]
            if self._batches and len(ids[0]) == 1:  # would run as a decode step, which damages every other slot
                ids, positions = [[*ids[0], 0]], [[0, 0]]
        else:
            lengths = [self._lengths.get(slot) for slot in slots]
            assert sorted(set(slots)) == slots, f"slots {slots} are not ascending"
            assert begins == lengths, f"slots {slots} hold {lengths} positions, not {begins}"
            assert max(begins) < self.max_total_tokens, f"slots {slots} have no position {max(begins)}"
            assert all(len(tokens) == 1 for tokens in ids), "a decode step has one token a slot"
            # The library overwrites position 0 of each slot that is not named: it holds no sequence from here on.
            self._lengths = {slot: begin + 1 for slot, begin in zip(slots, begins)}
            positions = [[begin] for begin in begins]
        arrays = (torch.from_numpy(np.array(rows)) for rows in (ids, positions, slots))  # much faster than torch.tensor
        return self._run(*arrays)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> Logits | SampledIds:
        """int64 [n, q], [n, q], [n] → [n, vocab], or ids [n] where the device samples. After an error of the runtime nothing
        works until a restart."""
        try:
            if not self._batches:  # all rows share a position, and a prompt has none
                positions, slots = None if ids.shape[1] > 1 else positions[0], torch.zeros(1, dtype=torch.int64)
            output = self._model(ids, positions, slots)
        except Exception as error:
            raise DeviceLost(explain(error)) from error
        if self.sampling == "device":
            return SampledIds(output[:, 0].long().numpy())
        # The library allocates the logits of each call, as [vocab, n]; what is returned here is a view of them.
        is_bfloat16 = output.dtype == torch.bfloat16
        logits = output.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else output.numpy()
        return logits[:, : self.vocab_size]


def generation_config(slots: Sequence[tuple[int, float, float]], vocab_size: int):
    """What the device samples with: top_k, top_p and temperature of each slot. A new object each time, because the library
    writes into the one that it is given."""
    top_k, top_p, temperature = map(list, zip(*slots))
    options = {"do_sample": True, "dynamic": True, "per_batch_line": True, "global_top_k": min(DEVICE_TOP_K, vocab_size)}
    return _library().GenerationConfig(**options, top_k=top_k, top_p=top_p, temperature=temperature)


def make(build: Build, work_dir: Path) -> Any:
    """The library's model with its weights in host memory, not compiled and not on the device."""
    library, family, programs = _library(), build.family, build.programs
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # the library calls torch.load without it, and pickles may run code
    checkpoint, view = build.checkpoint(), work_dir / "checkpoint"  # the same files with another config.json
    view.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.resolve().iterdir():
        if path.name != "config.json":
            (view / path.name).symlink_to(path)
    (view / "config.json").write_text(json.dumps(build.legacy, indent=1))
    options = dict(family.options)
    if programs.sampling == "device":
        options["on_device_generation"] = generation_config([GREEDY] * programs.batch_size, build.legacy["vocab_size"])
    if programs.continuous_batching:
        options["continuous_batching"] = library.ContinuousBatchingConfig(batch_size_for_shared_caches=programs.batch_size)
    if programs.quantize == "int8":
        options["quant"] = library.QuantizationConfig(quant_dtype="s8", dequant_dtype=AMP[programs.dtype])
    # A cast of bfloat16 logits to float32 would take the host longer than sampling from them.
    for name, value in (option.split("=") for option in programs.neuron_config):
        options[name] = value == "true" or (int(value) if value.isdigit() else value)
    options["cast_logits_dtype"] = programs.dtype if programs.dtype in LOGITS_DTYPES else "float32"
    lengths = {"n_positions": list(programs.position_buckets), "context_length_estimate": list(programs.prefill_buckets)}
    if not programs.continuous_batching:  # such families take single numbers
        lengths = {name: lengths[name][-1] for name in lengths}
        if not family.has_prefill:
            del lengths["context_length_estimate"]
    with reported_as(f"{build.config.model_name} cannot be built for Neuron", explain):
        model = getattr(library, family.name).from_pretrained(
            str(view),
            batch_size=programs.batch_size,
            tp_degree=programs.tp_degree,
            amp=AMP[programs.dtype],
            neuron_config=library.NeuronConfig(**options, compilation_worker_count=build.compile_workers),
            **lengths,
        )
        expected, found = build.legacy.get("rope_theta"), getattr(model.config, "rope_theta", None)
        if programs.continuous_batching and expected not in (None, found):
            raise ModelError(f"the library reads rope_theta {found} where config.json has {expected}; it needs transformers 4")
    return model


def _machine(config: Config) -> Machine:
    """This machine; without a device, where only `compile` works, one with the cores of --tp-degree."""
    machine = detect() or Machine(usable_cores(None, os.environ) or config.tp_degree or 1)
    degree, cores = config.tp_degree or 0, machine.cores
    if degree > cores:
        raise ConfigError(f"--tp-degree {degree} (TP_DEGREE) needs more cores than the {cores} that this process may use")
    return machine


def _check(config: Config, legacy: dict[str, Any], model_type: str) -> None:
    """Refuses what the library would compute wrongly, or refuse without a helpful message."""
    if config.sampling == "device" and not FAMILIES[model_type].samples_on_device:
        raise ModelError(f"--sampling device (SAMPLING) is not supported for {model_type} models on Neuron; give host")
    check_values(legacy, model_type)


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
    logger.info("Compiling programs for prompts up to %d tokens and positions up to %d, %d at a time", *lengths)
    with progress_logged("compiling"), reported_as(failure, explain):
        yield
    logger.info("Compiled in %.0f s", time.monotonic() - started_at)
