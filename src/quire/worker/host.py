"""The host: the memory and the cores that this process may use, and the size of the KV cache on a CPU.

Imports no torch, so that `quire info` can compute beforehand what a worker will find.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from quire import envs

GIB = 1 << 30
DEFAULT_CPU_KV_CACHE_BYTES = 4 * GIB
CPU_KV_CACHE_SHARE = 0.4
"""Largest share of the memory left after loading that the cache takes by default: the machine has other users."""
_ROOT = Path("/")


def cpu_kv_cache_bytes(free_bytes: int, useful_bytes: int) -> int:
    """Returns the bytes of the KV cache on a CPU where no flag sets them: QUIRE_CPU_KVCACHE_SPACE, or a share of
    `free_bytes` (left after loading), but never more than `useful_bytes`, which max_num_seqs requests of the full
    length would fill."""
    asked = envs.CPU_KVCACHE_SPACE.number()
    if asked > 0:
        return int(asked * GIB)
    return min(DEFAULT_CPU_KV_CACHE_BYTES, int(CPU_KV_CACHE_SHARE * free_bytes), useful_bytes)


def useful_kv_cache_bytes(model_len: int, max_num_seqs: int, block_size: int, block_bytes: int) -> int:
    """Returns the bytes that `max_num_seqs` requests of the full context length would fill, plus the null block.
    `block_bytes` is one block of every layer."""
    return (-(-model_len // block_size) * max_num_seqs + 1) * block_bytes


def available_cpu_memory(root: Path = _ROOT) -> int:
    """Returns the bytes this process may still take: the system's available memory, or what its control groups leave if
    that is less.

    Where the system does not report it (no /proc), half of the physical memory. `root` is for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        system = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        system = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([system, *_cgroup_headrooms(root)]))


def memory_limit(root: Path = _ROOT) -> int | None:
    """Returns the smallest memory limit in bytes of this process' control groups; None without a limit."""
    return min((limit for limit, _ in _cgroup_limits(root)), default=None)


def cpu_quota(root: Path = _ROOT) -> int | None:
    """Returns the number of CPUs the control groups grant, rounded up; None without a limit."""
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
    """Returns limit minus use for each control group above this process that has a limit. Reclaimable page cache is
    free."""
    headrooms = []
    for limit, group in _cgroup_limits(root):
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if not used.strip().isdigit():
            continue
        stat = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        headrooms.append(limit - int(used) + cache)
    return headrooms


def _cgroup_limits(root: Path) -> list[tuple[int, Path]]:
    """Returns (limit in bytes, directory) of each control group above this process that has a limit: one at which
    processes are killed, or one from which on they are slowed down (version 2, memory.high).

    Without a limit, version 2 has the word "max" and version 1 a number near 2**63.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    texts = [(_read(group / name), group) for group in _cgroups(root, "memory") for name in names]
    return [(int(text), group) for text, group in texts if text.strip().isdigit() and int(text) < 2**60]


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Returns this process' control group directories for a controller, from its own up to the root, v2 and v1."""
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
