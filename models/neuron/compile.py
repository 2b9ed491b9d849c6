"""The subcommand `compile`: writes a folder with a compiled model, which `serve` loads in seconds and never
compiles.

Owns what such a folder holds apart from the graphs: the manifest, the tokenizer, and the weights of a local
model. The settings go to `build.BuildPlan`, which decides what is compiled. Needs no device.

    python3 -m models.neuron.compile --model-id X --output DIR [flags]
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

import config as configuration
from config import Config
from manifest import WEIGHTS, Manifest
from models.cache import renamed_when_complete
from models.checkpoint.fetch import OTHER_FORMAT, copy_metadata
from models.checkpoint.source import fetch_source
from models.errors import ModelError, reject_by_config
from models.machine import detect
from models.neuron import Neuron, artifact, plan
from models.neuron.build import BuildPlan, make_compiled
from run import ConfigError

logger = logging.getLogger("compile")


def compile_model(config: Config, output: Path) -> None:
    """Compiles a model into the folder `output`, which is new or empty, with all that `serve` needs to load
    it. Takes minutes, and downloads a model on the hub first. The folder appears when it is complete. It
    names a model on the hub by its id and commit; weights that are local, or were converted, are in it, as
    hard links where possible.

    Raises ConfigError for an `output` that is not empty, is a link or a mount point, or cannot be written;
    for a model that is compiled already; for a machine without a device if --tp-degree is not given; for
    --lora-adapters. Raises ConfigError or ModelError for a model that cannot be compiled.
    """
    if config.lora_adapters:
        raise ConfigError(f"--lora-adapters (LORA_ADAPTERS): {plan.ADAPTERS_ELSEWHERE}")
    with _writing(output):
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"--output {output} exists and is not empty; name another folder, or remove it")
        if output.is_symlink() or output.is_mount():  # cannot be replaced by the finished folder
            raise ConfigError(f"--output {output} is a symbolic link or a mount point; name a folder in it")
    config, folder, commit = fetch_source(config, Neuron)
    if folder.name != commit:  # not as the hub has it: from a GGUF file, dequantized, or with an adapter
        commit = None
    manifest = Manifest.read(folder)
    if manifest.is_compiled:
        raise ConfigError(
            f"{config.model_name} is compiled already; give the checkpoint that it was made from"
        )
    reject_by_config(manifest.config_json)
    if detect() is None and not config.tp_degree:
        raise ConfigError(
            "this machine has no Neuron device whose cores could be counted; give --tp-degree (TP_DEGREE)"
        )
    build = BuildPlan.decide(config, folder, manifest)
    with (
        _writing(output),
        tempfile.TemporaryDirectory() as work_dir,
        renamed_when_complete(output) as staging,
    ):
        failure = f"{config.model_name} cannot be compiled"
        model, build = make_compiled(build, Path(work_dir), lambda model: model.cpu_compile(), failure)
        model.save(str(staging / artifact.COMPILED))
        _write_model(build, manifest, staging, commit)
    logger.info("Compiled %s into %s; serve it with --model-id %s", config.model_name, output, output)


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turns an OSError of the body into a ConfigError that names --output."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from None


def _write_model(build: BuildPlan, manifest: Manifest, target: Path, commit: str | None) -> None:
    """Writes everything but the graphs into the folder `target`: tokenizer files, a config.json with the
    section about the graphs that are there already, and the weights. If `commit` is given, no weights are
    written, but the hub id and commit to download them by. May download the checkpoint. Raises OSError if a
    file cannot be written, ModelError as `BuildPlan.checkpoint` does."""
    checkpoint = build.checkpoint()
    copy_metadata(checkpoint, target)
    if commit is None:
        weights = target / artifact.CHECKPOINT
        weights.mkdir()
        shutil.copyfile(checkpoint / "config.json", weights / "config.json")
        for path in {path for pattern in WEIGHTS for path in checkpoint.glob(pattern)}:
            if path.is_file() and not path.name.startswith(OTHER_FORMAT):
                place = weights / path.relative_to(checkpoint)
                place.parent.mkdir(exist_ok=True)
                _link(path, place)
    section = dataclasses.asdict(build.compiled_config)
    section["checkpoint_id"] = build.config.model_id if commit else None
    section["checkpoint_revision"] = commit
    section["files"] = artifact.checksums(target / artifact.COMPILED)
    (target / "config.json").write_text(json.dumps({**manifest.config_json, "neuron": section}, indent=2))


def _link(source: Path, target: Path) -> None:
    """Makes `target` a hard link to the file `source`, so that weights take no space twice, or a copy where
    no hard link is possible, as on another file system. Raises OSError."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


USAGE = """entrypoint.sh compile --model-id X --output DIR [flags]

Compiles a model for Inferentia2 or Trainium into the folder DIR, with or without a device on this machine;
then `serve --model-id DIR` loads it in seconds and never compiles. The flags are those of `serve`
(entrypoint.sh --help lists them); these decide what is compiled: --max-batch-size --max-total-tokens
--max-batch-total-tokens --prefill-buckets --position-buckets --prefill-chunk --speculate --tp-degree
--dtype --quantize --sampling --neuron-config --kv-cache-dtype --max-snapshot-memory.
The weights of a local model are put into DIR, those of a hub model are downloaded by its id."""


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand with these arguments, which have no program name; the environment has settings,
    too. Sets up the log. Returns the exit code: 0, or 2 after one line on stderr for settings or a model that
    cannot be compiled. --help raises SystemExit."""
    parser = configuration.Parser(usage=USAGE, allow_abbrev=False)
    parser.add_argument("--output", metavar="DIR", help="a folder that does not exist, or is empty")
    try:
        options, flags = parser.parse_known_args(argv)
        if not options.output:
            raise ConfigError("--output is missing: the folder for the compiled model")
        config = configuration.parse(flags, os.environ)
        config.set_up_log()
        if config.device not in ("auto", "neuron"):
            raise ConfigError(f"--device {config.device}: only models for Neuron are compiled; leave it out")
        compile_model(config, Path(options.output).expanduser())
    except (ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
