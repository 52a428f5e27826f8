"""Matrices: y = x W^T + b, alone or several side by side."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.worker.layers.weights import weight


class Linear(nn.Module):
    """One projection. `weight` is [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features)
        self.bias = weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] to [..., out_features]."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Several projections of one input as one matrix: one product instead of three, and one read of x.

    `parts` maps the checkpoint's name of each projection to its rows, from top to bottom.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See PackedWeights."""
        for parameter, tensor in self.named_parameters(recurse=False):
            rows = torch.split(tensor.data, list(self.parts.values()))
            yield from ((f"{part}.{parameter}", view) for part, view in zip(self.parts, rows, strict=True))
