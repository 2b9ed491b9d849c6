"""Compiled programs on disk: what they were compiled for, where they are kept, and whether they match the settings.

A compiled model is a folder: `config.json` with a `neuron` section, tokenizer files, `compiled/` with the programs, and
`checkpoint/` with the weights, or the hub id to download them by. `compile` writes such folders, and optimum-neuron did.
`with_programs` refuses settings that contradict one. The programs that `serve` compiles itself are kept in a `Cache`, which
names the values that differ where it has none. Knows neither torch nor the library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import config as configuration
from config import DTYPES, Config, ConfigError, read_json

COMPILED, CHECKPOINT = "compiled", "checkpoint"  # subfolders, named as optimum-neuron does
OPTIMUM, EXPORTER = "optimum-neuron", "neuron-textgen"
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
        """The `neuron` section of a `config.json`, with optimum-neuron's names where it has one."""
        section = dataclasses.asdict(self)
        section["num_cores"] = section.pop("tp_degree")
        section["auto_cast_type"] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[section.pop("dtype")]
        section |= {"task": "text-generation", "sequence_length": self.max_total_tokens, "compiler_type": "neuronx-cc"}
        return section | {"exporter_version": configuration.VERSION}

    @classmethod
    def from_section(cls, section: Mapping[str, Any], source: Path) -> Programs:
        """Raises ConfigError where `section`, the `neuron` section of the file `source`, is incomplete or wrong."""

        def value(name: str, kind: type, choices: tuple = ()) -> Any:
            found = section.get(name)
            if type(found) is not kind or (kind is int and found < 1) or (choices and found not in choices):
                raise ConfigError(f"{source}: `neuron.{name}` is {found!r}; compile the model again")
            return found

        def lengths(name: str) -> tuple[int, ...]:
            found = value(name, list)
            if not found or any(type(length) is not int or length < 1 for length in found):
                raise ConfigError(f"{source}: `neuron.{name}` is {found!r}; compile the model again")
            return tuple(found)

        if section.get("task", "text-generation") != "text-generation":
            raise ConfigError(f"{source} is of a model that was compiled for {section['task']}, not for text-generation")
        batch_size, length = value("batch_size", int), value("sequence_length", int)
        dtype = DTYPES[value("auto_cast_type", str, tuple(name for name in DTYPES if name != "auto"))]
        common = {"batch_size": batch_size, "tp_degree": value("num_cores", int), "dtype": dtype}
        common["compiler_version"] = value("compiler_version", str)
        if section.get("exporter") != EXPORTER:
            # optimum-neuron compiles one prompt bucket of the whole length; without continuous batching the library's default.
            has_batching = batch_size > 1
            positions = [length] if has_batching else default_buckets(length)
            return cls(
                **common,
                prefill_buckets=tuple(positions if has_batching else [n // 2 for n in positions]),
                position_buckets=tuple(positions),
                continuous_batching=has_batching,
                quantize=None,
                sampling="host",
                exporter=OPTIMUM,
            )
        return cls(
            **common,
            prefill_buckets=lengths("prefill_buckets"),
            position_buckets=lengths("position_buckets"),
            continuous_batching=value("continuous_batching", bool),
            quantize=value("quantize", str, ("int8",)) if section.get("quantize") else None,
            sampling=value("sampling", str, ("host", "device")),
            transformers_neuronx_version=value("transformers_neuronx_version", str),
        )


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
    for setting, limit, unit in (
        ("max_batch_size", programs.batch_size, "slots"),
        ("max_total_tokens", programs.max_total_tokens, "positions"),
        ("max_input_tokens", programs.max_input_tokens, "prompt tokens"),
    ):
        given = getattr(config, setting)
        if given is not None and given > limit:
            raise ConfigError(
                f"{_flag(setting, given)} is more than the {limit} {unit} that {name} was compiled for; give at most {limit}, "
                "or compile it again"
            )
    for setting in ("tp_degree", "dtype", "quantize", "sampling", "prefill_buckets", "position_buckets"):
        given, compiled = getattr(config, setting), getattr(programs, setting)
        is_subset = isinstance(given, tuple) and set(given) <= set(compiled)  # the limits become buckets unasked
        if given not in (None, "auto", compiled) and not is_subset:
            raise ConfigError(
                f"{_flag(setting, given)} contradicts {name}, which was compiled for {_shown(compiled)}; leave it out, "
                "or compile it again"
            )
    total = config.max_total_tokens or programs.max_total_tokens
    return dataclasses.replace(
        config,
        max_batch_size=config.max_batch_size or programs.batch_size,
        max_total_tokens=total,
        max_input_tokens=config.max_input_tokens or min(total - 1, programs.max_input_tokens),
        tp_degree=programs.tp_degree,
        dtype=programs.dtype,
        quantize=programs.quantize,
        sampling=programs.sampling,
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
    if _number(programs.compiler_version) > _number(compiler):
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


def _number(version: str) -> list[int]:
    """The numbers that a version begins with, for comparison."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return numbers


@dataclass(frozen=True)
class Cache:
    """The programs that `serve` compiled, one folder for each set, inside the compiler's own cache folder."""

    folder: Path

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Cache | None:
        """None when NEURON_COMPILE_CACHE_URL is not a local folder: only the compiler can look there."""
        url = environ.get("NEURON_COMPILE_CACHE_URL", "").strip() or CACHE
        scheme, found, path = url.partition("://")
        if found and scheme != "file":
            return None
        return cls(Path(path if found else url) / EXPORTER)

    def find(self, model: str, programs: Programs) -> Path | None:
        """The folder with the programs for a model (`model_key`)."""
        entry = self._entry(model, programs)
        return entry if (entry / "programs.json").is_file() else None

    def missing(self, model: str, programs: Programs) -> str:
        """Why `find` found nothing: the values in which the nearest entry differs."""
        wanted = _plain(programs)
        differences = [
            [
                f"{name} {_shown(value)} instead of {_shown(found.get(name))}"
                for name, value in wanted.items()
                if found.get(name) != value
            ]
            for found in self._records(model)
        ]
        if not differences:
            return f"{self.folder} holds none of this model"
        return f"{self.folder} has programs for other values: {', '.join(min(differences, key=len))}"

    def add(self, model: str, programs: Programs, save: Callable[[str], None]) -> Path:
        """Keeps what `save` writes into a folder. Raises OSError on failure; an incomplete entry is never found."""
        entry = self._entry(model, programs)
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            save(str(made))
            (made / "programs.json").write_text(json.dumps({"model": model, "programs": _plain(programs)}, indent=1))
            made.chmod(0o755)
            self.remove(entry)
            made.rename(entry)
        except BaseException:
            self.remove(made)
            raise
        return entry

    def remove(self, entry: Path) -> None:
        shutil.rmtree(entry, ignore_errors=True)

    def _entry(self, model: str, programs: Programs) -> Path:
        text = json.dumps([model, _plain(programs)], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:20]

    def _records(self, model: str) -> list[dict[str, Any]]:
        records = []
        for path in self.folder.glob("*/programs.json"):
            try:
                record = read_json(path)
                if record["model"] == model:
                    records.append(dict(record["programs"]))
            except (ConfigError, KeyError, TypeError, ValueError):
                continue  # of another version, or not written by this server: no reason not to serve
        return records


def _plain(programs: Programs) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(programs)))


def model_key(checkpoint_config: Mapping[str, Any]) -> str:
    """20 hex digits over the fields of a checkpoint's config.json that its programs depend on."""
    relevant = {name: value for name, value in checkpoint_config.items() if name not in VOLATILE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:20]
