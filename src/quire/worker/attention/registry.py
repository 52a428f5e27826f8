"""The table of attention backends, best first."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ConfigError
from quire.resolve import resolve
from quire.worker.attention.backend import AttentionBackend
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.reference import TORCH_KERNELS

BACKENDS: dict[str, str] = {
    "native": "quire.worker.attention.native_backend:NativeAttentionBackend",
    "torch": "quire.worker.attention.torch_backend:TorchAttentionBackend",
}
"""Dotted class names, in order of preference. They are imported on demand: a backend may need an optional package."""


def make_attention_backend(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: Kernels = TORCH_KERNELS
) -> AttentionBackend[Any]:
    """Returns the first backend of the table that supports these types. Raises ConfigError if none does."""
    for dotted_name in BACKENDS.values():
        backend_class: type[AttentionBackend[Any]] = resolve(dotted_name)
        if backend_class.supports(device, dtype, cache_dtype, kernels):
            return backend_class(kernels)
    raise ConfigError(
        f"no attention backend for device {device.type}, dtype {dtype} and KV cache dtype {cache_dtype} "
        f"(tried {', '.join(BACKENDS)}); choose another --dtype or --kv-cache-dtype"
    )
