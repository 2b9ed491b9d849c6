"""A run of the server: its private folder and its socket, and what its processes need of the machine.

Owns `ConfigError`, the limits of this process that are too low for any model, and the lines that explain a
full disk or exhausted memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

Json = dict[str, Any]  # a JSON object, in annotations

HERE = Path(__file__).resolve().parent

PARENT = "NEURON_TEXTGEN_PARENT"  # environment variable: the id of the process that started this one
SOCKET = "worker.sock"  # in the folder of a run
MAX_SOCKET_NAME = 107  # bytes; the kernel's limit
MIN_FILES = 256  # open files of a process that serves a few connections
MIN_ADDRESS_SPACE = 2_000_000_000  # bytes; the demonstration model takes 1.4 GB
OTHER_FOLDERS = "name another folder with TMPDIR, --model-cache (MODEL_CACHE) or NUMBA_CACHE_DIR"
REMEDIES = {
    errno.ENOSPC: f"free space, or {OTHER_FOLDERS}",
    errno.EDQUOT: f"free space, or {OTHER_FOLDERS}",
    errno.EROFS: OTHER_FOLDERS,
    errno.ENAMETOOLONG: OTHER_FOLDERS,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "use a machine or container with more memory, or raise its limit (ulimit -v)",
}


class ConfigError(Exception):
    """A setting, a model folder or a machine that cannot be used; the message is one line for the user."""


def run_dir() -> Path:
    """The private folder of this run: the resolved configuration and the socket between the processes. Raises
    KeyError outside of a run, where entrypoint.sh has not named the folder."""
    return Path(os.environ["NEURON_TEXTGEN_RUN_DIR"])


def socket_address() -> str:
    return f"ipc://{run_dir() / SOCKET}"


def die_with_parent() -> None:
    """Makes the kernel kill this process (SIGKILL) when its parent dies: no process may survive and hold the
    device.

    Raises SystemExit if the parent that the variable PARENT names has died already: the kernel only looks at
    the present parent, which may be process 1 of a container. Sets PARENT to this process's id, for the
    processes that this one starts.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    parent = str(os.getppid())
    if os.environ.get(PARENT, parent) != parent:
        raise SystemExit(f"error: process {os.environ[PARENT]}, which started this one, has ended")
    os.environ[PARENT] = str(os.getpid())  # for the processes that this one starts


def check_private(folder: Path, name: str) -> None:
    """Raises ConfigError if another user owns the folder or may write to it: its files are trusted. A folder
    that is missing or cannot be looked at passes. name: what the error calls the folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        status = folder.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{name} belongs to user {status.st_uid}, not to user {os.geteuid()}; give another folder"
            )
        if status.st_mode & 0o022:
            raise ConfigError(
                f"{name} can be written to by other users; chmod 700 it, or give another folder"
            )


def check_process_limits(run_dir: Path) -> None:
    """Raises ConfigError if this process may have fewer than MIN_FILES open files or MIN_ADDRESS_SPACE bytes
    of address space, or if the path of the socket in `run_dir` has more than MAX_SOCKET_NAME bytes. Changes
    no limit."""
    excess = len(os.fsencode(run_dir / SOCKET)) - MAX_SOCKET_NAME
    if excess > 0:
        raise ConfigError(
            f"{run_dir.parent}: the path is {excess} bytes too long for a folder with a socket; "
            "name another with TMPDIR"
        )
    for kind, least, what in (
        (resource.RLIMIT_NOFILE, MIN_FILES, "open files (ulimit -n)"),
        (resource.RLIMIT_AS, MIN_ADDRESS_SPACE, "bytes of address space (ulimit -v)"),
    ):
        limit, _hard = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and limit < least:
            raise ConfigError(
                f"this process may have {limit} {what}, and the server needs at least {least}; "
                "raise the limit"
            )


def explained(error: OSError | MemoryError, where: str | None = None) -> str | None:
    """Returns one line with the exhausted resource of the machine and the remedy; None for an error whose
    number is not in REMEDIES. A MemoryError counts as ENOMEM. The line begins with the path of a file, if one
    is known.

    where: the path in the line; None: the path that the error itself names, if it names one.
    """
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number not in REMEDIES:
        return None
    line = f"{os.strerror(number)}; {REMEDIES[number]}"
    file = where or getattr(error, "filename", None)
    return f"{file}: {line}" if file else line


def trim_memory() -> None:
    """Gives free memory back to the system, in about 10 ms; nothing with another C library than glibc. glibc
    keeps half as much again as a large tokenizer takes."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
