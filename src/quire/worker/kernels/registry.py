"""Which kernels a worker computes with."""

from __future__ import annotations

import torch

from quire import envs
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import DTYPES, NativeKernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.tried import choose_instruction_set

logger = init_logger(__name__)


def choose_kernels(device: torch.device, dtype: torch.dtype, num_threads: int) -> Kernels:
    """Native ones on a CPU, for the types they know; torch's for the rest, or where QUIRE_CPU_KERNELS says so.

    Raises ConfigError if QUIRE_CPU_KERNELS names an instruction set that is not there.
    """
    wanted = envs.CPU_KERNELS.get()
    if device.type != "cpu" or dtype not in DTYPES or wanted == "torch":
        return TORCH_KERNELS
    library = native_library()
    there = [] if library is None else library.instruction_sets()
    if wanted not in ("auto", *there):
        raise ConfigError(
            f"{envs.CPU_KERNELS.name}={wanted!r}: there are no such kernels here; "
            f"known are {', '.join(['auto', 'torch', *there])}"
        )
    if library is None:
        return TORCH_KERNELS
    instruction_set = choose_instruction_set(there) if wanted == "auto" else wanted
    logger.info("native kernels: %s, %d threads", instruction_set, num_threads)
    return NativeKernels(Context(library, num_threads, instruction_set))
