"""The kernels in plain torch, on any device: the reference for others, and what runs where nothing else can."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quire.worker.kernels.base import (
    LOGITS,
    PLAIN,
    ActivationKernel,
    EmbeddingKernel,
    ExpertsKernel,
    Kernels,
    LinearKernel,
    LinearSpec,
    NormKernel,
    NormSpec,
    RotationKernel,
    RouterKernel,
    RouterSpec,
    Turns,
)
from quire.worker.kernels.reference_quantized import quantized_linear
from quire.worker.layers.activation import gated, get_activation, soft_cap
from quire.worker.quantization.weight import QuantizedWeight
from quire.worker.sample.kernel import SamplingKernel
from quire.worker.sample.torch_kernel import TorchSampling


class TorchKernels(Kernels):
    """Everything by torch's own functions."""

    name: ClassVar[str] = "torch"
    keeps_weights: ClassVar[bool] = True

    def linear(self, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """See Kernels.linear."""
        return functools.partial(linear, weight=weight, bias=bias, spec=spec)

    def can_quantize(self, weight: QuantizedWeight) -> bool:
        """See Kernels.can_quantize."""
        return True

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """See Kernels.quantized_linear."""
        return functools.partial(quantized_linear, weight=weight, bias=bias, spec=spec)

    def embedding(self, table: Tensor, head: LinearSpec | None) -> EmbeddingKernel:
        """See Kernels.embedding."""
        return TorchEmbedding(table, head or LOGITS)

    def rms_norm(self, weight: Tensor, spec: NormSpec) -> NormKernel:
        """See Kernels.rms_norm."""
        return functools.partial(rms_norm, weight=weight, spec=spec)

    def rotation(
        self,
        head_size: int,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        spec: NormSpec | None = None,
    ) -> RotationKernel:
        """See Kernels.rotation."""
        return functools.partial(turn_heads, head_size=head_size, query_norm=query_norm, key_norm=key_norm, spec=spec)

    def activation(self, name: str, gated: bool = False) -> ActivationKernel:
        """See Kernels.activation."""
        return functools.partial(activate, name=name, is_gated=gated)

    def router(self, spec: RouterSpec, dtype: torch.dtype) -> RouterKernel:
        """See Kernels.router."""
        return functools.partial(route, spec=spec, dtype=dtype)

    def experts(self, gate_up: Tensor, down: Tensor, activation: str) -> ExpertsKernel:
        """See Kernels.experts."""
        return functools.partial(ask_experts, gate_up=gate_up, down=down, activation=activation)

    def quantized_experts(
        self, gate_up: Sequence[QuantizedWeight], down: Sequence[QuantizedWeight], activation: str
    ) -> ExpertsKernel:
        """See Kernels.quantized_experts."""
        return functools.partial(
            ask_experts, gate_up=gate_up, down=down, activation=activation, product=quantized_linear
        )

    def sampling(self) -> SamplingKernel:
        """See Kernels.sampling."""
        return TorchSampling()


class TorchEmbedding:
    """See EmbeddingKernel."""

    def __init__(self, table: Tensor, head: LinearSpec) -> None:
        self._table = table
        self._head = head

    def lookup(self, ids: Tensor) -> Tensor:
        """See EmbeddingKernel.lookup."""
        return functional.embedding(ids, self._table)

    def project(self, x: Tensor) -> Tensor:
        """See EmbeddingKernel.project."""
        return linear(x, weight=self._table, bias=None, spec=self._head)


def linear(
    x: Tensor, residual: Tensor | None = None, *, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN
) -> Tensor:
    """See LinearKernel."""
    y = functional.linear(x, weight, bias)
    if spec.float32_output:
        y = y.float()
    if spec.divisor != 1.0:
        y = y / spec.divisor
    y = soft_cap(y, spec.soft_cap)
    if spec.activation is not None:
        y = activate(y, name=spec.activation, is_gated=spec.gated)
    return y if residual is None else residual + y


def rms_norm(x: Tensor, residual: Tensor | None = None, *, weight: Tensor, spec: NormSpec) -> Tensor:
    """See NormKernel."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.scale_in_float32:
        y = (wide * (spec.weight_offset + weight.float())).to(x.dtype)
    else:
        y = weight * wide.to(x.dtype)
    return y if residual is None else residual + y


def turn_heads(
    query: Tensor,
    key: Tensor,
    turns: Turns | None,
    *,
    head_size: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    spec: NormSpec | None = None,
) -> tuple[Tensor, Tensor]:
    """See RotationKernel."""
    n = query.shape[0]
    q, k = query.view(n, -1, head_size), key.view(n, -1, head_size)  # [n, heads, head_size]
    if spec is not None and query_norm is not None and key_norm is not None:
        q, k = rms_norm(q, weight=query_norm, spec=spec), rms_norm(k, weight=key_norm, spec=spec)
    if turns is not None:
        q, k = rotate(q, *turns.rows), rotate(k, *turns.rows)
    return q.reshape(n, -1), k.reshape(n, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rotary_dim elements of each head, keep the rest.

    x: [num_tokens, num_heads, head_size]; cos, sin: [num_tokens, 1, rotary_dim / 2]. The products are in the type of
    cos and sin, the result in that of x.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def activate(x: Tensor, *, name: str, is_gated: bool) -> Tensor:
    """See ActivationKernel."""
    function = get_activation(name)
    return gated(function, x) if is_gated else function(x)


def route(logits: Tensor, *, spec: RouterSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See RouterKernel. Weights that are rounded have the model's type: products with them are rounded, too."""
    weights, ids = logits.softmax(dim=-1).topk(spec.num_experts_per_token, dim=-1)  # [n, k] each
    if spec.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights if spec.weights_in_float32 else weights.to(dtype)


def ask_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    gate_up: Tensor | Sequence[QuantizedWeight],
    down: Tensor | Sequence[QuantizedWeight],
    activation: str,
    product: Callable[..., Tensor] = linear,
) -> Tensor:
    """See ExpertsKernel, and with `quantized_linear` as product Kernels.quantized_experts."""
    inner = LinearSpec(activation=activation, gated=True)

    def answer(expert: int, x: Tensor) -> Tensor:
        between = product(x, weight=gate_up[expert], bias=None, spec=inner)
        return product(between, weight=down[expert], bias=None)

    return combine_answers(x, ids, weights, residual, answer, len(gate_up))


def combine_answers(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    answer: Callable[[int, Tensor], Tensor],
    num_experts: int,
) -> Tensor:
    """The weighted sum of what each token's experts answer. Tokens are sorted by expert, so each expert runs once, on
    its own tokens."""
    (n, k), hidden = ids.shape, x.shape[1]
    order = ids.flatten().argsort(stable=True)  # [n * k] choices, by expert
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    answers = x.new_empty(n * k, hidden)  # [n * k, hidden], a row per choice
    for expert, choices in enumerate(torch.split(order, counts)):
        if len(choices):
            answers[choices] = answer(expert, x[choices // k])
    y = (answers.view(n, k, hidden) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
    return y if residual is None else residual + y


TORCH_KERNELS = TorchKernels()
