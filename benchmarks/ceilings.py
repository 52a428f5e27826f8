"""Measures the limits of this machine: bytes read from memory and bfloat16 products, by the native kernels' own loops.

    python -m benchmarks.ceilings

prints one JSON object: GB/s and TFLOP/s with one thread and with all. The bytes and operations of a decode step,
divided by them, give its shortest possible time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.worker.kernels.library import Context, native_library

MEMORY_BYTES = 1 << 28
"""Larger than any cache."""


class Clock:
    """The clock of `best_seconds`.

    The processor time of one thread leaves out what neighbours on the machine take: right for kernels on one thread,
    wrong for more.
    """

    now: Callable[[], float] = staticmethod(time.perf_counter)

    @classmethod
    def count_processor_time(cls) -> None:
        """Counts processor time from now on, of this thread only."""
        cls.now = staticmethod(time.thread_time)


def best_seconds(*runs: Callable[[], object], at_least: float = 0.3, least_reps: int = 3) -> list[float]:
    """Returns the best time of each in seconds. The runs take turns."""
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + at_least * len(runs)
    while time.perf_counter() < deadline or len(times[0]) < least_reps:
        for run, taken in zip(runs, times, strict=True):
            start = Clock.now()
            run()
            taken.append(Clock.now() - start)
    return [min(taken) for taken in times]


def ceilings(context: Context) -> tuple[float, float]:
    """Returns bytes read per second, and bfloat16 operations per second."""
    memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    memory[::4096] = 1  # pages that exist, each its own
    cdll = context.library.cdll
    operations = cdll.qk_multiply_bf16(context.handle, 256)
    read, multiply = best_seconds(
        lambda: cdll.qk_read_memory(context.handle, memory.ctypes.data, MEMORY_BYTES),
        lambda: cdll.qk_multiply_bf16(context.handle, 256),
    )
    return MEMORY_BYTES / read, operations / multiply


def measure() -> dict[str, Any] | None:
    """Returns both ceilings for one thread and for as many as this process may use; None without the native library."""
    library = native_library()
    if library is None:
        return None
    name = library.instruction_sets()[0]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result: dict[str, Any] = {"instruction_set": name}
    for count in sorted({1, threads}):
        read, multiply = ceilings(Context(library, count, name))
        result[str(count)] = {"read_gb_s": round(read / 1e9, 1), "bf16_tflop_s": round(multiply / 1e12, 2)}
    return result


if __name__ == "__main__":
    print(json.dumps(measure()))
    sys.exit(0)
