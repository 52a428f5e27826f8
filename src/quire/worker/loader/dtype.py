"""Which type the model computes in."""

from __future__ import annotations

import torch

from quire.config.model import ModelConfig, resolve_dtype_name


def resolve_dtype(model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """See `resolve_dtype_name`. Raises ModelLoadError for a type Quire cannot run."""
    dtype: torch.dtype = getattr(torch, resolve_dtype_name(model_config, device.type))
    return dtype
