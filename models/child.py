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
    """Returns the message as one escaped line of at most MAX_MESSAGE characters; a longer one loses its
    middle. Files may have a say in such messages."""
    line = escaped(message, 100_000)
    half = MAX_MESSAGE // 2 - 3
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


class ChildError(RuntimeError):
    """A child process that failed. The message is the last line that the child printed, `shortened`; for a
    child that was ended by a signal, or printed nothing, it says so. `code`: the exit code; below 0, the
    negative number of the signal."""

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
    """Runs `python -m` with these arguments in a child process, and waits for its end. Returns what it prints
    to stdout. stdin: the text that it reads; niceness: how far the child stands back behind other processes;
    environ: variables beside those of this process.

    logs_to_stderr: the child logs to the stderr of this process, and its last line on stdout is the reason of
    a failure; else the reason is its last line on stderr, and its stderr is not shown. Raises ChildError for
    any exit code but 0, and subprocess.TimeoutExpired after `timeout_s`, when the child has been killed.
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
