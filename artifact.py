"""Compiled programs on disk: what they were compiled for, where they are kept, and whether they are what was asked for.

A compiled model is a folder: `config.json` with a `neuron` section, tokenizer files, `compiled/` with the programs, and
`checkpoint/` with the weights or the hub id to fetch them by. `compile` makes such a folder, optimum-neuron made such
folders, and what they say is the truth: `agreed` finds what contradicts it. A checkpoint that is served as it is gets its
programs from a `Cache`, which tells what was missing when they are not there. Knows no torch and not the library.
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

COMPILED, CHECKPOINT = "compiled", "checkpoint"  # optimum-neuron's names
OPTIMUM = "optimum-neuron"
OURS = "neuron-textgen"
CACHE = "/var/tmp/neuron-compile-cache"  # where the library keeps its own when nothing is said

# Of a checkpoint's config.json: what changes with who saved it and not with what is computed.
VOLATILE = ("_name_or_path", "architectures", "transformers_version", "torch_dtype", "neuron", "use_cache")


@dataclass(frozen=True)
class Programs:
    """What a set of programs is compiled for. They run nothing else."""

    batch_size: int  # slots
    tp_degree: int
    dtype: str
    prefill_buckets: tuple[int, ...]
    position_buckets: tuple[int, ...]
    continuous_batching: bool
    quantize: str | None
    sampling: str  # host or device
    compiler_version: str
    transformers_neuronx_version: str | None = None  # not told by optimum-neuron
    exporter: str = OURS

    @property
    def max_total_tokens(self) -> int:
        return max(self.position_buckets)

    @property
    def max_input_tokens(self) -> int:
        """Without continuous batching what is left of a prompt after the largest bucket goes token by token."""
        longest = max(self.prefill_buckets) if self.continuous_batching else self.max_total_tokens
        return min(longest, self.max_total_tokens - 1)

    def section(self) -> dict[str, Any]:
        """As in a `config.json`, with optimum-neuron's names for what it has."""
        told = dataclasses.asdict(self)
        told |= {
            "task": "text-generation",
            "num_cores": told.pop("tp_degree"),
            "auto_cast_type": {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[told.pop("dtype")],
            "sequence_length": self.max_total_tokens,
            "compiler_type": "neuronx-cc",
            "exporter_version": configuration.VERSION,
        }
        return told

    @classmethod
    def from_section(cls, told: Mapping[str, Any], source: Path) -> Programs:
        """Raises ConfigError when `told`, the `neuron` section of the file `source`, lacks something."""

        def value(name: str, kind: type) -> Any:
            found = told.get(name)
            if type(found) is not kind or (kind is int and found < 1):
                raise ConfigError(f"{source}: `neuron.{name}` is {found!r}; compile the model again")
            return found

        def lengths(name: str) -> tuple[int, ...]:
            found = value(name, list)
            if not found or any(type(length) is not int or length < 1 for length in found):
                raise ConfigError(f"{source}: `neuron.{name}` is {found!r}; compile the model again")
            return tuple(found)

        if told.get("task", "text-generation") != "text-generation":
            raise ConfigError(f"{source} is of a model that was compiled for {told['task']}, not for text-generation")
        batch_size, length = value("batch_size", int), value("sequence_length", int)
        dtype = DTYPES.get(value("auto_cast_type", str))
        if dtype in (None, "auto"):
            raise ConfigError(f"{source}: `neuron.auto_cast_type` is {told['auto_cast_type']!r}; compile the model again")
        same = {"batch_size": batch_size, "tp_degree": value("num_cores", int), "dtype": dtype}
        same["compiler_version"] = value("compiler_version", str)
        if told.get("exporter") != OURS:
            # It compiles one length of prompt, the whole window; without continuous batching what the library takes by itself.
            batches = batch_size > 1
            positions = [length] if batches else [n for n in _powers_of_two(length) if n < length] + [length]
            prompts = [length] if batches else [n // 2 for n in positions]
            return cls(
                **same,
                prefill_buckets=tuple(prompts),
                position_buckets=tuple(positions),
                continuous_batching=batches,
                quantize=None,
                sampling="host",
                exporter=OPTIMUM,
            )
        return cls(
            **same,
            prefill_buckets=lengths("prefill_buckets"),
            position_buckets=lengths("position_buckets"),
            continuous_batching=value("continuous_batching", bool),
            quantize=told.get("quantize"),
            sampling=value("sampling", str),
            transformers_neuronx_version=value("transformers_neuronx_version", str),
        )


def _powers_of_two(most: int) -> list[int]:
    return [128 << n for n in range(most.bit_length()) if 128 << n <= most]


@dataclass(frozen=True)
class Artifact:
    """A folder with a compiled model."""

    folder: Path
    programs: Programs
    checkpoint_id: str | None  # of the hub, with the commit; None: the weights are in the folder
    checkpoint_revision: str | None

    @classmethod
    def read(cls, folder: Path) -> Artifact | None:
        """None for a folder that holds no compiled model; raises ConfigError for one that is incomplete."""
        source = folder / "config.json"
        told = read_json(source, required=True).get("neuron")
        if told is None:
            return None
        if not isinstance(told, dict):
            raise ConfigError(f"{source}: `neuron` should be an object; compile the model again")
        return cls(
            folder,
            Programs.from_section(told, source),
            checkpoint_id=told.get("checkpoint_id"),
            checkpoint_revision=told.get("checkpoint_revision"),
        )

    @property
    def compiled(self) -> Path:
        return self.folder / COMPILED

    @property
    def checkpoint(self) -> Path | None:
        return self.folder / CHECKPOINT if (self.folder / CHECKPOINT).is_dir() else None


def agreed(config: Config, programs: Programs, name: str) -> Config:
    """`config` with everything that was left open filled in from `programs`.

    Raises ConfigError, naming both values, for a setting that the programs cannot do. Smaller limits are fine.
    """
    for setting, most, what in (
        ("max_batch_size", programs.batch_size, "slots"),
        ("max_total_tokens", programs.max_total_tokens, "positions"),
        ("max_input_tokens", programs.max_input_tokens, "tokens of prompt"),
    ):
        given = getattr(config, setting)
        if given is not None and given > most:
            raise ConfigError(
                f"{_flag(setting, given)} is more than the {most} {what} that {name} was compiled for; give at most {most}, "
                "or compile it again"
            )
    for setting in ("tp_degree", "dtype", "quantize", "sampling", "prefill_buckets", "position_buckets"):
        given, compiled = getattr(config, setting), getattr(programs, setting)
        is_some = isinstance(given, tuple) and set(given) <= set(compiled)  # the limits are buckets unasked
        if given not in (None, "auto", compiled) and not is_some:
            raise ConfigError(
                f"{_flag(setting, given)} contradicts {name}, which was compiled for {_told(compiled)}; leave it out, "
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
    return f"{configuration.flag_name(entry)} {_told(value)} ({', '.join(entry.metadata['names'])})"


def _told(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def check_versions(programs: Programs, compiler: str, library: str, name: str) -> None:
    """Programs of a newer compiler do not run on an older runtime, and the library finds only its own. `compiler` and
    `library` are the versions that are here.

    Raises ConfigError with both versions.
    """
    if _number(programs.compiler_version) > _number(compiler):
        raise ConfigError(
            f"{name} was compiled by neuronx-cc {programs.compiler_version}, and here is {compiler}, which is older; use an "
            "image with the newer one, or compile it again"
        )
    compiled_with = programs.transformers_neuronx_version
    if compiled_with not in (None, library):
        raise ConfigError(
            f"{name} was compiled with transformers-neuronx {compiled_with}, and here is {library}; use an image with the same "
            "one, or compile it again"
        )


def _number(version: str) -> list[int]:
    """For comparing: the numbers that a version begins with."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return numbers


@dataclass(frozen=True)
class Cache:
    """The programs that `serve` compiled, one folder for each set, below where the compiler keeps its own."""

    folder: Path

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Cache | None:
        """None when NEURON_COMPILE_CACHE_URL is not on this machine's disks: the compiler alone looks there."""
        url = environ.get("NEURON_COMPILE_CACHE_URL", "").strip() or CACHE
        scheme, found, path = url.partition("://")
        if found and scheme != "file":
            return None
        return cls(Path(path if found else url) / OURS)

    def find(self, model: str, programs: Programs) -> Path | None:
        """The folder with the programs for a model (`model_key`)."""
        entry = self._entry(model, programs)
        return entry if (entry / "programs.json").is_file() else None

    def missing(self, model: str, programs: Programs) -> str:
        """Why `find` found nothing: what differs from the nearest that is there."""
        wanted = _plain(programs)
        others = [told["programs"] for told in self._records() if told["model"] == model]
        if not others:
            return f"{self.folder} holds none of this model"
        nearest = min(others, key=lambda told: len(_differing(told, wanted)))
        differences = [
            f"{name} {_told(wanted[name])} instead of {_told(nearest.get(name))}" for name in _differing(nearest, wanted)
        ]
        return f"{self.folder} has them for other values: {', '.join(differences)}"

    def add(self, model: str, programs: Programs, save: Callable[[str], None]) -> Path:
        """Keeps what `save` writes into a folder. Raises OSError where that cannot be; half of it is never found."""
        entry = self._entry(model, programs)
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            save(str(made))
            (made / "programs.json").write_text(json.dumps({"model": model, "programs": _plain(programs)}, indent=1))
            made.chmod(0o755)
            shutil.rmtree(entry, ignore_errors=True)
            made.rename(entry)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return entry

    def remove(self, entry: Path) -> None:
        shutil.rmtree(entry, ignore_errors=True)

    def _entry(self, model: str, programs: Programs) -> Path:
        text = json.dumps([model, _plain(programs)], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:20]

    def _records(self) -> list[dict[str, Any]]:
        records = []
        for path in self.folder.glob("*/programs.json"):
            try:
                told = read_json(path)
                records.append({"model": told["model"], "programs": dict(told["programs"])})
            except (ConfigError, KeyError, TypeError, ValueError):
                continue  # of another version, or not ours: no reason not to serve
        return records


def _plain(programs: Programs) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(programs)))


def _differing(told: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [name for name in wanted if told.get(name) != wanted[name]]


def model_key(told: Mapping[str, Any]) -> str:
    """What of a checkpoint's config.json the programs depend on, in 20 digits."""
    same = {name: value for name, value in told.items() if name not in VOLATILE}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:20]
