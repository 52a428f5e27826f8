"""Rotary embeddings of transformers' models on Quire's kernel.

A rotary module is adopted if the rows of its cosines have two equal halves: it rotates each element of the first half
of a head with one of the second, as the kernel does. It attaches its table to the cosines that it returns.

Nearly every family rotates by a function (q, k, cos, sin) of its modeling file. It is wrapped: it calls the kernel for
such cosines, and the original function for all others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.fallback.interface import Recording
from quire.worker.kernels.base import Kernels, RotationKernel
from quire.worker.kernels.plan import NotPlannableError
from quire.worker.kernels.specs import RotaryAngles

_NAME = "quire_rotation"
"""Attribute of an adopted module's cosines: their `RotaryAngles`, and a function from a head size to a kernel."""
NEAR = 0.02
"""Largest difference that roundings make, relative to the largest number."""
_STRETCH = 1 << 14
"""Positions whose angles are computed at once."""


class AdoptedRotary(nn.Module):
    """A module that answers with cosines and sines of positions, [1, n, rotary_dim] each."""

    tables: dict[Any, tuple[Tensor, Tensor] | None]
    """Cosines and sines of all positions, [context_len, rotary_dim / 2], by the type of x and further arguments; None
    where the kernel has no use for them."""
    kernel_of: Callable[[int], RotationKernel]
    context_len: int

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """x: any tensor of the model's type; position_ids: [1, n]."""
        original: Any = super().forward
        key = (x.dtype, args, tuple(kwargs.items()))
        if key not in self.tables:
            stretches = torch.split(torch.arange(self.context_len, device=x.device)[None], _STRETCH, dim=1)
            self.tables[key] = _halve([original(x, stretch, *args, **kwargs) for stretch in stretches])
        tables = self.tables[key]
        if tables is None or position_ids.dim() != 2:
            return original(x, position_ids, *args, **kwargs)
        try:
            answer = original(x, position_ids, *args, **kwargs)
        except NotPlannableError:  # a step is being recorded; only the wrapped function can use this placeholder
            answer = tables[0][:1, :1].expand(1, position_ids.shape[1], 2 * tables[0].shape[1]), tables[1]
        setattr(answer[0], _NAME, (RotaryAngles(*tables, position_ids[0]), self.kernel_of))
        return answer


def _halve(answers: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Returns the first halves of the rows of cosines and sines, if the second are the same."""
    for answer in answers:
        if not isinstance(answer, tuple) or len(answer) != 2 or any(t.dim() != 3 or t.is_complex() for t in answer):
            return None
        if not all(torch.equal(*t.chunk(2, dim=-1)) for t in answer):
            return None
    cos, sin = (torch.cat([t[0].chunk(2, dim=-1)[0] for t in parts]) for parts in zip(*answers, strict=True))
    return cos, sin


def _rotating(function: Any) -> Any:
    """Returns `function`, (q, k, cos, sin) to q and k, wrapped: for an adopted module's cosines it calls a kernel."""

    @functools.wraps(function)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        angles, kernel_of = getattr(cos, _NAME, (None, None))
        if kernel_of is None or args or kwargs or q.dim() != 4 or len(q) != 1 or not q.dtype == k.dtype == cos.dtype:
            return function(q, k, cos, sin, *args, **kwargs)
        rows = [x[0].transpose(0, 1).flatten(1) for x in (q, k)]  # [n, heads * head_size]
        turned = kernel_of(q.shape[3])(*rows, angles)
        return tuple(x.view(len(x), -1, q.shape[3]).transpose(0, 1)[None] for x in turned)

    setattr(rotate, _NAME, function)
    return rotate


def adopt_rotations(
    model: nn.Module, before: Recording, run: Callable[[], Recording], kernels: Kernels, context_len: int
) -> None:
    """Puts the rotary embeddings of `model` on `kernels`, unless `run` then records anything else than `before`."""
    kernel_of = functools.cache(kernels.rotation)
    modules = [m for m in model.modules() if any("inv_freq" in name for name in m._buffers) and not m._parameters]
    originals = [type(module) for module in modules]
    for module in modules:
        module.__dict__.update(tables={}, kernel_of=kernel_of, context_len=context_len)
        module.__class__ = type(type(module).__name__, (AdoptedRotary, type(module)), {})
    for site in before.sites:
        forward: Any = inspect.unwrap(type(model.get_submodule(site.module)).forward)
        for name in forward.__code__.co_names:
            function = forward.__globals__.get(name)
            is_plain = inspect.isfunction(function) and not hasattr(function, _NAME)
            if is_plain and [*inspect.signature(function).parameters][:4] == ["q", "k", "cos", "sin"]:
                forward.__globals__[name] = _rotating(function)
    if not _gives_the_same(before, run):
        for module, original in zip(modules, originals, strict=True):
            module.__class__ = original


def _gives_the_same(before: Recording, run: Callable[[], Recording]) -> bool:
    """Returns whether attention gets, and the model answers, what they did before, within rounding.

    The kernel writes into queries and keys: a model that uses them again, too, is found by that.
    """
    try:
        now = run()
    except Exception:  # the original has run: the kernel is not for this
        return False
    old, new = ([*(x for site in each.sites for x in site.inputs), each.logits] for each in (before, now))
    return all(
        a.dtype == b.dtype and (a - b).abs().max() <= NEAR * a.abs().max() for a, b in zip(old, new, strict=True)
    )
