"""Weights as checkpoints name them.

A module tree mirrors the checkpoint's names, so a parameter's path is its tensor's name. A module that keeps several of
the checkpoint's tensors in one parameter (`q_proj`, `k_proj`, `v_proj` in one matrix; all experts in one block) says so
by implementing `PackedWeights`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.config.quantization import QuantizationScheme
from quire.worker.kernels.base import Kernels
from quire.worker.quantization.weight import Kind, QuantizedWeight


@runtime_checkable
class PackedWeights(Protocol):
    """A module whose own parameters are not tensors of the checkpoint, but hold them."""

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's name, relative to the module's parent, and the part of a parameter it belongs in (a view)."""


@runtime_checkable
class NamedWeights(Protocol):
    """A model whose tensors checkpoints call by several names, or keep beside some that it has no use for."""

    def checkpoint_name(self, name: str) -> str | None:
        """What the model calls a checkpoint's tensor; None for one of no use."""


@runtime_checkable
class Prepared(Protocol):
    """A module that computes by kernels made of its weights, or of its children's."""

    def prepare(self, kernels: Kernels) -> Any:
        """Make the kernels: the weights are loaded. What the kernels do not need any more is given back."""

    def discard(self) -> None:
        """Give the kernels back, because the weights they were made of go."""


@runtime_checkable
class QuantizableWeights(Protocol):
    """A module that can compute with its matrices in few bits."""

    scheme: QuantizationScheme | None
    """How they are quantized when the kernels are made; None: they are not."""
    quantized_bytes: int | None
    """What they take, once kernels are made of integers."""

    def store(self, parts: Sequence[QuantizedWeight]) -> bool:
        """Make the next kernels of these: the checkpoint's matrices, in the order of the module's tensors. False if
        they differ too much to be computed with in one; then the module's parameters are to be filled."""

    @property
    def stored_kinds(self) -> tuple[Kind, ...]:
        """Of the matrices that are stored, as the kernels get them; empty if none are."""

    def store_outlines(self, kinds: Sequence[Kind]) -> None:
        """Make the next kernels of matrices of these kinds that are packed already."""


class GivenBack:
    """Stands where a module's kernels were until its weights were given back: whoever calls it is told so."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("the weights of this module were given back: load them again first")

    __call__ = lookup = project = __iter__ = _refuse


GIVEN_BACK: Any = GivenBack()


def weight(*shape: int) -> nn.Parameter:
    """An unfilled parameter on the current default device. Quire never trains: no gradients."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor the model wants from a checkpoint, by the checkpoint's name: parameters, or views into them."""
    return {name: tensor for path, module in model.named_modules() for name, tensor in own_tensors(path, module)}


def own_tensors(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Those of `checkpoint_tensors` that are the module's own, not its children's. `path` is its place in the model."""
    if isinstance(module, PackedWeights):
        parent, _, _ = path.rpartition(".")
        return [(f"{parent}.{name}", view) for name, view in module.checkpoint_tensors()]
    prefix = path + "." if path else ""
    return [(prefix + name, tensor.data) for name, tensor in module.named_parameters(recurse=False)]


def packed_parameters(module: nn.Module) -> tuple[str, ...]:
    """The parameters that a module's kernels pack, and need no more once they have: `module.packed_parameters`, where
    it says so."""
    return tuple(getattr(module, "packed_parameters", ()))


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype, without: Collection[str] = ()) -> None:
    """Give the module's own parameters unfilled memory; on the meta device, take it away. Those named in `without` are
    left on the meta device.

    Not nn.Module.to_empty: on meta tensors it makes torch import sympy, which takes a second.
    """
    for name, parameter in module.named_parameters(recurse=False):
        place = torch.device("meta") if name in without else device
        empty = torch.empty(parameter.shape, dtype=dtype, device=place)
        setattr(module, name, nn.Parameter(empty, requires_grad=False))


def forget(module: nn.Module, name: str) -> None:
    """Give back the memory of a parameter. Its shape and type stay, on the meta device."""
    shape = torch.empty_like(getattr(module, name), device="meta")
    setattr(module, name, nn.Parameter(shape, requires_grad=False))


def weight_bytes(model: nn.Module) -> int:
    """Memory of the weights, in the form they are computed with."""
    return sum(_own_bytes(module) for module in model.modules())


def _own_bytes(module: nn.Module) -> int:
    quantized = getattr(module, "quantized_bytes", None)
    packed = () if quantized is None else packed_parameters(module)
    own = [(n, p) for n, p in module.named_parameters(recurse=False) if n not in packed]
    return (quantized or 0) + sum(p.numel() * p.element_size() for _, p in own)
