"""The Neuron machine that this process runs on: cores, instance family, host memory, and the processes that hold its cores.

Reads /dev, sysfs, procfs, `neuron-ls` and the Neuron runtime's environment variables, and hands a `Machine` to
`models/neuron.py` and `models/compile.py`. Knows no model, no prices, no torch; `models/plan.py` decides what fits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import ConfigError

FAMILIES = ("inf2", "trn1")  # trn1n, a trn1 with a faster network, counts as trn1
NEURON_LS = ("neuron-ls", "-j")


@dataclass(frozen=True)
class Machine:
    cores: int  # NeuronCores that this process may use
    family: str | None
    instance: str | None  # EC2 instance type; in a container with some of the devices still that of the whole machine
    host_bytes: int | None  # the container's memory limit where it has one
    source: str  # where the number of cores comes from


def detect(
    root: str | Path = "/", environ: Mapping[str, str] = os.environ, neuron_ls: Sequence[str] = NEURON_LS
) -> Machine | None:
    """The Neuron devices of this machine or container; None when there are none.

    Devices are /dev/neuronN; cores come from sysfs, else from `neuron-ls -j`, else 2 per device.
    NEURON_RT_VISIBLE_CORES, or else NEURON_RT_NUM_CORES, limits them; raises ConfigError for a value that the runtime refuses.
    """
    root = Path(root)
    devices = {int(path.name[6:]) for path in root.glob("dev/neuron*") if re.fullmatch(r"neuron\d+", path.name)}
    if not devices:
        return None
    sysfs = root / "sys/devices/virtual/neuron_device"
    counts = [_number(_read(sysfs / f"neuron{device}/core_count")) for device in devices]
    if all(counts):
        cores, source = sum(filter(None, counts)), "sysfs"
    elif cores := _listed_cores(neuron_ls, devices):
        source = " ".join(neuron_ls)
    else:
        cores, source = 2 * len(devices), "/dev/neuron*, 2 cores for each"
    product = _read(root / "sys/devices/virtual/dmi/id/product_name")  # the instance type on EC2's Nitro machines
    architecture = _read(sysfs / f"neuron{min(devices)}/info/architecture/instance_type").lower()
    usable, limit = usable_cores(cores, environ)
    return Machine(
        cores=usable,
        family=next((family for family in FAMILIES for name in (product, architecture) if name.startswith(family)), None),
        instance=product if product.startswith(tuple(f"{family}." for family in FAMILIES)) else None,
        host_bytes=host_memory(root),
        source=f"{source}, {limit}" if limit else source,
    )


def usable_cores(cores: int | None, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """How many of `cores` (None: unknown) the runtime takes, and the environment variable that limits them ("": none).

    Raises ConfigError for a value that the runtime refuses.
    """
    visible, number = (environ.get(name, "").strip() for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"))
    if visible:
        name, value = "NEURON_RT_VISIBLE_CORES", visible
        ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in visible.split(",")]
        ids = [core for r in ranges if r for core in range(int(r[1]), min(int(r[2] or r[1]), 1 << 12) + 1)]
        if not all(ranges) or not ids or ids != list(range(ids[0], ids[0] + len(ids))):
            raise ConfigError(f"{name} {visible!r} should be one core (0), or cores in a row (0-3, or 0,1,2-3)")
        wanted = len(ids)
    elif number:
        name, value, wanted = "NEURON_RT_NUM_CORES", number, _number(number)
        if wanted is None:
            raise ConfigError(f"{name} {number!r} should be a number of cores, 0 for all")
    else:
        return cores, ""
    if cores is not None and wanted > cores:
        raise ConfigError(f"{name} {value!r} asks for {wanted} cores and there are {cores}")
    return wanted or cores, f"{name}={value}"


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory of this machine, or of this container where it has a limit."""
    total = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    limits = (int(total[1]) * 1024 if total else None, _number(_read(root / "sys/fs/cgroup/memory.max")))
    return min(filter(None, limits), default=None)


def holders(neuron_ls: Sequence[str] = NEURON_LS) -> list[tuple[int, str]]:
    """(pid, command) of each other process that holds NeuronCores and that neuron-ls can see."""
    found = {}
    for device in _listed_devices(neuron_ls):
        for process in device.get("neuron_processes") or ():
            if isinstance(process.get("pid"), int) and process["pid"] != os.getpid():
                command = str(process.get("command") or "").split()
                found[process["pid"]] = command[0] if command else "a process"
    return sorted(found.items())


def _listed_cores(command: Sequence[str], devices: set[int]) -> int:
    """Cores of `devices` as neuron-ls counts them; 0 when it does not."""
    try:
        return sum(entry["nc_count"] for entry in _listed_devices(command) if entry["neuron_device"] in devices)
    except (KeyError, TypeError):
        return 0


def _listed_devices(command: Sequence[str]) -> list[dict[str, Any]]:
    """What neuron-ls prints about each device; empty when it is not installed, fails or prints something else."""
    try:
        listed = json.loads(subprocess.run(command, capture_output=True, timeout=30, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]+", text) else None
