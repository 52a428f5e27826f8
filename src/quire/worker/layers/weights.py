"""Weights as checkpoints name them.

A module tree mirrors the checkpoint's names, so a parameter's path is its tensor's name. A module that keeps several of
the checkpoint's tensors in one parameter (`q_proj`, `k_proj`, `v_proj` in one matrix; all experts in one block) says so
by implementing `PackedWeights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class PackedWeights(Protocol):
    """A module whose own parameters are not tensors of the checkpoint, but hold them."""

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's name, relative to the module's parent, and the part of a parameter it belongs in (a view)."""


def weight(*shape: int) -> nn.Parameter:
    """An unfilled parameter on the current default device. Quire never trains: no gradients."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor the model wants from a checkpoint, by the checkpoint's name: parameters, or views into them."""
    wanted: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedWeights):
            parent, _, _ = path.rpartition(".")
            wanted.update((f"{parent}.{name}", view) for name, view in module.checkpoint_tensors())
        else:
            prefix = path + "." if path else ""
            wanted.update((prefix + name, tensor.data) for name, tensor in module.named_parameters(recurse=False))
    return wanted
