"""A Python module in a child process: its imports and its memory are released at its end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from logs import escaped
from run import HERE

MAX_MESSAGE = 200  # characters


def shortened(message: object) -> str:
    """One line of at most MAX_MESSAGE characters, of a message in which files may have a say; its middle is
    left out."""
    line = escaped(message, 100_000)
    half = MAX_MESSAGE // 2 - 3
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


class ChildError(RuntimeError):
    """A child process that failed; the message is the last line that it printed, of which the middle is left
    out where it is long. `code`: its exit code."""

    def __init__(self, code: int, lines: Sequence[str]):
        line = lines[-1] if lines else f"the process ended with code {code}"
        if code < 0:
            line = f"the process was ended by {signal.Signals(-code).name}"
        super().__init__(shortened(line))
        self.code = code

    @property
    def is_of_machine(self) -> bool:
        """Whether the process was ended by a signal, or had no memory."""
        return self.code < 0 or self.code == errno.ENOMEM


def run_module(
    arguments: Sequence[str],
    stdin: str = "",
    logs_to_stderr: bool = False,
    timeout_s: float | None = None,
    niceness: int = 0,
    **environ: str,
) -> str:
    """What `python -m` prints with these arguments. `logs_to_stderr`: its stderr is the log, and it prints
    the reason of a failure. `niceness`: how far it stands back behind other processes. `environ`: variables
    beside those of this process.

    Raises ChildError, and subprocess.TimeoutExpired after `timeout_s`.
    """
    done = subprocess.run(
        ["nice", f"-n{niceness}", sys.executable, "-m", *arguments],
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
