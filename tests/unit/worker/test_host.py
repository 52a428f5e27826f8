"""Memory and cores as control groups grant them, over a made-up file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.worker import host

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """1000 MiB available, no control groups."""
    return write(tmp_path, {"proc/meminfo": f"MemTotal: {2000 * 1024} kB\nMemAvailable:  {1000 * 1024} kB\n"})


def test_without_control_groups_the_system_decides(machine: Path) -> None:
    assert host.available_cpu_memory(machine) == 1000 * MIB
    assert host.cpu_quota(machine) is None


def test_without_proc_half_of_the_memory(tmp_path: Path) -> None:
    assert 0 < host.available_cpu_memory(tmp_path) < 1 << 50


def test_version_2_limits_of_the_group_and_those_above(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": str(300 * MIB),
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": str(500 * MIB),
            "sys/fs/cgroup/pod/memory.current": str(350 * MIB),
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        },
    )
    assert host.available_cpu_memory(machine) == 200 * MIB  # 500 - 350 + 50 of reclaimable page cache
    assert host.cpu_quota(machine) == 2  # 1.5, rounded up


def test_a_group_that_is_slowed_down_is_full(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": str(500 * MIB),
            "sys/fs/cgroup/pod/memory.high": str(400 * MIB),
            "sys/fs/cgroup/pod/memory.current": str(300 * MIB),
        },
    )
    assert host.available_cpu_memory(machine) == 100 * MIB
    assert host.memory_limit(machine) == 400 * MIB


def test_version_2_seen_from_inside_a_container(machine: Path) -> None:
    """The path is the host's and does not exist here; the container's own limits are at the mount."""
    write(
        machine,
        {
            "proc/self/cgroup": "0::/../../host/path\n",
            "sys/fs/cgroup/memory.max": str(400 * MIB),
            "sys/fs/cgroup/memory.current": str(500 * MIB),
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    assert host.available_cpu_memory(machine) == 0
    assert host.cpu_quota(machine) == 1


def test_version_1_limits(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "7:memory:/a\n4:cpu,cpuacct:/a\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(600 * MIB),
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(100 * MIB),
            "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert host.available_cpu_memory(machine) == 510 * MIB
    assert host.cpu_quota(machine) == 3


def test_the_largest_number_of_version_1_is_no_limit(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        },
    )
    assert host.memory_limit(machine) is None


def test_this_machine_has_memory() -> None:
    assert host.available_cpu_memory() > 16 * MIB
