"""Threads of the native library: any number gives the same bits, and those without work cost nothing."""

from __future__ import annotations

import gc
import threading
import time

import torch

from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels


def test_many_small_jobs_on_more_threads_than_cores(library: NativeLibrary) -> None:
    """Helpers come and go, sleep and wake: no piece of work is lost or done twice where it would show."""
    weight = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    one, five = (NativeKernels(Context(library, n, library.instruction_sets()[0])).linear(weight, None) for n in (1, 5))
    expected = one(x)
    for i in range(3000):
        assert torch.equal(five(x), expected)
        if i % 1000 == 0:
            threading.Event().wait(0.01)  # long enough for helpers to fall asleep


def test_idle_threads_cost_nothing(library: NativeLibrary) -> None:
    kernels = NativeKernels(Context(library, 4, library.instruction_sets()[0]))
    kernel = kernels.linear(torch.ones(512, 32), None)
    kernel(torch.ones(64, 32))
    start = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - start < 0.1


def test_threads_end_with_their_context(library: NativeLibrary) -> None:
    def num_threads() -> int:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

    gc.collect()
    before = num_threads()
    kernels = NativeKernels(Context(library, 4, library.instruction_sets()[0]))
    assert num_threads() == before + 3
    del kernels
    gc.collect()
    assert num_threads() == before
