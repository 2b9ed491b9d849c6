"""The verb `compile`: writes a folder with a compiled model, which `serve` loads in seconds and never compiles.

Owns what such a folder holds apart from the programs: the manifest, the tokenizer, and the weights of a local model. Hands
the settings to `neuron.Build`, which decides what is compiled. Knows nothing of requests, and needs no device.

    python3 -m models.compile --model-id X --output DIR [flags]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import config as configuration
from config import Config, ConfigError, Manifest, read_json
from models import artifact
from models.base import ModelError, progress_logged, reported_as
from models.fetch import fetch
from models.machine import detect
from models.neuron import PROGRESS_S, Build, DeviceSampling, compiling, explain, make

logger = logging.getLogger("compile")


def compile_model(config: Config, output: Path) -> None:
    """Compiles a model into the folder `output`, with everything that `serve` needs to load it.

    Works with and without a device. Raises ConfigError or ModelError.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists and is not empty; name another folder, or remove it")
    folder, commit = fetch(config)
    manifest = Manifest.read(folder)
    if manifest.is_compiled:
        raise ConfigError(f"{config.model_name} is compiled already; give the checkpoint that it was made from")
    if detect() is None and not config.tp_degree:
        raise ConfigError("this machine has no Neuron device whose cores could be counted; give --tp-degree (HF_NUM_CORES)")
    build = Build.decide(config, folder, manifest)
    if not build.family.is_saved:
        raise ModelError(f"the library cannot save compiled {manifest.model_type} models; serve them without compiling first")
    parameters = DeviceSampling(build) if build.programs.sampling == "device" else None
    with tempfile.TemporaryDirectory() as work_dir, _renamed_when_complete(output) as staging:
        model = make(build, Path(work_dir), parameters)
        failure = f"{config.model_name} cannot be compiled"
        with compiling(build), progress_logged("compiling", PROGRESS_S), reported_as(failure, explain):
            model.cpu_compile()
        model.save(str(staging / artifact.COMPILED))
        _write_model(build, staging, commit)
    logger.info("Compiled %s into %s; serve it with --model-id %s", config.model_name, output, output)


@contextlib.contextmanager
def _renamed_when_complete(output: Path) -> Iterator[Path]:
    """A temporary folder that becomes `output` at the end: `serve` would take half a model for a whole one."""
    staging = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        yield staging
        staging.chmod(0o755)
        if output.is_dir():
            output.rmdir()
        staging.rename(output)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from None
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)


def _write_model(build: Build, target: Path, commit: str | None) -> None:
    """Everything but the programs: tokenizer files, the weights of a local model, and what was compiled."""
    checkpoint = build.checkpoint()
    weights = {path for path in checkpoint.iterdir() if path.name.endswith((".safetensors", ".bin", ".index.json"))}
    for path in checkpoint.iterdir():
        if path.is_file() and path not in weights:
            shutil.copyfile(path, target / path.name)
    if commit is None:
        (target / artifact.CHECKPOINT).mkdir()
        for path in {*weights, checkpoint / "config.json"}:
            _link_or_copy(path.resolve(), target / artifact.CHECKPOINT / path.name)
    section = build.programs.section() | {
        "checkpoint_id": build.config.model_id if commit else None,
        "checkpoint_revision": commit,
    }
    manifest = read_json(checkpoint / "config.json", required=True) | {"neuron": section}
    (target / "config.json").write_text(json.dumps(manifest, indent=2))


def _link_or_copy(source: Path, target: Path) -> None:
    """Within one file system the weights take no space twice."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


HELP = """\
Usage: entrypoint.sh compile --model-id X --output DIR [flags]

Compiles a model for Inferentia2 or Trainium into the folder DIR, with or without a device on this machine; then
`serve --model-id DIR` loads it in seconds and never compiles. The flags are those of `serve` (--help lists them); these
decide what is compiled: --max-batch-size --max-total-tokens --max-input-tokens --prefill-buckets --position-buckets
--tp-degree --dtype --quantize --sampling. The weights of a local model are put into DIR, those of a hub model are
downloaded by its id."""


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output", nargs="?")
    options, flags = parser.parse_known_args(argv)
    try:
        if not options.output:
            raise ConfigError("--output is missing: the folder for the compiled model")
        config = configuration.parse(flags, os.environ)
        configuration.set_up_logging(config.json_output)
        if config.device not in ("auto", "neuron"):
            raise ConfigError(f"--device {config.device}: only models for Neuron are compiled; leave it out")
        compile_model(dataclasses.replace(config, device="neuron"), Path(options.output).expanduser())
    except (ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
