"""Compiled programs on disk: what they were compiled for, where they are kept, and whether they match the settings.

A compiled model is a folder: `config.json` with a `neuron` section, tokenizer files, `compiled/` with the programs, and
`checkpoint/` with the weights, or the hub id to download them by. `compile` writes such folders, and optimum-neuron did.
`with_programs` refuses settings that contradict one. The programs that `serve` compiles itself are kept in a `Cache`, which
names the values that differ where it has none. Knows neither torch nor the library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import config as configuration
from config import DTYPES, Config, ConfigError, read_json

logger = logging.getLogger("model")

COMPILED, CHECKPOINT = "compiled", "checkpoint"  # subfolders, named as optimum-neuron does
OPTIMUM, EXPORTER = "optimum-neuron", "neuron-textgen"
# What a `neuron` section holds: the type, or the allowed values. optimum-neuron writes the first few only.
FIELDS: dict[str, type | tuple] = {"batch_size": int, "sequence_length": int, "num_cores": int, "compiler_version": str}
FIELDS |= {"auto_cast_type": tuple(name for name in DTYPES if name != "auto")}
OWN_FIELDS = {"prefill_buckets": list, "position_buckets": list, "continuous_batching": bool, "quantize": (None, "int8")}
OWN_FIELDS |= {"sampling": ("host", "device"), "transformers_neuronx_version": str}
RECORD = "programs.json"  # in each entry of the cache
CACHE = "/var/tmp/neuron-compile-cache"  # the library's default
# Fields of a checkpoint's config.json that do not change what is computed.
VOLATILE = ("_name_or_path", "architectures", "transformers_version", "torch_dtype", "neuron", "use_cache")


def default_buckets(limit: int) -> list[int]:
    """Powers of two from 128 up to `limit`, and `limit` itself: the library's own choice."""
    return [128 << n for n in range(limit.bit_length()) if 128 << n < limit] + [limit]


@dataclass(frozen=True)
class Programs:
    """The values that a set of programs was compiled for. It runs nothing else."""

    batch_size: int  # slots
    tp_degree: int
    dtype: str
    prefill_buckets: tuple[int, ...]
    position_buckets: tuple[int, ...]
    continuous_batching: bool
    quantize: str | None
    sampling: str  # host or device
    compiler_version: str
    transformers_neuronx_version: str | None = None  # not recorded by optimum-neuron
    exporter: str = EXPORTER

    @property
    def max_total_tokens(self) -> int:
        return max(self.position_buckets)

    @property
    def max_input_tokens(self) -> int:
        """Without continuous batching the library runs what exceeds the largest prompt bucket token by token."""
        longest = max(self.prefill_buckets) if self.continuous_batching else self.max_total_tokens
        return min(longest, self.max_total_tokens - 1)

    def section(self) -> dict[str, Any]:
        """The `neuron` section of a `config.json`, with optimum-neuron's names where it has them."""
        section = dataclasses.asdict(self)
        section["num_cores"] = section.pop("tp_degree")
        section["auto_cast_type"] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[section.pop("dtype")]
        section |= {"task": "text-generation", "sequence_length": self.max_total_tokens, "compiler_type": "neuronx-cc"}
        return section | {"exporter_version": configuration.VERSION}

    @classmethod
    def from_section(cls, section: Mapping[str, Any], source: Path) -> Programs:
        """Raises ConfigError where `section`, the `neuron` section of the file `source`, is incomplete or wrong."""
        is_own = section.get("exporter") == EXPORTER
        if section.get("task", "text-generation") != "text-generation":
            raise ConfigError(f"{source} is of a model that was compiled for {section['task']}, not for text-generation")
        for name, kind in (FIELDS | OWN_FIELDS if is_own else FIELDS).items():
            if not _is_valid(section.get(name), kind):
                raise ConfigError(f"{source}: `neuron.{name}` is {section.get(name)!r}; compile the model again")
        batch_size, length = section["batch_size"], section["sequence_length"]
        if is_own:
            values = {name: section.get(name) for name in (*OWN_FIELDS, "exporter")}
        else:  # one prompt bucket of the whole length; without continuous batching the library's default
            positions = [length] if batch_size > 1 else default_buckets(length)
            prompts = positions if batch_size > 1 else [n // 2 for n in positions]
            values = {"prefill_buckets": prompts, "position_buckets": positions, "continuous_batching": batch_size > 1}
            values |= {"quantize": None, "sampling": "host", "exporter": OPTIMUM}
        return cls(
            batch_size=batch_size,
            tp_degree=section["num_cores"],
            dtype=DTYPES[section["auto_cast_type"]],
            compiler_version=section["compiler_version"],
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()},
        )


def _is_valid(value: Any, kind: type | tuple) -> bool:
    """Whether a value of a `neuron` section is one of those allowed, or of that type: a count, or a list of some counts."""
    if isinstance(kind, tuple):
        return value in kind
    if kind is list:
        return isinstance(value, list) and value != [] and all(_is_valid(count, int) for count in value)
    return type(value) is kind and (kind is not int or value > 0)


@dataclass(frozen=True)
class Artifact:
    """A folder with a compiled model."""

    folder: Path
    programs: Programs
    checkpoint_id: str | None  # on the hub, with its commit; None: the weights are in the folder
    checkpoint_revision: str | None

    @classmethod
    def read(cls, folder: Path) -> Artifact | None:
        """None for a folder that holds no compiled model; raises ConfigError for one that is incomplete."""
        source = folder / "config.json"
        section = read_json(source, required=True).get("neuron")
        if section is None:
            return None
        if not isinstance(section, dict):
            raise ConfigError(f"{source}: `neuron` should be an object; compile the model again")
        programs = Programs.from_section(section, source)
        return cls(folder, programs, section.get("checkpoint_id"), section.get("checkpoint_revision"))

    @property
    def compiled(self) -> Path:
        return self.folder / COMPILED

    @property
    def checkpoint(self) -> Path | None:
        return self.folder / CHECKPOINT if (self.folder / CHECKPOINT).is_dir() else None


def with_programs(config: Config, programs: Programs, name: str) -> Config:
    """`config` with every value that was left open taken from `programs`, of the model `name`.

    Raises ConfigError, naming both values, for a setting that the programs do not support. Smaller limits are supported.
    """
    total = config.max_total_tokens or programs.max_total_tokens
    limits = {"max_batch_size": programs.batch_size, "max_total_tokens": programs.max_total_tokens}
    limits |= {"max_input_tokens": programs.max_input_tokens}
    for setting, limit in limits.items():
        given = getattr(config, setting) or 0
        if given > limit:
            raise ConfigError(
                f"{_flag(setting, given)} is more than the {limit} that {name} was compiled for; give at most {limit}, or "
                "compile it again"
            )
    for setting in ("tp_degree", "dtype", "quantize", "sampling", "prefill_buckets", "position_buckets"):
        given, compiled = getattr(config, setting), getattr(programs, setting)
        is_subset = isinstance(given, tuple) and set(given) <= set(compiled)  # the limits become buckets unasked
        if given not in (None, "auto", compiled) and not is_subset:
            raise ConfigError(
                f"{_flag(setting, given)} contradicts {name}, which was compiled for {_shown(compiled)}; leave it out, "
                "or compile it again"
            )
    return dataclasses.replace(
        config,
        max_batch_size=config.max_batch_size or programs.batch_size,
        max_total_tokens=total,
        max_input_tokens=config.max_input_tokens or min(total - 1, programs.max_input_tokens),
        **{name: getattr(programs, name) for name in ("tp_degree", "dtype", "quantize", "sampling")},
    )


def _flag(setting: str, value: Any) -> str:
    entry = next(entry for entry in dataclasses.fields(Config) if entry.name == setting)
    return f"{configuration.flag_name(entry)} {_shown(value)} ({', '.join(entry.metadata['names'])})"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def check_versions(programs: Programs, compiler: str, library: str, name: str) -> None:
    """Programs of a newer compiler do not run on an older runtime, and the library finds only its own programs.

    `compiler` and `library` are the installed versions. Raises ConfigError with both versions.
    """
    if _numbers(programs.compiler_version) > _numbers(compiler):
        raise ConfigError(
            f"{name} was compiled by neuronx-cc {programs.compiler_version}, which is newer than the installed {compiler}; use "
            "a newer image, or compile it again"
        )
    compiled_with = programs.transformers_neuronx_version
    if compiled_with not in (None, library):
        raise ConfigError(
            f"{name} was compiled with transformers-neuronx {compiled_with}, and {library} is installed; use an image with the "
            "same version, or compile it again"
        )


def _numbers(version: str) -> list[int]:
    """The numbers that a version begins with, for comparison."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]


@dataclass(frozen=True)
class Cache:
    """The programs that `serve` compiled, one folder for each set, inside the compiler's own cache folder."""

    folder: Path

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Cache | None:
        """None when NEURON_COMPILE_CACHE_URL is not a local folder: only the compiler can look there."""
        url = urlsplit(environ.get("NEURON_COMPILE_CACHE_URL", "").strip() or CACHE)
        return cls(Path(url.path) / EXPORTER) if url.scheme in ("", "file") else None

    def find(self, model: str, programs: Programs) -> Path | None:
        """The folder with the programs for a model (`model_key`). A damaged one is removed."""
        entry = self._entry(model, programs)
        if not (entry / RECORD).is_file():
            return None
        with contextlib.suppress(ConfigError, KeyError, OSError):
            if read_json(entry / RECORD)["files"] == _hashes(entry):
                return entry
        logger.warning("The kept programs in %s are damaged and are removed", entry)
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def missing(self, model: str, programs: Programs) -> str:
        """Why `find` found nothing: the values in which the nearest entry differs."""
        differences = []
        for path in self.folder.glob(f"*/{RECORD}"):
            with contextlib.suppress(ConfigError, KeyError, TypeError):  # a record of another version: compile
                record = read_json(path)
                if record["model"] == model:
                    found, wanted = record["programs"], _values(programs)
                    names = [name for name in wanted if wanted[name] != found[name]]
                    differences.append([f"{name} {_shown(wanted[name])} instead of {_shown(found[name])}" for name in names])
        if not differences:
            return f"{self.folder} holds none of this model"
        return f"{self.folder} has programs for other values: {', '.join(min(differences, key=len))}"

    def add(self, model: str, programs: Programs, save: Callable[[str], None]) -> Path:
        """Keeps what `save` writes into a folder. Raises OSError on failure; an incomplete entry is never found."""
        entry = self._entry(model, programs)
        with renamed_when_complete(entry) as staging:
            save(str(staging))
            record = {"model": model, "programs": _values(programs), "files": _hashes(staging)}
            (staging / RECORD).write_text(json.dumps(record, indent=1))
        return entry

    def _entry(self, model: str, programs: Programs) -> Path:
        return self.folder / _digest([model, _values(programs)])


@contextlib.contextmanager
def renamed_when_complete(target: Path) -> Iterator[Path]:
    """A temporary folder that replaces `target` at the end: half a model would be taken for a whole one. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield staging
        staging.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _values(programs: Programs) -> dict[str, Any]:
    """Everything that the programs of a checkpoint depend on, as JSON keeps it."""
    values = dataclasses.asdict(programs) | {"NEURON_CC_FLAGS": os.environ.get("NEURON_CC_FLAGS", "")}
    return json.loads(json.dumps(values))


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def model_key(checkpoint_config: Mapping[str, Any]) -> str:
    """20 hex digits over the fields of a checkpoint's config.json that its programs depend on."""
    return _digest({name: value for name, value in checkpoint_config.items() if name not in VOLATILE})
