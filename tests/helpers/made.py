"""What tests make once, in one process of a run, for the others and for later runs: tiny checkpoints, what they are converted
into, and what transformers generates from them.

It is kept beside the environment, in a folder that is named by all that decides what is made: the code of models/ and of the
tests' own helpers, the versions of the packages, and the processor. `make clean` removes it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from models.cache import digest, identify, installed, locked, renamed_when_complete
from run import HERE

PACKAGES = ("torch", "transformers", "tokenizers", "openvino", "nncf", "numpy", "safetensors")
DAY_S = 24 * 3600


def _processor() -> list[str]:
    """Its instruction sets decide how numbers are rounded."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        lines += [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    return lines


def _folder() -> Path:
    code = [*identify(HERE, ("config.py", "manifest.py")), *identify(HERE / "models", ("*.py", "*/*.py"))]
    helpers = identify(HERE / "tests" / "helpers", ("made.py", "tiny_models.py", "vision_models.py"))
    helpers += identify(HERE / "tests" / "published", ("*.py",))
    name = digest([code, helpers, [installed(package) for package in PACKAGES], _processor()])
    folder = Path(sys.prefix) / "made" / name
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in folder.parent.iterdir():  # of other code; not of a run that may still go on
            if other.stat().st_mtime < time.time() - DAY_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


FOLDER = _folder()


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` has filled: in this process, in another one, or in an earlier run. Its parent is its own, so that
    what is made of it may lie beside it."""
    target = FOLDER / name / "model"
    if not target.exists():
        with locked(target.with_name("lock"), "making"):
            if not target.exists():
                with renamed_when_complete(target) as new:
                    make(new)
    return target


def value(name: str, make: Callable[[], object]):
    """The same for a value that JSON can hold."""
    folder = once(name, lambda new: (new / "value.json").write_text(json.dumps(make())))
    return json.loads((folder / "value.json").read_text())
