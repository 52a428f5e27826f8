"""Normalisation of each row by itself. Sums are float32 whatever the model's type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.worker.kernels.base import Kernels, NormKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import NormSpec
from quire.worker.layers.weights import KernelModule, weight


class RMSNorm(KernelModule):
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019).

    Families differ in where they round to the model's type: Llama before the product with w; OLMo 2 and Gemma
    (`scale_in_float32`) after it. Gemma stores w - 1 (`weight_offset=1`).
    """

    def __init__(self, dim: int, eps: float, *, weight_offset: float = 0.0, scale_in_float32: bool = False) -> None:
        super().__init__()
        self.weight = weight(dim)
        self.spec = NormSpec(eps=eps, weight_offset=weight_offset, scale_in_float32=scale_in_float32)
        self.row_orders: Mapping[str, Tensor] = {}
        self._kernel: NormKernel | None = None

    def prepare(self, kernels: Kernels) -> NormKernel:
        self._kernel = kernel = kernels.rms_norm(self.weight.data, self.spec)
        return kernel

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [..., dim], normalised over the last dimension; `residual`, of the same shape, is added after it."""
        return (self._kernel or self.prepare(TORCH_KERNELS))(x, residual)


class UnitNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps), without weights."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps, scale_in_float32=True)
        del self.weight
        self.dim = dim

    weight: Any  # a tensor, but no parameter

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Makes the weights that kernels need."""
        self.weight = torch.ones(self.dim, dtype=dtype, device=device)


class LayerNorm(KernelModule):
    """(x - mean) / sqrt(var + eps) * w + b (Ba et al. 2016); without `affine` no w, without `bias` no b.

    `groups`: each of that many parts of a row is normalised by itself, with the same w and b. Nemotron stores w - 1
    (`weight_offset=1`).
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        affine: bool = True,
        bias: bool = True,
        weight_offset: float = 0.0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.dim, self.groups = dim, groups
        self.weight = weight(dim) if affine else None
        self.bias = weight(dim) if affine and bias else None
        self.spec = NormSpec(eps=eps, weight_offset=weight_offset)
        self.row_orders: Mapping[str, Tensor] = {}
        self._kernel: NormKernel | None = None

    def prepare(self, kernels: Kernels) -> NormKernel:
        weight, bias = (None if parameter is None else parameter.data for parameter in (self.weight, self.bias))
        self._kernel = kernel = kernels.layer_norm(self.dim, weight, bias, self.spec, self.groups)
        return kernel

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [n, groups * dim], each part normalised; `residual`, of the same shape, is added after it."""
        return (self._kernel or self.prepare(TORCH_KERNELS))(x, residual)


class HeadNorms(LayerNorm):
    """A LayerNorm for each of the heads of a row: weights [num_heads, head_dim], no bias.

    Checkpoints have them as one tensor, or with `is_list` as `norms.0`, `norms.1`, ....
    """

    def __init__(self, head_dim: int, eps: float, num_heads: int, *, is_list: bool) -> None:
        super().__init__(head_dim, eps, affine=False, groups=num_heads)
        self.weight = weight(num_heads, head_dim)
        self.is_list = is_list

    def stored_tensors(self, path: str) -> list[tuple[str, Tensor]]:
        assert self.weight is not None
        if not self.is_list:
            return [(f"{path}.weight", self.weight.data)]
        return [(f"{path}.norms.{i}.weight", row) for i, row in enumerate(self.weight.data)]


Norm = RMSNorm | LayerNorm
