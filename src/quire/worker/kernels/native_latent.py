"""The native kernels of latent attention: a linear layer for each head, and norm and rotation in place."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from quire.worker.kernels.library import DTYPES, BatchedLinearArgs, Context, RotateArgs
from quire.worker.kernels.native_moe import pack_all
from quire.worker.kernels.specs import LatentSizes, NormSpec, RotaryAngles


class NativeBatchedLinear:
    """A linear layer for each head: BatchedLinearKernel."""

    def __init__(self, context: Context, weight: Tensor) -> None:
        self._context = context
        self._memory = pack_all(context, weight.contiguous(), is_gated=False)
        heads, n, k = weight.shape
        self._args = BatchedLinearArgs(
            heads=heads, n=n, k=k, dtype=DTYPES[weight.dtype], packed=self._memory.data_ptr()
        )

    def __call__(self, x: Tensor, tail: Tensor | None = None) -> Tensor:
        args = self._args
        args.m, args.tail_size = x.shape[0], 0 if tail is None else tail.shape[2]
        x = x if x.stride(2) == 1 else x.contiguous()
        args.x, args.x_stride, args.x_head_stride = x.data_ptr(), x.stride(0), x.stride(1)
        if tail is not None:
            tail = tail if tail.stride(2) == 1 else tail.contiguous()
            args.tail, args.tail_stride, args.tail_head_stride = tail.data_ptr(), tail.stride(0), tail.stride(1)
        y = torch.empty((x.shape[0], args.heads, args.n + args.tail_size), dtype=x.dtype)
        args.y = y.data_ptr()
        self._context.library.cdll.qk_batched_linear(self._context.handle, byref(args))
        return y


class NativeLatent:
    """Norm of the latent and rotation beside it: LatentKernel. Works in place."""

    def __init__(self, context: Context, sizes: LatentSizes, norm: Tensor, spec: NormSpec) -> None:
        self._context = context
        self._sizes = sizes
        self._norm = norm
        self._latent = RotateArgs(
            num_heads=1,
            head_size=sizes.rank,
            scale_in_float32=spec.scale_in_float32,
            eps=spec.eps,
            offset=spec.weight_offset,
            query_norm=norm.data_ptr(),
        )
        self._queries = RotateArgs(head_size=sizes.rotary + sizes.plain)
        self._key = RotateArgs(head_size=sizes.rotary, num_heads=1)

    def __call__(self, query: Tensor, key: Tensor, angles: RotaryAngles | None) -> tuple[Tensor, Tensor]:
        sizes = self._sizes
        query, key = (x if x.stride(1) == 1 else x.contiguous() for x in (query, key))
        self._run(self._latent, key[:, : sizes.rank], None)
        if angles is not None:
            self._queries.num_heads = query.shape[1] // (sizes.rotary + sizes.plain)
            self._run(self._queries, query, angles)
            self._run(self._key, key[:, sizes.rank :], angles)
        return query, key

    def _run(self, args: Any, x: Tensor, angles: RotaryAngles | None) -> None:
        """Norms or rotates the heads of x as if they were queries, without keys."""
        args.tokens, args.dtype, args.query, args.query_stride = len(x), DTYPES[x.dtype], x.data_ptr(), x.stride(0)
        if angles is not None:
            cos, sin = angles.cos, angles.sin
            args.rotary_half, args.table_dtype = cos.shape[-1], DTYPES[cos.dtype]
            args.cos, args.sin, args.positions = cos.data_ptr(), sin.data_ptr(), angles.positions.data_ptr()
        self._context.library.cdll.qk_rotate(self._context.handle, byref(args))
