"""The verb `plan`: which model fits on which Inferentia2 or Trainium machine, at what price, and at which published speed.

Arithmetic over a model's config.json: how heads and weights are split across NeuronCores, the device memory of weights and KV
cache, and the tp_degree, batch size and length to use. `main` prints it; `models/neuron.py` calls `choose` for the machine it
runs on. Instance types, prices and published figures are data, in plan.json. Knows no torch, no requests, and reads no weights.

Source references: "T/" is the code of transformers-neuronx 0.13.322, "SDK@" is the public repository aws-neuron-sdk at a tag.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config import DTYPES, Config, ConfigError, read_json
from models import fetch

GIB = 1 << 30
CORE_BYTES = 16 * GIB  # HBM of a NeuronCore-v2 (SDK@v2.25.0:general/arch/neuron-hardware/inf2-arch.rst:32-70)
HEADROOM = 0.8  # share of a core to fill; compiled code, scratch, logits and the runtime need the rest (an estimate)
MAX_BATCH_SIZE = 32  # defaults; larger values must be set explicitly
MAX_LENGTH = 4096
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes

# Known to load: the developer guide's values, the application note's 12, the runtime's 16 on trn1.
TP_DEGREES = {"inf2": (1, 2, 4, 8, 12, 24), "trn1": (1, 2, 8, 16, 32)}

CONTINUOUS_BATCHING = GATED = ("llama", "mistral", "mixtral")  # gated: three MLP matrices, RMSNorm, no biases
ONE_SLOT = ("gpt2", "opt", "bloom", "gpt_neox")


@dataclass(frozen=True)
class Instance:
    """A machine to plan for. A bare number of cores has no family, and its memory and price are unknown."""

    name: str
    cores: int
    family: str | None = None
    host_gib: int | None = None
    dollars_per_hour: float | None = None


@dataclass(frozen=True)
class Published:
    """A speed that others measured and published; quoted, never scaled."""

    model: str
    quantize: str | None
    instance: str
    tp_degree: int | None  # None: not stated, or several servers side by side
    batch_size: int
    length: int | None  # prompt and completion
    prompt: int | None
    tokens_per_s: float  # of the whole machine
    ttft_ms: float | None
    token_ms: float | None
    source: str


_DATA = json.loads(Path(__file__).with_name("plan.json").read_text(encoding="utf-8"))
INSTANCES = {row["name"]: Instance(**row) for row in _DATA["instances"]}
PUBLISHED_SHAPES: dict[str, dict[str, int]] = _DATA["shapes"]  # by model: the fields of its Shape
PUBLISHED = [Published(**dict(zip(_DATA["figure_columns"], row))) for row in _DATA["figures"]]


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder that decide its memory, as transformers-neuronx reads them (T/*/config.py)."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int  # of one expert
    vocab: int
    experts: int  # 0 for a dense model
    window: int | None  # context length; None: unlimited
    positions: int  # rows of a learned position table; 0 with rotary embeddings or ALiBi
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

        is_gated = model_type in GATED
        hidden = number("hidden_size", "n_embd", "n_embed")
        heads = number("num_attention_heads", "n_head")
        window = number("max_position_embeddings", "n_positions", "seq_length", default=2048)
        shape = cls(
            model_type=model_type,
            layers=number("num_hidden_layers", "n_layer"),
            hidden=hidden,
            heads=heads,
            # transformers' default: 8 for Mistral and Mixtral, else as many as heads
            kv_heads=number("num_key_value_heads", default=heads if model_type == "llama" else 8) if is_gated else heads,
            intermediate=number("intermediate_size", "ffn_dim", "n_inner", default=None if is_gated else 4 * hidden),
            vocab=number("vocab_size"),
            experts=number("num_local_experts", default=8) if model_type == "mixtral" else 0,
            window=None if model_type == "bloom" else window,  # ALiBi has no limit
            positions={"gpt2": window, "opt": window + 2}.get(model_type, 0),
            is_tied=bool(data.get("tie_word_embeddings", model_type in ("gpt2", "opt", "bloom"))),
            dtype=DTYPES.get(str(data.get("dtype") or data.get("torch_dtype")), "float32"),  # transformers' default
        )
        if hidden % heads or heads % shape.kv_heads:
            sizes = f"hidden_size {hidden}, {heads} attention heads and {shape.kv_heads} key-value heads"
            raise ConfigError(f"config.json: {sizes} do not divide each other")
        if data.get("head_dim") not in (None, shape.head_dim):
            rule = f"transformers-neuronx takes hidden_size / num_attention_heads, which is {shape.head_dim} here"
            raise ConfigError(f"head_dim {data['head_dim']} is not served on Neuron: {rule}")
        return shape

    def served_in(self, dtype: str) -> str:
        """The dtype that a name of config.DTYPES means for this checkpoint: auto is its own."""
        return self.dtype if DTYPES[dtype] == "auto" else DTYPES[dtype]

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def has_continuous_batching(self) -> bool:
        return self.model_type in CONTINUOUS_BATCHING

    @property
    def embedding_bytes(self) -> int:
        """The embedding tables, which stay in host memory in float32 (T/llama/model.py:280-286)."""
        return 4 * self.hidden * (self.vocab + self.positions)

    @property
    def parameters(self) -> int:
        tables = self.hidden * (self.vocab * (1 if self.is_tied else 2) + self.positions)
        return self.layers * (self.matrix_parameters(tp_degree=1) + self.vector_parameters) + tables + self.norm_parameters

    @property
    def host_bytes(self) -> int:
        """Host memory during loading: the whole checkpoint and the embedding tables. Compiling needs more."""
        return self.parameters * WIDTHS[self.dtype] + self.embedding_bytes

    def matrix_parameters(self, tp_degree: int) -> int:
        """Of one layer's attention and MLP matrices on all cores together, padded for `tp_degree`."""
        attention = 2 * self.head_dim * sum(padded_heads(self.heads, self.kv_heads, tp_degree))
        mlp = (3 if self.model_type in GATED else 2) * _round_up(self.intermediate * max(1, self.experts), tp_degree)
        return self.hidden * (attention + mlp)

    @property
    def vector_parameters(self) -> int:
        """Norms, biases and the router of one layer: few, and copied to every core."""
        return self.hidden * (2 + self.experts) if self.model_type in GATED else 9 * self.hidden + self.intermediate

    @property
    def norm_parameters(self) -> int:
        return self.hidden * {"bloom": 4}.get(self.model_type, 1 if self.model_type in GATED else 2)


def padded_heads(heads: int, kv_heads: int, tp_degree: int) -> tuple[int, int]:
    """Query heads and cached key-value heads of all cores together, after the library's padding and replication.

    Both are multiples of `tp_degree`; `kv_heads` divides `heads`. Follows T/utils.py:325-391 and
    T/decoder.py:100-176,1762-1768 with `group_query_attention=None`, the library's default.
    """
    padded = _round_up(heads, tp_degree)
    if heads == kv_heads:
        return padded, padded
    if kv_heads % tp_degree == 0:  # whole key-value heads on each core
        return padded, kv_heads
    if tp_degree % kv_heads == 0 and (padded - heads) % kv_heads == 0:  # each head on several cores
        return padded, tp_degree
    if padded * kv_heads == heads * tp_degree:  # the padded query heads of a core share one head
        return padded, _round_up(kv_heads, tp_degree)
    return padded, padded  # one for each query head


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


@dataclass(frozen=True)
class Sizing:
    """A model split over `tp_degree` cores: the memory that one core holds, and whether that works.

    `dtype`: one of config.DTYPES, auto is the checkpoint's. `quantize`: None, or int8 for the matrices of the layers.
    """

    shape: Shape
    tp_degree: int
    batch_size: int
    length: int  # positions of a slot
    dtype: str = "auto"
    quantize: str | None = None

    @property
    def weights_bytes(self) -> int:
        """Matrices / tp_degree with padded heads, plus what every core repeats; the embedding table is on the host."""
        shape, tp_degree, width = self.shape, self.tp_degree, WIDTHS[self.shape.served_in(self.dtype)]
        matrices = shape.matrix_parameters(tp_degree) // tp_degree
        layer = matrices * (1 if self.quantize else width) + shape.vector_parameters * width
        head = shape.hidden * _round_up(shape.vocab, tp_degree) // tp_degree
        return shape.layers * layer + (head + shape.norm_parameters) * width

    @property
    def kv_bytes(self) -> int:
        """2 · layers · length · batch_size · (cached heads / tp_degree) · head_dim · bytes."""
        heads = padded_heads(self.shape.heads, self.shape.kv_heads, self.tp_degree)[1] // self.tp_degree
        width = WIDTHS[self.shape.served_in(self.dtype)]
        return 2 * self.shape.layers * self.length * self.batch_size * heads * self.shape.head_dim * width

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        return self.unsupported is None and self.total_bytes <= HEADROOM * CORE_BYTES

    @property
    def unsupported(self) -> str | None:
        """Why the library cannot run this, whatever the memory, and what would work; None: it can."""
        shape, tp_degree, experts = self.shape, self.tp_degree, self.shape.experts
        if self.batch_size > 1 and not shape.has_continuous_batching:
            return f"batch size {self.batch_size}: {shape.model_type} has no continuous batching on Neuron; 1 would work"
        if shape.model_type == "gpt_neox" and self.quantize:  # T/gptneox/model.py
            return "--quantize int8: gpt_neox cannot be quantized on Neuron; none would work"
        if shape.model_type == "gpt_neox" and shape.heads % tp_degree:
            degrees = [degree for degree in allowed_tp_degrees(None, shape.heads) if shape.heads % degree == 0]
            return f"tp_degree {tp_degree} does not divide the {shape.heads} heads; {', '.join(map(str, degrees))} would"
        if experts and experts % tp_degree and tp_degree % experts:  # T/mixtral/config.py:61
            return f"tp_degree {tp_degree} and {experts} experts: one has to divide the other; {experts} would work"
        # The library pads the columns of all experts as one matrix: a remainder would shift them to the next expert's cores.
        if experts and tp_degree > experts and shape.intermediate % (tp_degree // experts):
            return (
                f"tp_degree {tp_degree} spreads each expert over {tp_degree // experts} cores, which does not divide its "
                f"intermediate_size {shape.intermediate}; {experts} would work"
            )
        return None

    @property
    def reason(self) -> str | None:
        """Why it does not work and what would, each change alone, in one line; None: it works."""
        if self.unsupported or self.fits:
            return self.unsupported
        free = HEADROOM * CORE_BYTES - self.weights_bytes
        slots, length = (int(free * count // self.kv_bytes) for count in (self.batch_size, self.length))
        degrees = [degree for degree in allowed_tp_degrees(None, 32) if degree > self.tp_degree]
        fitting = [degree for degree in degrees if replace(self, tp_degree=degree).fits]
        options = [f"batch size {slots}"] * (slots > 0) + [f"length {length // 128 * 128}"] * (length >= 128)
        options += [f"tp_degree {degree}" for degree in fitting[:1]]
        options += ["--quantize int8"] * (not self.quantize and replace(self, quantize="int8").fits)
        advice = f"{', or '.join(options)} would fit" if options else "no machine that is known here is large enough"
        return (
            f"{self.total_bytes / GIB:.1f} GiB a core (weights {self.weights_bytes / GIB:.1f}, KV cache "
            f"{self.kv_bytes / GIB:.1f}) with tp_degree {self.tp_degree}, batch size {self.batch_size} and length "
            f"{self.length} is more than {HEADROOM:.0%} of {CORE_BYTES // GIB} GiB; {advice}"
        )

    def __str__(self) -> str:
        return (
            f"weights {self.weights_bytes / GIB:.2f} + KV cache {self.kv_bytes / GIB:.2f} GiB, "
            f"{self.total_bytes / CORE_BYTES:.0%} of a core's {CORE_BYTES // GIB}"
        )


def allowed_tp_degrees(family: str | None, cores: int) -> list[int]:
    """The values of TP_DEGREES up to `cores`, ascending; without a family those of both."""
    known = TP_DEGREES[family] if family else set().union(*TP_DEGREES.values())
    return sorted(degree for degree in known if degree <= cores)


@dataclass(frozen=True)
class Choice:
    sizing: Sizing
    reason: str  # one line for the log
    warning: str | None  # one line where host memory looks too small


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
    """The tp_degree, batch size and length for a machine; values that are given are kept.

    The longest length up to the model's window and 4096 that fits (else halves of it), then the largest batch size of 1, 2,
    4 … 32, then the tp_degree with the fewest bytes per core, as a decode step reads all of them. Raises ConfigError with
    the numbers and what would fit where nothing does.
    """
    if quantize not in (None, "int8"):
        raise ConfigError(f"--quantize {quantize} (QUANTIZE): on Neuron it is int8 or none")
    allowed = allowed_tp_degrees(family, cores)
    # Inferentia2's collectives take any even number (collective-communication.rst:79-127), but only these are known to load.
    is_even_inf2 = family == "inf2" and tp_degree and tp_degree % 2 == 0 and tp_degree <= cores
    if tp_degree and tp_degree not in allowed and not is_even_inf2:
        machine = f"{cores} cores{f' of {family}' if family else ''}"
        raise ConfigError(f"tp_degree {tp_degree} cannot be had with {machine}; {', '.join(map(str, allowed))} would work")
    if length and shape.window and length > shape.window:
        raise ConfigError(f"length {length} is more than the {shape.window} positions of the model; give at most that")
    longest = length or min(shape.window or MAX_LENGTH, MAX_LENGTH)
    lengths = [longest] if length else [longest >> n for n in range(16) if n == 0 or longest >> n >= 128]
    most = MAX_BATCH_SIZE if shape.has_continuous_batching else 1
    batch_sizes = [batch_size] if batch_size else [1 << n for n in range(most.bit_length())]
    sizings = [
        Sizing(shape, degree, size, positions, dtype, quantize)
        for degree in ([tp_degree] if tp_degree else allowed)
        for size in batch_sizes
        for positions in lengths
    ]
    working = [sizing for sizing in sizings if sizing.fits]
    if not working:
        possible = [sizing for sizing in sizings if not sizing.unsupported] or sizings
        nearest = min(possible, key=lambda sizing: (sizing.batch_size, sizing.total_bytes))
        raise ConfigError(f"the model does not fit on {cores} cores: {nearest.reason}")
    best = max(working, key=lambda sizing: (sizing.length, sizing.batch_size, -sizing.total_bytes))
    slots = f"up to {MAX_BATCH_SIZE} slots" if shape.has_continuous_batching else f"1 slot, as {shape.model_type} takes no more"
    reason = (
        f"tp_degree {best.tp_degree} of {cores} cores, batch size {best.batch_size}, length {best.length}: {best}; "
        f"what is not given is chosen for length (up to {MAX_LENGTH} and the window), then batch size ({slots}), then memory"
    )
    warning = None
    if host_bytes is not None and shape.host_bytes > host_bytes:
        loading = f"loading takes about {shape.host_bytes / GIB:.1f} GiB of host memory and there are {host_bytes / GIB:.1f}"
        warning = f"{loading}; compiling takes several more"
    return Choice(best, reason, warning)


def published(shape: Shape, dtype: str = "auto", quantize: str | None = None) -> list[Published]:
    """The published figures for models of exactly this size; none in float32, which nobody measured."""
    if shape.experts or shape.served_in(dtype) == "float32":
        return []
    models = [model for model, sizes in PUBLISHED_SHAPES.items() if sizes.items() <= asdict(shape).items()]
    return [row for row in PUBLISHED if row.model in models and row.quantize == quantize]


def read_config(model_id: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a folder, of a path to itself, or of a hub id (nothing else is downloaded). Raises ConfigError."""
    path = Path(model_id).expanduser()
    if path.is_file():
        return read_json(path, required=True)
    if path.is_dir():
        return read_json(path / "config.json", required=True)
    if Config(model_id=model_id).is_local:
        raise ConfigError(f"--model-id {model_id}: there is no such folder")
    try:
        from huggingface_hub import hf_hub_download

        fetch.quiet_hub_library()
        path = hf_hub_download(model_id, "config.json", revision=revision, token=fetch.hub_token())
    except ImportError:
        why = "no such folder, and huggingface_hub is not installed to ask the hub"
        raise ConfigError(f"--model-id {model_id}: {why}") from None
    except Exception as error:
        why = fetch.explain_hub_error(error, revision)
        raise ConfigError(f"--model-id {model_id}: its config.json cannot be had: {why}") from None
    return read_json(Path(path), required=True)


@dataclass(frozen=True)
class Wanted:
    """The settings of `plan` that `choose` takes; None leaves the choice to it."""

    batch_size: int | None
    length: int | None
    dtype: str
    quantize: str | None


def report(shape: Shape, instances: Sequence[Instance], wanted: Wanted) -> Iterator[str]:
    """The lines that `plan` prints, of any length."""
    choices: dict[Instance, Choice | ConfigError] = {}  # an error: why nothing fits
    for instance in instances:
        host_bytes = instance.host_gib and instance.host_gib * GIB
        try:
            choices[instance] = choose(shape, instance.cores, host_bytes, family=instance.family, **asdict(wanted))
        except ConfigError as error:
            choices[instance] = error
    experts = f", {shape.experts} experts" if shape.experts else ""
    heads = f"{shape.heads}/{shape.kv_heads} heads"
    yield f"{shape.model_type}: {shape.parameters:,} parameters in {shape.dtype}, {shape.layers} layers, {heads}{experts}"
    int8 = ", its layers in int8" if wanted.quantize else ""
    yield f"served in {shape.served_in(wanted.dtype)}{int8}; window: {shape.window or 'no end'}"
    embedding = f"with {shape.embedding_bytes / GIB:.2f} for the embedding table in float32"
    yield f"host memory to load it: {shape.host_bytes / GIB:.1f} GiB, {embedding}"
    yield ""
    yield from _table(shape, choices, wanted)
    yield ""
    yield from _recommendations(choices)
    yield ""
    yield from _figures(published(shape, wanted.dtype, wanted.quantize), choices)


def _table(shape: Shape, choices: Mapping[Instance, Choice | ConfigError], wanted: Wanted) -> Iterator[str]:
    most = wanted.batch_size or (MAX_BATCH_SIZE if shape.has_continuous_batching else 1)
    batch_sizes = sorted({1 << n for n in range(most.bit_length())} | {most})
    longest = min(shape.window or 16384, 16384)
    lengths = [wanted.length] if wanted.length else [n for n in (1024, 2048, 4096, 8192) if n < longest] + [longest]
    yield f"Largest batch size, up to {most}, by length. Sizes are of one core; at most {HEADROOM:.0%} is filled,"
    yield f"as compiled code, scratch and the runtime need the rest of its {CORE_BYTES // GIB} GiB."
    header = f"{'':14}{'tp':>4}{'weights':>11}{'KV heads':>10}{'KV/token':>10}"
    yield header + "".join(f"{length:>7} " for length in lengths).rstrip()
    for instance, choice in choices.items():
        for degree in allowed_tp_degrees(instance.family, instance.cores):
            token = Sizing(shape, degree, 1, 1, wanted.dtype, wanted.quantize)
            cached = padded_heads(shape.heads, shape.kv_heads, degree)[1]
            row = f"{instance.name if degree == 1 else '':14}{degree:>4}"
            row += f"{token.weights_bytes / GIB:>7.2f} GiB{cached:>10}{token.kv_bytes / 1024:>6.0f} KiB"
            for length in lengths:
                sizings = [replace(token, batch_size=size, length=length) for size in batch_sizes]
                fitting = [sizing for sizing in sizings if sizing.fits]
                is_chosen = isinstance(choice, Choice) and choice.sizing in fitting
                row += f"{fitting[-1].batch_size if fitting else '-':>7}{'*' if is_chosen else ' '}"
            yield row.rstrip()
    yield "*: recommended for that machine.  -: does not fit, or cannot be spread like that."


def _recommendations(choices: Mapping[Instance, Choice | ConfigError]) -> Iterator[str]:
    lengths = {}  # of the machines that can load the model
    for instance, choice in choices.items():
        if isinstance(choice, ConfigError):
            yield f"{instance.name}: {choice}"
            continue
        best = choice.sizing
        price = f" (${instance.dollars_per_hour:.2f} an hour)" if instance.dollars_per_hour else ""
        yield f"{instance.name}{price}: tp_degree {best.tp_degree}, batch size {best.batch_size}, length {best.length}"
        yield f"    {best}"
        if choice.warning:
            yield f"    {choice.warning}"
        else:
            lengths[instance] = best.length
    if len(choices) > 1:
        cheapest = min(lengths, key=lambda instance: (-lengths[instance], instance.dollars_per_hour), default=None)
        text = f"{cheapest.name}, the cheapest for length {lengths[cheapest]}" if cheapest else "none, as nothing fits"
        yield f"Recommended: {text}."


def _figures(figures: Sequence[Published], choices: Mapping[Instance, Choice | ConfigError]) -> Iterator[str]:
    yield "Published figures (others' runs with a full batch, not of this server):"
    for instance, choice in choices.items():
        if isinstance(choice, ConfigError):
            continue
        tp_degree, batch_size, price = choice.sizing.tp_degree, choice.sizing.batch_size, instance.dollars_per_hour
        rows = [row for row in figures if row.instance == instance.name and row.tp_degree in (None, tp_degree)]
        for row in rows:
            if row.batch_size == batch_size:
                degree = f", tp_degree {tp_degree}" if row.tp_degree else ""
                length = f", length {row.length}" if row.length else ""
                prompt = f" ({row.prompt} of it prompt)" if row.prompt else ""
                latency = f", first token {row.ttft_ms:g} ms, then {row.token_ms:g} ms each" if row.ttft_ms else ""
                cost = f", ${price / 3600 / row.tokens_per_s * 1e6:.2f} per million tokens" if price else ""
                yield f"  {instance.name}, {row.model}{degree}, batch size {batch_size}{length}{prompt}:"
                yield f"    {row.tokens_per_s:.1f} tokens/s{latency}{cost}"
                yield f"    [{row.source}]"
        batch_sizes = sorted({row.batch_size for row in rows})
        if batch_size not in batch_sizes:
            hint = f"; there are some for {', '.join(map(str, batch_sizes))} (--max-batch-size)" if rows else ""
            yield f"  {instance.name}: no published figure for tp_degree {tp_degree}, batch size {batch_size}{hint}"
    if any(instance in INSTANCES.values() for instance in choices):  # else the price is --price, or unknown
        yield ""
        yield f"Prices as of {_DATA['prices']['as_of']}, check: {_DATA['prices']['source']}. --price sets one."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message} (--help lists the flags)")


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
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
    model_id = os.environ.get("MODEL_ID") or os.environ.get("HF_MODEL_ID")
    parser.add_argument("--model-id", default=model_id, help="a hub id, a folder, or a config.json (or MODEL_ID)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--instance", choices=INSTANCES, metavar="TYPE", help=f"one of {', '.join(INSTANCES)}; default: all")
    machine.add_argument("--cores", type=_count, help="a number of cores instead of an instance type")
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


def main(argv: Sequence[str]) -> int:
    try:
        arguments = _arguments(argv)
        shape = Shape.from_config(read_config(arguments.model_id, arguments.revision))
        instances = list(INSTANCES.values())
        if arguments.cores:
            instances = [Instance(f"{arguments.cores} cores", arguments.cores)]
        elif arguments.instance:
            instances = [INSTANCES[arguments.instance]]
        if arguments.price:
            instances = [replace(instances[0], dollars_per_hour=arguments.price)]
        quantize = None if arguments.quantize == "none" else arguments.quantize
        wanted = Wanted(arguments.max_batch_size, arguments.max_total_tokens, arguments.dtype, quantize)
        lines = list(report(shape, instances, wanted))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        print(textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
