"""A Neuron machine is recognised by its files, and cores that the runtime would reject are rejected first. Memory is taken as
it is written, and pages of files are given back."""

import numpy as np
import pytest

from models.machine import Machine, detect, host_memory, release_files, resident_memory, usable_threads, zeros
from run import ConfigError

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """Makes the files of a machine with `chips`, of which a container was given `devices`."""

    def make(devices=(0,), chips=None, core_count="2", product="inf2.8xlarge", kind="Inf2", memory_max=None):
        (tmp_path / "dev/neuron_log").mkdir(parents=True)  # not a device
        for device in devices:
            (tmp_path / f"dev/neuron{device}").touch()
        files = {"sys/devices/virtual/dmi/id/product_name": product, "proc/meminfo": "MemTotal: 134217728 kB\nMemFree: 1 kB"}
        for chip in range(chips or max(devices, default=-1) + 1):
            folder = f"sys/devices/virtual/neuron_device/neuron{chip}"
            files |= {f"{folder}/core_count": core_count, f"{folder}/info/architecture/instance_type": kind}
        for name, text in (files | {"sys/fs/cgroup/memory.max": memory_max}).items():
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text + "\n")
        return tmp_path

    return make


def look(root, **environ):
    return detect(root, environ)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, Machine(2, "inf2", "inf2.8xlarge", 128 * GIB)),
        ({"devices": range(12), "product": "inf2.48xlarge"}, Machine(24, "inf2", "inf2.48xlarge", 128 * GIB)),
        ({"devices": (3, 4), "chips": 12, "memory_max": str(8 * GIB)}, Machine(4, "inf2", "inf2.8xlarge", 8 * GIB)),
        ({"memory_max": "max"}, Machine(2, "inf2", "inf2.8xlarge", 128 * GIB)),
        ({"product": "trn1n.32xlarge", "kind": None}, Machine(2, "trn1", "trn1n.32xlarge", 128 * GIB)),
        ({"product": "KVM", "kind": "Trn1"}, Machine(2, "trn1", None, 128 * GIB)),
        ({"product": None, "kind": "Trn1n"}, Machine(2, "trn1", None, 128 * GIB)),
        ({"devices": (0, 1), "core_count": None, "product": None, "kind": "Trn9"}, Machine(4, None, None, 128 * GIB)),
        ({"devices": (), "chips": 12}, None),
    ],
)
def test_cores_family_and_memory_are_those_of_this_machine_or_container(machine, files, expected):
    assert look(machine(**files)) == expected


@pytest.mark.parametrize(
    "environ, cores",
    [
        ({"NEURON_RT_VISIBLE_CORES": "3"}, 1),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "1,2,3-5"}, 5),
        ({"NEURON_RT_VISIBLE_CORES": "0-3", "NEURON_RT_NUM_CORES": "8"}, 4),
        ({"NEURON_RT_NUM_CORES": "8"}, 8),
        ({"NEURON_RT_NUM_CORES": "0"}, 24),
        ({"NEURON_RT_NUM_CORES": " ", "NEURON_RT_VISIBLE_CORES": ""}, 24),
    ],
)
def test_the_runtimes_variables_limit_the_cores(machine, environ, cores):
    assert look(machine(range(12)), **environ).cores == cores


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("NEURON_RT_VISIBLE_CORES", "0,2", "in a row"),
        ("NEURON_RT_VISIBLE_CORES", "3-1", "in a row"),
        ("NEURON_RT_VISIBLE_CORES", "all", "in a row"),
        ("NEURON_RT_VISIBLE_CORES", "0-3", "4 cores and there are 2"),
        ("NEURON_RT_NUM_CORES", "many", "a number of cores"),
        ("NEURON_RT_NUM_CORES", "-1", "a number of cores"),
        ("NEURON_RT_NUM_CORES", "4", "4 cores and there are 2"),
    ],
)
def test_cores_that_the_runtime_would_refuse_are_refused_first(machine, name, value, words):
    with pytest.raises(ConfigError) as refused:
        look(machine(), **{name: value})
    assert name in str(refused.value) and value in str(refused.value) and words in str(refused.value)


NO_LIMIT = str(2**63 - 4096)  # of cgroup v1
# What /proc/self/cgroup has, and the files with limits below /sys/fs/cgroup, in GiB where they are numbers.
CGROUPS = {
    "v1, a container that sees itself as the root": ("5:memory:/\n0::/", {"memory/memory.limit_in_bytes": 3}, 3),
    "v1, a container that sees its path on the host": (
        "4:cpu,cpuacct:/docker/4f\n3:memory:/docker/4f",
        {"memory/memory.limit_in_bytes": 3},
        3,
    ),
    "v1, a pod": (
        "3:memory:/kubepods/burstable/pod7/4f",
        {
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/kubepods/memory.limit_in_bytes": 48,
            "memory/kubepods/burstable/pod7/memory.limit_in_bytes": 6,
            "memory/kubepods/burstable/pod7/4f/memory.limit_in_bytes": NO_LIMIT,
        },
        6,
    ),
    "v1 without a limit": ("3:memory:/", {"memory/memory.limit_in_bytes": NO_LIMIT}, 64),
    "v2, a container": ("0::/", {"memory.max": 3}, 3),
    "v2, a path that is not below the mount": ("0::/../../system.slice/own.service", {"memory.max": 3}, 3),
    "v2 without a limit": ("0::/user.slice", {"user.slice/memory.max": "max"}, 64),
    "v2, a limit of the unit": ("0::/system.slice/own.service", {"system.slice/own.service/memory.max": 5}, 5),
    "v2, a limit of the slice": (
        "0::/team.slice/own.service/worker",
        {"team.slice/memory.max": 4, "team.slice/own.service/memory.max": 5, "team.slice/own.service/worker/memory.max": "max"},
        4,
    ),
    "v2, slowed down before its limit": ("0::/a.slice", {"a.slice/memory.max": 5, "a.slice/memory.high": 4}, 4),
    "v2, more than the machine has": ("0::/a.slice", {"a.slice/memory.max": 500}, 64),
    "v2, another group's": ("0::/a.slice", {"b.slice/memory.max": 2}, 64),
    "v2, colons in a name": ("0::/a:/b.scope", {"a:/b.scope/memory.max": 2}, 2),
    "both, limited by v1": (
        "9:memory:/system.slice/own.service\n1:name=systemd:/system.slice/own.service\n0::/system.slice/own.service",
        {"memory/system.slice/own.service/memory.limit_in_bytes": 7, "memory/memory.limit_in_bytes": NO_LIMIT},
        7,
    ),
    "both, limited by v2": ("1:name=systemd:/own.slice\n0::/own.slice", {"unified/own.slice/memory.max": 7}, 7),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_the_memory_is_the_least_that_a_cgroup_of_the_process_or_one_above_allows(tmp_path, name):
    own, limits, gib = CGROUPS[name]
    files = {"proc/meminfo": f"MemTotal: {64 << 20} kB\n", "proc/self/cgroup": own + "\n"}
    for path, limit in limits.items():
        files[f"sys/fs/cgroup/{path}"] = f"{limit * GIB if isinstance(limit, int) else limit}\n"
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert host_memory(tmp_path) == gib * GIB


V1_QUOTA = {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}
QUOTAS = [
    ("0::/", {"cpu.max": "350000 100000\n"}, 3),
    ("0::/", {"cpu.max": "50000 100000\n"}, 1),
    ("0::/", {"cpu.max": "max 100000\n"}, 6),
    ("0::/system.slice/own.service", {"system.slice/own.service/cpu.max": "200000 100000\n"}, 2),
    ("0::/team.slice/own.service", {"team.slice/cpu.max": "4 1\n", "team.slice/own.service/cpu.max": "max 1\n"}, 4),
    ("4:cpu,cpuacct:/docker/4f", {f"cpu/{name}": text for name, text in V1_QUOTA.items()}, 2),
    ("4:cpu,cpuacct:/own.service", {f"cpu/own.service/{name}": text for name, text in V1_QUOTA.items()}, 2),
    ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
    ("0::/", {}, 6),
]


@pytest.mark.parametrize(("own", "files", "threads"), QUOTAS)
def test_the_threads_are_the_cores_that_affinity_and_the_quotas_of_all_cgroups_allow(
    tmp_path, monkeypatch, own, files, threads
):
    in_sysfs = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": own, **in_sysfs}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    assert usable_threads(tmp_path) == threads


def test_memory_is_taken_as_it_is_written():
    before = resident_memory()["Anon"]
    array = zeros((64, 2**20))
    array[::16, 0] = 7
    assert resident_memory()["Anon"] - before < 2**20
    assert array[:, 0].sum() == 28 and array.shape == (64, 2**20)


def test_pages_of_a_file_are_given_back_and_read_again(tmp_path):
    size = 2**25
    (tmp_path / "weights").write_bytes(bytes([7]) * size)
    (tmp_path / "link").symlink_to(tmp_path)
    array = np.memmap(tmp_path / "weights", mode="r")
    before = resident_memory()["File"]
    assert array.sum() == 7 * size
    assert resident_memory()["File"] - before > 0.9 * size
    release_files(tmp_path / "link")
    assert resident_memory()["File"] - before < 0.1 * size
    assert array.sum() == 7 * size
