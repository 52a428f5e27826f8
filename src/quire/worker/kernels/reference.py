"""The kernels in plain torch, on any device: the reference for the others, and used where there are no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quire.worker.kernels.base import (
    ActivationKernel,
    BatchedLinearKernel,
    EmbeddingKernel,
    ExpertsKernel,
    ExpertsShare,
    Kernels,
    LatentKernel,
    LinearKernel,
    NormKernel,
    RotationKernel,
    RouterKernel,
)
from quire.worker.kernels.lora import (
    AdapterBatch,
    AdapterSite,
    LowRank,
    LowRankShape,
    PackedLowRank,
    Take,
    TorchAdapterBatch,
    TorchAdapterSite,
    TorchLowRank,
)
from quire.worker.kernels.specs import (
    LOGITS,
    PLAIN,
    Activation,
    ExpertsSpec,
    LatentSizes,
    LinearSpec,
    NormSpec,
    RotaryAngles,
    RouterSpec,
    XieluSpec,
    gated,
    get_activation,
    soft_cap,
    xielu,
)
from quire.worker.quantization.weight import QuantizedWeight
from quire.worker.sample.kernel import SamplingKernel
from quire.worker.sample.torch_kernel import TorchSampling


class TorchKernels(Kernels):
    """Kernels made of torch's own functions."""

    name: ClassVar[str] = "torch"
    keeps_weights: ClassVar[bool] = True

    def linear(self, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        return TorchLinear(linear, weight, bias, spec)

    def can_quantize(self, weight: QuantizedWeight) -> bool:
        return True

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        return TorchLinear(quantized_linear, weight, bias, spec)

    def embedding(self, table: Tensor, head: LinearSpec | None) -> EmbeddingKernel:
        return TorchEmbedding(table, head or LOGITS)

    def batched_linear(self, weight: Tensor) -> BatchedLinearKernel:
        return functools.partial(batched_linear, weight=weight)

    def latent(self, sizes: LatentSizes, norm: Tensor, spec: NormSpec) -> LatentKernel:
        return functools.partial(norm_and_rotate_latent, sizes=sizes, norm=norm, spec=spec)

    def rms_norm(self, weight: Tensor, spec: NormSpec) -> NormKernel:
        return functools.partial(rms_norm, weight=weight, spec=spec)

    def layer_norm(
        self, dim: int, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, groups: int = 1
    ) -> NormKernel:
        return functools.partial(layer_norm, dim=dim, weight=weight, bias=bias, spec=spec, groups=groups)

    def rotation(
        self,
        head_size: int,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        spec: NormSpec | None = None,
    ) -> RotationKernel:
        return functools.partial(rotate_heads, head_size=head_size, query_norm=query_norm, key_norm=key_norm, spec=spec)

    def activation(self, name: str, gated: bool = False) -> ActivationKernel:
        return functools.partial(apply, function=functools.partial(activate, name=name, is_gated=gated))

    def xielu(self, spec: XieluSpec) -> ActivationKernel:
        return functools.partial(apply, function=functools.partial(xielu, spec=spec))

    def router(
        self,
        spec: RouterSpec,
        dtype: torch.dtype,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> RouterKernel:
        return functools.partial(route, spec=spec, dtype=dtype, choice_bias=choice_bias, expert_scale=expert_scale)

    def experts(
        self, gate_up: Tensor, down: Tensor, spec: ExpertsSpec, biases: tuple[Tensor, Tensor] | None = None
    ) -> ExpertsKernel:
        return TorchExperts(gate_up, down, spec, biases)

    def quantized_experts(
        self,
        gate_up: Sequence[QuantizedWeight],
        down: Sequence[QuantizedWeight],
        spec: ExpertsSpec,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> ExpertsKernel:
        return TorchExperts(gate_up, down, spec, biases, quantized_linear)

    def sampling(self) -> SamplingKernel:
        return TorchSampling()

    def adapter_batch(self) -> AdapterBatch:
        return TorchAdapterBatch()

    def adapter_site(self, batch: AdapterBatch, shape: LowRankShape) -> AdapterSite:
        return TorchAdapterSite(batch)

    def pack_low_rank(
        self, parts: Sequence[LowRank | None], shape: LowRankShape, take: Take | None = None
    ) -> PackedLowRank:
        return TorchLowRank(parts, shape)


class TorchLinear:
    """A linear layer: LinearKernel."""

    def __init__(
        self, function: Callable[..., Tensor], weight: Tensor | QuantizedWeight, bias: Tensor | None, spec: LinearSpec
    ) -> None:
        """`function`: `linear` or `quantized_linear`."""
        self._function = functools.partial(function, weight=weight)
        self._bias, self._spec = bias, spec
        self._sums = LinearSpec(float32_output=True, float32_inputs=spec.float32_inputs)
        self.site: AdapterSite | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = self._function(x, residual, bias=self._bias, spec=self._spec)
        if self.site is not None:
            assert isinstance(self.site, TorchAdapterSite)
            for rows, low_rank in self.site.segments(len(x)):
                sums = self._function(x[rows], bias=None, spec=self._sums) + low_rank.multiply(x[rows])
                y[rows] = finish(sums, None if residual is None else residual[rows], self._bias, self._spec, y.dtype)
        return y if out is None else out.copy_(y)


class TorchEmbedding:
    """A table of vectors: EmbeddingKernel."""

    def __init__(self, table: Tensor, head: LinearSpec) -> None:
        self._table = table
        self._head = TorchLinear(linear, table, None, head)
        self.lookup_site: AdapterSite | None = None

    @property
    def project_site(self) -> AdapterSite | None:
        return self._head.site

    @project_site.setter
    def project_site(self, site: AdapterSite | None) -> None:
        self._head.site = site

    def lookup(self, ids: Tensor, residual: Tensor | None = None) -> Tensor:
        y = functional.embedding(ids, self._table)
        if self.lookup_site is not None:
            assert isinstance(self.lookup_site, TorchAdapterSite)
            for rows, low_rank in self.lookup_site.segments(len(ids)):
                y[rows] += low_rank.look_up(ids[rows])
        return y if residual is None else residual + y

    def lookup_share(self, ids: Tensor, first: int, out: Tensor) -> None:
        rows = ((ids >= first) & (ids < first + len(self._table))).nonzero()[:, 0]
        out[rows] = self._table[ids[rows] - first]
        if self.lookup_site is not None:
            assert isinstance(self.lookup_site, TorchAdapterSite)
            for segment, low_rank in self.lookup_site.segments(len(ids)):
                own = rows[(rows >= segment.start) & (rows < segment.stop)]
                out[own] += low_rank.look_up(ids[own])

    def project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._head(x, out=out)


def linear(
    x: Tensor, residual: Tensor | None = None, *, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN
) -> Tensor:
    if spec.float32_inputs:
        y = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    else:
        y = functional.linear(x, weight, bias)
    if spec.float32_output:
        y = y.float()
    if spec.divisor != 1.0:
        y = y / spec.divisor
    y = soft_cap(y, spec.soft_cap)
    if spec.clip is not None:
        y = y.clamp(-spec.clip, spec.clip)
    if spec.activation is not None:
        y = activate(y, name=spec.activation, is_gated=spec.gated)
    return y if residual is None else residual + y


def rms_norm(x: Tensor, residual: Tensor | None = None, *, weight: Tensor, spec: NormSpec) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.scale_in_float32:
        y = (wide * (spec.weight_offset + weight.float())).to(x.dtype)
    else:
        y = weight * wide.to(x.dtype)
    return y if residual is None else residual + y


def layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    dim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    groups: int = 1,
) -> Tensor:
    if weight is not None and spec.weight_offset:
        weight = weight + spec.weight_offset
    parts = x.reshape(*x.shape[:-1], groups, dim) if groups > 1 else x
    if weight is None or weight.dim() == 1:
        y = functional.layer_norm(parts, (dim,), weight, bias, spec.eps)
    else:
        y = functional.layer_norm(parts.float(), (dim,), eps=spec.eps) * weight
        y = (y if bias is None else y + bias).to(x.dtype)
    y = y.view(x.shape)
    return y if residual is None else residual + y


def rotate_heads(
    query: Tensor,
    key: Tensor,
    angles: RotaryAngles | None,
    *,
    head_size: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    spec: NormSpec | None = None,
) -> tuple[Tensor, Tensor]:
    n = query.shape[0]
    q, k = (x.view(n, x.shape[1] // head_size, head_size) for x in (query, key))  # [n, heads, head_size]
    if spec is not None and query_norm is not None and key_norm is not None:
        q, k = rms_norm(q, weight=query_norm, spec=spec), rms_norm(k, weight=key_norm, spec=spec)
    if angles is not None:
        q, k = rotate(q, *angles.rows), rotate(k, *angles.rows)
    return q.reshape(n, -1), k.reshape(n, -1)


def batched_linear(x: Tensor, tail: Tensor | None = None, *, weight: Tensor) -> Tensor:
    y = torch.einsum("nha,hba->nhb", x, weight)
    return y if tail is None else torch.cat([y, tail], dim=-1)


def norm_and_rotate_latent(
    query: Tensor, key: Tensor, angles: RotaryAngles | None, *, sizes: LatentSizes, norm: Tensor, spec: NormSpec
) -> tuple[Tensor, Tensor]:
    latent, rotary = key[:, : sizes.rank], key[:, sizes.rank :]
    latent = rms_norm(latent, weight=norm, spec=spec)
    if angles is not None:
        heads = query.view(len(query), -1, sizes.rotary + sizes.plain)
        query, rotary = (rotate(x, *angles.rows).flatten(1) for x in (heads, rotary[:, None]))
    return query, torch.cat([latent, rotary], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first rotary_dim elements of each head and keeps the rest.

    x: [num_tokens, num_heads, head_size]; cos, sin: [num_tokens, 1, rotary_dim / 2]. The products are in the type of
    cos and sin, the result in that of x.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def apply(x: Tensor, factors: Tensor | None = None, residual: Tensor | None = None, *, function: Activation) -> Tensor:
    """Applies an element-wise function: ActivationKernel."""
    y = function(x)
    if factors is not None:
        y = (factors.reshape(*y.shape, -1) * y.unsqueeze(-1)).flatten(1)
    return y if residual is None else residual + y


def activate(x: Tensor, *, name: str, is_gated: bool) -> Tensor:
    return gated(name, x) if is_gated else get_activation(name)(x)


def route(
    logits: Tensor,
    *,
    spec: RouterSpec,
    dtype: torch.dtype,
    choice_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses experts: RouterKernel. Rounded weights have the model's type, so that products with them are rounded,
    too."""
    if spec.score == "sparsemixer":
        ids, weights = choose_by_turns(logits, spec)
    else:
        scores = logits.softmax(dim=-1) if spec.score == "softmax" else logits.sigmoid()
        ids = choose(scores, logits, spec, choice_bias)
        weights = scores.gather(-1, ids)
    if spec.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True).clamp(min=spec.norm_min) + spec.norm_eps)
    weights = weights * spec.factor
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return ids, weights if spec.weights_in_float32 else weights.to(dtype)


def choose(scores: Tensor, logits: Tensor, spec: RouterSpec, choice_bias: Tensor | None) -> Tensor:
    """Returns the ids of the best experts, [n, k]. Where nothing is added to the scores, they are compared as logits,
    of which none were rounded to the same number."""
    k, groups = spec.num_experts_per_token, spec.num_groups
    if choice_bias is None and groups == 1:
        return best(logits, k)
    sums = scores if choice_bias is None else scores + choice_bias
    if groups > 1:
        grouped = sums.view(sums.shape[0], groups, -1)  # [n, groups, experts of a group]
        counted = 2 if spec.group_score == "two best" else 1
        kept = best(grouped.topk(counted, dim=-1).values.sum(dim=-1), spec.num_kept_groups)
        is_kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=sums.device).scatter(-1, kept, True)
        sums = grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
    return best(sums, k)


def best(x: Tensor, k: int) -> Tensor:
    """Returns the columns of the k largest of each row, the largest first, of equal ones the first. (torch.topk leaves
    open which of equal ones it takes.)"""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def choose_by_turns(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Returns ids and weights, [n, k] each, of the score "sparsemixer"."""
    left, ids, weights = logits, [], []
    for _ in range(spec.num_experts_per_token):
        chosen = best(left, 1)
        top = left.gather(-1, chosen)
        is_far = (top - logits) / torch.maximum(logits.abs(), top) > spec.threshold
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
        ids.append(chosen)
    return torch.cat(ids, dim=-1), torch.cat(weights, dim=-1)


class TorchExperts:
    """The experts: ExpertsKernel. Quantized ones have sums that are rounded after the activation."""

    def __init__(
        self,
        gate_up: Tensor | Sequence[QuantizedWeight],
        down: Tensor | Sequence[QuantizedWeight],
        spec: ExpertsSpec,
        biases: tuple[Tensor, Tensor] | None = None,
        product: Callable[..., Tensor] | None = None,
    ) -> None:
        """`product`: `linear`, or `quantized_linear`."""
        self._gate_up, self._down, self._spec, self._biases = gate_up, down, spec, biases
        self._product: Callable[..., Tensor] = product or linear
        self._sums = PLAIN if product is None else LOGITS
        self._sites: tuple[AdapterSite | None, AdapterSite | None] = None, None
        self._share: ExpertsShare | None = None

    def set_sites(self, gate_up: AdapterSite | None, down: AdapterSite | None) -> None:
        self._sites = gate_up, down

    def set_share(self, share: ExpertsShare) -> None:
        self._share = share

    def move_to(self, kernels: Kernels) -> None:
        """Does nothing: torch has threads of its own."""

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None, shared: Tensor | None = None
    ) -> Tensor:
        if self._share is not None:
            return self._compute_share(self._share, x, ids, weights, (shared, residual))
        scales_inputs = self._spec.scales_inputs
        y = combine_answers(x, ids, weights, self._answer, len(self._gate_up), scales_inputs=scales_inputs)
        for addend in (shared, residual):
            y = y if addend is None else addend + y
        return y

    def _compute_share(
        self,
        share: ExpertsShare,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        addends: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        (n, k), own = ids.shape, slice(share.outputs.start, share.outputs.stop)

        def sum_up(y: Tensor, answers: Tensor) -> Tensor:
            answers = answers.view(n, k, -1)
            total = (answers if self._spec.scales_inputs else answers * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
            for addend in addends:
                total = total if addend is None else addend[:, own] + total
            return y.copy_(total)

        if share.pool is not None:
            tokens, choices, meeting = share.pool.share(x, ids)
            for i, rows in _rows_by_expert(share.experts, choices):
                meeting[rows] = self._answer(i, tokens[rows // k], rows // k).float()
            start = share.pool.own.start
            share.pool.wait()
            return sum_up(torch.empty_like(x), meeting[start * k : (start + n) * k])
        inputs = x.repeat_interleave(k, 0)  # [n * k, hidden], a row for each choice
        if self._spec.scales_inputs:
            inputs = (inputs * weights.flatten().unsqueeze(-1)).to(x.dtype)
        chosen, meeting = _rows_by_expert(share.experts, ids), share.meeting[: n * k]
        if share.gather is None:
            for i, rows in chosen:
                meeting[rows] = self._answer(i, inputs[rows], rows // k, share.experts[i]).float()
            share.ready()
            return sum_up(torch.empty_like(x), meeting)
        size, columns = self._down[0].shape[1], slice(share.inner.start, share.inner.stop)
        for i, rows in chosen:
            meeting[rows, columns] = self._between(i, inputs[rows], rows // k, i)
        share.ready()
        answers = x.new_empty(n * k, len(share.outputs))
        for i, rows in chosen:
            answers[rows] = self._down_of(i, meeting[rows, :size], rows // k, i)
        return share.gather(n, x.dtype, lambda y: sum_up(y, answers))

    def _answer(self, expert: int, x: Tensor, tokens: Tensor, number: int | None = None) -> Tensor:
        """Returns the outputs of one of the kernel's experts; `number` is its number in the mixture."""
        number = expert if number is None else number
        return self._down_of(expert, self._between(expert, x, tokens, number), tokens, number)

    def _between(self, expert: int, x: Tensor, tokens: Tensor, number: int) -> Tensor:
        """Returns what the second matrix gets."""
        bias = None if self._biases is None else self._biases[0][expert]
        both = self._product(x, weight=self._gate_up[expert], bias=bias, spec=self._sums)
        for rows, low_rank in _rows_of(self._sites[0], tokens):
            sums = self._product(x[rows], weight=self._gate_up[expert], bias=bias, spec=LOGITS)
            change = low_rank.multiply(x[rows], number)
            if self._spec.halves_alternate:
                change = change.view(len(rows), 2, -1).mT.flatten(1)
            both[rows] = (sums + change).to(both.dtype)
        return gated(self._spec.activation, both, self._spec.halves_alternate).to(x.dtype)

    def _down_of(self, expert: int, between: Tensor, tokens: Tensor, number: int) -> Tensor:
        bias = None if self._biases is None else self._biases[1][expert]
        y = self._product(between, weight=self._down[expert], bias=bias)
        for rows, low_rank in _rows_of(self._sites[1], tokens):
            sums = self._product(between[rows], weight=self._down[expert], bias=bias, spec=LOGITS)
            y[rows] = (sums + low_rank.multiply(between[rows], number)).to(y.dtype)
        return y


def _rows_by_expert(experts: Sequence[int], ids: Tensor) -> list[tuple[int, Tensor]]:
    """Returns, for those of `experts` that are among the choices `ids`, their place and the numbers of the choices."""
    flat = ids.flatten()
    chosen = [(i, (flat == expert).nonzero().flatten()) for i, expert in enumerate(experts)]
    return [(i, rows) for i, rows in chosen if len(rows)]


def _rows_of(site: AdapterSite | None, tokens: Tensor) -> Iterator[tuple[Tensor, TorchLowRank]]:
    """Yields which rows, those of `tokens` in ascending order, have an adapter, and its part."""
    if site is None or not len(tokens):
        return
    assert isinstance(site, TorchAdapterSite)
    for segment, low_rank in site.segments(int(tokens[-1]) + 1):
        rows = ((tokens >= segment.start) & (tokens < segment.stop)).nonzero().flatten()
        if len(rows):
            yield rows, low_rank


def combine_answers(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    answer: Callable[[int, Tensor, Tensor], Tensor],
    num_experts: int,
    *,
    scales_inputs: bool,
) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts, or their sum for weighted inputs. Tokens are
    sorted by expert, so that each expert runs once, on its own tokens. `answer` gets an expert, inputs, and the tokens
    that they are of."""
    (n, k), hidden = ids.shape, x.shape[1]
    order = ids.flatten().argsort(stable=True)  # [n * k] choices, by expert
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    answers = x.new_empty(n * k, hidden)  # [n * k, hidden], a row per choice
    for expert, choices in enumerate(torch.split(order, counts)):
        if len(choices):
            inputs = x[choices // k]
            if scales_inputs:
                inputs = (inputs * weights.flatten()[choices].unsqueeze(-1)).to(x.dtype)
            answers[choices] = answer(expert, inputs, choices // k)
    answers = answers.view(n, k, hidden)
    if not scales_inputs:
        answers = answers * weights.unsqueeze(-1)
    return answers.sum(dim=1).to(x.dtype)


TORCH_KERNELS = TorchKernels()


MAX_INT8 = 127.0
SMALLEST_MAXIMUM = 1e-30
"""A row without a larger magnitude counts as zeros: dividing by its maximum would overflow."""


def quantized_linear(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    weight: QuantizedWeight,
    bias: Tensor | None,
    spec: LinearSpec = PLAIN,
) -> Tensor:
    if weight.quantizes_inputs:
        values, scales = quantize_rows(x)
        y = multiply_int8(values, weight.values).float() * weight.scales.squeeze(1) * scales
    else:
        y = x.float() @ weight.dequantize().T
    return finish(y, residual, bias, spec, x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 [n, dim] and float32 scales [n, 1] of x: [n, dim]. A row's largest magnitude becomes 127. A row with
    a NaN or an infinity gets the scale NaN."""
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    factor = torch.where(largest > SMALLEST_MAXIMUM, torch.full_like(largest, MAX_INT8) / largest, 0.0)
    values = (wide * factor).round().clamp(-MAX_INT8, MAX_INT8)
    scales = torch.where(largest.isfinite(), largest / MAX_INT8, torch.nan)
    return values.nan_to_num(0.0).to(torch.int8), scales


def multiply_int8(x: Tensor, weight: Tensor) -> Tensor:
    """Returns [n, m], exact sums. x: [n, k] int8, weight: [m, k] int8. Where torch has no integer product, float64 is
    exact, too: sums stay below 2^53."""
    if x.device.type == "cpu":
        return torch._int_mm(x, weight.T)
    return x.double() @ weight.T.double()


def finish(y: Tensor, residual: Tensor | None, bias: Tensor | None, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    """Applies bias, divisor, cap, activation and residual in float32, and rounds y once, at the end."""
    if bias is not None:
        y = y + bias
    if spec.divisor != 1.0:
        y = y / spec.divisor
    y = soft_cap(y, spec.soft_cap)
    if spec.clip is not None:
        y = y.clamp(-spec.clip, spec.clip)
    if spec.activation is not None:
        y = activate(y, name=spec.activation, is_gated=spec.gated)
    if residual is not None:
        y = residual + y
    return y if spec.float32_output else y.to(dtype)
