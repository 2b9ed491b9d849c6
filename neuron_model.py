"""Static-batch models on Inferentia2 and Trainium, through transformers-neuronx 0.13. Implements StaticBatchModel.

All shapes are fixed when the model is compiled: slots, prompt buckets, position buckets. `Build` decides them before a weight
is read: from what a compiled model says of itself, else from the settings and from what fits on this machine. What the library
asks for and does not check (a live slot that a step does not name, a prompt of one token, positions, dtypes) is seen
to here, so that no caller can break it. Knows no requests, and of sampling only what the device does itself. The
library is imported when a model is made, never before.

Source of the library's rules: its public code at 0.13.322, and AWS' developer guide for continuous batching.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import artifact
import plan
from artifact import Artifact, Cache, Programs
from config import DEVICE_TOP_K, Config, ConfigError, Manifest, read_json
from model import (
    DeviceLost,
    ModelError,
    fetch_artifact,
    fetch_checkpoint,
    fetch_weights,
    first_line,
    reported_as,
    still_at_it,
)

logger = logging.getLogger("model")

PROGRESS_S = 30.0  # how often a long compilation says that it is still at it
CORES_WAIT_S = 60.0  # how long to wait for cores that another process holds; a container that is being replaced needs some
CORES_NAP_S = 2.0
FEW_TOKENS = 1024  # the vocabulary of an understudy
COMPILER_BYTES = 8 << 30  # host memory that is set aside for each compiler: an estimate, it takes several GB for a large model


@dataclass(frozen=True)
class Family:
    """How the library serves one kind of model. Without `batches` it runs one request at a time, and without `has_prefill`
    even a prompt goes token by token; with `samples` the device can choose the tokens."""

    name: str
    batches: bool = False
    has_prefill: bool = True
    is_saved: bool = True  # its programs can be saved and loaded
    samples: bool = False  # on the device, if it is asked to
    options: dict[str, Any] = field(default_factory=dict)  # of NeuronConfig


FAMILIES = {
    "llama": Family("LlamaForSampling", batches=True, samples=True, options={"attention_layout": "BSH", "fuse_qkv": True}),
    "mistral": Family("MistralForSampling", batches=True, samples=True, options={"fuse_qkv": True}),
    "mixtral": Family("MixtralForSampling", batches=True),
    "gpt2": Family("GPT2ForSamplingWithContextBroadcasting"),
    "opt": Family("OPTForSampling"),
    "bloom": Family("BloomForSampling"),
    "gpt_neox": Family("GPTNeoXForSampling", has_prefill=False, is_saved=False),
}
OPTIMUM_BATCHES = ("LlamaForSampling", "MistralForSampling")  # what optimum-neuron batches continuously
LOGITS = {"bfloat16": torch.bfloat16}  # what the host chooses from as it is; for other dtypes float32
AMP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

# What the runtime and the compiler say, and what it means to a person. The first that occurs counts.
MEANINGS = (
    ("Allocation Failure", "the device has too little memory for this model; lower --max-batch-size or --max-total-tokens"),
    ("status=4", "the device has too little memory for this model; lower --max-batch-size or --max-total-tokens"),
    ("status=2", "this tp_degree does not work on this machine; give another with --tp-degree (HF_NUM_CORES)"),
    ("Driver version", "there is no Neuron driver on this machine (aws-neuronx-dkms on the host)"),
    ("could not be initialized", "no Neuron device can be used here; in a container pass it with --device=/dev/neuron0"),
    ("No neuron device", "no Neuron device can be used here; in a container pass it with --device=/dev/neuron0"),
    (
        "terminated abruptly",
        "the compiler ran out of the machine's memory; give --compile-workers 1, or a larger machine",
    ),
)


def explain(error: BaseException) -> str:
    """The library's words, and what they mean where that is known; one line."""
    lines = str(error).strip().splitlines()
    told = ": ".join([type(error).__name__, *(line.strip() for line in lines[:1])])
    return next((f"{meaning} ({told})" for words, meaning in MEANINGS if words.lower() in str(error).lower()), told)


@dataclass(frozen=True)
class Build:
    """Everything that is decided before a weight is read."""

    config: Config  # with all that was left open filled in
    programs: Programs
    family: Family
    legacy: dict[str, Any]  # the checkpoint's config.json as the library reads it
    folder: Path
    artifact: Artifact | None  # a compiled model; None: a plain checkpoint
    compile_workers: int

    @classmethod
    def decide(cls, config: Config, folder: Path, manifest: Manifest) -> Build:
        """For the model in `folder`, of which the weights need not be there yet.

        Raises ConfigError or ModelError for what cannot be served, with the reason.
        """
        _library()
        told = read_json(folder / "config.json", required=True)
        legacy = legacy_config(told)
        shape = plan.Shape.from_config(told)
        family, machine, found = FAMILIES[shape.model_type], plan.detect(), Artifact.read(folder)
        _check(config, legacy, shape.model_type)
        if found:
            artifact.check_versions(found.programs, *_versions(), config.model_name)
            config = artifact.agreed(config, found.programs, config.model_name)
            family = _family_of(found.programs, family, config.model_name)
        window = _window(legacy, shape)
        if config.max_total_tokens:
            _check_length(config, manifest, window)
        cores = _cores(config, machine)
        if not found:
            config = _sized(config, dataclasses.replace(shape, window=window), cores, machine)
        config = config.with_manifest(manifest)
        most = min(os.cpu_count() or 1, (plan.host_memory() or 0) // COMPILER_BYTES)
        return cls(
            config=config,
            programs=found.programs if found else _programs(config, family),
            family=family,
            legacy=legacy,
            folder=folder,
            artifact=found,
            compile_workers=config.compile_workers or max(1, most),
        )

    def checkpoint(self) -> Path:
        """The folder with the weights, downloaded if they have to be."""
        if self.artifact is None:
            return fetch_weights(self.config, self.folder)
        fetch_artifact(self.config, self.folder)
        if self.artifact.checkpoint:
            return self.artifact.checkpoint
        if not self.artifact.checkpoint_id:
            raise ModelError(
                f"{self.config.model_name} has no folder `{artifact.CHECKPOINT}` and names no checkpoint_id to fetch its "
                "weights by; compile it again"
            )
        return fetch_checkpoint(self.config, self.artifact.checkpoint_id, self.artifact.checkpoint_revision)


class ProgramMissing(ModelError):
    """The library asks for a program that a folder does not have."""


class NeuronModel:
    """A model on NeuronCores. One call at a time, from the thread that made it."""

    device = "neuron"
    gives_prompt_logits = False
    prompt_part, most_along = None, 0

    def __init__(self, build: Build, work_dir: Path, announce: Callable[[str], None] = lambda phase: None):
        """`work_dir` is a folder of this run, in which the checkpoint is laid out as the library can read it. `announce` is
        called with "compiling" before anything is compiled.

        Raises ModelError for what cannot be served, with the reason.
        """
        config = build.config
        self.batch_size = config.max_batch_size
        self.max_input_tokens, self.max_total_tokens = config.max_input_tokens, config.max_total_tokens
        self.vocab_size = build.legacy["vocab_size"]
        self.dtype = build.programs.dtype
        self.quantize = build.programs.quantize
        self.sampling = build.programs.sampling
        self._batches = build.programs.continuous_batching
        self._given: tuple = None, None, None  # the tensors of the last step
        self._named: list[int] = []  # the slots of the last step
        self._held: list[int] = []  # how many positions each of them holds
        self._prefilled: dict[int, int] = {}  # the same by slot, of those with a prompt since
        _limit_cores(build.programs.tp_degree)
        self._announce = announce
        self._lines = DeviceSampling(build) if self.sampling == "device" else None
        self._model = make(build, work_dir, self._lines)
        if build.artifact:
            self._load(build.artifact.compiled)
        elif build.family.is_saved:
            self._load_or_compile(build, Cache.here())
        else:
            self._compile(build)

    def _load(self, compiled: Path) -> None:
        """Raises ProgramMissing when they were compiled for something else, or by something else."""
        logger.info("Loading the compiled programs of %s", compiled)
        self._model.load(str(compiled))
        with reported_as("the model cannot be brought onto the device", explain):
            try:
                self._to_device()
            except FileNotFoundError:
                raise ProgramMissing(
                    f"{compiled} lacks a program of this model: it was compiled from another checkpoint, or by a library that "
                    "builds other programs than this one; compile it again"
                ) from None

    def _load_or_compile(self, build: Build, cache: Cache | None) -> None:
        key = artifact.model_key(build.legacy)
        if cache is None:
            logger.info("The compiler's cache is %s; it may have the programs", os.environ["NEURON_COMPILE_CACHE_URL"])
            return self._compile(build)
        if entry := cache.find(key, build.programs):
            try:
                return self._load(entry)
            except ProgramMissing as error:
                cache.remove(entry)
                raise DeviceLost(f"{error}. They are removed, and the next start compiles them") from None
        logger.info("Compiling, because %s", cache.missing(key, build.programs))
        self._compile(build)
        try:
            entry = cache.add(key, build.programs, self._model.save)
            logger.info("Kept the compiled programs in %s for the next start", entry)
        except OSError as error:
            logger.warning("The compiled programs cannot be kept, so each start compiles them anew: %s", _writable(error))

    def _compile(self, build: Build) -> None:
        self._announce("compiling")
        with compiling(build), reported_as("the model cannot be brought onto the device", explain):
            self._to_device()

    def _to_device(self) -> None:
        """Waits for cores that another process holds, for a while."""
        deadline = time.monotonic() + CORES_WAIT_S
        with still_at_it("compiling or loading programs", PROGRESS_S):
            while True:
                try:
                    return self._model.to_neuron()
                except RuntimeError as error:
                    if not _cores_are_held(error):
                        raise
                    if time.monotonic() > deadline:
                        raise ModelError(
                            f"the cores are held by another process{_holders()}, also after {CORES_WAIT_S:.0f} s; stop it, or "
                            f"name other cores with NEURON_RT_VISIBLE_CORES ({first_line(error)})"
                        ) from None
                    logger.warning("The cores are held by another process%s; trying again", _holders())
                time.sleep(CORES_NAP_S)

    def set_sampling(self, slot: int, top_k: int, top_p: float, temperature: float) -> None:
        assert self._lines is not None and 0 <= slot < self.batch_size
        if self._lines.change(slot, top_k, top_p, temperature):
            try:
                self._model.update_generation_config(self._lines.config())
            except Exception as error:
                raise DeviceLost(explain(error)) from error

    def prefill(self, slot: int, prompt: list[int]) -> torch.Tensor:
        assert 0 <= slot < self.batch_size and 1 <= len(prompt) <= self.max_input_tokens
        # A prompt of one token would be taken for a decode step, which damages every other slot.
        ids, positions = (prompt, range(len(prompt))) if len(prompt) > 1 or not self._batches else ([*prompt, 0], (0, 0))
        output = self._run(torch.tensor([ids]), torch.tensor([list(positions)]), torch.tensor([slot]))
        self._prefilled[slot] = len(prompt)
        return output

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        # Mostly they are the same as in the last step, filled anew.
        old_tokens, old_positions, old_slots = self._given
        if tokens is not old_tokens or positions is not old_positions or slots is not old_slots:
            self._given = tokens, positions, slots
            self._columns = tokens.unsqueeze(1), positions.unsqueeze(1)
            self._arrays = slots.numpy(), positions.numpy()
        named, given = self._arrays[0].tolist(), self._arrays[1].tolist()
        if self._prefilled or named != self._named or given != self._held:  # others than in the last step
            filled = dict(zip(self._named, self._held)) | self._prefilled
            held = [filled.get(slot) for slot in named]
            assert sorted(set(named)) == named, "slots are named once, ascending"
            assert given == held, f"slots {named} hold {held} positions, not {given}"
        assert named and max(given) < self.max_total_tokens, f"slots {named} have no position {max(given)}"
        # The library writes over the first position of each slot that is not named: it is lost from here on.
        self._named, self._held = named, [position + 1 for position in given]
        self._prefilled.clear()
        return self._run(*self._columns, slots)

    def understudy(self) -> NeuronModel:
        understudy = copy.copy(self)
        understudy.batch_size = min(2, self.batch_size)
        understudy.vocab_size = FEW_TOKENS
        understudy.max_total_tokens = sys.maxsize
        understudy._given = None, None, None
        understudy._named, understudy._held, understudy._prefilled = [], [], {}
        logits = torch.rand(FEW_TOKENS, understudy.batch_size).to(LOGITS.get(self.dtype, torch.float32))
        understudy._model = lambda _ids, _positions, slots: logits[:, : len(slots)].t()  # as the library's lie in memory
        return understudy

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n, q], [n, q], [n] → float32 or bfloat16 [n, vocab], or int64 [n] where the device samples. After an error of
        the runtime nothing works until a restart."""
        try:
            if not self._batches:  # all rows share a position, which a prompt does not name
                positions, slots = None if ids.shape[1] > 1 else positions[0], torch.zeros(1, dtype=torch.int64)
            output = self._model(ids, positions, slots)
        except Exception as error:
            raise DeviceLost(explain(error)) from error
        if self._lines is not None:
            return output[:, 0].long()  # they come as int32, and the next step's must have the dtype of its positions
        # Mostly there is nothing to cut off or to change, and each call of torch counts while the device waits.
        if output.size(1) > self.vocab_size:
            output = output[:, : self.vocab_size]
        return output


class DeviceSampling:
    """What the device samples with: top_k, top_p and temperature of each slot.

    It is done in the model's own dtype, among the DEVICE_TOP_K likeliest at most. A filtered token gets a logit of -30000
    there, whatever the temperature made of the others: that limits how low it may be, and float16 how high.
    """

    GREEDY = (1, 1.0, 1.0)
    LOWEST, HIGHEST = 0.01, 10000.0  # temperatures: what is beyond is the likeliest token, and chance

    def __init__(self, build: Build):
        self._most = min(DEVICE_TOP_K, build.legacy["vocab_size"])
        self._lines = [self.GREEDY] * build.programs.batch_size

    def change(self, slot: int, top_k: int, top_p: float, temperature: float) -> bool:
        """Notes what a slot samples with. Returns whether that is new: to tell the device costs time."""
        line = (min(top_k or self._most, self._most), top_p, min(temperature, self.HIGHEST))
        if top_k == 1 or temperature < self.LOWEST:
            line = self.GREEDY
        is_new = line != self._lines[slot]
        self._lines[slot] = line
        return is_new

    def config(self):
        """Made anew each time, because the library writes into the one that it is given."""
        top_k, top_p, temperature = map(list, zip(*self._lines))
        return _library().GenerationConfig(
            do_sample=True,
            dynamic=True,
            per_batch_line=True,
            global_top_k=self._most,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
        )


def buckets(given: Sequence[int] | None, limit: int, flag: str) -> list[int]:
    """The lengths that programs are compiled for: `given`, or powers of two from 128; always up to `limit`.

    A longer prompt or text runs in the smallest that holds it. Raises ModelError for buckets beyond the limit.
    """
    if given is None:
        given = [128 << n for n in range(limit.bit_length()) if 128 << n < limit]
    if given and max(given) > limit:
        raise ModelError(f"{flag} {max(given)}: more than the {limit} tokens that there can be; leave it out")
    return sorted({*given, limit})


def legacy_config(told: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` as transformers 4 wrote it. transformers 5 moved the rotary base and the dtype to other names, which the
    library does not read: it would go on with its defaults, without a word, and talk nonsense."""
    legacy = {name: value for name, value in told.items() if name != "neuron"}  # that section is about compiled programs
    rope = legacy.pop("rope_parameters", None)
    if rope is not None:
        if any(isinstance(value, dict) for value in rope.values()):
            raise ModelError("a model with other rotary positions in some of its layers cannot be served on Neuron")
        rope = dict(rope)
        legacy["rope_theta"] = rope.pop("rope_theta", legacy.get("rope_theta", 10000.0))
        scaled = rope.get("rope_type", "default") != "default"
        legacy["rope_scaling"] = rope | {"type": rope["rope_type"]} if scaled else None
    if "dtype" in legacy:
        legacy["torch_dtype"] = legacy.pop("dtype")
    return legacy


def lay_out(folder: Path, legacy: dict[str, Any], target: Path) -> Path:
    """A folder with the files of `folder` and `legacy` for its config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.resolve().iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    (target / "config.json").write_text(json.dumps(legacy, indent=1))
    return target


def make(build: Build, work_dir: Path, lines: DeviceSampling | None):
    """The library's model with its weights in host memory; nothing is compiled or on the device yet."""
    library, family, programs, config = _library(), build.family, build.programs, build.config
    view = lay_out(build.checkpoint(), build.legacy, work_dir / "checkpoint")
    with reported_as(f"{config.model_name} cannot be built for Neuron", explain):
        model = getattr(library, family.name).from_pretrained(
            str(view),
            batch_size=programs.batch_size,
            **_lengths(programs, family),
            tp_degree=programs.tp_degree,
            amp=AMP[programs.dtype],
            neuron_config=_neuron_config(library, build, lines),
        )
        if family.batches:
            _check_rope(model, build.legacy)
    return model


def _lengths(programs: Programs, family: Family) -> dict[str, Any]:
    """What programs are compiled for. The families that do not batch take single numbers."""
    positions, prompts = list(programs.position_buckets), list(programs.prefill_buckets)
    if programs.continuous_batching:
        return {"n_positions": positions, "context_length_estimate": prompts}
    if programs.exporter == artifact.OPTIMUM or not family.has_prefill:
        return {"n_positions": positions[-1]}
    return {"n_positions": positions[-1], "context_length_estimate": prompts[-1]}


def _programs(config: Config, family: Family) -> Programs:
    """What is compiled for a plain checkpoint."""
    compiler, library = _versions()
    return Programs(
        batch_size=config.max_batch_size,
        tp_degree=config.tp_degree,
        dtype=config.dtype,
        prefill_buckets=tuple(buckets(config.prefill_buckets, config.max_input_tokens, "--prefill-buckets")),
        position_buckets=tuple(buckets(config.position_buckets, config.max_total_tokens, "--position-buckets")),
        continuous_batching=family.batches,
        quantize=config.quantize,
        sampling=config.sampling or "host",
        compiler_version=compiler,
        transformers_neuronx_version=library,
    )


def _family_of(programs: Programs, family: Family, name: str) -> Family:
    """How a compiled model runs: what optimum-neuron compiled differs from ours in some options."""
    if programs.exporter != artifact.OPTIMUM:
        return family
    if programs.batch_size > 1 and family.name not in OPTIMUM_BATCHES:
        raise ModelError(f"{name} was compiled for {programs.batch_size} requests that all begin together; compile it again")
    if family.name == "GPT2ForSamplingWithContextBroadcasting":
        raise ModelError(f"{name} was compiled by optimum-neuron for another class of GPT-2; compile it again")
    return dataclasses.replace(family, options={"fuse_qkv": True} | family.options, batches=programs.continuous_batching)


def _cores(config: Config, machine: plan.Machine | None) -> int:
    """How many cores there are. Without a device the library speaks for itself; it is taken to have what was asked for."""
    named, source = (machine.cores, machine.source) if machine else plan.usable_cores(None, os.environ)
    cores = named or config.tp_degree or 1
    if config.tp_degree and config.tp_degree > cores:
        raise ConfigError(
            f"--tp-degree {config.tp_degree} (HF_NUM_CORES) needs more cores than the {cores} that there are ({source}); "
            f"give at most {cores}"
        )
    return cores


def _sized(config: Config, shape: plan.Shape, cores: int, machine: plan.Machine | None) -> Config:
    """With a tp_degree, a batch size, a length and a dtype that fit on this machine, where they were left open.

    Raises ConfigError where nothing fits.
    """
    try:
        choice = plan.choose(
            shape,
            cores,
            machine.host_bytes if machine else None,
            family=machine.family if machine else None,
            tp_degree=config.tp_degree,
            batch_size=config.max_batch_size,
            length=config.max_total_tokens,
            dtype=config.dtype,
            quantize=config.quantize,
        )
    except ConfigError as error:
        raise ConfigError(f"{error} (--tp-degree, --max-batch-size, --max-total-tokens, --quantize)") from None
    logger.info("%s%s", f"{machine.instance or machine.family or 'this machine'}: " if machine else "", choice.reason)
    if choice.warning:
        logger.warning("%s", choice.warning)
    return dataclasses.replace(
        config,
        tp_degree=choice.sizing.tp_degree,
        max_batch_size=choice.sizing.batch_size,
        max_total_tokens=choice.sizing.length,
        dtype=shape.served_in(config.dtype),
    )


def _check(config: Config, legacy: dict[str, Any], model_type: str) -> None:
    """What the library would compute wrongly, or refuse in words for its authors."""
    if config.sampling == "device" and not FAMILIES[model_type].samples:
        raise ModelError(
            f"--sampling device (SAMPLING): transformers-neuronx cannot do that for {model_type} models; give SAMPLING=host"
        )
    if (config.max_batch_size or 1) > 1 and not FAMILIES[model_type].batches:
        raise ModelError(
            f"--max-batch-size {config.max_batch_size} (MAX_BATCH_SIZE): {model_type} models run one request at a time on "
            "Neuron; give 1"
        )
    if legacy.get("attention_bias") and FAMILIES[model_type].batches:
        raise ModelError(f"this {model_type} model has biases in its attention, which transformers-neuronx leaves out")
    scaling = legacy.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"this {model_type} model stretches its positions ({kind}), which cannot be served on Neuron")


def _window(legacy: dict[str, Any], shape: plan.Shape) -> int | None:
    """Positions that a slot may have: a Mistral that slides its attention works only as far as it need not."""
    slides = legacy.get("sliding_window", 4096) if shape.model_type == "mistral" else None  # 4096: transformers' default
    return min(filter(None, (shape.window, slides)), default=None)


def _check_length(config: Config, manifest: Manifest, window: int | None) -> None:
    config.with_manifest(manifest)  # the model's own limit, in its own words
    if window and config.max_total_tokens > window:
        raise ModelError(
            f"--max-total-tokens {config.max_total_tokens} (MAX_TOTAL_TOKENS): this model slides its attention over {window} "
            f"positions, which slots on Neuron cannot; give at most {window}"
        )


def _check_rope(model, legacy: dict[str, Any]) -> None:
    found, expected = getattr(model.config, "rope_theta", None), legacy.get("rope_theta")
    if expected is not None and found != expected:
        raise ModelError(f"the library reads rope_theta {found} where config.json says {expected}; it needs transformers 4")


def _limit_cores(tp_degree: int) -> None:
    """The runtime takes no more cores than the model needs, unless somebody said which it may take."""
    if not os.environ.get("NEURON_RT_VISIBLE_CORES"):
        os.environ.setdefault("NEURON_RT_NUM_CORES", str(tp_degree))


def _cores_are_held(error: RuntimeError) -> bool:
    told = str(error).lower()
    # The runtime writes the reason to the console, not always into the exception: with a device there is one left.
    return "not available" in told or ("could not be initialized" in told and plan.detect() is not None)


def _holders() -> str:
    pids = plan.holders()
    return f" ({', '.join(f'{command} with pid {pid}' for pid, command in pids)})" if pids else ""


def _versions() -> tuple[str, str]:
    """Of the compiler and of the library."""
    compiler, library = (importlib.import_module(name) for name in ("neuronxcc", "transformers_neuronx"))
    return str(compiler.__version__), str(library.__version__)


def _writable(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            f"{error.filename} may not be written by user {os.getuid()}; give that user the folder (chown), or another one "
            "with NEURON_COMPILE_CACHE_URL"
        )
    return str(error)


def _library():
    try:
        import transformers_neuronx
    except ImportError as error:
        raise ModelError(
            f"--device neuron needs transformers-neuronx, which the Neuron SDK brings up to 2.25.0 ({error}); use the image"
        ) from None
    return transformers_neuronx


def _neuron_config(library, build: Build, lines: DeviceSampling | None):
    programs, options = build.programs, dict(build.family.options)
    if lines is not None:
        options["on_device_generation"] = lines.config()
    if programs.continuous_batching:
        options["continuous_batching"] = library.ContinuousBatchingConfig(batch_size_for_shared_caches=programs.batch_size)
    if programs.quantize == "int8":
        options["quant"] = library.QuantizationConfig(quant_dtype="s8", dequant_dtype=AMP[programs.dtype])
    # As the device gives them: to make float32 of them would take the host longer than to choose from them.
    options["cast_logits_dtype"] = programs.dtype if programs.dtype in LOGITS else "float32"
    return library.NeuronConfig(**options, compilation_worker_count=build.compile_workers)


@contextlib.contextmanager
def compiling(build: Build) -> Iterator[None]:
    """Says in the log what is compiled, each program when it is done, and how long all took."""
    programs, started_at = build.programs, time.monotonic()
    logger.info(
        "Compiling programs for prompts up to %s tokens and positions up to %s, %d at a time",
        ", ".join(map(str, programs.prefill_buckets)),
        ", ".join(map(str, programs.position_buckets)),
        build.compile_workers,
    )
    compiler = importlib.import_module("transformers_neuronx.compiler")
    compile_one = compiler.compile_hlo_module
    compiler.compile_hlo_module = _told_of(compile_one)
    try:
        yield
    finally:
        compiler.compile_hlo_module = compile_one
    logger.info("Compiled in %.0f s", time.monotonic() - started_at)


def _told_of(compile_one):
    """The library calls it for each program, in processes that it forks."""

    def compile_and_tell(hlo_module, tag=None, *more, **named):
        started_at = time.monotonic()
        program = compile_one(hlo_module, tag, *more, **named)
        kind, _, length = (tag or "").partition("-seqlen")
        what = {"context": "prompts up to", "token": "positions up to"}.get(kind, tag)
        logger.info("Compiled %s %s in %.1f s", what, length.partition("-")[0], time.monotonic() - started_at)
        return program

    return compile_and_tell
