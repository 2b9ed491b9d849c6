"""A Python module in a child process: its imports and its memory are released at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from run import HERE


class ChildError(RuntimeError):
    """A child process that failed; the message is the last line that it printed. `code`: its exit code."""

    def __init__(self, code: int, lines: Sequence[str]):
        super().__init__(lines[-1] if lines else f"the process ended with code {code}")
        self.code = code


def run_module(
    arguments: Sequence[str],
    stdin: str = "",
    logs_to_stderr: bool = False,
    timeout_s: float | None = None,
    **environ: str,
) -> str:
    """What `python -m` prints with these arguments. `logs_to_stderr`: its stderr is the log, and it prints
    the reason of a failure. `environ`: variables beside those of this process.

    Raises ChildError, and subprocess.TimeoutExpired after `timeout_s`.
    """
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=None if logs_to_stderr else subprocess.PIPE,
        text=True,
        cwd=HERE,
        env=os.environ | environ,
        timeout=timeout_s,
    )
    if done.returncode:
        printed = done.stdout if logs_to_stderr else done.stderr
        raise ChildError(done.returncode, printed.strip().splitlines())
    return done.stdout
