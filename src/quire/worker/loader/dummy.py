"""Random weights for `load_format="dummy"`: to measure speed and memory without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NOISE_LEN = 1_000_003
"""A prime, so that rows of a matrix never line up with the repetition of the noise."""
_SCALE = 0.02


@torch.no_grad()
def fill_with_noise(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill each tensor with numbers small enough never to overflow: the same for the same seed.

    One block of noise is repeated, as drawing billions of numbers would take longer than reading them. Vectors whose
    name says norm are ones, so that activations keep their size.
    """
    noise = torch.empty(_NOISE_LEN).normal_(std=_SCALE, generator=torch.Generator().manual_seed(seed)).repeat(2)
    noise = noise.to(next(iter(tensors.values())))  # converted once: what follows only copies
    start = 0
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "norm" in name and name.endswith("weight"):
            tensor.fill_(1.0)
            continue
        for part in torch.split(tensor.view(-1), _NOISE_LEN):
            part.copy_(noise[start : start + part.numel()])
            start = (start + part.numel()) % _NOISE_LEN
