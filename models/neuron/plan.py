"""The subcommand `plan`: which model fits on which Inferentia2 or Trainium machine.

Arithmetic over a model's config.json: how heads and weights are split across NeuronCores, the device memory
of weights and KV cache, and the tp_degree, batch size and context length to use. `main` prints it;
neuron/build.py calls `choose_sizing` for the machine it runs on. Instance types are data, in plan.json. Reads
no weights.

Source references: "T/" is the code of transformers-neuronx 0.13.322, "SDK@" is the public repository
aws-neuron-sdk at a tag."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import config as configuration
from config import DTYPES, FP8, TRIAL_MODEL, TRIAL_REPOSITORY, Config
from manifest import Manifest, read_json
from models.checkpoint.fetch import fetch
from models.checkpoint.quantization import Quantization, dequantized_config, written_dtype
from models.errors import ModelError, reject_by_config
from models.machine import GIB, Machine
from models.neuron import families
from models.neuron.base_family import Family, Tower, padded_heads, round_up
from run import ConfigError

MAX_CORES = 32  # of the largest machine
CORE_BYTES = 16 * GIB  # HBM of a NeuronCore-v2 (SDK@v2.25.0:general/arch/neuron-hardware/inf2-arch.rst:32-70)
# The share of a core to fill. Compiled code, scratch, logits and the runtime need the rest: an estimate.
HEADROOM = 0.8
# Defaults; larger values must be set explicitly.
MAX_BATCH_SIZE = 32
MAX_LENGTH = 4096
PREFILL_CHUNK = 128  # tokens of a prompt between two decode steps, by default
SNAPSHOTS = 4  # of recurrent states for each slot, at most
USEFUL_LENGTH = 2048  # context length of a slot: no machine with room for less is recommended
COMPILER_BYTES = 8 * GIB  # host memory for each compiler process: an estimate, a large model takes several GB
# Values of --neuron-config that change the arithmetic here.
ON_DEVICE_EMBEDDING = "on_device_embedding=true"
SHARD_OVER_SEQUENCE = "shard_over_sequence=true"
# The graphs of transformers-neuronx for prompt chunks are wrong with these.
WHOLE_PROMPTS = (SHARD_OVER_SEQUENCE, "sequence_parallel_norm=true")

# Estimates, from AWS's published figures of Llama 2 7B and Llama 3 70B with 24 cores: a decode step takes
# LAYER_S a layer, and reads a core's weights at READ_BYTES_S; prompts reach 17% of a core's peak.
LAYER_S = 139e-6
READ_BYTES_S = 278e9
PREFILL_FLOPS = 0.17 * 95e12

_DATA = json.loads(Path(__file__).with_name("plan.json").read_text(encoding="utf-8"))
TP_DEGREES: dict[str, list[int]] = _DATA["tp_degrees"]  # by family
INSTANCES = {
    row["name"]: Machine(row["cores"], row["family"], row["name"], row["host_gib"] * GIB, row["host_cores"])
    for row in _DATA["instances"]
}

# Estimates.
HOST_FLOPS = 37e9  # of a host core in float32, a second
TILE_CORES = 16  # that a tile keeps busy


def check_settings(family: Family, config: Config) -> None:
    """Raises ConfigError for slots that are longer than the model's context length, and for a --quantize or
    --kv-cache-dtype that only other devices support. For a model with recurrent layers also for --auto-cast,
    as their states need float32, and for a prefill chunk of fewer tokens than twice the draft tokens plus 1:
    at least 7 with --speculate 3. This excludes 0: recurrent layers compute squares of the length of a
    chunk, so no prompt runs whole."""
    if config.quantize not in (None, "int8"):
        raise ConfigError(
            f"--quantize {config.quantize} (QUANTIZE) is not supported on Neuron; give int8 or none"
        )
    if config.kv_cache_dtype not in ("auto", FP8):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} (KV_CACHE_DTYPE) is not supported on Neuron; give "
            f"auto or {FP8}"
        )
    if family.recurrent_layers:
        chunk = PREFILL_CHUNK if config.prefill_chunk is None else config.prefill_chunk
        drafts = config.speculate or 0
        least = 2 * drafts + 1  # these, as many that were accepted before, and the newest token
        if chunk < least:
            raise ConfigError(
                f"--prefill-chunk {chunk} (PREFILL_CHUNK) is not supported for models with recurrent layers "
                f"on Neuron with --speculate {drafts} (SPECULATE); give {least} or more"
            )
        if "--auto-cast" in os.environ.get("NEURON_CC_FLAGS", ""):
            raise ConfigError(
                "--auto-cast in NEURON_CC_FLAGS is not supported for models with recurrent layers, whose "
                "states need float32; leave it out"
            )
    length = config.max_total_tokens
    if length and length > family.length:
        raise ConfigError(
            f"--max-total-tokens {length} (MAX_TOTAL_TOKENS) is more than the context length of this model "
            f"on Neuron, {family.length}"
        )


def memory_warning(family: Family, machine: Machine) -> str | None:
    """Returns one line if the machine's host memory looks too small to load the model, or to compile it;
    None: it looks large enough, or is unknown."""
    if machine.host_bytes is None or family.host_bytes + COMPILER_BYTES <= machine.host_bytes:
        return None
    return (
        f"there are {machine.host_bytes / GIB:.1f} GiB of host memory: loading takes about "
        f"{family.host_bytes / GIB:.1f}, compiling about {COMPILER_BYTES // GIB} more; "
        "`compile` needs no device and runs on a larger machine"
    )


def tile_s(tower: Tower, machine: Machine) -> float:
    """Returns about how many seconds a tile of an image takes on the host's cores of a machine."""
    return tower.tile_flops / (HOST_FLOPS * min(TILE_CORES, machine.host_cores or 1))


@dataclass(frozen=True)
class Sizing:
    """A model split over `tp_degree` cores: the memory that one core holds, and whether that works. Bytes are
    those of one core."""

    family: Family
    tp_degree: int
    batch_size: int
    length: int  # positions of a slot
    dtype: str = "auto"
    quantize: str | None = None  # int8: the matrices of the layers
    neuron_config: Sequence[str] = ()
    prefill_chunk: int = 0  # tokens of a prompt that run at a time; 0: all
    kv_cache_dtype: str = "auto"
    snapshot_memory: float = 0.0  # GB on all cores

    @property
    def chunk(self) -> int:
        """The tokens of a prompt chunk: `prefill_chunk`; 0 if no prompt is longer and no layer is recurrent
        (prompts with recurrent layers run in chunks that end at snapshots)."""
        is_wanted = self.family.recurrent_layers or self.prefill_chunk < self.length - 1
        return self.prefill_chunk if is_wanted else 0

    @property
    def _width(self) -> int:
        """Bytes of a weight, unless it is quantized, and of a logit."""
        return DTYPES[self.family.served_in(self.dtype)].bytes

    @property
    def _vocab(self) -> int:
        """The part of the vocabulary on one core, in the output matrix and in the logits."""
        return round_up(self.family.vocab, self.tp_degree) // self.tp_degree

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on a core: matrices / tp_degree with padded heads, plus what is replicated on
        every core. The embedding table is on the host, unless --neuron-config says otherwise."""
        family = self.family
        width = self._width
        matrices = self.family.matrix_parameters(self.tp_degree) // self.tp_degree
        layers = matrices * (1 if self.quantize else width) + family.vectors * width
        tables = 2 if ON_DEVICE_EMBEDDING in self.neuron_config else 1
        return layers + family.hidden * (tables * self._vocab + 1) * width

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of all slots, on a core."""
        family = self.family
        _padded, cached = padded_heads(family.heads, family.kv_heads, self.tp_degree)
        positions = self.positions
        if SHARD_OVER_SEQUENCE in self.neuron_config:  # T/llama/model.py:41-56, T/decoder.py:1794-1807
            positions = (positions + 128) // max(1, self.tp_degree // family.kv_heads)
        heads = cached // self.tp_degree
        width = 1 if self.kv_cache_dtype == FP8 else self._width
        values = 2 * family.attention_layers * heads * family.head_dim
        return values * positions * self.batch_size * width

    @property
    def reserved(self) -> int:
        """Positions that only fillers of chunks use (CompiledConfig.reserved)."""
        return self.chunk if self.family.recurrent_layers else 0

    @property
    def positions(self) -> int:
        """The positions of a slot's KV cache: `length` and `reserved`."""
        return self.length + self.reserved

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all slots and snapshots, on a core."""
        size = self.family.state_bytes(self.tp_degree, self.dtype)
        return (self.batch_size + self.snapshots) * size // self.tp_degree

    @property
    def snapshots(self) -> int:
        """How many recurrent states are kept beside those of slots: SNAPSHOTS for each slot, or fewer if
        `snapshot_memory` is less; 0 without recurrent layers."""
        size = self.family.state_bytes(self.tp_degree, self.dtype)
        return min(SNAPSHOTS * self.batch_size, int(self.snapshot_memory * 1e9) // size) if size else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, KV cache, states and the logits of a chunk, on a core."""
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.chunk_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the logits after each token of a chunk, on a core."""
        return self.chunk * self._vocab * self._width

    @property
    def step_s(self) -> float:
        """About how many seconds a decode step takes, in which short sequences run."""
        return self.family.layers * LAYER_S + self.weights_bytes / READ_BYTES_S

    def prompt_s(self, tokens: int) -> float:
        """Returns about how many seconds a prompt of so many tokens takes, for which all experts are
        computed."""
        return 2 * self.family.parameters * tokens / (self.tp_degree * PREFILL_FLOPS)

    @property
    def fits(self) -> bool:
        """Whether it is supported, and fills at most HEADROOM of a core."""
        return self.unsupported is None and self.total_bytes <= HEADROOM * CORE_BYTES

    @property
    def unsupported(self) -> str | None:
        """Why transformers-neuronx cannot run this with any memory, and what would work, in one line; None:
        it can. Reasons are --neuron-config shard_over_sequence with a KV cache in FP8 or with these key-value
        heads, norms over all heads that `tp_degree` cuts, and experts that it does not cut into whole
        columns."""
        tp_degree = self.tp_degree
        family = self.family
        heads = family.heads
        kv_heads = family.kv_heads
        experts = family.experts
        shards = SHARD_OVER_SEQUENCE in self.neuron_config
        if shards and self.kv_cache_dtype == FP8:
            return (
                f"--neuron-config {SHARD_OVER_SEQUENCE} (NEURON_CONFIG) is not supported with "
                f"--kv-cache-dtype {FP8} (KV_CACHE_DTYPE); leave one of them out"
            )
        if shards and (kv_heads in (heads, tp_degree) or tp_degree % kv_heads):
            return (
                f"--neuron-config {SHARD_OVER_SEQUENCE} (NEURON_CONFIG) needs more heads than its {kv_heads} "
                f"key-value heads, and a tp_degree of two or more times {kv_heads}; "
                f"not {heads} and {tp_degree}"
            )
        if family.head_norms == "all" and (heads % tp_degree or kv_heads % tp_degree):
            return (
                f"tp_degree {tp_degree} does not divide {heads} attention and {kv_heads} key-value heads, "
                f"over all of which a norm goes; {math.gcd(heads, kv_heads)} would work"
            )
        if experts and not experts.fits(tp_degree):
            possible = ", ".join(map(str, filter(experts.fits, allowed_tp_degrees())))
            return (
                f"tp_degree {tp_degree} cuts each of {experts.count} experts into "
                f"{experts.pieces(tp_degree)} pieces, which does not divide its {experts.columns} columns; "
                f"{possible} would work"
            )
        return None

    def most(self, field: str, values: Sequence[int]) -> int | None:
        """Returns the largest of the ascending `values` with which this fits if `field` has it, and all else
        stays; None: there is none."""
        return next((value for value in reversed(values) if replace(self, **{field: value}).fits), None)

    def reason(self, degrees: Sequence[int]) -> str:
        """Returns why a sizing that is supported does not fit and what would, each change alone, in one line.
        degrees: the tp_degrees that the machine has; larger ones are recommended with a larger instance."""
        slots = self.most("batch_size", range(1, self.batch_size))
        length = self.most("length", range(128, self.length, 128))
        larger = [degree for degree in allowed_tp_degrees() if degree > self.tp_degree]
        fitting = [degree for degree in larger if replace(self, tp_degree=degree).fits]
        here = [f"--tp-degree {degree}" for degree in fitting if degree in degrees]
        elsewhere = [f"a larger instance with --tp-degree {degree}" for degree in fitting]
        options = []
        if slots:
            options.append(f"--max-batch-size {slots}")
        if length:
            options.append(f"--max-total-tokens {length}")
        options += (here or elsewhere)[:1]
        if not self.quantize and replace(self, quantize="int8").fits:
            options.append("--quantize int8")
        if self.kv_cache_dtype != FP8 and replace(self, kv_cache_dtype=FP8).fits:
            options.append(f"--kv-cache-dtype {FP8}")
        advice = "no known machine is large enough"
        if options:
            advice = f"{', or '.join(options)} would fit"
        return f"{self}, and at most {HEADROOM:.0%} can be filled; {advice}"

    def __str__(self) -> str:
        """The sizes and the memory of a core, as a part of a line for the user."""
        sizes = f"tp_degree {self.tp_degree}, batch size {self.batch_size}, context length {self.length}"
        fp8 = " (FP8)" if self.kv_cache_dtype == FP8 else ""
        states = f" + states {self.state_bytes / GIB:.2f}" if self.state_bytes else ""
        memory = (
            f"weights {self.weights_bytes / GIB:.2f} + KV cache {self.kv_bytes / GIB:.2f}{states} GiB{fp8}"
        )
        return f"{sizes}: {memory}, {self.total_bytes / CORE_BYTES:.0%} of a core's {CORE_BYTES // GIB}"


def allowed_tp_degrees(family: str | None = None, cores: int = MAX_CORES) -> list[int]:
    """Returns the values of TP_DEGREES up to `cores`, ascending. family: of instances, such as "inf2"; None:
    the values of all families."""
    known = TP_DEGREES[family] if family else set().union(*TP_DEGREES.values())
    return sorted(degree for degree in known if degree <= cores)


def choose_sizing(family: Family, machine: Machine, config: Config) -> Sizing:
    """Returns the tp_degree, batch size and context length for a machine; those that are set in `config` are
    kept, but never more slots than `max_batch_total_tokens` allows.

    Of what fits, the longest slots count first: the model's context length, at most 4096 and
    `max_batch_total_tokens`, else halves of that; then the largest batch size of 1, 2, 4 … 32, or what
    `max_batch_total_tokens` leaves of these; then the tp_degree with the fewest bytes per core, as a decode
    step reads all of them. Where nothing fits, raises ConfigError with the numbers and what would fit. Raises
    ConfigError, too, for settings that the model or the machine does not support.
    """
    chunk = _prefill_chunk(family, config)
    check_settings(family, config)
    degrees = _tp_degrees(machine, config)
    longest = min(family.length, MAX_LENGTH, config.max_batch_total_tokens or MAX_LENGTH)
    lengths = [longest >> n for n in range(16) if n == 0 or longest >> n >= 128]
    batch_sizes = [1 << n for n in range(MAX_BATCH_SIZE.bit_length())]
    sizings = [
        Sizing(
            family,
            tp_degree,
            batch_size,
            length,
            dtype=config.dtype,
            quantize=config.quantize,
            neuron_config=config.neuron_config or (),
            prefill_chunk=chunk,
            kv_cache_dtype=config.kv_cache_dtype,
            snapshot_memory=config.max_snapshot_memory,
        )
        for tp_degree in ([config.tp_degree] if config.tp_degree else degrees)
        for length in ([config.max_total_tokens] if config.max_total_tokens else lengths)
        for batch_size in sorted({config.slots(length, slots) for slots in batch_sizes})
    ]
    possible = [sizing for sizing in sizings if not sizing.unsupported]
    if not possible:
        raise ConfigError(sizings[0].unsupported)
    working = [sizing for sizing in possible if sizing.fits]
    if not working:
        nearest = min(possible, key=lambda sizing: (sizing.batch_size, sizing.total_bytes))
        raise ConfigError(f"the model does not fit on {machine.cores} cores: {nearest.reason(degrees)}")
    return max(working, key=lambda sizing: (sizing.length, sizing.batch_size, -sizing.total_bytes))


def _tp_degrees(machine: Machine, config: Config) -> list[int]:
    """Returns the tp_degrees that are known to load on a machine, ascending. Raises ConfigError for a
    configured one that the machine does not support; an even one on Inferentia2 passes, and is not added to
    the result."""
    degrees = allowed_tp_degrees(machine.family, machine.cores)
    degree = config.tp_degree
    if not degree or degree in degrees:
        return degrees
    # Inferentia2's collectives take any even number (collective-communication.rst:79-127), but only the
    # others are known to load.
    if machine.family == "inf2" and degree % 2 == 0 and degree <= machine.cores:
        return degrees
    family = f" of {machine.family}" if machine.family else ""
    known = ", ".join(map(str, degrees))
    raise ConfigError(
        f"tp_degree {degree} is not possible with {machine.cores} cores{family}; {known} would work"
    )


def _prefill_chunk(family: Family, config: Config) -> int:
    """Returns the tokens of a chunk, 0 for whole prompts: those of `config`; else PREFILL_CHUNK, or 0 with an
    option of WHOLE_PROMPTS. Raises ConfigError for an option of WHOLE_PROMPTS together with a
    --prefill-chunk other than 0 or with layers that graph.py builds."""
    options = config.neuron_config or ()
    chunk = config.prefill_chunk
    whole = [option for option in options if option in WHOLE_PROMPTS]
    if whole and family.has_own_layers:
        raise ConfigError(
            f"--neuron-config {whole[0]} (NEURON_CONFIG) is not supported for "
            f"{family.model_type} models on Neuron; leave it out"
        )
    if chunk and whole:
        raise ConfigError(
            f"--prefill-chunk {chunk} (PREFILL_CHUNK) is not supported with --neuron-config {whole[0]} "
            "(NEURON_CONFIG) on Neuron; give 0"
        )
    if chunk is not None:
        return chunk
    return 0 if whole else PREFILL_CHUNK


def report(name: str, family: Family, machines: Sequence[Machine], config: Config) -> Iterator[str]:
    """Yields the lines that `plan` prints, of any length: the model, each machine with what fits or why
    nothing does, and the recommended machine if there are several. name: the model's. Raises nothing for what
    does not fit."""
    served = family.served_in(config.dtype)
    if config.quantize:
        served += f", its layers in {config.quantize}"
    size = f"{family.parameters:,} parameters in {family.dtype}, {family.layers} layers"
    yield f"{name} ({family.model_type}): {size}"
    memory = f"host memory to load it: {family.host_bytes / GIB:.1f} GiB"
    yield f"served in {served}; context length: {family.length}; {memory}"
    if family.tower:
        tower = family.tower
        size = (
            f"{tower.parameters:,} parameters, {4 * tower.parameters / GIB:.1f} GiB of that memory in float32"
        )
        yield f"reads images, with the vision tower on the host: about {size}"
    numbers = 2 * family.attention_layers * family.kv_heads * family.head_dim
    float32_kib = numbers * DTYPES["float32"].bytes / 1024
    sizes = [
        f"{share * float32_kib:.1f} KiB in {dtype}"
        for dtype, share in {"float32": 1, **configuration.KV_SHARE_OF_FLOAT32}.items()
    ]
    yield f"on a CPU, a token's KV cache takes {', '.join(sizes)} (--kv-cache-dtype)"
    useful = min(USEFUL_LENGTH, family.length, config.max_total_tokens or USEFUL_LENGTH)
    recommended: list[tuple[int, int, int, str]] = []  # longest first, then smallest
    for machine in machines:
        yield ""
        yield machine.instance
        try:
            sizing = choose_sizing(family, machine, config)
        except ConfigError as error:
            yield f"  {error}"
            continue
        yield from _report_machine(sizing, machine, config)
        if sizing.length >= useful and family.host_bytes <= machine.host_bytes:
            recommended.append((-sizing.length, machine.cores, machine.host_bytes, machine.instance))
    yield ""
    if len(machines) > 1:
        answer = f"none, as no machine has room for a context length of {useful}"
        if recommended:
            longest, _cores, _host_bytes, instance = min(recommended)
            answer = f"{instance}, the smallest for context length {-longest}"
        yield f"Recommended: {answer}."
        yield ""
    rest = "compiled code, scratch and the runtime need the rest"
    yield f"At most {HEADROOM:.0%} of a core's memory is filled: {rest}."


def _report_machine(sizing: Sizing, machine: Machine, config: Config) -> Iterator[str]:
    """Yields the lines about one machine on which `sizing` fits: its memory; a warning about host memory;
    about how long a tile of an image takes, and a step and a prompt of a mixture of experts; what an FP8 KV
    cache would change, if it allows more tokens; and the largest batch size for several context lengths."""
    family = sizing.family
    yield f"  {sizing}"
    if warning := memory_warning(family, machine):
        yield f"  {warning}"
    if family.tower:
        yield f"  an image takes about {tile_s(family.tower, machine):.1f} s a tile on the host (estimate)"
    with contextlib.suppress(ConfigError):  # not supported with it
        smaller = choose_sizing(family, machine, replace(config, kv_cache_dtype=FP8))
        if smaller.batch_size * smaller.length > sizing.batch_size * sizing.length:
            slots = f"batch size {smaller.batch_size}, context length {smaller.length}"
            yield f"  with --kv-cache-dtype {FP8}: {slots} (not validated on hardware)"
    if experts := family.experts:
        step = f"a decode step takes about {1000 * sizing.step_s:.0f} ms"
        prompt = f"a prompt of {USEFUL_LENGTH} tokens about {sizing.prompt_s(USEFUL_LENGTH):.2f} s"
        yield f"  all {experts.count} experts are computed for each token: {step}, {prompt} (estimates)"
    slots = range(1, (config.max_batch_size or MAX_BATCH_SIZE) + 1)
    lengths = [length for length in (1024, 2048, 4096, 8192, 16384) if length <= family.length]
    largest = [
        f"{replace(sizing, length=length).most('batch_size', slots) or 'none'} for {length}"
        for length in lengths or [family.length]
    ]
    yield f"  largest batch size (up to {slots[-1]}) by context length: {', '.join(largest)}"


ADAPTERS_ELSEWHERE = (
    "LoRA adapters by request are for CPUs and GPUs; on Neuron --merge-lora (MERGE_LORA) merges one into the "
    "weights, which takes no memory"
)
USAGE = """entrypoint.sh plan --model-id X [--instance TYPE] [flags]

Shows what fits on which AWS Neuron machine. Only the model's config.json is read (without --model-id the
demonstration model's). The flags are those of `serve` (entrypoint.sh --help lists them); these are used:
--model-id --revision --max-total-tokens --max-batch-size --max-batch-total-tokens --prefill-chunk
--speculate --tp-degree --dtype --quantize --neuron-config --kv-cache-dtype --max-snapshot-memory.
Exit code 1: the model fits on none of the machines."""


def main(argv: Sequence[str]) -> int:
    """Prints what fits where; reads the model's config.json, from the hub if need be. argv has no program
    name. Returns the exit code: 0 if the model fits on one of the machines; 1 if on none, whatever the
    reason; 2 after one line on stderr for flags or a config.json that cannot be read, a download that fails,
    a GGUF file, or a model that is not supported on Neuron. --help raises SystemExit."""
    parser = configuration.Parser(usage=USAGE, allow_abbrev=False)
    parser.add_argument(
        "--instance",
        choices=INSTANCES,
        type=lambda name: name.removeprefix("ml."),
        help="of EC2 or SageMaker",
    )
    try:
        options, flags = parser.parse_known_args(argv)
        config = configuration.parse(flags, os.environ)
        if config.model_id == TRIAL_MODEL:
            config = replace(config, model_id=TRIAL_REPOSITORY)
        if config.is_gguf or (":" in config.model_id and not config.is_local):  # owner/name:Q4_K_M
            raise ConfigError(
                "plan reads a config.json; give the checkpoint that the GGUF file was made from"
            )
        folder, _commit = fetch(config, ["config.json"])
        read_json(folder / "config.json", required="model folder")  # if the hub has none, no folder was made
        data = Manifest.read(folder).config_json
        reject_by_config(data)
        notices = []
        if quantization := Quantization.read(folder):
            data = dequantized_config(data, written_dtype(config))
            notices.append(quantization.notice(config))
        if config.lora_adapters:
            notices.append(ADAPTERS_ELSEWHERE)
        family = families.of(data)
        machines = [machine for name, machine in INSTANCES.items() if options.instance in (None, name)]
        for line in (*notices, *report(config.model_name, family, machines, config)):
            indent = " " * (len(line) - len(line.lstrip()) + 4)
            print(textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False))
        return 0 if any(_has_sizing(family, machine, config) for machine in machines) else 1
    except (ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _has_sizing(family: Family, machine: Machine, config: Config) -> bool:
    """Whether the model fits on a machine with these settings."""
    try:
        choose_sizing(family, machine, config)
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
