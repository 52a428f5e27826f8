"""Muon: momentum whose update is orthogonalised, for the weight matrices inside the layers.

Follows K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): the momentum matrix is
brought near the closest semi-orthogonal matrix by five Newton-Schulz steps with the quintic of that note. It needs
about half the tokens that AdamW needs here, which is what two cores have to spare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic, from the note
STEPS = 5


class Muon:
    """Updates matrices of equal shape together. Owns the momentum; the learning rate is given with each step."""

    def __init__(self, weights: Iterable[Tensor], momentum: float = 0.95, decay: float = 0.1) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in weights:
            groups[tuple(weight.shape)].append(weight)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros_like(torch.stack(group)) for group in self.groups]
        self.momentum = momentum
        self.decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with Nesterov momentum, scaled so that every entry moves about as far as with AdamW."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([weight.grad for weight in group if weight.grad is not None])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5  # Liu et al. 2025, "Muon is scalable for LLM training"
            for weight, change in zip(group, update, strict=True):
                weight.mul_(1 - rate * self.decay).add_(change, alpha=-rate * scale)
                weight.grad = None


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices, for a stack [count, out, in]."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result.to(matrices.dtype)
