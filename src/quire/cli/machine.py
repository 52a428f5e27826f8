"""What this machine is, read from the system without loading torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_NOTABLE_FLAGS = (
    "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""The instruction sets that decide which kernels can run."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Model, cores this process may use, and notable instruction sets."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip().lower(), value.strip())
    except OSError:
        pass
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": [flag for flag in _NOTABLE_FLAGS if flag in flags],
    }


def memory_facts(meminfo: Path = Path("/proc/meminfo")) -> dict[str, Any]:
    """Total and available bytes, and the cgroup's limit where there is one below the total."""
    sizes: dict[str, int] = {}
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            sizes[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return {"memory_bytes": None, "available_bytes": None, "cgroup_limit_bytes": None}
    total = sizes.get("MemTotal")
    limit = _cgroup_limit()
    return {
        "memory_bytes": total,
        "available_bytes": sizes.get("MemAvailable"),
        "cgroup_limit_bytes": limit if limit is not None and (total is None or limit < total) else None,
    }


def _cgroup_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None
