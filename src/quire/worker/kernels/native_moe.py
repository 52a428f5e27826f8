"""Mixture of experts by the native library: csrc/experts.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, pointer

import torch
from torch import Tensor

from quire.worker.kernels.barrier import check_barrier
from quire.worker.kernels.base import ExpertsShare, Kernels, PooledTokens
from quire.worker.kernels.library import (
    ACTIVATIONS,
    CONSTANTS,
    DTYPES,
    Context,
    ExpertsArgs,
    ExpertsPoolStruct,
    PackArgs,
    RouteArgs,
    set_residual,
    with_packed_rows,
)
from quire.worker.kernels.lora import AdapterSite
from quire.worker.kernels.native_lora import site_pointer
from quire.worker.kernels.native_quantized import QuantizedMatrix
from quire.worker.kernels.specs import ExpertsSpec, RouterSpec
from quire.worker.quantization.weight import QuantizedWeight

BETWEEN, ANSWERS, SUMS = (CONSTANTS[f"QK_EXPERTS_{step}"] for step in ("BETWEEN", "ANSWERS", "SUMS"))
SCORES = {
    "softmax": CONSTANTS["QK_SCORE_SOFTMAX"],
    "sigmoid": CONSTANTS["QK_SCORE_SIGMOID"],
    "sparsemixer": CONSTANTS["QK_SCORE_SPARSEMIXER"],
}


class NativeRouter:
    """The choice of experts: RouterKernel."""

    def __init__(
        self,
        context: Context,
        spec: RouterSpec,
        dtype: torch.dtype,
        choice_bias: Tensor | None,
        expert_scale: Tensor | None,
    ) -> None:
        self._context = context
        self._k = spec.num_experts_per_token
        self._per_expert = [None if t is None else t.float().contiguous() for t in (choice_bias, expert_scale)]
        bias, scale = (None if t is None else t.data_ptr() for t in self._per_expert)
        self._args = RouteArgs(
            chosen=self._k,
            score=SCORES[spec.score],
            normalize=spec.normalize,
            groups=spec.num_groups,
            kept_groups=spec.num_kept_groups,
            group_by_two=spec.group_score == "two best",
            round_to_bf16=dtype == torch.bfloat16 and not spec.weights_in_float32,
            norm_eps=spec.norm_eps,
            norm_min=spec.norm_min,
            factor=spec.factor,
            threshold=spec.threshold,
            choice_bias=bias,
            expert_scale=scale,
        )

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits, args = logits.contiguous(), self._args
        n, num_experts = logits.shape
        ids, weights = torch.empty((n, self._k), dtype=torch.int64), torch.empty((n, self._k))
        args.tokens, args.num_experts = n, num_experts
        args.logits, args.ids, args.weights = logits.data_ptr(), ids.data_ptr(), weights.data_ptr()
        self._context.library.cdll.qk_route(self._context.handle, byref(args))
        return ids, weights


class PlainBlock:
    """Matrices of all experts, packed one after another. weights: [num_experts, outputs, inputs]."""

    def __init__(self, context: Context, weights: Tensor, *, is_gated: bool, halves_alternate: bool = False) -> None:
        self.memory = pack_all(context, weights, is_gated=is_gated, halves_alternate=halves_alternate)
        self.num_experts, _, self.num_inputs = weights.shape
        self.quantization: Structure | None = None


class QuantizedBlock:
    """Quantized matrices of all experts."""

    def __init__(
        self, context: Context, weights: Sequence[QuantizedWeight], *, is_gated: bool, halves_alternate: bool = False
    ) -> None:
        self._matrix = QuantizedMatrix(context, weights, is_gated=is_gated, halves_alternate=halves_alternate)
        self.memory = self._matrix.values
        self.num_experts, self.num_inputs = len(weights), self._matrix.k
        self.quantization = self._matrix.describe()


class NativeExperts:
    """The experts: ExpertsKernel."""

    def __init__(
        self,
        context: Context,
        gate_up: PlainBlock | QuantizedBlock,
        down: PlainBlock | QuantizedBlock,
        spec: ExpertsSpec,
        biases: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._context = context
        self._blocks = gate_up, down
        self._biases = None if biases is None else arrange_biases(*biases, halves_alternate=spec.halves_alternate)
        self._args = ExpertsArgs(
            hidden=gate_up.num_inputs,
            expert_size=down.num_inputs,
            num_experts=down.num_experts,
            activation=ACTIVATIONS[spec.activation],
            scale_inputs=spec.scales_inputs,
            gate_up=gate_up.memory.data_ptr(),
            down=down.memory.data_ptr(),
            inner=down.num_inputs,
            outputs=gate_up.num_inputs,
            own_experts=down.num_experts,
        )
        if gate_up.quantization is not None and down.quantization is not None:
            self._args.gate_up_quantization = pointer(gate_up.quantization)
            self._args.down_quantization = pointer(down.quantization)
        if self._biases is not None:
            self._args.gate_up_bias, self._args.down_bias = (bias.data_ptr() for bias in self._biases)
        self._sites: tuple[AdapterSite | None, AdapterSite | None] = None, None
        self._share: ExpertsShare | None = None

    def set_share(self, share: ExpertsShare) -> None:
        args, self._share = self._args, share
        args.num_experts, args.own_experts, args.first_expert = share.num_experts, len(share.experts), share.first
        args.places = None if share.places is None else share.places.data_ptr()
        args.inner_start, args.inner, args.outputs = share.inner.start, len(share.inner), len(share.outputs)
        if share.pool is not None:
            step, memory = share.pool.step, (t.data_ptr() for t in share.pool.memory)
            args.pool = pointer(ExpertsPoolStruct(pointer(step), *memory))
        elif share.gather is None:
            args.answers = share.meeting.data_ptr()
        else:
            args.between, args.between_stride = share.meeting.data_ptr(), share.meeting.stride(0)

    def move_to(self, kernels: Kernels) -> None:
        context = getattr(kernels, "context", None)
        assert isinstance(context, Context)
        assert context.instruction_set == self._context.instruction_set
        self._context = context
        context.num_kernels += 1

    def set_sites(self, gate_up: AdapterSite | None, down: AdapterSite | None) -> None:
        args = self._args
        args.gate_up_adapters = site_pointer(self._context, gate_up, args.hidden, 2 * args.inner)
        args.down_adapters = site_pointer(self._context, down, args.expert_size, args.outputs)
        self._sites = gate_up, down

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None, shared: Tensor | None = None
    ) -> Tensor:
        x, ids, weights, share = with_packed_rows(x), ids.contiguous(), weights.contiguous(), self._share
        self._args.weights = weights.data_ptr()
        if share is not None and share.pool is not None and share.pool.is_remote:
            return self._exchange(share.pool, share.places, (x, ids), residual, shared)
        self._set_tokens(x, ids)
        if share is None or share.pool is not None:
            return self._sum(BETWEEN | ANSWERS, torch.empty(x.shape, dtype=x.dtype), residual, shared)
        if share.gather is None:
            self._run(BETWEEN | ANSWERS)
            share.ready(ids.numel())
            return self._sum(0, torch.empty(x.shape, dtype=x.dtype), residual, shared)
        self._run(BETWEEN)
        share.ready(ids.numel())
        own = slice(share.outputs.start, share.outputs.stop)
        addends = [None if addend is None else addend[:, own] for addend in (residual, shared)]
        return share.gather(len(x), x.dtype, lambda y: self._sum(ANSWERS, y, *addends))

    def _exchange(
        self,
        pool: PooledTokens,
        places: Tensor | None,
        tokens: tuple[Tensor, Tensor],
        residual: Tensor | None,
        shared: Tensor | None,
    ) -> Tensor:
        """Computes what the kernel computes by itself where all engines are on one machine."""
        args, (x, ids) = self._args, tokens
        inputs, choices, answers = pool.share(x, ids)
        self._set_tokens(inputs, choices)
        args.answers = answers.data_ptr()
        self._run(BETWEEN | ANSWERS)
        order = order_answers(choices, places)
        pool.wait(lambda: order)
        answers = answers[own_rows(order, ids.shape[1], pool.own)]
        args.answers = answers.data_ptr()
        self._set_tokens(x, ids)
        try:
            return self._sum(0, torch.empty(x.shape, dtype=x.dtype), residual, shared)
        finally:
            args.answers = None

    def _set_tokens(self, x: Tensor, ids: Tensor) -> None:
        args = self._args
        args.dtype = DTYPES[x.dtype]
        (args.tokens, args.chosen), args.ids = ids.shape, ids.data_ptr()
        args.x, args.x_stride = x.data_ptr(), x.stride(0)

    def _run(self, steps: int) -> None:
        self._args.steps = steps
        failure = self._context.library.cdll.qk_experts(self._context.handle, byref(self._args))
        if failure:
            check_barrier(failure)

    def _sum(self, steps: int, y: Tensor, residual: Tensor | None, shared: Tensor | None) -> Tensor:
        """Runs `steps`, then fills `y` with the sums."""
        args = self._args
        args.y, args.y_stride = y.data_ptr(), y.stride(0)
        residual = set_residual(args, residual)
        args.shared = None
        if shared is not None:
            shared = with_packed_rows(shared)
            args.shared, args.shared_stride = shared.data_ptr(), shared.stride(0)
        self._run(steps | SUMS)
        return y


def order_answers(choices: Tensor, places: Tensor | None) -> Tensor:
    """Returns the number of the choice of each of the kernel's answers. It has a row for each of the `choices`, [n, k],
    by the place of the expert and then in their order."""
    experts = choices.flatten()
    return torch.argsort(experts if places is None else places[experts], stable=True)


def own_rows(order: Tensor, k: int, own: range) -> Tensor:
    """Returns which of the kernel's answers are for the tokens `own`, in the order in which it would have them with
    these alone. `order`: that of all answers; each token has `k`."""
    return ((order >= own.start * k) & (order < own.stop * k)).nonzero().flatten()


def arrange_biases(gate_up: Tensor, down: Tensor, *, halves_alternate: bool) -> tuple[Tensor, Tensor]:
    """Returns float32 biases of all experts, those of the gates first. gate_up: [num_experts, 2 * expert_size]."""
    if halves_alternate:
        gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)
    return gate_up.float().contiguous(), down.float().contiguous()


def pack_all(context: Context, weights: Tensor, *, is_gated: bool, halves_alternate: bool = False) -> Tensor:
    """Returns all matrices packed, one after another. weights: [num_experts, n, k], or [num_experts, 2 * n, k] if
    gated; on the meta device if `context.packs` has them."""
    num_experts, rows, k = weights.shape
    n, dtype, cdll = rows // 2 if is_gated else rows, DTYPES[weights.dtype], context.library.cdll
    size = cdll.qk_packed_bytes(n, k, dtype, is_gated)

    def pack(memory: Tensor) -> None:
        for expert, weight in enumerate(weights):
            stride = weight.stride(0)
            args = PackArgs(n=n, k=k, dtype=dtype, gated=is_gated, weights=weight.data_ptr())
            args.stride, args.half_stride = (2 * stride, stride) if halves_alternate else (stride, n * stride)
            args.packed = memory.data_ptr() + expert * size
            cdll.qk_pack(context.handle, byref(args))

    return context.packs.take(num_experts * size, pack)
