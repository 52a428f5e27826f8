"""Interfaces between modules and the weights of checkpoints.

A module tree mirrors the checkpoint's names, so a parameter's path is its tensor's name. A module that stores several
of the checkpoint's tensors in one parameter (`q_proj`, `k_proj`, `v_proj` in one matrix; all experts in one block)
implements `PackedWeights`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, _ProtocolMeta, runtime_checkable

import torch
from torch import Tensor, nn

from quire.config.quantization import QuantizationScheme
from quire.worker.kernels.base import Kernels
from quire.worker.quantization.weight import Kind, QuantizedWeight

T = TypeVar("T")


@cache
def _members(interface: type) -> tuple[str, ...]:
    return tuple(name for name in {**vars(interface), **interface.__annotations__} if not name.startswith("_"))


class _Interface(_ProtocolMeta):
    """Makes isinstance quick: with that of Python 3.11's protocols a small model spends a third of its loading."""

    def __instancecheck__(self, instance: object) -> bool:
        return all(hasattr(instance, name) for name in _members(self))


@runtime_checkable
class PackedWeights(Protocol, metaclass=_Interface):
    """A module whose own parameters are not tensors of the checkpoint, but hold them."""

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor's name, relative to the module's parent, and its part of a parameter (a view)."""


@runtime_checkable
class StoredOtherwise(Protocol, metaclass=_Interface):
    """A module whose parameters checkpoints hold in another shape."""

    def stored_tensors(self, path: str) -> list[tuple[str, Tensor]]:
        """Returns the checkpoint's tensors of this module, whose place in the model is `path`: their names, and each as
        a view of a parameter."""


@runtime_checkable
class NamedWeights(Protocol, metaclass=_Interface):
    """A model whose tensors have other names in checkpoints, or whose checkpoints hold tensors that it does not
    need."""

    def checkpoint_name(self, name: str) -> str | None:
        """Returns the model's name of a checkpoint's tensor; None if the model does not need it."""


@runtime_checkable
class ReorderedWeights(Protocol, metaclass=_Interface):
    """A module that computes with rows in another order than checkpoints have them in: see row_order.py."""

    row_orders: Mapping[str, Tensor]
    """Orders of the rows: by the name of a part, for a module that is a `PackedWeights`, else of all its tensors, under
    an empty name. What is not named stays in place."""


class Cut(NamedTuple):
    """The rows of a tensor that one of several workers has."""

    rows: Tensor
    """Numbers of the rows, in the model's order."""
    num_rows: int
    """Rows of the whole tensor."""


@runtime_checkable
class CutWeights(Protocol, metaclass=_Interface):
    """A module of which one worker has a part of the rows: see worker/loader/shards.py."""

    cuts: Mapping[str, Cut]
    """Cuts by the name of a part, as in `ReorderedWeights`."""


@runtime_checkable
class Prepared(Protocol, metaclass=_Interface):
    """A module that computes by kernels made of its weights, or of its children's."""

    def prepare(self, kernels: Kernels) -> Any:
        """Makes the kernels from the loaded weights, and frees what they do not need."""

    def discard(self) -> None:
        """Drops the kernels, because the weights they were made of are about to be freed."""


@runtime_checkable
class QuantizableWeights(Protocol, metaclass=_Interface):
    """A module that can compute with quantized matrices."""

    scheme: QuantizationScheme | None
    """Quantization when the kernels are made; None: none."""
    quantized_bytes: int | None
    """Bytes of the quantized matrices, once kernels are made of them."""

    def store(self, parts: Sequence[QuantizedWeight]) -> bool:
        """Stores the checkpoint's quantized matrices, in the order of the module's tensors, for the next kernels.
        Returns False if they differ too much to form one matrix; then the module's parameters must be filled."""

    @property
    def stored_kinds(self) -> tuple[Kind, ...]:
        """Kinds of the stored matrices, as the kernels get them; empty if none are stored."""

    def store_outlines(self, kinds: Sequence[Kind]) -> None:
        """Stores outlines of matrices of these kinds, whose values are packed already, for the next kernels."""


class GivenBack:
    """Stands for a module's kernels while its weights are freed: each use raises."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("the weights of this module were given back: load them again first")

    __call__ = lookup = project = __iter__ = _refuse


GIVEN_BACK: Any = GivenBack()


class KernelModule(nn.Module):
    """A `Prepared` module whose `prepare` makes `_kernel`, and whose first use makes it of torch's kernels if nothing
    else did."""

    _kernel: Any

    def discard(self) -> None:
        self._kernel = GIVEN_BACK


class Elsewhere(nn.Module):
    """Stands for a module that another worker has."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple: it is no child

    def originals(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yields the module, whose place in the model is `path`, and those in it, by their places."""
        yield from self._original[0].named_modules(prefix=path)

    def missing_tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the checkpoint's tensors of the module, whose place in the model is `path`, in the order of its
        modules."""
        for name, module in self.originals(path):
            yield from own_tensors(name, module)


def weight(*shape: int) -> nn.Parameter:
    """Returns an unfilled parameter on the current default device. Quire never trains: no gradients."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns every tensor the model needs, by the checkpoint's name: parameters, or views into them."""
    return {name: tensor for path, module in model.named_modules() for name, tensor in own_tensors(path, module)}


def own_tensors(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the entries of `checkpoint_tensors` that belong to the module itself. `path` is its place in the
    model."""
    if isinstance(module, PackedWeights):
        parent, _, _ = path.rpartition(".")
        return [(f"{parent}.{name}", view) for name, view in module.checkpoint_tensors()]
    if isinstance(module, StoredOtherwise):
        return module.stored_tensors(path)
    prefix = path + "." if path else ""
    return [(prefix + name, tensor.data) for name, tensor in module.named_parameters(recurse=False)]


def absent_tensors(path: str, module: nn.Module) -> set[str]:
    """Returns those of `own_tensors` that stand for parts of the module that other workers have."""
    parent = path.rpartition(".")[0]
    return {f"{parent}.{name}" for name in getattr(module, "absent_tensors", ())}


def own_row_orders(path: str, module: nn.Module) -> dict[str, Tensor]:
    """Returns the row order of each of `own_tensors` that has one, by its name without the parameter's. Of a module
    that is cut it has the worker's rows only."""
    orders = dict(module.row_orders) if isinstance(module, ReorderedWeights) else {}
    for part, cut in module.cuts.items() if isinstance(module, CutWeights) else ():
        orders[part] = orders[part][cut.rows] if part in orders else cut.rows
    return _by_tensor(path, orders)


def own_cuts(path: str, module: nn.Module) -> dict[str, Cut]:
    """Returns the cut of each of `own_tensors` that has one, by its name without the parameter's."""
    return _by_tensor(path, module.cuts) if isinstance(module, CutWeights) else {}


def _by_tensor(path: str, by_part: Mapping[str, T]) -> dict[str, T]:
    parent = path.rpartition(".")[0]
    return {f"{parent}.{part}" if part else path: value for part, value in by_part.items()}


def packed_parameters(module: nn.Module) -> tuple[str, ...]:
    """Returns the parameters that a module's kernels pack and then no longer need: `module.packed_parameters`."""
    return tuple(getattr(module, "packed_parameters", ()))


def parameter_dtype(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of a module's own parameter in a model of type `dtype`: float32 for those that the module names
    in `float32_parameters`, because rounding them would change a choice."""
    return torch.float32 if name in getattr(module, "float32_parameters", ()) else dtype


def is_allocated(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether all of the module's own parameters have memory on `device` and the types `allocate` gives."""
    own = module.named_parameters(recurse=False)
    return all(p.device == device and p.dtype == parameter_dtype(module, name, dtype) for name, p in own)


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype, without: Collection[str] = ()) -> None:
    """Gives the module's own parameters unfilled memory on `device`, which may be meta. Those named in `without` go to
    the meta device.

    nn.Module.to_empty is not used: on meta tensors it makes torch import sympy, which takes a second.
    """
    for name, parameter in module.named_parameters(recurse=False):
        place = torch.device("meta") if name in without else device
        empty = torch.empty(parameter.shape, dtype=parameter_dtype(module, name, dtype), device=place)
        setattr(module, name, nn.Parameter(empty, requires_grad=False))


def forget(module: nn.Module, name: str) -> None:
    """Frees the memory of a parameter. Its shape and type stay, on the meta device."""
    shape = torch.empty_like(getattr(module, name), device="meta")
    setattr(module, name, nn.Parameter(shape, requires_grad=False))


def weight_bytes(model: nn.Module) -> int:
    """Returns the memory of the weights, in the form that kernels compute with."""
    return sum(_own_bytes(module) for module in model.modules())


def _own_bytes(module: nn.Module) -> int:
    quantized = getattr(module, "quantized_bytes", None)
    packed = () if quantized is None else packed_parameters(module)
    own = [(n, p) for n, p in module.named_parameters(recurse=False) if n not in packed]
    return (quantized or 0) + sum(p.numel() * p.element_size() for _, p in own)
