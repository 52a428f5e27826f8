"""What the library calls types and functions, and what it asks of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {None: 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_new": 4, "gelu_pytorch_tanh": 4}


def with_packed_rows(x: Tensor) -> Tensor:
    """x: [n, dim] itself if the elements of a row are neighbours, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def set_residual(args: Any, residual: Tensor | None) -> Tensor | None:
    """Have `args`, of a linear layer or a norm, name what is added. The tensor returned is the one named, and must
    outlive the call."""
    if residual is None:
        args.residual = None
        return None
    residual = with_packed_rows(residual)
    args.residual, args.residual_stride = residual.data_ptr(), residual.stride(0)
    return residual
