"""What runs on NeuronCores: decided before a weight is read, then compiled or loaded through
transformers-neuronx 0.13.

All shapes are fixed when a model is compiled: slots, prompt buckets, position buckets. `BuildPlan` decides
them, from the manifest of a compiled model, else from the settings and what fits on this machine.
`load_model` puts transformers-neuronx's model on the device, with compiled graphs (NEFFs) that came with the
model, cached ones, or newly compiled ones; `model.py` runs it. Imports transformers-neuronx when it builds,
and torch only through it.

Source: the public code of transformers-neuronx 0.13.322.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from config import DEVICE_TOP_K, DTYPES, FP8, Config
from manifest import Manifest, check_weights
from models.base import LOGITS_DTYPES, Announce
from models.checkpoint.fetch import fetch_artifact, fetch_checkpoint, fetch_weights
from models.errors import ModelError, first_line, named, progress_logged, reported_as
from models.machine import Machine, detect, host_memory, usable_cores, usable_threads
from models.neuron import artifact, families, plan
from models.neuron.artifact import Artifact, CachedGraphs, CompiledConfig, buckets
from models.neuron.base_family import Family
from models.neuron.driver import Versions
from models.neuron.legacy_config import legacy_config
from run import ConfigError, Json

logger = logging.getLogger("model")

# How long to wait for cores that another process holds: replacing a container takes some time.
CORES_WAIT_S = 60.0
CORES_RETRY_S = 2.0
GREEDY = (1, 1.0, 1.0)  # top_k, top_p, temperature of a slot where the device samples
FLAGS = "NEURON_CC_FLAGS"
TENSORIZER_OPTIONS = "--internal-hlo2tensorizer-options"
FP8_OPTION = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"


class Part(NamedTuple):
    """A part of a model that is left out where it does not compile, or fails its check at startup."""

    name: str
    field: str  # of CompiledConfig
    setting: str  # with which it is left out
    off: str  # its value


HYBRID = Part("On-device sampling", "sampling", "--sampling", "host")
CHUNKS = Part("Chunked prefill", "prefill_chunk", "--prefill-chunk", "0")
DRAFTS = Part("Speculative decoding", "verify_length", "--speculate", "0")

DEVICE_ERROR = "nrt_|neuron runtime|neuron device|cores are held"  # an error that the compiler does not cause
INIT_ERROR = "nrt_init|could not be initialized"  # may be a driver that does not fit the runtime library
NO_FP8 = "evrf051|f8e4m3"  # an error of the compiler
NOT_ON_DEVICE = "cannot be loaded onto the device"
MISSING = "a compiled graph of this model is missing; remove the folder and compile it again"
# What errors of the runtime, the compiler and transformers-neuronx mean, by a pattern in lower case; the
# first match is used.
MEANINGS = {
    "allocation fail|status=4": "the device has too little memory for this model; "
    "lower --max-batch-size or --max-total-tokens",
    "status=2": "a compiled graph is damaged (compile again), "
    "or this machine lacks this tp_degree (--tp-degree, TP_DEGREE)",
    "driver version": "there is no Neuron driver on this machine (aws-neuronx-dkms on the host)",
    "could not be initialized|no neuron device": "no Neuron device can be used here; in a container pass "
    "it with --device=/dev/neuron0",
    "terminated abruptly": "the compiler ran out of host memory; "
    "give --compile-workers 1, or a larger machine",
    "filenotfounderror": MISSING,
    NO_FP8: "this compiler does not support a KV cache in FP8; leave out --kv-cache-dtype (KV_CACHE_DTYPE)",
}


def explain(error: BaseException) -> str:
    """Returns one line about an error of the runtime, the compiler or transformers-neuronx: its type and
    first line; if MEANINGS has it, after what it means. If the device could not be initialized, the line has
    the versions of driver and runtime library."""
    text = f"{type(error).__name__}: {error}".lower()
    reason = named(error)
    if re.search(INIT_ERROR, text):
        reason += f"; {Versions.read()}"
    for pattern, meaning in MEANINGS.items():
        if re.search(pattern, text):
            return f"{meaning} ({reason})"
    return reason


def is_device_error(error: BaseException) -> bool:
    """Whether an error is one of the device or its runtime, by its message: other graphs would fail as
    well."""
    return re.search(DEVICE_ERROR, str(error).lower()) is not None


@dataclass(frozen=True)
class BuildPlan:
    """Everything that is decided before a weight is read."""

    config: Config  # with everything that was left open filled in
    compiled_config: CompiledConfig
    family: Family
    folder: Path
    artifact: Artifact | None  # of a compiled model's folder; None: a plain checkpoint
    manifest: Manifest

    @classmethod
    def decide(cls, config: Config, folder: Path, manifest: Manifest) -> BuildPlan:
        """Returns the plan for the model in `folder`, whose weights may still have to be downloaded. The
        values of this server's compiled graphs that came with the model are kept. Else the settings decide,
        and what fits on this machine, which is logged. The sizes of optimum-neuron's graphs are then taken
        for settings that are open; these graphs themselves are not used.

        Raises ConfigError for settings that are not supported, contradict the compiled graphs or fit nowhere,
        for an unsupported or damaged config.json and for graphs of a newer compiler; ModelError as `library`
        does, for graphs of another model class and for values of config.json that are not supported.
        """
        library()
        family = families.of(manifest.config_json)
        found = Artifact.of(manifest.config_json, folder / "config.json")
        if found and found.compiled_config:
            compiled_config = found.compiled_config
            config = _configured_for(compiled_config, family, config)
        else:
            if found:
                config = artifact.with_optimum(config, found.optimum)
            config, compiled_config = _sized(family, config)
        position_buckets = compiled_config.position_buckets
        if plan.SHARD_OVER_SEQUENCE in compiled_config.neuron_config and len(position_buckets) > 1:
            # Each graph splits a slot over the cores by its own length: a longer graph does not find what a
            # shorter one wrote.
            raise ConfigError(
                f"--neuron-config {plan.SHARD_OVER_SEQUENCE} (NEURON_CONFIG) works with one position bucket, "
                f"not {', '.join(map(str, position_buckets))}; leave --position-buckets (POSITION_BUCKETS) "
                "out, and compile a compiled model again"
            )
        memory_workers = (host_memory() or 0) // plan.COMPILER_BYTES
        workers = config.compile_workers or max(1, min(usable_threads(), memory_workers))
        config = dataclasses.replace(config.with_manifest(manifest), compile_workers=workers)
        if manifest.reads_images and plan.ON_DEVICE_EMBEDDING in compiled_config.neuron_config:
            raise ConfigError(
                f"--neuron-config {plan.ON_DEVICE_EMBEDDING} (NEURON_CONFIG) is not supported for models "
                "that read images, whose embeddings the host looks up; leave it out"
            )
        return cls(config, compiled_config, family, folder, found, manifest)

    def checkpoint(self) -> Path:
        """Returns the folder with the weights, after a download if they are on the hub: that of a plain
        checkpoint, a compiled model's subfolder, or the checkpoint that a compiled model names. Of a compiled
        model the graphs are downloaded as well. Waits for downloads. Raises ModelError for one that fails,
        for a model on the hub without weights, and for a compiled model that neither has nor names a
        checkpoint. Whether a local folder holds weights is not checked."""
        if self.artifact is None:
            return fetch_weights(self.config, self.folder)
        subfolders = [artifact.CHECKPOINT]
        if self.artifact.compiled_config:
            subfolders.append(artifact.COMPILED)
        fetch_artifact(self.config, self.folder, subfolders)
        if (self.folder / artifact.CHECKPOINT).is_dir():
            return self.folder / artifact.CHECKPOINT
        if not self.artifact.checkpoint_id:
            raise ModelError(
                f"{self.folder} has no folder `checkpoint` and names no checkpoint_id; compile it again"
            )
        return fetch_checkpoint(self.config, self.artifact.checkpoint_id, self.artifact.checkpoint_revision)

    def fallbacks(self) -> Iterator[BuildPlan]:
        """Yields this plan, then those to try where transformers-neuronx or the compiler fails on a part of
        it. First draft tokens are left out, and stay so; then prompt chunks, unless layers are recurrent;
        then sampling on the device, unless --sampling is given; then both."""
        yield self
        if self.compiled_config.verify_length:
            yield from self._with(verify_length=0).fallbacks()
            return
        if self.compiled_config.prefill_chunk and not self.compiled_config.reserved:
            yield self._with(prefill_chunk=0)
        if self.compiled_config.sampling == "hybrid" and not self.config.sampling:
            yield from self._with(sampling="host").fallbacks()

    def _with(self, **changes: Any) -> BuildPlan:
        """Returns a copy of this plan with these values of `compiled_config`."""
        return dataclasses.replace(self, compiled_config=dataclasses.replace(self.compiled_config, **changes))

    def warn_of(self, built: CompiledConfig, reason: str) -> None:
        """Logs a warning for each of chunks, draft tokens and sampling on the device that this plan has and
        `built` lacks. reason: the end of these lines."""
        for part in (CHUNKS, DRAFTS, HYBRID):
            if getattr(self.compiled_config, part.field) != getattr(built, part.field):
                logger.warning("%s is off (%s), %s", part.name, part.setting, reason)

    def compiled(self) -> Path | None:
        """Returns the folder of the compiled graphs that came with the model, after a comparison with their
        checksums; None: none came. Downloads nothing: `checkpoint` has to come before. Raises ModelError for
        a file that is missing or damaged, OSError for one that cannot be read. Graphs of older versions have
        no checksums: their folder is returned without a look at it."""
        if self.artifact is None or self.artifact.compiled_config is None:
            return None
        folder = self.folder / artifact.COMPILED
        if damage := artifact.verify_checksums(folder, self.artifact.files or {}):
            raise ModelError(f"{damage}; copy {self.folder} again, or compile the model again")
        return folder


def _configured_for(compiled_config: CompiledConfig, family: Family, config: Config) -> Config:
    """Returns the settings with the values of a compiled model. Raises ConfigError for graphs of a newer
    compiler, settings that contradict these values or that the family does not support, and too few cores;
    ModelError for graphs of another model class."""
    artifact.check_compiler(compiled_config, compiler_version(), config.model_name)
    config = artifact.with_compiled_config(config, compiled_config)
    model_class = family.name
    if compiled_config.model_class not in (None, model_class):
        raise ModelError(
            f"{config.model_name} was compiled for {compiled_config.model_class}, not {model_class}; "
            "compile it again"
        )
    given = config.max_snapshot_memory
    state_bytes = family.state_bytes(compiled_config.tp_degree, compiled_config.dtype)
    held = compiled_config.snapshots * state_bytes / 1e9
    if given != Config.max_snapshot_memory and given < held:  # the default does not count as given
        raise ConfigError(
            f"--max-snapshot-memory {given:g} (MAX_SNAPSHOT_MEMORY) is less than the {held:.3g} GB that "
            f"{config.model_name} was compiled for; leave it out, or compile it again"
        )
    plan.check_settings(family, config)
    _machine(config)
    return config


def _sized(family: Family, config: Config) -> tuple[Config, CompiledConfig]:
    """Returns the settings with the sizes and the dtype for this machine, and what has to be compiled for it.
    Sizes that are set stay. Logs the sizes, and a warning if host memory looks too small.

    Raises ConfigError where nothing fits, for settings that this family or machine does not support, for
    buckets that are longer than a slot, and for slots that are too short for --speculate.
    """
    machine = _machine(config)
    sizing = plan.choose_sizing(family, machine, config)
    logger.info("On %s with %d cores: %s", machine.instance or "this machine", machine.cores, sizing)
    if warning := plan.memory_warning(family, machine):
        logger.warning(warning)
    dtype = family.served_in(config.dtype)
    position_buckets = config.position_buckets
    if plan.SHARD_OVER_SEQUENCE in (config.neuron_config or ()) and position_buckets is None:
        position_buckets = ()  # one, of the whole length: see BuildPlan.decide
    config = dataclasses.replace(
        config,
        tp_degree=sizing.tp_degree,
        max_batch_size=sizing.batch_size,
        max_total_tokens=sizing.length,
        dtype=dtype,
    )
    compiled_config = CompiledConfig(
        batch_size=sizing.batch_size,
        tp_degree=sizing.tp_degree,
        dtype=dtype,
        prefill_buckets=buckets(
            sizing.reserved or sizing.length, config.prefill_buckets, "--prefill-buckets"
        ),
        position_buckets=buckets(sizing.positions, position_buckets, "--position-buckets"),
        quantize=config.quantize,
        kv_cache_dtype=FP8 if config.kv_cache_dtype == FP8 else None,
        sampling=config.sampling or "hybrid",
        prefill_chunk=sizing.chunk,
        model_class=family.name,
        compiler_version=compiler_version(),
        transformers_neuronx_version=str(library().__version__),
        neuron_config=config.neuron_config or (),
        verify_length=_verify_length(config, sizing.length),
        reserved=sizing.reserved,
        snapshots=sizing.snapshots,
    )
    return config, compiled_config


def _verify_length(config: Config, length: int) -> int:
    """Tokens of each slot in the graph that verifies draft tokens: these, and the token before them; 0: there
    are no draft tokens. Raises ConfigError for slots that are too short."""
    if not config.speculate:
        return 0
    if config.speculate + 2 > length:  # a position bucket has to be longer than the tokens of the graph
        raise ConfigError(
            f"--speculate {config.speculate} (SPECULATE) needs slots of more tokens than {length}"
        )
    return config.speculate + 1


def _machine(config: Config) -> Machine:
    """Returns this machine. Without a device, where only `compile` works, the result has the cores that
    NEURON_RT_* variables name (`usable_cores`), else those of --tp-degree, else one.

    Raises ConfigError for a --tp-degree of more cores than this process may use, and for values of
    NEURON_RT_* that the runtime rejects.
    """
    machine = detect() or Machine(usable_cores(None, os.environ) or config.tp_degree or 1)
    if config.tp_degree and config.tp_degree > machine.cores:
        raise ConfigError(
            f"--tp-degree {config.tp_degree} (TP_DEGREE) needs more cores than the {machine.cores} "
            "that this process may use"
        )
    return machine


def library():
    """Imports and returns the package transformers_neuronx. Raises ModelError where it or neuronx-cc, which
    it imports, is not installed."""
    try:
        import transformers_neuronx
    except ImportError as error:
        raise ModelError(f"--device neuron needs transformers-neuronx ({error}); use the image") from None
    return transformers_neuronx


def compiler_version() -> str:
    """Returns the version of neuronx-cc. `library` has to come before: it fails where there is none."""
    import neuronxcc

    return str(neuronxcc.__version__)


def log_versions() -> dict[str, str | None]:
    """Logs and returns the versions that graphs are compiled and run with, by name: driver, runtime,
    compiler, transformers_neuronx; None: unknown. `BuildPlan.decide` has to come before."""
    versions = {
        **Versions.read()._asdict(),
        "compiler": compiler_version(),
        "transformers_neuronx": str(library().__version__),
    }
    listed = ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
    logger.info("Neuron versions: %s", listed)
    return versions


# The model of transformers-neuronx: built, compiled, loaded


def load_model(build: BuildPlan, work_dir: Path, announce: Announce) -> tuple[Any, BuildPlan]:
    """Returns the model on the device, and what was built, which may be one of `BuildPlan.fallbacks`. Its
    graphs came with the model, are in the cache, or are compiled now and added to the cache. If
    NEURON_COMPILE_CACHE_URL is no local folder, only the compiler looks there and adds to it. Waits while
    another server compiles the same graphs, and up to CORES_WAIT_S for cores that another process holds.

    work_dir: a folder of this run, for the checkpoint as transformers-neuronx reads it. Calls `announce` with
    "compiling" before anything is compiled. Limits the runtime to the cores of the plan by
    NEURON_RT_NUM_CORES, unless that or NEURON_RT_VISIBLE_CORES is set. Raises ModelError or ConfigError for
    what cannot be served.
    """
    if not os.environ.get("NEURON_RT_VISIBLE_CORES"):  # without either variable the runtime takes all cores
        os.environ.setdefault("NEURON_RT_NUM_CORES", str(build.compiled_config.tp_degree))
    if compiled := build.compiled():
        return _load_graphs(build, work_dir, compiled), build
    key = artifact.config_digest(legacy_config(families.text_config(build.manifest.config_json)))
    if cached := CachedGraphs.here(build.config.compile_cache_size, key, build.compiled_config):
        return _load_cached(cached, build, work_dir, announce)
    announce("compiling")  # only the compiler can read its cache, at NEURON_COMPILE_CACHE_URL
    return make_compiled(build, work_dir, _to_device, f"the model {NOT_ON_DEVICE}")


def make(build: BuildPlan, work_dir: Path) -> Any:
    """Returns the model of transformers-neuronx, not compiled, not on the device; it reads its weights when
    that happens. Downloads weights that are on the hub. Writes `work_dir`/checkpoint, in the place of what an
    earlier call has written.

    Raises ConfigError for weight files that are too small for config.json or cannot be read, ModelError if
    there are none, or transformers-neuronx fails or reads another `rope_theta`.
    """
    # Imported here: it needs transformers-neuronx, which only machines with a device have.
    from models.neuron.graph import FamilyForSampling

    family = build.family
    checkpoint = build.checkpoint()
    check_weights(family.parameters, checkpoint)
    compiled_config = build.compiled_config
    with reported_as(f"{build.config.model_name} cannot be built for Neuron", explain):
        model = FamilyForSampling.from_pretrained(
            str(_view_of(checkpoint, family.as_llama(), work_dir / "checkpoint")),
            family=family,
            compiled_config=compiled_config,
            batch_size=compiled_config.batch_size,
            tp_degree=compiled_config.tp_degree,
            amp=DTYPES[compiled_config.dtype].short,
            n_positions=list(compiled_config.position_buckets),
            context_length_estimate=list(compiled_config.prefill_buckets),
            neuron_config=_neuron_config(build),
        )
        found = model.config.rope_theta
        expected = family.config["rope_theta"]
        if found != expected:
            raise ModelError(
                f"transformers-neuronx reads rope_theta {found} where config.json has {expected}; "
                "it needs transformers 4"
            )
    return model


def _view_of(checkpoint: Path, config_json: Json, view: Path) -> Path:
    """Makes the folder `view` anew, and returns it. It has symbolic links to all in the folder `checkpoint`
    but its config.json, and `config_json` in the place of that. Raises OSError."""
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir(parents=True)
    for path in checkpoint.resolve().iterdir():
        if path.name != "config.json":
            (view / path.name).symlink_to(path)
    (view / "config.json").write_text(json.dumps(config_json, indent=1))
    return view


def _neuron_config(build: BuildPlan) -> Any:
    """Returns the NeuronConfig of transformers-neuronx for what `build` compiles. Options of --neuron-config
    are set last, and override others."""
    compiled_config = build.compiled_config
    dtype = compiled_config.dtype
    amp = DTYPES[dtype].short
    options = {
        "attention_layout": "BSH",
        "fuse_qkv": True,
        "compilation_worker_count": build.config.compile_workers,
        "continuous_batching": library().ContinuousBatchingConfig(
            batch_size_for_shared_caches=compiled_config.batch_size
        ),
        # A cast of bfloat16 logits to float32 would take the host longer than sampling from them.
        "cast_logits_dtype": dtype if dtype in LOGITS_DTYPES else "float32",
    }
    if compiled_config.sampling == "hybrid":
        options["log_softmax_scores"] = True  # see HybridDecoder
    if compiled_config.sampling != "host":
        slots = [GREEDY] * compiled_config.batch_size
        options["on_device_generation"] = generation_config(slots, build.family.vocab)
    if compiled_config.quantize == "int8":
        options["quant"] = library().QuantizationConfig(quant_dtype="s8", dequant_dtype=amp)
    if compiled_config.kv_cache_dtype:
        from transformers_neuronx.config import KVCacheQuantizationConfig

        options["kv_cache_quant"] = KVCacheQuantizationConfig(quant_dtype="f8e4m3fn", dequant_dtype=amp)
    for option in compiled_config.neuron_config:
        name, value = option.split("=")
        options[name] = value if name == "collectives_layout" else json.loads(value)
    return library().NeuronConfig(**options)


def generation_config(slots: Sequence[tuple[int, float, float]], vocab_size: int) -> Any:
    """Returns the device's sampling parameters. slots: top_k, top_p and temperature of each slot; greedy is a
    top_k of 1. vocab_size: with DEVICE_TOP_K the bound of the tokens that are sampled from. The object is new
    each time, because transformers-neuronx changes it."""
    top_k, top_p, temperature = map(list, zip(*slots))
    return library().GenerationConfig(
        do_sample=True,
        dynamic=True,
        per_batch_line=True,
        global_top_k=min(DEVICE_TOP_K, vocab_size),
        top_k=top_k,
        top_p=top_p,
        temperature=temperature,
    )


def _enable_several(model: Any, compiled_config: CompiledConfig) -> None:
    """Adds to `model`, before it is compiled or loaded, the graphs for several tokens, in the position
    buckets that are longer: one graph extends a slot by a prompt chunk, the other verifies the draft tokens
    of every slot. A graph that `compiled_config` has no tokens for is left out. transformers-neuronx bisects
    the graphs by their numbers of tokens."""
    wanted = {(compiled_config.prefill_chunk, 1), (compiled_config.verify_row, compiled_config.batch_size)}
    for tokens, slots in sorted(wanted):
        if tokens:
            lengths = [size for size in model.token_buckets if size > tokens]
            model.decoder_lm_head_for_speculation[tokens, slots] = (
                model.decoder_param_set.init_speculative_decoder(
                    unroll=model.unroll,
                    buckets=lengths,
                    model_obj=model,
                    n_active_tokens=tokens,
                    batch_size=slots,
                )
            )


def make_compiled(
    build: BuildPlan, work_dir: Path, compile_: Callable[[Any], None], failure: str
) -> tuple[Any, BuildPlan]:
    """Returns the model, compiled by `compile_`, and what was built: the first of `BuildPlan.fallbacks` that
    compiles. What it lacks of `build` is logged, with the first error. Takes minutes for each try; each makes
    the model anew.

    compile_: compiles the model that it gets, and may put it onto the device. Raises ModelError: `failure`,
    with the reason of the last plan that was tried. An error of the device, of a KV cache in FP8, or before
    the compiler runs ends the tries. Raises ConfigError for weight files that are too small or cannot be
    read, and as `_compiling` does.
    """
    first_error = ""  # its text: the traceback of an error holds the model
    *_, last = ways = list(build.fallbacks())
    for way in ways:
        model = make(way, work_dir)
        try:
            with _compiling(way, failure):
                _enable_several(model, way.compiled_config)
                compile_(model)
            break
        except ModelError as error:
            if way is last or is_device_error(error) or re.search(NO_FP8, str(error).lower()):
                raise
            first_error = first_error or str(error)
        model = None
        gc.collect()  # its weights are on the device
    build.warn_of(way.compiled_config, f"as compiling for it failed: {first_error}")
    return model, way


@contextlib.contextmanager
def _compiling(build: BuildPlan, failure: str) -> Iterator[None]:
    """A context manager for a body that compiles. Logs what is compiled, every few seconds that it still is,
    and how long it took. While the body runs, NEURON_CC_FLAGS of this process has the option that a KV cache
    in FP8 needs. Raises ModelError, `failure` and the reason, for any error of the body; a ModelError stays
    as it is. With such a cache, raises ConfigError for a quote in NEURON_CC_FLAGS that is not closed."""
    compiled_config = build.compiled_config
    started_at = time.monotonic()
    logger.info(
        "Compiling graphs for prompts up to %d tokens and positions up to %d, %d at a time",
        max(compiled_config.prefill_buckets),
        max(compiled_config.position_buckets),
        build.config.compile_workers,
    )
    flags = os.environ.get(FLAGS)
    if compiled_config.kv_cache_dtype:
        os.environ[FLAGS] = flags_for_fp8(flags or "")
    try:
        with progress_logged("compiling"), reported_as(failure, explain):
            yield
    finally:
        os.environ.pop(FLAGS, None)
        if flags is not None:
            os.environ[FLAGS] = flags
    logger.info("Compiled in %.0f s", time.monotonic() - started_at)


def flags_for_fp8(flags: str) -> str:
    """Returns the value `flags` of NEURON_CC_FLAGS with the option that lets the compiler take e4m3fn for the
    device's e4m3: values up to 240 are the same in both. All options for the tensorizer are joined in one
    flag, at the end. Raises ConfigError for a quote that is not closed."""
    try:
        words = shlex.split(re.sub(f"{TENSORIZER_OPTIONS}\\s+", f"{TENSORIZER_OPTIONS}=", flags))
    except ValueError as error:
        raise ConfigError(f"{FLAGS} {flags!r}: {error}") from None
    given = [word for word in words if word.startswith(f"{TENSORIZER_OPTIONS}=")]
    options = [option for word in given for option in word.partition("=")[2].split()]
    if FP8_OPTION not in options:
        options.append(FP8_OPTION)
    others = [word for word in words if word not in given]
    return shlex.join([*others, f"{TENSORIZER_OPTIONS}={' '.join(options)}"])


def _load_cached(
    cached: CachedGraphs, build: BuildPlan, work_dir: Path, announce: Announce
) -> tuple[Any, BuildPlan]:
    """Loads the model with graphs of the cache, or compiles it and adds the graphs to the cache. Returns the
    model on the device, and what was built. Waits without a limit while another server compiles the same
    graphs; then uses these. Calls `announce` with "compiling" only before it compiles.

    Graphs in the cache that are damaged or no longer fit are removed. If new graphs cannot be kept, a warning
    says why. Raises ModelError, or ConfigError for weight files that are too small.
    """
    with cached.locked(is_shared=True):  # several servers may load the same graphs
        if kept := _load_kept(cached, build, work_dir):
            return kept
    with cached.locked(is_shared=False):  # one compiles them, and the others wait
        if kept := _load_kept(cached, build, work_dir):
            return kept
        logger.info("%s has no compiled graphs for this model, these settings and versions", cached.cache)
        announce("compiling")
        model, build = make_compiled(build, work_dir, _to_device, f"the model {NOT_ON_DEVICE}")
        try:
            cached.add(model.save, build.compiled_config)
            logger.info("Kept the compiled graphs in %s for the next startup", cached.folder)
        except OSError as error:
            logger.warning(
                "The compiled graphs cannot be kept, so each startup compiles them again: %s; "
                "give that folder to user %d (chown), or another one with NEURON_COMPILE_CACHE_URL",
                error,
                os.getuid(),
            )
    return model, build


def _load_kept(cached: CachedGraphs, build: BuildPlan, work_dir: Path) -> tuple[Any, BuildPlan] | None:
    """Returns the model on the device with the graphs of the cache, and what was built; None: the cache does
    not have them. Logs which parts were left out when they were compiled.

    Graphs are removed, and the result is None, if another version of this server or of transformers-neuronx
    named them differently. Raises ModelError for any other error of the device, or of the weights.
    """
    built = cached.find()
    if not built:
        return None
    build.warn_of(built, f"as compiling for it has failed; remove {cached.folder} to try again")
    build = dataclasses.replace(build, compiled_config=built)
    try:
        return _load_graphs(build, work_dir, cached.folder), build
    except ModelError as error:
        if f"{NOT_ON_DEVICE}: {MISSING}" not in str(error):
            raise
        cached.remove(error)
    gc.collect()  # the weights that were loaded
    return None


def _load_graphs(build: BuildPlan, work_dir: Path, compiled: Path) -> Any:
    """Returns the model on the device with the compiled graphs of the folder `compiled`. Waits up to
    CORES_WAIT_S for held cores. Raises ModelError for graphs that are missing or that the device rejects, and
    the errors of `make` for the weights."""
    logger.info("Loading the compiled graphs of %s", compiled)
    model = make(build, work_dir)
    with progress_logged("loading compiled graphs"), reported_as(f"{compiled} {NOT_ON_DEVICE}", explain):
        _enable_several(model, build.compiled_config)
        model.load(str(compiled))
        _to_device(model)
    return model


def _to_device(model: Any) -> None:
    """Puts the model onto the device; compiles the graphs if none were loaded. While another process holds
    cores, waits, and tries again every CORES_RETRY_S with a warning in the log; after CORES_WAIT_S it raises
    ModelError. Any other error of transformers-neuronx is raised as it is."""
    deadline = time.monotonic() + CORES_WAIT_S
    while True:
        try:
            model.to_neuron()
            return
        except RuntimeError as error:
            if not _are_cores_held(error):
                raise
            if time.monotonic() > deadline:
                raise ModelError(
                    f"the cores are held by another process, also after {CORES_WAIT_S:.0f} s "
                    f"({first_line(error)}; {Versions.read()}); stop it (neuron-ls), or set "
                    "NEURON_RT_VISIBLE_CORES to others"
                ) from None
        logger.warning("The NeuronCores are held by another process; trying again")
        time.sleep(CORES_RETRY_S)


def _are_cores_held(error: RuntimeError) -> bool:
    """Whether another process holds the cores. The exception does not always name the reason: if the cores
    could not be initialized on a machine with a device, that is taken for it."""
    message = str(error).lower()
    return "not available" in message or ("could not be initialized" in message and detect() is not None)
