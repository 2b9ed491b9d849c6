"""The machine that this process runs on: CPU cores; NeuronCores, instance family, host memory; and the memory
of this process.

Reads /dev, sysfs, procfs and the Neuron runtime's environment variables into a `Machine`; plan.py decides
what fits on one. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from run import ConfigError

GIB = 1 << 30
INSTANCE_FAMILY = re.compile("inf2|trn1")  # trn1n, a trn1 with a faster network, counts as trn1


@dataclass(frozen=True)
class Machine:
    cores: int  # NeuronCores that this process may use
    family: str | None = None
    # EC2 instance type; in a container with some of the devices still that of the whole machine.
    instance: str | None = None
    host_bytes: int | None = None  # the container's memory limit where it has one
    host_cores: int | None = None  # physical ones of the host's processors


def detect(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine | None:
    """Returns the Neuron devices of this machine or container; None when there are none. root: the folder
    that stands for /.

    Devices are /dev/neuronN; cores come from sysfs, else 2 per device, as Inferentia2 and Trainium1 have.
    `cores` of the result are those that `usable_cores` leaves. Raises ConfigError for a value of
    NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES that the runtime rejects, or that asks for more cores than
    there are.
    """
    devices = [int(path.name[6:]) for path in root.glob("dev/neuron*") if path.name[6:].isdigit()]
    if not devices:
        return None
    sysfs = root / "sys/devices/virtual/neuron_device"
    cores = sum(_number(read_text(sysfs / f"neuron{device}/core_count")) or 2 for device in devices)
    # The instance type on EC2's Nitro machines.
    product = read_text(root / "sys/devices/virtual/dmi/id/product_name")
    architecture = read_text(sysfs / f"neuron{min(devices)}/info/architecture/instance_type").lower()
    named = INSTANCE_FAMILY.match(product)
    found = named or INSTANCE_FAMILY.match(architecture)
    return Machine(
        cores=usable_cores(cores, environ),
        family=found[0] if found else None,
        instance=product if named else None,
        host_bytes=host_memory(root),
    )


def usable_cores(cores: int | None, environ: Mapping[str, str]) -> int | None:
    """Returns how many of `cores` (None: unknown) the runtime takes. NEURON_RT_VISIBLE_CORES limits them;
    only without that variable, NEURON_RT_NUM_CORES does. Without both, or with NEURON_RT_NUM_CORES=0, the
    result is `cores`.

    Raises ConfigError for a value that the runtime rejects, or that asks for more than `cores`.
    """
    for name, count, rule in (
        ("NEURON_RT_VISIBLE_CORES", _cores_in_row, "one core (0), or cores in a row (0-3, or 0,1,2-3)"),
        ("NEURON_RT_NUM_CORES", _number, "a number of cores, 0 for all"),
    ):
        value = environ.get(name, "").strip()
        if not value:
            continue
        wanted = count(value)
        if wanted is None:
            raise ConfigError(f"{name} {value!r} should be {rule}")
        if cores is not None and wanted > cores:
            raise ConfigError(f"{name} {value!r} asks for {wanted} cores and there are {cores}")
        return wanted or cores
    return cores


def _cores_in_row(ranges: str) -> int | None:
    """Returns how many cores "0-3" or "0,1,2-3" names, both 4; None where they are not in a row, as in "0,2",
    and for another text."""
    count = 0
    follows = None
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not found:
            return None
        first = int(found[1])
        last = int(found[2] or first)
        if last < first or follows not in (None, first):
            return None
        follows = last + 1
        count += follows - first
    return count


def host_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that this process may have; None: unknown. It is the least of the machine's
    memory and the limits of `_cgroups`."""
    total = re.search(r"MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"))
    limits = [int(total[1]) * 1024 if total else None]
    for folder in _cgroups(root):
        # Above memory.high a process is slowed down until it hardly moves.
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits += [_number(read_text(folder / name)) for name in names]
    return min(filter(None, limits), default=None)


def usable_threads(root: Path = Path("/")) -> int:
    """Returns how many cores the process may use, at least 1: those of its affinity, or fewer if the CPU
    quota of one of `_cgroups`, rounded down, is less."""
    threads = [len(os.sched_getaffinity(0))]
    for folder in _cgroups(root):
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # the first has both numbers
        match " ".join(read_text(folder / name) for name in names).split():
            case [quota, period] if _number(quota):  # neither "max" nor -1
                threads.append(int(quota) // int(period))
    return max(1, min(threads))


def _cgroups(root: Path) -> Iterator[Path]:
    """Yields the folders of the process's cgroups, of version 2 or 1, and of the cgroups above these; some do
    not exist. A container may see its own cgroup as the root, and its path in /proc may not be below that
    root."""
    for path in re.findall(":/(.*)", ":/\n" + read_text(root / "proc/self/cgroup")):
        for mount in ("", "unified", "memory", "cpu"):
            group = root / "sys/fs/cgroup" / mount / path
            yield from (group, *group.parents)


def resident_memory() -> dict[str, int]:
    """Returns the bytes of this process in memory: "Anon", its own, and "File", pages of files, which the
    kernel drops when memory is short. {} if the kernel does not tell."""
    found = re.findall(r"^Rss(Anon|File):\s+(\d+) kB", read_text(Path("/proc/self/status")), re.MULTILINE)
    return {kind: int(size) * 1024 for kind, size in found}


def zeros(shape: Sequence[int]) -> np.ndarray:
    """Returns an array of zeros, uint8, of any shape. It takes memory page by page, as pages are written;
    numpy's own takes 2 MB at a time."""
    memory = mmap.mmap(-1, math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(shape)


def release_files(folder: Path) -> None:
    """Gives back the memory of the files in `folder` itself that this process has mapped to read. They stay
    mapped: a page that is read again comes from the page cache."""
    madvise = ctypes.CDLL(None).madvise
    for line in read_text(Path("/proc/self/maps")).splitlines():
        addresses, access, *_, path = line.split(maxsplit=5)
        if access == "r--s" and Path(path).parent == folder.resolve():
            begin, end = (int(address, 16) for address in addresses.split("-"))
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def read_text(path: Path) -> str:
    """Returns the text of a file without the spaces around it; "" where the file cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    """The number that a text of digits is; None for any other text."""
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def cpu_multiplies_bfloat16() -> bool:
    """Whether an x86 CPU has instructions that multiply bfloat16; false for other CPUs."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in flags or "amx_bf16" in flags
