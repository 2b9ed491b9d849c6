"""The simulated device, and all that only the fake has: violations, failures on purpose, and the function behind its logits.

A process takes cores when its first model goes to the device, under locks of the operating system, and has them until it ends.
The environment says what machine it is and what goes wrong on it:

    FAKE_NEURON_STATE_DIR   where locks, violations.log and compiles.log are, one machine a folder (fake_neuron in the temp dir)
    FAKE_NEURON_CORES       cores of the machine (2); 0: there is no device
    FAKE_NEURON_CORE_BYTES  memory of a core (16 GiB)
    FAKE_NEURON_COMPILE_S   seconds that a program takes to compile (0)
    FAKE_NEURON_STEP_S      seconds that a decode step takes (0)
    FAKE_NEURON_PREFILL_S   seconds that a prompt takes (0)
    FAKE_NEURON_SEED        of the sampling on the device (0)
    FAKE_NEURON_SDK         compiled programs of another SDK are not found (2.25.0)
    FAKE_NEURON_TRANSFORMERS  the version of transformers that the library is said to run on (4.48.3)
    FAKE_NEURON_STRICT      0: violations are written down, and the model goes on with the damage, as the library does (1)
    FAKE_NEURON_FAIL        what fails, with commas between: init, oom, compile, prefill:N, step:N, nan:N, hang:N, kill:N,
                            where N is the N-th prefill or decode step of the process, from 1

A file `fail` in the state folder with one of these words (without N) makes the next one fail in a process that runs; it is
removed when it has done so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from array import array
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from transformers_neuronx import compiler

TENSOR_PARALLEL_DEGREES = (1, 2, 4, 8, 12, 16, 24, 32)
FAVOURED = 3  # ids 0 to 2, among which most models have their end of text

violations: list[str] = []  # of this process; those of all are in violations.log
compiles: list[str] = []  # programs that this process compiled; those of all are in compiles.log


class FakeNeuronViolation(Exception):
    """The library would have taken this call, and its answers would be wrong from here on."""


def expected_logits(tokens: list[int], vocab: int) -> torch.Tensor:
    """The logits after `tokens`: float32 [vocab], a fixed function of all of them, and as bfloat16 has them.

    After one context in sixteen the ids 0, 1 and 2 are ahead of all others, so that greedy texts come to an end.
    """
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=7).digest()
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big"))) * 3
    if digest[0] % 16 == 0:
        logits[:FAVOURED] += 24
    return logits.bfloat16().float()


def state_dir() -> Path:
    folder = Path(os.environ.get("FAKE_NEURON_STATE_DIR") or Path(tempfile.gettempdir(), "fake_neuron"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def violate(told: str) -> None:
    """Writes `told` down and raises FakeNeuronViolation, if the fake is strict."""
    violations.append(told)
    append("violations.log", told)
    if os.environ.get("FAKE_NEURON_STRICT", "1") != "0":
        raise FakeNeuronViolation(told)


def append(name: str, line: str) -> None:
    with open(state_dir() / name, "a") as file:
        file.write(f"{os.getpid()} {line}\n")


def _log(line: str) -> None:
    print(f"ERROR   {line}", file=sys.stderr, flush=True)  # the runtime writes to the console, too


def _seconds(name: str) -> float:
    return float(os.environ.get(name, 0))


def _must_fail(kind: str, count: int | None = None) -> bool:
    order = kind if count is None else f"{kind}:{count}"
    if order in os.environ.get("FAKE_NEURON_FAIL", "").split(","):
        return True
    file = state_dir() / "fail"
    try:
        if file.read_text().strip() != kind:
            return False
        file.unlink()
    except FileNotFoundError:
        return False
    return True


class Runtime:
    """The cores of this process, and their memory."""

    def __init__(self):
        self.pid = os.getpid()
        self.thread = threading.get_ident()
        self.dead: str | None = None
        self.prefills = 0
        self.steps = 0
        self.generator = torch.Generator().manual_seed(int(os.environ.get("FAKE_NEURON_SEED", 0)))
        self._busy = threading.Lock()
        self._locks: dict[int, int] = {}  # core → file descriptor
        if _must_fail("init"):
            self._refuse("NRT:nrt_init Failed to initialize devices")
        self._take_cores()
        self.free_bytes = {core: int(os.environ.get("FAKE_NEURON_CORE_BYTES", 16 << 30)) for core in self.cores}

    @property
    def cores(self) -> list[int]:
        return sorted(self._locks)

    def _take_cores(self) -> None:
        machine = int(os.environ.get("FAKE_NEURON_CORES", 2))
        if machine == 0:
            self._refuse("NRT:nrt_init Unable to determine Neuron Driver version. Is the driver (aws-neuronx-dkms) installed?")
        visible, number = (os.environ.get(f"NEURON_RT_{name}_CORES") for name in ("VISIBLE", "NUM"))
        try:
            candidates = _core_list(visible) if visible else list(range(machine))
            wanted = len(candidates) if visible else int(number or 0) or machine
        except ValueError:
            self._refuse("NRT:nrt_init NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES is malformed")
        if candidates != list(range(candidates[0], candidates[0] + len(candidates))):
            self._refuse("NRT:nrt_init Neuron cores are not contiguous")
        for core in candidates:
            if core < machine and len(self._locks) < wanted:
                self._lock(core)
        if len(self._locks) < wanted:
            available = len(self._locks)
            self.close()
            asked = f"nc{candidates[0]}-nc{candidates[0] + wanted - 1}"
            self._refuse(f"NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:{asked} Available:{available}")

    def _lock(self, core: int) -> None:
        # Record locks belong to the process: a forked child neither has them nor keeps them, and a killed one loses them.
        file = os.open(state_dir() / f"core-{core}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
        else:
            self._locks[core] = file

    def _refuse(self, log: str) -> None:
        _log(log)
        raise RuntimeError(f"The PyTorch Neuron Runtime could not be initialized. Driver or core problem, see the log: {log}")

    def close(self) -> None:
        for file in self._locks.values():
            os.close(file)
        self._locks.clear()

    def die(self, told: str) -> None:
        """Raises the RuntimeError of a call that failed on the device; nothing runs in this process after it."""
        self.dead = told
        _log(f"TDRV: {told}")
        raise RuntimeError(told)

    def allocate(self, bytes_per_core: int, tp_degree: int) -> None:
        if _must_fail("oom"):
            self.die('nrt_tensor_allocate status=4 message="Allocation Failure"')
        for core in self.cores[:tp_degree]:
            self.free_bytes[core] -= bytes_per_core
            if self.free_bytes[core] < 0:
                _log(f"TDRV:dmem_alloc_internal Failed to alloc DEVICE memory: {bytes_per_core} on NC {core}")
                self.die('nrt_tensor_allocate status=4 message="Allocation Failure"')

    def load_programs(self, tp_degree: int, intact: bool) -> None:
        if tp_degree > len(self._locks) or (tp_degree not in TENSOR_PARALLEL_DEGREES and tp_degree % 32):
            _log("TDRV: Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32")
            self.die('nrt_load_collectives status=2 message="Invalid"')
        if not intact:
            self.die('nrt_load_collectives status=2 message="Invalid NEFF"')

    def __enter__(self):
        """One call of forward()."""
        if not self._busy.acquire(blocking=False):
            violate("a second forward() has begun before the first was done")
            self._busy.acquire()
        try:
            self._check_caller()
        except BaseException:
            self._busy.release()
            raise
        return self

    def __exit__(self, *_):
        self._busy.release()

    def _check_caller(self) -> None:
        if self.dead:
            raise RuntimeError(f"the runtime has failed before: {self.dead}")
        if self.thread != threading.get_ident():
            violate("forward() in another thread than to_neuron()")

    def prefill(self) -> None:
        self.prefills += 1
        time.sleep(_seconds("FAKE_NEURON_PREFILL_S"))
        if _must_fail("prefill", self.prefills):
            self.die('nrt_execute status=1004 message="Execution error"')

    def step(self) -> bool:
        """Runs a decode step. Returns whether its numbers are to be NaN."""
        self.steps += 1
        time.sleep(_seconds("FAKE_NEURON_STEP_S"))
        if _must_fail("kill", self.steps):
            os.kill(os.getpid(), signal.SIGKILL)
        if _must_fail("hang", self.steps):
            threading.Event().wait()
        if _must_fail("step", self.steps):
            self.die('nrt_execute status=1004 message="Execution error"')
        return _must_fail("nan", self.steps)


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The runtime of this process, started by the first call."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime()
    if _runtime.pid != os.getpid():
        violate("a process that was forked after to_neuron() has used the device")
        raise RuntimeError("the device belongs to the parent process")
    if _runtime.dead:
        raise RuntimeError(f"the runtime has failed before: {_runtime.dead}")
    return _runtime


def restart() -> None:
    """What the end of this process and the start of another would do, for tests that stay in one."""
    global _runtime
    if _runtime is not None:
        _runtime.close()
    _runtime = None
    violations.clear()
    compiles.clear()


def compile_programs(programs: dict[str, str], workers: int | None) -> None:
    """All at once, or as many at a time as there are workers. programs: file name → tag."""
    if _must_fail("speculation") and any(tag.startswith("speculation") for tag in programs.values()):
        raise RuntimeError("neuronx-cc failed with exit code 70")
    if _must_fail("compile"):
        raise BrokenProcessPool("A process in the process pool was terminated abruptly while the future was running.")
    rounds = -(-len(programs) // (workers or len(programs) or 1))
    time.sleep(_seconds("FAKE_NEURON_COMPILE_S") * rounds)
    for name, tag in programs.items():
        compiler.compile_hlo_module(name, tag, 1)


def _core_list(told: str) -> list[int]:
    """'3', '0-3' or '0,1,4-7'."""
    cores = []
    for part in told.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    if not cores:
        raise ValueError(told)
    return cores
