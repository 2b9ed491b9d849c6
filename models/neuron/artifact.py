"""Compiled graphs (NEFFs) on disk: what they were compiled for, where they are kept, and whether they match
the settings.

A compiled model is a folder: `config.json` with a `neuron` section, tokenizer files, `compiled/` with the
graphs, and `checkpoint/` with the weights, or the hub id to download them by. `compile` writes such folders;
`with_compiled_config` rejects settings that contradict one. optimum-neuron writes such folders, too: only
their values and weights are used. `CachedGraphs` are those that `serve` compiles itself. Imports neither
torch nor transformers-neuronx."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from packaging.version import InvalidVersion, Version

from config import DTYPE_NAMES, NEURON_CONFIG, Config
from manifest import read_json
from models.cache import digest, evict, installed, locked, mark_used, renamed_when_complete
from run import ConfigError, Json, check_private

logger = logging.getLogger("model")

# Subfolders, named as optimum-neuron does.
COMPILED = "compiled"
CHECKPOINT = "checkpoint"
EXPORTER = "neuron-textgen"
RECORD = "programs.json"  # in each entry of the cache
RUNTIME = ("torch-neuronx", "libneuronxla")  # packages that load graphs; the SDK's version decides theirs
CACHE = "/var/tmp/neuron-compile-cache"  # transformers-neuronx's default
# Fields of a checkpoint's config.json that do not change what is computed.
VOLATILE = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "torch_dtype",
    "neuron",
    "quantization_config",
    "use_cache",
)


def buckets(limit: int, given: Sequence[int] | None, flag: str) -> tuple[int, ...]:
    """Returns the lengths that graphs are compiled for, ascending: `given`, or powers of two from 128, from
    2,048 on also halfway to the next; always with `limit` itself. A prompt or sequence runs in the smallest
    that holds it. A limit of 4,000 gives 128, 256, 512, 1024, 2048, 3072, 4000.

    Raises ConfigError for buckets above the limit. flag: the setting of `given`, for the error.
    """
    if given is None:
        powers = [128 << n for n in range(limit.bit_length())]
        halfway = [length * 3 // 2 for length in powers if length >= 2048]
        given = [length for length in (*powers, *halfway) if length < limit]
    if max(given, default=0) > limit:
        raise ConfigError(f"{flag} {max(given)} is more than the limit of {limit} tokens; leave it out")
    return tuple(sorted({*given, limit}))


# A compiled folder may come from the hub.
Count = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
Counts = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
Length = Annotated[int, msgspec.Meta(ge=0)]
Option = Annotated[
    str, msgspec.Meta(pattern="^(" + "|".join(f"{k}={v}" for k, v in NEURON_CONFIG.items()) + ")$")
]


@dataclass(frozen=True)
class CompiledConfig:
    """The values that a set of graphs was compiled for, and runs with. `compile` writes them as a `neuron`
    section."""

    batch_size: Count  # slots
    tp_degree: Count
    dtype: Literal["float32", "bfloat16", "float16"]
    prefill_buckets: Counts
    position_buckets: Counts
    quantize: Literal["int8"] | None
    sampling: Literal["host", "device", "hybrid"]
    compiler_version: str
    transformers_neuronx_version: str
    exporter: Literal["neuron-textgen"] = EXPORTER
    continuous_batching: bool = True  # of every family; a part of older manifests and keys
    neuron_config: tuple[Option, ...] = ()  # further options of transformers-neuronx, NAME=VALUE
    # Tokens of a prompt chunk; 0: prompts run whole, as in older manifests.
    prefill_chunk: Length = 0
    model_class: str | None = None  # None: an older manifest
    # Tokens of each slot in the graph that verifies draft tokens; 0: there is none, as in older manifests.
    verify_length: Length = 0
    kv_cache_dtype: Literal["fp8_e4m3fn"] | None = None  # None: `dtype`, as in older manifests
    # Positions at the end of each slot that only fillers use: where layers have recurrent states, a call
    # cannot begin earlier than at the next token.
    reserved: Length = 0
    snapshots: Length = 0  # of recurrent states

    @property
    def max_total_tokens(self) -> int:
        """The positions of a slot that requests can use."""
        return max(self.position_buckets) - self.reserved

    @property
    def max_input_tokens(self) -> int:
        """The tokens of the longest prompt, which leaves a position for one token of output."""
        if self.reserved:  # prompts run in chunks
            return self.max_total_tokens - 1
        return min(max(self.prefill_buckets), self.max_total_tokens - 1)

    @property
    def verify_row(self) -> int:
        """Tokens of each slot that the graph which verifies draft tokens runs: `verify_length`; where layers
        have recurrent states, also as many draft tokens as may have been accepted before."""
        return max(0, 2 * self.verify_length - 1) if self.reserved else self.verify_length


@dataclass(frozen=True)
class Optimum:
    """What optimum-neuron compiled a model for. transformers-neuronx does not find these graphs: they are
    named by hashes, and another version built them with other options."""

    batch_size: Count
    sequence_length: Count
    num_cores: Count
    auto_cast_type: Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
    task: Literal["text-generation"] = "text-generation"


Checksums = dict[str, tuple[int, str]]  # of files by name: size in bytes, SHA-256


@dataclass(frozen=True)
class Artifact:
    """What the `neuron` section in the `config.json` of a compiled model says."""

    checkpoint_id: str | None = None  # on the hub, with its commit; None: the weights are in the folder
    checkpoint_revision: str | None = None
    files: Checksums | None = (
        None  # the compiled graphs as they were saved; None: written by an older version
    )
    # Made of the other fields of the section: one of the two.
    compiled_config: CompiledConfig | None = None
    optimum: Optimum | None = None

    @classmethod
    def of(cls, config_json: Json, source: Path) -> Artifact | None:
        """Reads the `neuron` section of a config.json; None: there is none, so the model is not compiled. A
        section without `exporter` is one of optimum-neuron, and the result has `optimum`; else it has
        `compiled_config`. source: the path of the config.json, for errors.

        Raises ConfigError for a section that is incomplete, or holds an unsupported value. Raises it for an
        unknown field, too, as this may change what the graphs compute; those of optimum-neuron are ignored.
        """
        section = config_json.get("neuron")
        if section is None:
            return None
        try:
            found = msgspec.convert(section, cls)
            if "exporter" not in section:
                return dataclasses.replace(found, optimum=msgspec.convert(section, Optimum))
            compiled_config = msgspec.convert(section, CompiledConfig)
            known = {field.name for table in (CompiledConfig, cls) for field in dataclasses.fields(table)}
            if unknown := sorted(section.keys() - known):
                raise msgspec.ValidationError(f"Object contains unknown field `{unknown[0]}`")
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{source}: `neuron` cannot be served ({error}); compile the model again"
            ) from None
        return dataclasses.replace(found, compiled_config=compiled_config)


def with_optimum(config: Config, optimum: Optimum) -> Config:
    """Returns a copy of `config` with the values of optimum-neuron's folder for what was left open: batch
    size, length of a slot, tp_degree and dtype. Settings that were given stay, also if they differ. Logs that
    the model has to be compiled, and the values that were taken."""
    values = {
        "max_batch_size": optimum.batch_size,
        "max_total_tokens": optimum.sequence_length,
        "tp_degree": optimum.num_cores,
        "dtype": DTYPE_NAMES[optimum.auto_cast_type],
    }
    values = {name: value for name, value in values.items() if getattr(config, name) in (None, "auto")}
    named = ", ".join(_flag(name, value) for name, value in values.items())
    logger.info(
        "The compiled graphs of optimum-neuron cannot be loaded; %s is compiled with its values: %s",
        config.model_name,
        named,
    )
    return dataclasses.replace(config, **values)


def with_compiled_config(config: Config, compiled_config: CompiledConfig) -> Config:
    """Returns a copy of `config` with the tp_degree, dtype, quantization and sampling of compiled graphs.
    Limits that were left open are those of the graphs; all other settings stay.

    Raises ConfigError, with both values, for a limit above the compiled one, and for any other setting that
    contradicts the compiled value of its name. Not an error: a lower limit, some of the compiled buckets or
    --neuron-config options, and 0, which turns a part off. For graphs of 4 slots, --max-batch-size 3 and
    --prefill-chunk 0 are possible, --max-batch-size 5 and --dtype float32 with graphs in bfloat16 are not.
    """
    name = config.model_name
    remedy = "leave it out, or compile it again"
    limits = {
        "max_batch_size": compiled_config.batch_size,
        "max_total_tokens": compiled_config.max_total_tokens,
        "max_input_tokens": compiled_config.max_input_tokens,
        "speculate": max(0, compiled_config.verify_length - 1),
    }
    for setting, limit in limits.items():
        given = getattr(config, setting) or 0
        if given > limit:
            raise ConfigError(
                f"{_flag(setting, given)} is more than the {limit} that {name} was compiled for; {remedy}"
            )
    for setting, compiled in vars(compiled_config).items():
        given = getattr(config, setting, None)
        is_subset = isinstance(given, tuple) and set(given) <= set(compiled)  # the limits are always buckets
        if given not in (None, "auto", 0, compiled) and not is_subset:
            raise ConfigError(
                f"{_flag(setting, given)} contradicts {name}, compiled for {_shown(compiled)}; {remedy}"
            )
    total = config.max_total_tokens or compiled_config.max_total_tokens
    return dataclasses.replace(
        config,
        max_batch_size=config.max_batch_size or compiled_config.batch_size,
        max_total_tokens=total,
        max_input_tokens=config.max_input_tokens or min(total - 1, compiled_config.max_input_tokens),
        tp_degree=compiled_config.tp_degree,
        dtype=compiled_config.dtype,
        quantize=compiled_config.quantize,
        sampling=compiled_config.sampling,
    )


def _flag(setting: str, value: Any) -> str:
    """Returns a setting and its value for an error or a log line: "--tp-degree 2 (TP_DEGREE)"."""
    return f"--{setting.replace('_', '-')} {_shown(value)} ({setting.upper()})"


def _shown(value: Any) -> str:
    """Returns a value as it is written after a flag: "128,256" for a list, "none" for None or an empty
    list."""
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value)) or None
    return "none" if value is None else str(value)


def check_compiler(compiled_config: CompiledConfig, installed: str, name: str) -> None:
    """Raises ConfigError, with both versions, for graphs of a newer compiler than `installed`, the version of
    neuronx-cc here: they do not run on an older runtime. So does a `compiler_version` that is no version.
    name: the model's, for the error."""
    compiler = compiled_config.compiler_version
    try:
        release = Version(compiler).release
    except InvalidVersion:
        raise ConfigError(f"{name} was compiled by neuronx-cc {compiler!r}, which is no version") from None
    if release > Version(installed).release:
        raise ConfigError(
            f"{name} was compiled by neuronx-cc {compiler}, newer than the installed {installed}; "
            "compile again"
        )


@dataclass(frozen=True)
class Record:
    """What an entry of the cache says of itself: the checksums of its graphs, and what they were compiled
    for."""

    files: Checksums
    built: CompiledConfig


@dataclass(frozen=True)
class CachedGraphs:
    """A set of graphs that `serve` compiled, in a folder of its own inside the compiler's cache folder."""

    cache: Path  # the folder of all sets
    size_gb: float  # that they may have together
    model: str  # its `config_digest`
    compiled_config: CompiledConfig

    @classmethod
    def here(cls, size_gb: float, model: str, compiled_config: CompiledConfig) -> CachedGraphs | None:
        """Returns the cached graphs for a model and its settings, whether or not they have been compiled yet.
        None: NEURON_COMPILE_CACHE_URL is not a local folder, where only the compiler can look.

        size_gb: of all sets together; model: its `config_digest`. Raises ConfigError if another user owns the
        folder or may write into it.
        """
        url = urlsplit(os.environ.get("NEURON_COMPILE_CACHE_URL", "").strip() or CACHE)
        if url.scheme not in ("", "file"):
            return None
        cache = Path(url.path) / EXPORTER
        check_private(cache, f"{cache} (NEURON_COMPILE_CACHE_URL)")
        return cls(cache, size_gb, model, compiled_config)

    @property
    def folder(self) -> Path:
        """The folder of this set, which need not exist. Its name is a hash of what the graphs depend on."""
        return self.cache / digest([self.model, _graph_settings(self.compiled_config)])

    @contextlib.contextmanager
    def locked(self, is_shared: bool) -> Iterator[None]:
        """A context manager that holds the lock of the folder: shared, to load the graphs, or exclusive, to
        make them. Waits, with a line in the log, as long as another process holds the lock and one of the two
        is exclusive. Where the cache cannot be written, the body runs without a lock."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                lock = self.folder.with_suffix(".lock")
                stack.enter_context(locked(lock, "compiling these graphs into", is_shared))
            yield

    def find(self) -> CompiledConfig | None:
        """Returns what the graphs in the cache were compiled for, which may lack parts of `compiled_config`;
        None: there are none, or they were damaged. Reads all of their files to compare checksums. Marks them
        as used now. Removes damaged ones, with a warning in the log."""
        folder = self.folder
        record = folder / RECORD
        if not record.is_file():
            return None
        try:
            kept = msgspec.convert(read_json(record), Record)
            damage = verify_checksums(folder, kept.files)
        except (ConfigError, msgspec.ValidationError, OSError):
            damage = f"{record} is damaged"
        if damage is None:
            mark_used(record)
            return kept.built
        self.remove(damage)
        return None

    def remove(self, why: object) -> None:
        """Removes this set, with a warning in the log, which begins with `why`."""
        logger.warning("%s: removing these compiled graphs from the cache, to compile again", why)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, save: Callable[[str], None], built: CompiledConfig) -> None:
        """Calls `save` with the path of a new folder, which becomes the folder of this set, in the place of
        an earlier one. Then removes the sets that were used longest ago until the rest has `size_gb` at most,
        but neither this set nor those that another process is loading or making.

        built: what was compiled, as not everything in `compiled_config` may compile. Raises OSError if the
        folder cannot be written, and whatever `save` raises; an incomplete entry is never found.
        """
        with renamed_when_complete(self.folder) as new:
            save(str(new))
            record = Record(checksums(new), built)
            (new / RECORD).write_text(json.dumps(dataclasses.asdict(record), indent=1))
        evict(self.cache.glob(f"*/{RECORD}"), self.size_gb, "--compile-cache-size (COMPILE_CACHE_SIZE)")


def _graph_settings(compiled_config: CompiledConfig) -> Json:
    """Returns everything but the checkpoint that the compiled graphs depend on, for JSON: `compiled_config`,
    NEURON_CC_FLAGS, and the versions of the packages that load graphs (None: not installed)."""
    values = dataclasses.asdict(compiled_config)
    for name in ("verify_length", "kv_cache_dtype", "reserved", "snapshots"):
        if not values[name]:
            del values[name]  # as in older keys
    values["NEURON_CC_FLAGS"] = os.environ.get("NEURON_CC_FLAGS", "")
    for package in RUNTIME:
        values[package] = installed(package)
    return values


def checksums(folder: Path) -> Checksums:
    """Reads all files in `folder` and its subfolders. Returns their checksums by path, relative to
    `folder`."""
    return {str(path.relative_to(folder)): _facts(path) for path in folder.rglob("*") if path.is_file()}


def _facts(path: Path) -> tuple[int, str]:
    content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()


def verify_checksums(folder: Path, files: Checksums) -> str | None:
    """Compares the files in `folder` with `files`, a result of `checksums`. Returns the path of the first
    file that is missing or differs, and how, as a part of an error; None: all are the same. Further files do
    not matter. Raises OSError for a file that cannot be read."""
    for name, (size, sha256) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        found_size, found_sha256 = _facts(path)
        if found_size != size:
            return f"{path} is damaged: it has {found_size} bytes instead of {size}"
        if found_sha256 != sha256:
            return f"{path} is damaged: its SHA-256 differs"
    return None


def config_digest(checkpoint_config: Json) -> str:
    """Returns 32 hex digits over the fields of a checkpoint's config.json that its compiled graphs depend
    on."""
    return digest({name: value for name, value in checkpoint_config.items() if name not in VOLATILE})
