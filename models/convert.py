"""Converts a model, as a program.

python -m models.convert FOLDER TARGET < CONFIG.json     a model; CONFIG as `Config.to_json` writes it
python -m models.convert --check FOLDER < CONFIG.json    whether its config.json can be served
python -m models.convert --ahead                         the model of the settings, into the cache
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from pathlib import Path

import models
from config import Config, parse
from manifest import Manifest
from models.cache import (
    CANNOT_SERVE,
    CANNOT_WRITE,
    CannotWrite,
    NotConverted,
    ends_conversion,
    write_entry,
    write_rejection,
)
from models.errors import is_out_of_memory, named
from models.openvino import with_dtype
from run import die_with_parent

logger = logging.getLogger("model")


def main(arguments: list[str]) -> int:
    """Runs the program with the arguments of its command line; the settings come from stdin or, with --ahead,
    from the environment. Turns Python's warnings off in this process. Returns the exit code: 0, CANNOT_SERVE,
    CANNOT_WRITE, ENOMEM if memory ran out, or 1 for another OSError. Prints the reason to stdout, but not for
    lack of memory. Raises any other exception."""
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
            config.set_up_log()
            convert(config, Path(arguments[0]), Path(arguments[1]))
    except Exception as error:
        if is_out_of_memory(error):
            return errno.ENOMEM
        if not ends_conversion(error):
            raise
        print(error)
        if isinstance(error, OSError):
            return CANNOT_WRITE if isinstance(error, CannotWrite) else 1
        return CANNOT_SERVE
    return 0


def convert(config: Config, folder: Path, target: Path) -> None:
    """Fills `target` with the entry of the model in `folder`. If the model does not convert, the entry has
    the reason, and nothing is raised. A GGUF file is converted without torch and transformers, which other
    checkpoints need.

    Raises ModelError or ConfigError for what no engine can serve, CannotWrite or another OSError for files,
    and any error that says that memory could not be allocated.
    """
    manifest = Manifest.read(folder)
    if manifest.gguf_file:
        from models.openvino.gguf import write_graph
    else:
        from models.openvino.convert import write_graph
    try:
        facts = write_graph(with_dtype(config, manifest), manifest, folder, target)
    except Exception as error:
        if ends_conversion(error):
            raise
        logger.debug("not converted", exc_info=True)
        cause = error.__cause__ or error  # OpenVINO wraps what a model raises
        write_rejection(target, str(error) if type(error) is NotConverted else named(cause))
    else:
        write_entry(target, facts)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
