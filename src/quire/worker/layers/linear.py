"""Matrices: y = x W^T + b, alone or several side by side, with what can be done in the same pass over the result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.worker.kernels.base import PLAIN, Kernels, LinearKernel, LinearSpec
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.activation import get_activation
from quire.worker.layers.weights import GIVEN_BACK, forget, weight


class Linear(nn.Module):
    """One projection. `weight` is [out_features, in_features]; [2 * out_features, in_features] if the spec is gated.

    Raises UnsupportedModelError if the spec names an activation that is not implemented.
    """

    packed_parameters = ("weight",)

    def __init__(self, in_features: int, out_features: int, bias: bool = False, spec: LinearSpec = PLAIN) -> None:
        super().__init__()
        if spec.activation is not None:
            get_activation(spec.activation)
        rows = 2 * out_features if spec.gated else out_features
        self.weight = weight(rows, in_features)
        self.bias = weight(rows) if bias else None
        self.spec = spec
        self._kernel: LinearKernel | None = None

    def prepare(self, kernels: Kernels) -> LinearKernel:
        """See Prepared."""
        bias = None if self.bias is None else self.bias.data
        self._kernel = kernel = kernels.linear(self.weight.data, bias, self.spec)
        if not kernels.keeps_weights:
            forget(self, "weight")
        return kernel

    def discard(self) -> None:
        """See Prepared."""
        self._kernel = GIVEN_BACK

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, in_features] to [num_tokens, out_features]; `residual`, of that shape, is added."""
        return (self._kernel or self.prepare(TORCH_KERNELS))(x, residual)


class PackedLinear(Linear):
    """Several projections of one input as one matrix: one product instead of three, and one read of x.

    `parts` maps the checkpoint's name of each projection to its rows, from top to bottom.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False, spec: LinearSpec = PLAIN) -> None:
        super().__init__(in_features, sum(parts.values()) // (2 if spec.gated else 1), bias, spec)
        self.parts = parts

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See PackedWeights."""
        for parameter, tensor in self.named_parameters(recurse=False):
            rows = torch.split(tensor.data, list(self.parts.values()))
            yield from ((f"{part}.{parameter}", view) for part, view in zip(self.parts, rows, strict=True))
