"""Element-wise functions between the two halves of an MLP, by the name config.json gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModelError

Activation = Callable[[Tensor], Tensor]

_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}


def get_activation(name: str) -> Activation:
    """The function config.json calls `name`. Raises UnsupportedModelError."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not implemented; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(activation: Activation, gate_up: Tensor) -> Tensor:
    """activation(gate) * up. gate_up: [num_tokens, 2 * n], the gates first; returns [num_tokens, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap): bounds x smoothly (Gemma 2). None leaves it alone."""
    return x if cap is None else cap * torch.tanh(x / cap)
