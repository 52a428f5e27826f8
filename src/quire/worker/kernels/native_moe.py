"""Mixture of experts by the native library: csrc/experts.cpp."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from quire.worker.kernels.abi import ACTIVATIONS, DTYPES, set_residual, with_packed_rows
from quire.worker.kernels.base import RouterSpec
from quire.worker.kernels.library import Context, ExpertsArgs, PackArgs, RouteArgs


class NativeRouter:
    """See RouterKernel."""

    def __init__(self, context: Context, spec: RouterSpec, dtype: torch.dtype) -> None:
        self._context = context
        self._k = spec.num_experts_per_token
        self._args = RouteArgs(
            chosen=self._k,
            normalize=spec.normalize,
            round_to_bf16=dtype == torch.bfloat16 and not spec.weights_in_float32,
        )

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See RouterKernel."""
        logits, args = logits.contiguous(), self._args
        n, num_experts = logits.shape
        ids, weights = torch.empty((n, self._k), dtype=torch.int64), torch.empty((n, self._k))
        args.tokens, args.num_experts = n, num_experts
        args.logits, args.ids, args.weights = logits.data_ptr(), ids.data_ptr(), weights.data_ptr()
        self._context.library.cdll.qk_route(self._context.handle, byref(args))
        return ids, weights


class NativeExperts:
    """See ExpertsKernel. The experts' matrices lie packed one after another."""

    def __init__(self, context: Context, gate_up: Tensor, down: Tensor, activation: str) -> None:
        self._context = context
        self._matrices = pack_all(context, gate_up, is_gated=True), pack_all(context, down, is_gated=False)
        num_experts, hidden, expert_size = down.shape
        self._args = ExpertsArgs(
            hidden=hidden,
            expert_size=expert_size,
            dtype=DTYPES[down.dtype],
            num_experts=num_experts,
            activation=ACTIVATIONS[activation],
            gate_up=self._matrices[0].data_ptr(),
            down=self._matrices[1].data_ptr(),
            y_stride=hidden,
        )

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See ExpertsKernel."""
        x, ids, weights, args = with_packed_rows(x), ids.contiguous(), weights.contiguous(), self._args
        y = torch.empty(x.shape, dtype=x.dtype)
        (args.tokens, args.chosen), args.ids, args.weights = ids.shape, ids.data_ptr(), weights.data_ptr()
        args.x, args.x_stride, args.y = x.data_ptr(), x.stride(0), y.data_ptr()
        residual = set_residual(args, residual)
        self._context.library.cdll.qk_experts(self._context.handle, byref(args))
        return y


def pack_all(context: Context, weights: Tensor, *, is_gated: bool) -> Tensor:
    """weights: [num_experts, n, k], or [num_experts, 2 * n, k] if gated. All of them packed, one after another; of the
    meta device where `context.packs` has them."""
    num_experts, rows, k = weights.shape
    n, dtype, cdll = rows // 2 if is_gated else rows, DTYPES[weights.dtype], context.library.cdll
    size = cdll.qk_packed_bytes(n, k, dtype, is_gated)

    def pack(memory: Tensor) -> None:
        for expert, weight in enumerate(weights):
            args = PackArgs(n=n, k=k, dtype=dtype, gated=is_gated, weights=weight.data_ptr(), stride=weight.stride(0))
            args.packed = memory.data_ptr() + expert * size
            cdll.qk_pack(context.handle, byref(args))

    return context.packs.take(num_experts * size, pack)
