"""Values that describe what a kernel computes, and the activation functions. Layers and kernels share them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """The operations of a linear layer after its matrix product, in this order."""

    divisor: float = 1.0
    """The sums are divided by it."""
    soft_cap: float | None = None
    """c: the sums become c * tanh(sums / c)."""
    clip: float | None = None
    """c: the sums are cut to [-c, c]."""
    activation: str | None = None
    """A key of `ACTIVATIONS`."""
    gated: bool = False
    """The weight is two matrices, one above the other: activation(first(x)) * second(x)."""
    float32_output: bool = False
    """Keep the float32 sums instead of rounding them to the type of x."""
    float32_inputs: bool = False
    """Convert x and the weight to float32 before the product, where a product of their own type would be rounded. Not
    on quantized weights."""

    def __post_init__(self) -> None:
        assert not self.gated or (self.divisor, self.soft_cap, self.clip) == (1.0, None, None), "no kernel has both"


PLAIN = LinearSpec()
LOGITS = LinearSpec(float32_output=True)
TANH = LinearSpec(soft_cap=1.0)
"""tanh of the sums."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm of rows: layers/norm.py."""

    eps: float
    weight_offset: float = 0.0
    scale_in_float32: bool = False
    """A root mean square norm rounds after the product with the weight, not before. LayerNorm always does."""


@dataclass(frozen=True, kw_only=True)
class XieluSpec:
    """The numbers of an xIELU activation, which are learned: `xielu`."""

    positive: float
    negative: float
    slope: float = 0.5
    least: float = -1e-6


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """The rule by which a mixture of experts chooses. Of equal experts or groups, the smaller id is chosen."""

    num_experts_per_token: int
    normalize: bool
    """Scale the chosen experts' weights to a sum of 1. With softmax this is the softmax of the chosen logits."""
    weights_in_float32: bool = True
    """False rounds the experts' weights to the model's type."""
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """An expert's score, which is its weight: from the logits of all, or from its own. sparsemixer: each choice has a
    softmax of its own, over the experts not chosen before whose logits are near the best (Liu et al. 2024)."""
    threshold: float = 0.0
    """sparsemixer: largest distance of a near logit from the best, relative to the larger of the best and its own
    magnitude."""
    norm_eps: float = 0.0
    """Added to the sum by which weights are divided."""
    norm_min: float = 0.0
    """Least sum by which weights are divided."""
    factor: float = 1.0
    """Factor of all weights, applied last."""
    num_groups: int = 1
    """Groups of adjacent experts; only the experts of the best groups can be chosen (DeepSeek-AI 2024)."""
    num_kept_groups: int = 1
    """Number of the best groups."""
    group_score: Literal["best", "two best"] = "best"
    """A group's score: that of its best expert, or the sum of the two best."""

    def validate(self, num_experts: int) -> None:
        """Raises UnsupportedModelError unless the numbers fit together."""
        k, groups, kept = self.num_experts_per_token, self.num_groups, self.num_kept_groups
        if num_experts % groups or not 1 <= kept <= groups:
            raise UnsupportedModelError(f"{kept} of {groups} groups of {num_experts} experts cannot be chosen")
        if groups > 1 and self.group_score == "two best" and num_experts // groups < 2:
            raise UnsupportedModelError(f"{groups} groups of one expert have no sum of two scores")
        if not 1 <= k <= num_experts // groups * kept:
            raise UnsupportedModelError(
                f"{k} experts for each token cannot be chosen from {num_experts // groups * kept}"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts' computation: weight * down(activation(gate(x)) * up(x))."""

    activation: str = "silu"
    """A key of `ACTIVATIONS`, or CLAMPED_SWIGLU."""
    scales_inputs: bool = False
    """The weight scales an expert's input instead of its answer (Llama 4)."""
    halves_alternate: bool = False
    """Gates and what they are multiplied with take turns among the rows of gate_up and its biases (gpt-oss). False: all
    gates stand first."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024). All heads share one key: a latent, then a part that
    rotates. A query head in the model's order is a part that rotates, then one that does not."""

    query_rank: int | None
    """Elements of the latent that queries are made of; None: they are made of the hidden state."""
    rank: int
    """Elements of the latent that keys and values are made of."""
    plain: int
    """Elements of a query head that do not rotate."""
    rotary: int
    """Elements of a query head, and of the key, that rotate."""
    value: int
    """Elements of a value head."""


@dataclass(frozen=True)
class RotaryAngles:
    """Rotation angles of a step's tokens: tables of cosines and sines, and the tokens' rows in them."""

    cos: Tensor
    """[num_positions, rotary_dim / 2], like `sin`."""
    sin: Tensor
    positions: Tensor
    """[n] int64"""

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens, [n, 1, rotary_dim / 2] each: the same for every head."""
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)


Activation = Callable[[Tensor], Tensor]


def relu2(x: Tensor) -> Tensor:
    """Returns max(x, 0)^2 (So et al. 2021)."""
    return functional.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x), an approximation of gelu (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def xielu(x: Tensor, spec: XieluSpec) -> Tensor:
    """Returns positive * x^2 + slope * x for x > 0, else negative * (e^min(x, least) - 1 - x) + slope * x (Huang and
    Schlag 2024)."""
    above = spec.positive * x * x + spec.slope * x
    below = (torch.expm1(x.clamp(max=spec.least)) - x) * spec.negative + spec.slope * x
    return torch.where(x > 0, above, below)


_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": functional.relu,
    "relu2": relu2,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "swish": functional.silu,
}
"""Element-wise functions, by the name config.json gives them."""


def get_activation(name: str) -> Activation:
    """Returns the function config.json calls `name`. Raises UnsupportedModelError."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not implemented; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(name: str, gate_up: Tensor, halves_alternate: bool = False) -> Tensor:
    """Returns activation(gate) * up, [n, dim], or CLAMPED_SWIGLU of the two. gate_up: [n, 2 * dim], the gates
    first, or in turn."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if halves_alternate else gate_up.chunk(2, dim=-1)
    return clamped_swiglu(gate, up) if name == CLAMPED_SWIGLU else get_activation(name)(gate) * up


CLAMPED_SWIGLU = "clamped_swiglu"
"""The gated unit of gpt-oss, which is no product of an activation."""
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gate * sigmoid(1.702 gate) * (up + 1), with gates of at most 7 and up between -7 and 7."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(x / cap), which bounds x smoothly (Gemma 2); x where the cap is None."""
    return x if cap is None else cap * torch.tanh(x / cap)
