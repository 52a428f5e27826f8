"""The machine: which device, how much memory and how many cores are ours."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from quire.errors import ConfigError

_ROOT = Path("/")


def choose_device(name: str) -> torch.device:
    """The device of --device: auto takes CUDA when there is one. Raises ConfigError if it is not there."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: torch finds no CUDA device; use --device cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda", 0) if has_cuda and name != "cpu" else torch.device("cpu")


def available_cpu_memory(root: Path = _ROOT) -> int:
    """Bytes this process may still take: the system's available memory or what its control groups leave, if less.

    Where the system does not say (no /proc), half of the physical memory. `root` is for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        system = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        system = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([system, *_cgroup_headrooms(root)]))


def set_num_threads(root: Path = _ROOT) -> None:
    """Keep torch's threads within the CPU quota of the container. OMP_NUM_THREADS, where set, is left alone."""
    quota = cpu_quota(root)
    if "OMP_NUM_THREADS" not in os.environ and quota is not None and quota < torch.get_num_threads():
        torch.set_num_threads(quota)


def cpu_quota(root: Path = _ROOT) -> int | None:
    """CPUs the control groups grant, rounded up; None without a limit."""
    quotas = []
    for group in _cgroups(root, "cpu"):
        version_2 = _read(group / "cpu.max").split()
        version_1 = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quotas += [
            math.ceil(int(pair[0]) / int(pair[1]))
            for pair in (version_2, version_1)
            if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit()  # "max" or -1: no limit
        ]
    return max(1, min(quotas)) if quotas else None


def _cgroup_headrooms(root: Path) -> list[int]:
    """Limit minus use, for each control group above this process that has a limit. Reclaimable page cache is free."""
    headrooms = []
    for group in _cgroups(root, "memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if not limit.strip().isdigit() or not used.strip().isdigit():
            continue  # "max": no limit
        stat = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        headrooms.append(int(limit) - int(used) + cache)
    return headrooms


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The control group directories of this process for a controller, from its own up to the root, v2 and v1."""
    groups = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers  # v2 has no controllers here and mounts at the top
        if controllers and not mount.is_dir():
            mount = root / "sys/fs/cgroup" / controller
        own = mount / path.lstrip("/")
        while own != mount:  # inside a container the path may be the host's and not exist: reads give ""
            groups.append(own)
            own = own.parent
        groups.append(mount)
    return groups


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
