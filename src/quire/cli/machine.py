"""Facts of this machine, read from the system without loading torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from pathlib import Path
from typing import Any

from quire.worker.host import available_cpu_memory, cpu_quota, memory_limit

_LIBRARY = Path(__file__).parents[1] / "worker" / "kernels" / "libquire_kernels.so"

_NOTABLE_FLAGS = (
    "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""The instruction sets that decide which kernels can run."""


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Returns CPU model, cores this process may use, and notable instruction sets."""
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
        "container_cores": cpu_quota(),
        "instruction_sets": [flag for flag in _NOTABLE_FLAGS if flag in flags],
    }


def memory_facts() -> dict[str, Any]:
    """Returns bytes of the machine's memory, free for this process, and of the container's limit, if any."""
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return {
        "memory_bytes": total,
        "free_bytes": available_cpu_memory(),
        "container_limit_bytes": limit if limit is not None and limit < total else None,
    }


def read_speed(num_bytes: int = 1 << 28) -> float | None:
    """Returns the bytes per second that the usable cores read from memory, the best of four times; None without native
    kernels."""
    try:
        cdll = ctypes.CDLL(str(_LIBRARY))
    except OSError:
        return None
    cdll.qk_instruction_set.restype, cdll.qk_create.restype = ctypes.c_char_p, ctypes.c_void_p
    cores = min(filter(None, (cpu_facts()["usable_cores"], cpu_quota())))
    context = ctypes.c_void_p(cdll.qk_create(max(1, int(cores)), cdll.qk_instruction_set(0)))
    memory = mmap.mmap(-1, num_bytes)
    memory[:: mmap.PAGESIZE] = b"1" * (num_bytes // mmap.PAGESIZE)  # pages that exist, each its own
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        cdll.qk_read_memory(context, address, ctypes.c_int64(num_bytes))
        times.append(time.perf_counter() - start)
    cdll.qk_destroy(context)
    return num_bytes / min(times)
