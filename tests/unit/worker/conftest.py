"""The native kernels on every instruction set of this CPU.

Where the library was not built, tests of it are skipped; scripts/setup fails if it could have been."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.worker.kernels.library import Context, NativeLibrary, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.native_sampling import NativeSampling
from quire.worker.sample.kernel import SamplingKernel
from quire.worker.sample.torch_kernel import TorchSampling

LIBRARY = native_library()
INSTRUCTION_SETS = LIBRARY.instruction_sets() if LIBRARY is not None else ["none"]

MakeKernels = Callable[[int], NativeKernels]


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    """The library, if it was built."""
    if LIBRARY is None:
        pytest.skip("the native library was not built")
    return LIBRARY


@pytest.fixture(scope="session", params=INSTRUCTION_SETS)
def make_kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> MakeKernels:
    """`make_kernels(num_threads)`, for each instruction set."""
    made: dict[int, NativeKernels] = {}

    def make(num_threads: int) -> NativeKernels:
        if num_threads not in made:
            made[num_threads] = NativeKernels(Context(library, num_threads, request.param))
        return made[num_threads]

    return make


@pytest.fixture(scope="session", params=["torch", *(INSTRUCTION_SETS if LIBRARY is not None else [])])
def sampling(request: pytest.FixtureRequest) -> SamplingKernel:
    """Torch's sampling, and the native one on each instruction set, with two threads."""
    if LIBRARY is None or request.param == "torch":
        return TorchSampling()
    return NativeSampling(Context(LIBRARY, 2, request.param))
