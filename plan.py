"""What fits on an AWS Neuron machine and what to expect of it: arithmetic over a model's config.json.

This layer owns the sizes: the instance types and their prices, how heads and weights are spread over cores, the memory that
weights and KV cache take of each, which tp_degree, batch size and length to pick, and the speeds that others published. It
also looks at which machine this is. `plan` prints it for a person; `serve` on Neuron chooses by it. It knows no
torch, no HTTP, no sockets, and never sees a weight.

    python3 plan.py --model-id X [--instance inf2.48xlarge | --cores N] [--max-total-tokens N] [--max-batch-size N]

Sources stand beside the facts: "T/" is the code of transformers-neuronx 0.13.322, "SDK@" and "ON@" are the public repositories
aws-neuron-sdk and optimum-neuron at that tag.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hub
from config import DTYPES, Config, ConfigError, read_json

GIB = 1 << 30
CORE_BYTES = 16 * GIB  # HBM of a NeuronCore-v2 (SDK@v2.25.0:general/arch/neuron-hardware/inf2-arch.rst:32-70)
HEADROOM = 0.8  # of a core; compiled code, scratch, logits and the runtime need the rest (an estimate)
MAX_BATCH_SIZE = 32  # what is chosen without being asked for; a larger one may be asked for
MAX_LENGTH = 4096
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes

# What is known to load: the developer guide's values, the application note's 12, the runtime's 16 on trn1.
TP_DEGREES = {"inf2": (1, 2, 4, 8, 12, 24), "trn1": (1, 2, 8, 16, 32)}

CONTINUOUS_BATCHING = ("llama", "mistral", "mixtral")
ONE_SLOT = ("gpt2", "opt", "bloom", "gpt_neox")
GATED = CONTINUOUS_BATCHING  # three matrices in the MLP, RMSNorm, no biases

PRICES = "us-east-1, Linux, on demand, from aws.amazon.com/ec2/pricing/on-demand"
PRICES_AS_OF = "2025"


@dataclass(frozen=True)
class Instance:
    """A machine to plan for. A bare number of cores has no family, and nobody knows its memory or its price."""

    name: str
    cores: int
    family: str | None = None
    host_gib: int | None = None
    dollars_per_hour: float | None = None

    @property
    def chips(self) -> int:
        return self.cores // 2  # two NeuronCores on each Inferentia2 or Trainium chip

    @property
    def host_bytes(self) -> int | None:
        return None if self.host_gib is None else self.host_gib * GIB


# Cores and memory: inf2-arch.rst:32-70 and trn1-arch.rst:39-70 of SDK@v2.25.0:general/arch/neuron-hardware.
INSTANCES = {
    instance.name: instance
    for instance in (
        Instance("inf2.xlarge", 2, "inf2", 16, 0.7582),
        Instance("inf2.8xlarge", 2, "inf2", 128, 1.96786),
        Instance("inf2.24xlarge", 12, "inf2", 384, 6.49063),
        Instance("inf2.48xlarge", 24, "inf2", 768, 12.98127),
        Instance("trn1.2xlarge", 2, "trn1", 32, 1.34375),
        Instance("trn1.32xlarge", 32, "trn1", 512, 21.50),
    )
}


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder that decide its memory, as transformers-neuronx reads them (T/*/config.py)."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int  # of one expert where there are several
    vocab: int
    experts: int  # 0 for a dense model
    window: int | None  # positions it was made for
    positions: int  # rows of a learned position table, 0 with rotary embeddings or ALiBi
    is_tied: bool  # the output matrix is the embedding table; Neuron keeps both
    dtype: str  # of the checkpoint

    @classmethod
    def from_config(cls, data: Mapping[str, Any]) -> Shape:
        """From the object in a config.json that transformers 4 or 5 wrote.

        Raises ConfigError for a family that is not served on Neuron, and for numbers that are missing or contradict.
        """
        data = {**data, **data["text_config"]} if isinstance(data.get("text_config"), dict) else data
        model_type = "llama" if data.get("model_type") == "code_llama" else data.get("model_type")
        if model_type == "gptj":
            raise ConfigError("gptj is not served on Neuron: its answers are wrong after the first token; take another model")
        if model_type not in CONTINUOUS_BATCHING + ONE_SLOT:
            families = ", ".join(CONTINUOUS_BATCHING + ONE_SLOT)
            raise ConfigError(f"model_type {model_type!r} is not served on Neuron; these are: {families}")

        def number(*names: str, default: int | None = None) -> int:
            value = next((data[name] for name in names if data.get(name) is not None), default)
            if type(value) is not int or value < 1:
                raise ConfigError(f"config.json: {names[0]} is {value!r} and should be a positive whole number")
            return value

        gated = model_type in GATED
        hidden = number("hidden_size", "n_embd", "n_embed")
        heads = number("num_attention_heads", "n_head")
        window = number("max_position_embeddings", "n_positions", "seq_length", default=2048)
        shape = cls(
            model_type=model_type,
            layers=number("num_hidden_layers", "n_layer"),
            hidden=hidden,
            heads=heads,
            # transformers' own default for a config without the number: 8 for Mistral and Mixtral, else as many as heads
            kv_heads=number("num_key_value_heads", default=heads if model_type == "llama" else 8) if gated else heads,
            intermediate=number("intermediate_size", "ffn_dim", "n_inner", default=None if gated else 4 * hidden),
            vocab=number("vocab_size"),
            experts=number("num_local_experts", default=8) if model_type == "mixtral" else 0,
            window=None if model_type == "bloom" else window,  # ALiBi ends nowhere
            positions={"gpt2": window, "opt": window + 2}.get(model_type, 0),
            is_tied=bool(data.get("tie_word_embeddings", model_type in ("gpt2", "opt", "bloom"))),
            dtype=DTYPES.get(str(data.get("dtype") or data.get("torch_dtype")), "float32"),  # as transformers: no dtype is f32
        )
        if hidden % heads or heads % shape.kv_heads:
            raise ConfigError(
                f"config.json: hidden_size {hidden}, {heads} attention heads and {shape.kv_heads} key-value heads do not "
                "divide each other"
            )
        if data.get("head_dim") not in (None, shape.head_dim):
            raise ConfigError(
                f"head_dim {data['head_dim']} is not served on Neuron: transformers-neuronx takes hidden_size / "
                f"num_attention_heads, which is {shape.head_dim} here"
            )
        return shape

    def served_in(self, dtype: str) -> str:
        """What a name of config.DTYPES means for this checkpoint: auto is its own."""
        return self.dtype if DTYPES[dtype] == "auto" else DTYPES[dtype]

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def has_continuous_batching(self) -> bool:
        return self.model_type in CONTINUOUS_BATCHING

    @property
    def embedding_bytes(self) -> int:
        """The tables that stay on the host, in float32 (T/llama/model.py:280-286)."""
        return 4 * self.hidden * (self.vocab + self.positions)

    @property
    def parameters(self) -> int:
        matrices = self.attention_parameters(self.heads, self.kv_heads) + self.mlp_parameters(self.mlp_columns)
        tables = self.hidden * (self.vocab * (1 if self.is_tied else 2) + self.positions)
        return self.layers * (matrices + self.vector_parameters) + tables + self.norm_parameters

    @property
    def host_bytes(self) -> int:
        """Host memory while it loads: the whole checkpoint and the embedding tables; compiling adds to it."""
        return self.parameters * WIDTHS[self.dtype] + self.embedding_bytes

    @property
    def mlp_columns(self) -> int:
        return self.intermediate * max(1, self.experts)

    def attention_parameters(self, heads: int, kv_heads: int) -> int:
        """Of one layer's four matrices, for that many query and key-value heads."""
        return 2 * self.hidden * self.head_dim * (heads + kv_heads)

    def mlp_parameters(self, columns: int) -> int:
        """Of one layer's MLP matrices, for that many columns."""
        return (3 if self.model_type in GATED else 2) * self.hidden * columns

    @property
    def vector_parameters(self) -> int:
        """Norms, biases and the router of one layer: little, and on every core."""
        if self.model_type in GATED:
            return self.hidden * (2 + self.experts)
        return 9 * self.hidden + self.intermediate

    @property
    def norm_parameters(self) -> int:
        return self.hidden * {"bloom": 4}.get(self.model_type, 1 if self.model_type in GATED else 2)


def padded_heads(heads: int, kv_heads: int, tp_degree: int) -> tuple[int, int]:
    """Query heads and cached key-value heads of all cores together, after the library's padding and replication.

    Both divide by `tp_degree`. What T/utils.py:325-391 and T/decoder.py:100-176,1762-1768 come to for
    `group_query_attention=None`, the library's default; `kv_heads` divides `heads`.
    """
    padded = _round_up(heads, tp_degree)
    if heads == kv_heads:
        return padded, padded
    if kv_heads % tp_degree == 0:  # each core keeps whole heads
        return padded, kv_heads
    if tp_degree % kv_heads == 0 and (padded - heads) % kv_heads == 0:  # each head is kept by several cores
        return padded, tp_degree
    if padded * kv_heads == heads * tp_degree:  # the padded query heads of a core share one head
        return padded, _round_up(kv_heads, tp_degree)
    return padded, padded  # one for each query head


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


@dataclass(frozen=True)
class Sizing:
    """What one core holds, in bytes, and why that does not work (None: it does)."""

    tp_degree: int
    batch_size: int
    length: int  # positions of a slot
    weights_bytes: int
    kv_bytes: int
    reason: str | None = None

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    @property
    def share(self) -> float:
        return self.total_bytes / CORE_BYTES


def fits(
    shape: Shape, tp_degree: int, batch_size: int, length: int, dtype: str = "auto", quantize: str | None = None
) -> Sizing:
    """The memory of one core, and whether it is at most 80 % of it and the model can be spread like that.

    weights = matrices / tp_degree with padded heads, plus what every core repeats; the embedding table is on the host. KV =
    2 · layers · length · batch_size · (cached heads / tp_degree) · head_dim · bytes. `dtype`: one of
    config.DTYPES, auto is the checkpoint's. `quantize`: None, or int8 for the matrices of the layers.
    """
    sizing = _size(shape, tp_degree, batch_size, length, dtype, quantize)
    reason = _objection(shape, sizing, quantize)
    if reason is None and sizing.total_bytes > HEADROOM * CORE_BYTES:
        reason = (
            f"{sizing.total_bytes / GIB:.1f} GiB a core (weights {sizing.weights_bytes / GIB:.1f}, KV cache "
            f"{sizing.kv_bytes / GIB:.1f}) with tp_degree {tp_degree}, batch size {batch_size} and length {length} is more "
            f"than {HEADROOM:.0%} of {CORE_BYTES // GIB} GiB; {_remedy(shape, sizing, dtype, quantize)}"
        )
    return replace(sizing, reason=reason)


def _size(shape: Shape, tp_degree: int, batch_size: int, length: int, dtype: str, quantize: str | None) -> Sizing:
    if quantize not in (None, "int8"):
        raise ConfigError(f"--quantize {quantize}: on Neuron it is int8 or none")
    width = WIDTHS[shape.served_in(dtype)]
    heads, kv_heads = padded_heads(shape.heads, shape.kv_heads, tp_degree)
    columns = _round_up(shape.mlp_columns, tp_degree)
    matrices = (shape.attention_parameters(heads, kv_heads) + shape.mlp_parameters(columns)) // tp_degree
    layer = matrices * (1 if quantize else width) + shape.vector_parameters * width
    head = shape.hidden * _round_up(shape.vocab, tp_degree) // tp_degree
    return Sizing(
        tp_degree,
        batch_size,
        length,
        weights_bytes=shape.layers * layer + (head + shape.norm_parameters) * width,
        kv_bytes=2 * shape.layers * length * batch_size * (kv_heads // tp_degree) * shape.head_dim * width,
    )


def _objection(shape: Shape, sizing: Sizing, quantize: str | None) -> str | None:
    """Why the library cannot spread this model like that, however much memory there were."""
    tp_degree = sizing.tp_degree
    if sizing.batch_size > 1 and not shape.has_continuous_batching:
        return f"batch size {sizing.batch_size}: {shape.model_type} has no continuous batching on Neuron; 1 would work"
    if shape.model_type == "gpt_neox" and quantize:  # T/gptneox/model.py
        return "--quantize int8: gpt_neox cannot be quantized on Neuron; none would work"
    if shape.model_type == "gpt_neox" and shape.heads % tp_degree:
        return f"tp_degree {tp_degree} does not divide the {shape.heads} heads; {_degrees(shape.heads)} would"
    if shape.experts and shape.experts % tp_degree and tp_degree % shape.experts:  # T/mixtral/config.py:61
        return f"tp_degree {tp_degree} and {shape.experts} experts: one has to divide the other; {shape.experts} would work"
    # The columns of all experts are padded as one matrix, so a remainder would move columns to the neighbour's cores.
    if shape.experts and tp_degree > shape.experts and shape.intermediate % (tp_degree // shape.experts):
        return (
            f"tp_degree {tp_degree} spreads each expert over {tp_degree // shape.experts} cores, which does not divide its "
            f"intermediate_size {shape.intermediate}; {shape.experts} would work"
        )
    return None


def _degrees(heads: int) -> str:
    return ", ".join(str(degree) for degree in allowed_tp_degrees(None, heads) if heads % degree == 0)


def _remedy(shape: Shape, sizing: Sizing, dtype: str, quantize: str | None) -> str:
    """What would fit instead, each of it alone."""

    def works(tp_degree: int, quantize: str | None) -> bool:
        other = _size(shape, tp_degree, sizing.batch_size, sizing.length, dtype, quantize)
        return other.total_bytes <= HEADROOM * CORE_BYTES and _objection(shape, other, quantize) is None

    free = HEADROOM * CORE_BYTES - sizing.weights_bytes
    slots = int(free * sizing.batch_size // sizing.kv_bytes)
    length = int(free * sizing.length // sizing.kv_bytes) // 128 * 128
    degrees = [degree for degree in allowed_tp_degrees(None, 32) if degree > sizing.tp_degree and works(degree, quantize)]
    options = [f"batch size {slots}"] * (slots > 0) + [f"length {length}"] * (length > 0)
    options += [f"tp_degree {degree}" for degree in degrees[:1]]
    options += ["--quantize int8"] * (quantize is None and works(sizing.tp_degree, "int8"))
    return f"{', or '.join(options)} would fit" if options else "no machine that is known here is large enough"


def allowed_tp_degrees(family: str | None, cores: int) -> tuple[int, ...]:
    """The values of TP_DEGREES that `cores` can take, ascending; without a family those of either."""
    known = TP_DEGREES[family] if family else sorted({degree for values in TP_DEGREES.values() for degree in values})
    return tuple(degree for degree in known if degree <= cores)


@dataclass(frozen=True)
class Choice:
    """What to serve with, one line for the log that says why, and one about host memory where that looks short."""

    sizing: Sizing
    reason: str
    warning: str | None


def choose(
    shape: Shape,
    cores: int,
    host_bytes: int | None = None,
    *,
    family: str | None = None,
    tp_degree: int | None = None,
    batch_size: int | None = None,
    length: int | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
) -> Choice:
    """The tp_degree, batch size and length for a machine; what is given stays as it is.

    The longest length up to the model's window and 4096 that fits (else halves of it), then the largest batch size of 1, 2,
    4 … 32, then the tp_degree that leaves a core the fewest bytes, as a decode step reads all of them. Raises ConfigError
    with the numbers and what would fit where nothing does.
    """
    allowed = allowed_tp_degrees(family, cores)
    # Inferentia2's collectives take any even number (collective-communication.rst:79-127): good enough for who asks for it.
    if tp_degree and tp_degree not in allowed and not (family == "inf2" and tp_degree % 2 == 0 and tp_degree <= cores):
        raise ConfigError(
            f"tp_degree {tp_degree} cannot be had with {cores} cores{f' of {family}' if family else ''}; "
            f"{', '.join(map(str, allowed))} would work"
        )
    if length and shape.window and length > shape.window:
        raise ConfigError(f"length {length} is more than the {shape.window} positions of the model; give at most that")
    longest = length or min(shape.window or MAX_LENGTH, MAX_LENGTH)
    lengths = [longest] if length else [longest >> n for n in range(16) if n == 0 or longest >> n >= 128]
    batch_sizes = [batch_size] if batch_size else _powers_of_two(MAX_BATCH_SIZE if shape.has_continuous_batching else 1)
    sizings = [
        fits(shape, degree, size, positions, dtype, quantize)
        for degree in ([tp_degree] if tp_degree else allowed)
        for size in batch_sizes
        for positions in lengths
    ]
    working = [sizing for sizing in sizings if sizing.fits]
    if not working:
        possible = [sizing for sizing in sizings if _objection(shape, sizing, quantize) is None] or sizings
        nearest = min(possible, key=lambda sizing: (sizing.batch_size, sizing.total_bytes))
        raise ConfigError(f"the model does not fit on {cores} cores: {nearest.reason}")
    best = max(working, key=lambda sizing: (sizing.length, sizing.batch_size, -sizing.total_bytes))
    return Choice(best, _why(shape, best, cores), _host_warning(shape, host_bytes))


def _powers_of_two(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def _why(shape: Shape, best: Sizing, cores: int) -> str:
    slots = f"up to {MAX_BATCH_SIZE} slots" if shape.has_continuous_batching else f"1 slot, as {shape.model_type} takes no more"
    return (
        f"tp_degree {best.tp_degree} of {cores} cores, batch size {best.batch_size}, length {best.length}: {_memory(best)}; "
        f"what is not given is chosen for length (up to {MAX_LENGTH} and the window), then batch size ({slots}), then memory"
    )


def _memory(sizing: Sizing) -> str:
    return (
        f"weights {sizing.weights_bytes / GIB:.2f} + KV cache {sizing.kv_bytes / GIB:.2f} GiB, {sizing.share:.0%} of a core's "
        f"{CORE_BYTES // GIB}"
    )


def _host_warning(shape: Shape, host_bytes: int | None) -> str | None:
    if host_bytes is None or shape.host_bytes <= host_bytes:
        return None
    return (
        f"loading takes about {shape.host_bytes / GIB:.1f} GiB of host memory and there are {host_bytes / GIB:.1f}; compiling "
        "takes several more"
    )


@dataclass(frozen=True)
class Machine:
    """The Neuron machine that this process is on."""

    cores: int  # that this process may use
    family: str | None
    instance: str | None  # EC2's name; the machine's, even where a container was given a part of it
    host_bytes: int | None  # of this container, where it has a limit
    source: str  # of the number of cores


def detect(
    root: str | Path = "/", environ: Mapping[str, str] = os.environ, neuron_ls: Sequence[str] = ("neuron-ls", "-j")
) -> Machine | None:
    """What this machine is; None without a Neuron device (in a container: without one that was passed in).

    Devices are /dev/neuronN; cores come from sysfs, else from `neuron-ls -j`, else 2 for each.
    NEURON_RT_VISIBLE_CORES or else NEURON_RT_NUM_CORES limits them; raises ConfigError for a value that the runtime would
    refuse.
    """
    root = Path(root)
    devices = {int(path.name[6:]) for path in root.glob("dev/neuron*") if re.fullmatch(r"neuron\d+", path.name)}
    if not devices:
        return None
    folder = root / "sys/devices/virtual/neuron_device"
    counts = [_number(_read(folder / f"neuron{device}/core_count")) for device in devices]
    if all(counts):
        cores, source = sum(count for count in counts if count), "sysfs"
    elif cores := _listed_cores(neuron_ls, devices):
        source = " ".join(neuron_ls)
    else:
        cores, source = 2 * len(devices), "/dev/neuron*, 2 cores for each"
    name = _read(root / "sys/devices/virtual/dmi/id/product_name")  # EC2's Nitro machines tell their type here
    families = (name.split(".")[0], _read(folder / f"neuron{min(devices)}/info/architecture/instance_type").lower())
    usable, limited_by = usable_cores(cores, environ)
    return Machine(
        cores=usable,
        # a trn1n is a trn1 with more network
        family=next((known for known in TP_DEGREES for told in families if told.startswith(known)), None),
        instance=name if name in INSTANCES else None,
        host_bytes=host_memory(root),
        source=f"{source}, {limited_by}" if limited_by else source,
    )


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this machine has, or this container where it has a limit."""
    limits = (_kib(_read(root / "proc/meminfo")), _number(_read(root / "sys/fs/cgroup/memory.max")))
    return min((limit for limit in limits if limit), default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def _kib(meminfo: str) -> int | None:
    total = re.search(r"MemTotal:\s+(\d+) kB", meminfo)
    return int(total[1]) * 1024 if total else None


def _listed(command: Sequence[str]) -> list[dict[str, Any]]:
    """What neuron-ls tells of each device; nothing when it is not there or says nothing useful."""
    try:
        listed = json.loads(subprocess.run(command, capture_output=True, timeout=30, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _listed_cores(command: Sequence[str], devices: set[int]) -> int:
    """Cores of `devices` as neuron-ls counts them; 0 when it does not."""
    try:
        return sum(entry["nc_count"] for entry in _listed(command) if entry["neuron_device"] in devices)
    except (KeyError, TypeError):
        return 0


def holders(neuron_ls: Sequence[str] = ("neuron-ls", "-j")) -> list[tuple[int, str]]:
    """(pid, command) of each process that holds cores of this machine, as far as neuron-ls can see them; this one apart."""
    found = {}
    for entry in _listed(neuron_ls):
        for process in entry.get("neuron_processes") or ():
            if isinstance(process.get("pid"), int) and process["pid"] != os.getpid():
                found[process["pid"]] = str(process.get("command", "a process")).split()[0]
    return sorted(found.items())


def usable_cores(cores: int | None, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """How many of `cores` the runtime will take, and the variable that says so. None: nobody knows how many there are."""
    visible, number = (environ.get(name, "").strip() for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"))
    if visible:
        name, value = "NEURON_RT_VISIBLE_CORES", visible
        ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in visible.split(",")]
        named = [core for r in ranges if r for core in range(int(r[1]), min(int(r[2] or r[1]), 1 << 12) + 1)]
        if not all(ranges) or not named or named != list(range(named[0], named[0] + len(named))):
            raise ConfigError(f"{name} {visible!r} should be one core (0), or cores in a row (0-3, or 0,1,2-3)")
        wanted = len(named)
    elif number:
        name, value, wanted = "NEURON_RT_NUM_CORES", number, _number(number)
        if wanted is None:
            raise ConfigError(f"{name} {number!r} should be a number of cores, 0 for all")
    else:
        return cores, ""
    if cores is not None and wanted > cores:
        raise ConfigError(f"{name} {value!r} asks for {wanted} cores and there are {cores}")
    return wanted or cores, f"{name}={value}"


@dataclass(frozen=True)
class Published:
    """A speed that others measured and published: quoted, never scaled."""

    model: str
    quantize: str | None
    instance: str
    tp_degree: int | None  # None: not told, or several servers side by side
    batch_size: int
    length: int | None
    prompt: int | None
    tokens_per_s: float  # of the whole machine
    ttft_ms: float | None
    token_ms: float | None
    source: str

    def dollars_per_million(self, dollars_per_hour: float) -> float:
        return dollars_per_hour / 3600 / self.tokens_per_s * 1e6


# layers, hidden, heads, key-value heads, intermediate, vocabulary
PUBLISHED_SHAPES = {
    "Llama-2-7B": (32, 4096, 32, 32, 11008, 32000),
    "Llama-2-13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama-2-70B": (80, 8192, 64, 8, 28672, 32000),
    "Llama-3-8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama-3-70B": (80, 8192, 64, 8, 28672, 128256),
    "Mistral-7B": (32, 4096, 32, 8, 14336, 32000),
}
# SDK@v2.25.0:general/benchmarks/{inf2,trn1}/{latency,throughput}_data_decoder.csv: transformers-neuronx of SDK 2.18 at
# its largest tp_degree, FP16 with products in BF16. Each row: total length, prompt, tokens/s, ms to the first
# token, ms a token (medians), line of the file.
_SDK_ROWS = {
    ("inf2.48xlarge", 24, 1, "latency"): {
        "Llama-3-8B int8": [
            (4096, 128, 161.7, 25, 6.42, 4),
            (4096, 2048, 153.6, 102, 6.50, 5),
            (8192, 128, 145.0, 29, 7.41, 2),
            (8192, 4096, 133.6, 209, 7.47, 3),
        ],
        "Llama-3-70B": [
            (256, 128, 31.3, 78, 32.2, 11),
            (1152, 128, 30.8, 80, 32.47, 9),
            (4096, 2048, 28.8, 745, 34.67, 6),
        ],
        "Llama-2-7B": [(4096, 128, 156.1, 28, 6.47, 12), (8192, 128, 145.2, 29, 7.34, 13)],
        "Llama-2-13B": [
            (4096, 128, 112.5, 26, 9.17, 14),
            (8192, 4096, 97.4, 334, 10.17, 15),
            (16384, 8192, 73.2, 994, 13.50, 16),
        ],
        "Llama-2-70B": [(256, 128, 30.1, 77, 32.90, 17), (4096, 2048, 28.3, 810, 34.90, 22)],
        "Mistral-7B": [
            (4096, 128, 149.7, 27, 6.86, 23),
            (8192, 4096, 81.7, 558, 7.87, 24),
            (16384, 8192, 96.0, 540, 10.33, 25),
        ],
    },
    ("inf2.48xlarge", 24, 8, "throughput"): {
        "Llama-3-8B int8": [
            (4096, 128, 859.1, 66, 10.45, 4),
            (4096, 2048, 759.2, 824, 10.5, 5),
            (8192, 128, 649.2, 69, 15.22, 2),
            (8192, 4096, 522.0, 1993, 15.31, 3),
        ],
        "Llama-2-7B": [(4096, 128, 725.8, 77, 12.11, 12), (8192, 128, 578.0, 80, 16.39, 13)],
        "Llama-2-13B": [(4096, 128, 589.9, 109, 14.90, 14), (8192, 4096, 351.8, 7084, 20.99, 15)],
        "Mistral-7B": [(4096, 128, 761.9, 78, 11.64, 23), (16384, 8192, 411.0, 11085, 18.01, 25)],
    },
    ("trn1.32xlarge", 32, 1, "latency"): {
        "Llama-3-8B int8": [(4096, 128, 178.2, 15, 5.86, 4), (8192, 128, 157.3, 17, 7.03, 2)],
        "Llama-3-70B": [
            (256, 128, 40.8, 53, 26.48, 7),
            (1152, 128, 40.6, 53, 24.48, 6),
            (4096, 2048, 37.7, 547, 26.2, 5),
        ],
        "Llama-2-7B": [(8192, 128, 161.7, 13, 6.70, 8)],
        "Llama-2-13B": [(8192, 4096, 60.4, 864, 9.84, 9)],
        "Llama-2-70B": [(256, 128, 39.3, 54, 25.18, 11), (4096, 2048, 36.8, 691, 26.85, 16)],
        "Mistral-7B": [(16384, 8192, 49.6, 1323, 9.89, 17)],
    },
    ("trn1.32xlarge", 32, 8, "throughput"): {
        "Llama-3-8B int8": [(4096, 128, 1142.7, 49, 7.65, 4), (8192, 128, 933.5, 55, 9.95, 2)],
        "Llama-2-7B": [(8192, 128, 917.2, 66, 10.10, 8)],
        "Llama-2-13B": [(8192, 4096, 371.7, 6669, 19.86, 9)],
        "Mistral-7B": [(16384, 8192, 484.6, 8615, 15.44, 17)],
    },
    ("trn1.32xlarge", 32, 4, "throughput"): {
        "Llama-2-70B": [(1152, 128, 145.1, 157, 27.21, 13), (4096, 2048, 120.6, 2722, 31.79, 16)],
        "Llama-3-70B": [(1152, 128, 140.5, 130, 28.38, 6), (4096, 2048, 120.4, 1661, 32.33, 5)],
    },
}
_TGI = "TGI on optimum-neuron, ON@v0.0.27:benchmark/text-generation-inference/performance"
PUBLISHED = (
    *(
        Published(
            name.removesuffix(" int8"),
            "int8" if name.endswith(" int8") else None,
            *(instance, tp_degree, batch_size, length, prompt, tokens_per_s, ttft_ms, token_ms),
            f"SDK 2.25 docs, {instance[:4]}/{file}_data_decoder.csv:{line}",
        )
        for (instance, tp_degree, batch_size, file), models in _SDK_ROWS.items()
        for name, rows in models.items()
        for length, prompt, tokens_per_s, ttft_ms, token_ms, line in rows
    ),
    Published(
        "Llama-3-8B", None, "inf2.48xlarge", None, 32, 4096, None, 734.6, None, None, f"3 x tp_degree 8, saturated; {_TGI}"
    ),
    Published("Llama-3-70B", None, "inf2.48xlarge", None, 4, None, None, 66.6, None, None, f"16 clients; {_TGI}"),
    Published("Llama-3-70B", None, "trn1.32xlarge", None, 8, None, None, 133.0, None, None, f"64 clients; {_TGI}"),
)


def published(shape: Shape, dtype: str = "auto", quantize: str | None = None) -> list[Published]:
    """The figures for models of exactly this size; none in float32, which nobody measured."""
    sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.intermediate, shape.vocab)
    if shape.experts or shape.served_in(dtype) == "float32":
        return []
    return [row for row in PUBLISHED if PUBLISHED_SHAPES[row.model] == sizes and row.quantize == quantize]


def read_config(model_id: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a folder, of a file by its own path, or of a hub id, of which nothing else is fetched.

    Raises ConfigError, in one line, when there is none.
    """
    path = Path(model_id).expanduser()
    if path.is_file():
        return read_json(path, required=True)
    if Config(model_id=model_id).is_local:
        if not path.is_dir():
            raise ConfigError(f"--model-id {model_id}: there is no such folder")
        return read_json(path / "config.json", required=True)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ConfigError(
            f"--model-id {model_id}: no such folder, and huggingface_hub is not installed to ask the hub"
        ) from None
    hub.hush()
    try:
        path = Path(hf_hub_download(model_id, "config.json", revision=revision, token=hub.token()))
    except Exception as error:
        raise ConfigError(f"--model-id {model_id}: its config.json cannot be had: {hub.complaint(error, revision)}") from None
    return read_json(path, required=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message} (--help lists the flags)")


def _count(text: str) -> int:
    if not _number(text):
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 1")
    return int(text)


def _price(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of dollars")
    return float(text)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="entrypoint.sh plan",
        description="What fits on which AWS Neuron machine. Only the model's config.json is read.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model-id",
        default=os.environ.get("MODEL_ID") or os.environ.get("HF_MODEL_ID"),
        help="a hub id, a folder, or a config.json (or MODEL_ID)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--instance", choices=INSTANCES, metavar="TYPE", help=f"one of {', '.join(INSTANCES)}; default: all")
    places.add_argument("--cores", type=_count, help="a number of cores instead of an instance type")
    parser.add_argument("--max-total-tokens", type=_count, help="length of a slot; default: up to 4096")
    parser.add_argument("--max-batch-size", type=_count, help="slots; default: what fits, up to 32")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, metavar="DTYPE", help="bf16, fp16, fp32 or auto")
    parser.add_argument("--quantize", default="none", choices=("int8", "none"), help="int8 stores the layers in 8 bits")
    parser.add_argument("--price", type=_price, help="dollars an hour, with --instance or --cores; prices change")
    arguments = parser.parse_args(argv)
    if not arguments.model_id:
        parser.error("--model-id is missing")
    if arguments.price and not (arguments.instance or arguments.cores):
        parser.error("--price needs --instance or --cores")
    return arguments


@dataclass(frozen=True)
class Wanted:
    """What a person asked `plan` for; None leaves it open."""

    batch_size: int | None = None
    length: int | None = None
    dtype: str = "auto"
    quantize: str | None = None


def report(shape: Shape, instances: Sequence[Instance], wanted: Wanted) -> Iterator[str]:
    """The lines that `plan` prints, at most 100 columns each."""
    choices = {instance: _choice(shape, instance, wanted) for instance in instances}
    experts = f", {shape.experts} experts" if shape.experts else ""
    yield (
        f"{shape.model_type}: {shape.parameters:,} parameters in {shape.dtype}, {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads{experts}"
    )
    int8 = ", its layers in int8" if wanted.quantize else ""
    yield f"served in {shape.served_in(wanted.dtype)}{int8}; window: {shape.window or 'no end'}"
    yield (
        f"host memory to load it: {shape.host_bytes / GIB:.1f} GiB, with {shape.embedding_bytes / GIB:.2f} for the embedding "
        "table in float32"
    )
    yield ""
    yield from _table(shape, choices, wanted)
    yield ""
    yield from _recommendations(choices)
    yield ""
    yield from _expectations(shape, choices, wanted)


def _choice(shape: Shape, instance: Instance, wanted: Wanted) -> Choice | str:
    """What to serve with on that machine, or why nothing works."""
    try:
        return choose(
            shape,
            instance.cores,
            instance.host_bytes,
            family=instance.family,
            batch_size=wanted.batch_size,
            length=wanted.length,
            dtype=wanted.dtype,
            quantize=wanted.quantize,
        )
    except ConfigError as error:
        return str(error)


def _table(shape: Shape, choices: Mapping[Instance, Choice | str], wanted: Wanted) -> Iterator[str]:
    most = wanted.batch_size or (MAX_BATCH_SIZE if shape.has_continuous_batching else 1)
    batch_sizes = sorted({*_powers_of_two(most), most})
    longest = min(shape.window or 16384, 16384)
    lengths = [wanted.length] if wanted.length else sorted({n for n in (1024, 2048, 4096, 8192) if n < longest} | {longest})
    yield f"Largest batch size, up to {most}, by length. Sizes are of one core; at most {HEADROOM:.0%} is filled,"
    yield f"as compiled code, scratch and the runtime need the rest of its {CORE_BYTES // GIB} GiB."
    header = f"{'':14}{'tp':>4}{'weights':>11}{'KV heads':>10}{'KV/token':>10}"
    yield header + "".join(f"{length:>7} " for length in lengths).rstrip()
    for instance, choice in choices.items():
        for degree in allowed_tp_degrees(instance.family, instance.cores):
            one = fits(shape, degree, 1, 1, wanted.dtype, wanted.quantize)
            cached = padded_heads(shape.heads, shape.kv_heads, degree)[1]
            row = f"{instance.name if degree == 1 else '':14}{degree:>4}"
            row += f"{one.weights_bytes / GIB:>7.2f} GiB{cached:>10}{one.kv_bytes / 1024:>6.0f} KiB"
            for length in lengths:
                sizings = [fits(shape, degree, size, length, wanted.dtype, wanted.quantize) for size in batch_sizes]
                working = [sizing for sizing in sizings if sizing.fits]
                is_chosen = isinstance(choice, Choice) and choice.sizing in working
                row += f"{working[-1].batch_size if working else '-':>7}{'*' if is_chosen else ' '}"
            yield row.rstrip()
    yield "*: recommended for that machine.  -: does not fit, or cannot be spread like that."


def _recommendations(choices: Mapping[Instance, Choice | str]) -> Iterator[str]:
    for instance, choice in choices.items():
        if isinstance(choice, str):
            yield from _wrapped(f"{instance.name}: {choice}")
            continue
        best = choice.sizing
        price = f" (${instance.dollars_per_hour:.2f} an hour)" if instance.dollars_per_hour else ""
        yield f"{instance.name}{price}: tp_degree {best.tp_degree}, batch size {best.batch_size}, length {best.length}"
        yield f"    {_memory(best)}"
        if choice.warning:
            yield from _wrapped(choice.warning, "    ")
    if len(choices) > 1:
        roomy = {place: c.sizing.length for place, c in choices.items() if isinstance(c, Choice) and not c.warning}
        longest = max(roomy.values(), default=0)
        cheapest = min(
            (place for place, length in roomy.items() if length == longest),
            key=lambda place: place.dollars_per_hour or 0,
            default=None,
        )
        yield f"Recommended: {f'{cheapest.name}, the cheapest for length {longest}' if cheapest else 'none, as nothing fits'}."


def _expectations(shape: Shape, choices: Mapping[Instance, Choice | str], wanted: Wanted) -> Iterator[str]:
    """Published figures for what is recommended, or that there are none."""
    yield "Published figures (others' runs with a full batch, not of this server):"
    for instance, choice in choices.items():
        if isinstance(choice, str):
            continue
        best = choice.sizing
        rows = [row for row in published(shape, wanted.dtype, wanted.quantize) if row.instance == instance.name]
        rows = [row for row in rows if row.tp_degree in (None, best.tp_degree)]
        matching = [row for row in rows if row.batch_size == best.batch_size]
        for row in matching:
            length = f", length {row.length}" if row.length else ""
            prompt = f" ({row.prompt} of it prompt)" if row.prompt else ""
            degree = f", tp_degree {row.tp_degree}" if row.tp_degree else ""
            yield f"  {instance.name}, {row.model}{degree}, batch size {row.batch_size}{length}{prompt}:"
            speed = f"{row.tokens_per_s:.1f} tokens/s"
            if row.ttft_ms and row.token_ms:
                speed += f", first token {row.ttft_ms:g} ms, then {row.token_ms:g} ms each"
            if instance.dollars_per_hour:
                speed += f", ${row.dollars_per_million(instance.dollars_per_hour):.2f} per million tokens"
            yield f"    {speed}"
            yield from _wrapped(f"[{row.source}]", "    ")
        if not matching:
            others = ", ".join(map(str, sorted({row.batch_size for row in rows})))
            hint = f"; there are some for {others} (--max-batch-size)" if others else ""
            none = f"no published figure for tp_degree {best.tp_degree}, batch size {best.batch_size}{hint}"
            yield from _wrapped(f"{instance.name}: {none}", "  ")
    if any(instance in INSTANCES.values() for instance in choices):
        yield ""
        yield from _wrapped(f"Prices as of {PRICES_AS_OF}, check: {PRICES}. --price sets one.")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False)


def main(argv: Sequence[str]) -> int:
    try:
        arguments = _arguments(argv)
        shape = Shape.from_config(read_config(arguments.model_id, arguments.revision))
        if arguments.cores:
            instances = [Instance(f"{arguments.cores} cores", arguments.cores)]
        else:
            instances = [INSTANCES[arguments.instance]] if arguments.instance else list(INSTANCES.values())
        if arguments.price:
            instances = [replace(instances[0], dollars_per_hour=arguments.price)]
        quantize = None if arguments.quantize == "none" else arguments.quantize
        wanted = Wanted(arguments.max_batch_size, arguments.max_total_tokens, arguments.dtype, quantize)
        lines = list(report(shape, instances, wanted))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
