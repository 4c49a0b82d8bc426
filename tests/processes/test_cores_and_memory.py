"""The cores and the memory that a process may use, with limits of control groups."""

import os

import pytest

from mage_services.processes.cores_and_memory import memory_bytes, num_cores

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        # Version 2: a container sees its own group as the root; a job, those above it too.
        ("0::/", {"memory.max": "1000"}, 1000),
        ("0::/job/step", {"job/memory.max": "1000", "job/step/memory.max": "max"}, 1000),
        ("0::/job/step", {"job/memory.max": "1000", "job/step/memory.max": "900"}, 900),
        ("0::/user", {"user/memory.max": "max"}, MACHINE),
        ("0::/", {"memory.max": str(2 * MACHINE)}, MACHINE),
        # Version 1: Docker mounts the container's group at the root, but keeps the machine's path.
        ("4:memory:/docker/ab", {"memory/memory.limit_in_bytes": "1000"}, 1000),
        ("4:cpu,memory:/a:b", {"memory/a:b/memory.limit_in_bytes": "1000"}, 1000),
        ("4:cpu:/a\n0::/", {"memory/memory.limit_in_bytes": "1000"}, MACHINE),
        ("4:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MACHINE),
        # Both at once: the second version has no memory controller there.
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "1000"}, 1000),
        (None, {}, MACHINE),
    ],
)
def test_the_least_limit_of_the_groups_above_counts(tmp_path, groups, limits, expected):
    write_groups(tmp_path, groups, limits)
    assert memory_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/job/step", {"job/cpu.max": "350000 100000", "job/step/cpu.max": "max 100000"}, 4),
        (
            "4:cpu,cpuacct:/docker/ab",
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("4:memory:/", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, 64),
        (None, {}, 64),
    ],
)
def test_a_limit_of_cpu_time_counts_as_cores(tmp_path, monkeypatch, groups, limits, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    write_groups(tmp_path, groups, limits)
    assert num_cores(tmp_path) == expected


def write_groups(root, groups, limits):
    """Write the files of control groups below `root`."""
    if groups is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(groups + "\n")
    for name, limit in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")


def test_the_limits_of_this_process_can_be_read():
    assert 0 < memory_bytes() <= MACHINE
