"""The device that computes, the type it computes in, and torch's threads. `host.py` has what needs no torch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from quire.config.model import ModelConfig, resolve_dtype_name
from quire.errors import ConfigError
from quire.worker.host import cpu_quota


def choose_device(name: str) -> torch.device:
    """Returns the device of --device: auto is CUDA if there is one. Raises ConfigError if the device is missing."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: torch finds no CUDA device; use --device cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda", 0) if has_cuda and name != "cpu" else torch.device("cpu")


def set_num_threads(root: Path = Path("/"), num_shares: int = 1) -> None:
    """Limits torch's threads to the CPU quota of the container, of which each of
    `num_shares` workers has an equal share. OMP_NUM_THREADS, where set, is each worker's."""
    present = torch.get_num_threads()
    quota = cpu_quota(root)
    share = max(1, min(present, present if quota is None else quota) // num_shares)
    if "OMP_NUM_THREADS" not in os.environ and share < present:
        torch.set_num_threads(share)


def release_free_memory(device: torch.device) -> None:
    """Returns freed memory to the system: to the driver on CUDA, from the C library's heap on Linux.

    Large blocks are returned when they are freed. glibc keeps those below its threshold, which grows with use (up to 32
    MiB), until malloc_trim is called; other C libraries have no such call.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resolve_dtype(model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the type the model computes in. Raises ModelLoadError for one that Quire cannot run."""
    dtype: torch.dtype = getattr(torch, resolve_dtype_name(model_config, device.type))
    return dtype
