"""Converts a model, as a program.

python -m models.convert FOLDER TARGET < CONFIG.json     a model; CONFIG as `Config.to_json` writes it
python -m models.convert --check FOLDER < CONFIG.json    whether its config.json can be served
python -m models.convert --ahead                         the model of the settings, into the cache
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import logs
import models
from config import Config, parse
from manifest import Manifest
from models.cache import (
    CANNOT_SERVE,
    CANNOT_WRITE,
    OUT_OF_MEMORY_CODE,
    CannotWrite,
)
from models.errors import ModelError, is_out_of_memory
from run import ConfigError, die_with_parent


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")  # between libraries, about how they call each other
    try:
        if arguments == ["--ahead"]:
            prepared = models.prepare(parse([], os.environ))
            prepared.fetch_weights()
            models.load(prepared, lambda phase: None)
        elif arguments[0] == "--check":
            from models.checkpoint.architecture import read_architecture

            read_architecture(Config.from_json(sys.stdin.read()), Path(arguments[1]))
        else:
            config = Config.from_json(sys.stdin.read())
            logs.set_up(config.log_level, config.json_output)
            _convert(config, Path(arguments[0]), Path(arguments[1]))
    except Exception as error:
        if is_out_of_memory(error):
            return OUT_OF_MEMORY_CODE
        if not isinstance(error, (ConfigError, ModelError, OSError)):
            raise
        print(error)
        if isinstance(error, OSError):
            return CANNOT_WRITE if isinstance(error, CannotWrite) else 1
        return CANNOT_SERVE
    return 0


def _convert(config: Config, folder: Path, target: Path) -> None:
    """Fills `target` with the entry of a model. A GGUF file is converted without torch and transformers,
    which other checkpoints need."""
    if Manifest.read(folder).gguf_file:
        from models.openvino.gguf import convert
    else:
        from models.openvino.convert import convert
    convert(config, folder, target)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
