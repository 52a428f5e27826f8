"""Normalisation of each row by itself. Sums are float32 whatever the model's type."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.worker.layers.weights import weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019).

    Families differ in where they round to the model's type: Llama before the product with w; OLMo 2 and Gemma
    (`scale_in_float32`) after it. Gemma stores w - 1 (`weight_offset=1`).
    """

    def __init__(self, dim: int, eps: float, *, weight_offset: float = 0.0, scale_in_float32: bool = False) -> None:
        super().__init__()
        self.weight = weight(dim)
        self.eps = eps
        self.weight_offset = weight_offset
        self.scale_in_float32 = scale_in_float32

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim], normalised over the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.scale_in_float32:
            return (wide * (self.weight_offset + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * w + b (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = weight(dim) if affine else None
        self.bias = weight(dim) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim], normalised over the last dimension."""
        return functional.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
