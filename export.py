"""The verb `compile`: makes a folder of a compiled model, which `serve` loads in seconds and never compiles.

Owns what such a folder holds beside the programs: the manifest, the tokenizer, and the weights of a local model.

    python3 export.py --model-id X --output DIR [flags]
"""

from __future__ import annotations

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

import artifact
import config as configuration
import plan
from artifact import Artifact
from config import Config, ConfigError, Manifest, read_json
from model import ModelError, fetch, reported_as, still_at_it
from neuron_model import PROGRESS_S, Build, DeviceSampling, compiling, explain, make

logger = logging.getLogger("compile")


def export(config: Config, output: Path) -> None:
    """Compiles a model into the folder `output`, with what `serve` needs to load it and never compile.

    Without a device it is compiled as well. Raises ConfigError or ModelError.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is there and not empty; name another folder, or remove it")
    folder, commit = fetch(config)
    manifest = Manifest.read(folder)
    if Artifact.read(folder):
        raise ConfigError(f"{config.model_name} is compiled already; give the checkpoint that it was made from")
    if plan.detect() is None and not config.tp_degree:
        raise ConfigError("there is no Neuron device here whose cores could be counted; give --tp-degree (HF_NUM_CORES)")
    build = Build.decide(config, folder, manifest)
    if not build.family.is_saved:
        raise ModelError(f"the library cannot save compiled {manifest.model_type} models; serve them as they are")
    with tempfile.TemporaryDirectory() as work_dir, _beside(output) as made:
        model = make(build, Path(work_dir), DeviceSampling(build) if build.programs.sampling == "device" else None)
        with compiling(build), still_at_it("compiling", PROGRESS_S), reported_as("it cannot be compiled", explain):
            model.cpu_compile()
        model.save(str(made / artifact.COMPILED))
        _write_model(build, made, commit)
    logger.info("Compiled %s into %s; serve it with --model-id %s", config.model_name, output, output)


@contextlib.contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A folder that becomes `output` when all went well: half a model would be taken for a whole one."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from None
    try:
        yield made
        made.chmod(0o755)
        if output.is_dir():
            output.rmdir()
        made.rename(output)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_model(build: Build, made: Path, commit: str | None) -> None:
    """All but the programs: what the tokenizer needs, the weights of a local model, and what it was compiled for."""
    checkpoint = build.checkpoint()
    weights = {path for path in checkpoint.iterdir() if path.name.endswith((".safetensors", ".bin", ".index.json"))}
    for path in checkpoint.iterdir():
        if path.is_file() and path not in weights:
            shutil.copyfile(path, made / path.name)
    if commit is None:
        (made / artifact.CHECKPOINT).mkdir()
        for path in {*weights, checkpoint / "config.json"}:
            _link_or_copy(path.resolve(), made / artifact.CHECKPOINT / path.name)
    section = build.programs.section() | {
        "checkpoint_id": build.config.model_id if commit else None,
        "checkpoint_revision": commit,
    }
    told = read_json(checkpoint / "config.json", required=True) | {"neuron": section}
    (made / "config.json").write_text(json.dumps(told, indent=2))


def _link_or_copy(source: Path, target: Path) -> None:
    """On one file system weights are not there twice."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


HELP = """\
Usage: entrypoint.sh compile --model-id X --output DIR [flags]

Compiles a model for Inferentia2 or Trainium into the folder DIR, with or without a device on this machine; then
`serve --model-id DIR` loads it in seconds and never compiles. The flags are those of `serve` (--help lists them); what a
program is compiled for are: --max-batch-size --max-total-tokens --max-input-tokens --prefill-buckets --position-buckets
--tp-degree --dtype --quantize --sampling. The weights of a local model are put into DIR, those of a hub model are fetched
by its id."""


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    try:
        output, rest = _output(argv)
        config = configuration.parse(rest, os.environ)
        configuration.set_up_logging(config.json_output)
        if config.device not in ("auto", "neuron"):
            raise ConfigError(f"--device {config.device}: programs are compiled for Neuron alone; leave it out")
        export(dataclasses.replace(config, device="neuron"), output)
    except (ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _output(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """The value of --output, and the other words."""
    rest, found = [], None
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--output":
            found = words.pop(0) if words else ""
        elif word.startswith("--output="):
            found = word.partition("=")[2]
        else:
            rest.append(word)
    if not found:
        raise ConfigError("--output is missing: the folder for the compiled model")
    return Path(found).expanduser(), rest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
