"""Functions that run in child processes with limits on processor time, time and memory, for work that clients
can make expensive.

`SandboxedFunction` is the parent's side: a request goes to an idle child, and a child that exceeded a limit
is replaced. It names the function as `module:maker`; `maker(*setup)` runs once in each child and returns the
function, which takes a JSON value and returns a text or bytes, or raises `Rejected`.

A child reads requests from its standard input until that ends, each as four bytes of length and JSON. It
writes an ANSWER for each, and the result or the reason of a rejection, texts in UTF-8.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pkgutil
import posix
import resource
import signal
import struct
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run import HERE, trim_memory

CHILD = "import sys; sys.path[0] = sys.argv[1]; from text.limited import main; main(sys.argv[2])"
ANSWER = struct.Struct(">??I")  # whether the request is rejected; whether a text follows, and its bytes
WALL_S = 30.0  # many times what a request takes on a busy machine
# What Python needs to start, and what shows to which run a process belongs: no keys.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "NEURON_TEXTGEN_RUN_DIR")
# One heap and one thread: each takes a part of the address space, however little of it is used.
ONE_THREAD = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}


class Rejected(Exception):
    """The function rejects a request; the message is for the client."""


class LimitExceeded(Exception):
    """A request exceeded a limit; the message says which, as in "takes longer than 1 s of processor
    time"."""


class SandboxedFunction:
    """A function that runs in child processes. Threads may share it: each call has a child for itself.

    maker, setup: how a child makes the function; see the top of this file. cpu_s: seconds of processor time
    for one request. memory_bytes: memory of one request, beyond what a child has before its first request. A
    request and the start of a child may also take WALL_S seconds at most, because a child that waits takes no
    processor time. No child starts before `start` or the first call; there are as many children as calls ran
    at the same time, and none is ended while idle.
    """

    def __init__(
        self,
        maker: str,
        setup: Sequence[Any],
        *,
        cpu_s: float,
        memory_bytes: int,
    ):
        self._arguments = json.dumps([maker, setup, cpu_s, memory_bytes, WALL_S])
        self._reasons = {
            -signal.SIGPROF: f"takes longer than {cpu_s:g} s of processor time",
            -signal.SIGALRM: f"takes longer than {WALL_S:g} s",
            errno.ENOMEM: f"needs more than {memory_bytes // 2**20} MiB of memory",
        }
        self._reasons[-signal.SIGABRT] = self._reasons[errno.ENOMEM]  # so does Rust end where it gets none
        self._idle: deque[_Child] = deque()  # as many as threads have called at the same time

    def start(self) -> None:
        """Starts a child, so that the next request does not start one. Returns at once: the child makes the
        function meanwhile. Raises OSError if no process can be started."""
        self._idle.append(_Child(self._arguments))

    def __call__(self, request: Any) -> Any:
        """Runs the function in a child, and returns its text or bytes. request: a JSON value. Waits for the
        child, and starts one if none is idle.

        Raises Rejected if the function does, with its message; LimitExceeded if the child exceeds a limit or
        ends for another reason, such as another error of the function, and then starts a new child without
        waiting for it; RecursionError for a request that is nested too deeply; OSError if no process can be
        started.
        """
        written = json.dumps(request).encode()  # raises before a child is taken
        child = self._take()
        answer = child.ask(written)
        if answer is None:
            code = child.end()
            self.start()
            raise LimitExceeded(self._reasons.get(code, f"ended its process (code {code})"))
        self._idle.append(child)
        is_rejected, result = answer
        if is_rejected:
            raise Rejected(result)
        return result

    def _take(self) -> _Child:
        """Returns an idle child that still runs, or a new one. The caller must put it back into `_idle`."""
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.is_alive:
                    return child
        return _Child(self._arguments)


class _Child:
    """The parent's end of a child, for one thread at a time.

    A child is started and waited for in threads beside an event loop. The loop's library replaces functions
    of `os` by its own. The functions of `posix` are the real ones.
    """

    def __init__(self, arguments: str):
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD
        command = [sys.executable, "-c", CHILD, str(HERE), arguments]
        pipes: list[int] = []  # which no other process inherits
        try:
            pipes += posix.pipe()
            pipes += posix.pipe()
            requests, self._requests, self._answers, answers = pipes
            streams = [(os.POSIX_SPAWN_DUP2, requests, 0), (os.POSIX_SPAWN_DUP2, answers, 1)]
            self._pid = posix.posix_spawn(sys.executable, command, environment, file_actions=streams)
        except OSError:
            for end in pipes:
                posix.close(end)
            raise
        posix.close(requests)
        posix.close(answers)
        self._reader = open(self._answers, "rb", closefd=False)  # noqa: SIM115

    @property
    def is_alive(self) -> bool:
        """Whether the child runs. The first False reaps the child and closes its pipes; it must not be used
        after that."""
        if posix.waitpid(self._pid, os.WNOHANG) == (0, 0):
            return True
        self._close()
        return False

    def ask(self, request: bytes) -> tuple[bool, str | bytes] | None:
        """Sends a request, and waits for the answer. Returns whether the request is rejected, and the result
        or the reason; None if the child has ended, which `end` must then reap."""
        unsent = memoryview(len(request).to_bytes(4, "big") + request)
        with contextlib.suppress(BrokenPipeError, struct.error):  # the latter: nothing is there to unpack
            while unsent:
                unsent = unsent[posix.write(self._requests, unsent) :]
            is_rejected, is_text, length = ANSWER.unpack(self._reader.read(ANSWER.size))
            data = self._reader.read(length)
            if len(data) == length:
                return is_rejected, data.decode("utf-8", "surrogatepass") if is_text else data
        return None

    def end(self) -> int:
        """Waits for the end of the child, and closes its pipes. Returns its exit code, or the negative number
        of the signal that ended it."""
        self._close()
        return os.waitstatus_to_exitcode(posix.waitpid(self._pid, 0)[1])

    def _close(self) -> None:
        posix.close(self._requests)
        posix.close(self._answers)


def _limit(kind: int, most: int) -> None:
    """Sets the soft limit of this process to `most`, or to the hard limit if that is lower."""
    _soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def serve(maker: str, setup: list, cpu_s: float, memory_bytes: int, wall_s: float) -> None:
    """Runs in the child: makes the function, and answers the requests on standard input until that ends.

    The arguments are those of `SandboxedFunction`; wall_s is WALL_S. A request that exceeds a limit of time,
    or a start of more than `wall_s` seconds, ends the process by a signal. Raises MemoryError for a request
    that exceeds `memory_bytes`, and whatever the function raises other than Rejected.
    """
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    signal.setitimer(signal.ITIMER_REAL, wall_s)  # SIGALRM ends it
    function = pkgutil.resolve_name(maker)(*setup)
    trim_memory()
    signal.setitimer(signal.ITIMER_REAL, 0)  # waiting for a request is not part of it
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # that this process has now
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)
    while header := requests.read(4):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends it; RLIMIT_CPU counts whole seconds
        is_rejected = False
        try:
            result = function(request)
        except Rejected as error:
            is_rejected = True
            result = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)  # reading the next request is not part of it
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_text = isinstance(result, str)
        data = result.encode("utf-8", "surrogatepass") if is_text else result
        answers.write(ANSWER.pack(is_rejected, is_text, len(data)))
        answers.write(data)  # by itself: it may be large
        answers.flush()


def main(arguments: str) -> None:
    """Runs the child until its standard input ends. `arguments` are those of `serve`, in JSON. Closes all
    other open files, and silences the standard error; no file can be written. Exits with ENOMEM if memory
    runs out."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the parent has open
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing that a request does may fill the log
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 16)):
        _limit(kind, most)
    try:
        serve(*json.loads(arguments))
    except MemoryError:
        os._exit(errno.ENOMEM)  # `SandboxedFunction` has the words for it
