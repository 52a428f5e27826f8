"""Random weights for `load_format="dummy"`: to measure speed and memory without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_NOISE_LEN = 1_000_003
"""A prime, so that rows of a matrix never line up with the repetition of the noise."""
_SCALE = 0.02


class Noise:
    """Numbers small enough never to overflow: the same for the same seed and the same order of tensors.

    One block of noise is repeated, as drawing billions of numbers would take longer than reading them.
    """

    def __init__(self, seed: int) -> None:
        noise = np.random.Generator(np.random.Philox(seed)).standard_normal(_NOISE_LEN, dtype=np.float32)
        self._noise = torch.from_numpy(noise * np.float32(_SCALE)).repeat(2)
        self._start = 0

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each tensor. Vectors whose name says norm become ones, so that activations keep their size."""
        for name, tensor in tensors:
            if tensor.dim() == 1 and "norm" in name and name.endswith("weight"):
                tensor.fill_(1.0)
                continue
            self._noise = self._noise.to(tensor)  # converted once: what follows only copies
            for part in torch.split(tensor.view(-1), _NOISE_LEN):
                part.copy_(self._noise[self._start : self._start + part.numel()])
                self._start = (self._start + part.numel()) % _NOISE_LEN
