"""Paged attention by the native library: bf16 and float32 on CPUs, row-invariant to the bit.

A token's result is the same whether it is computed in a prompt, in a chunk of one, or while decoding, and does not
depend on the rest of the batch: see csrc/attention.h.
"""

from __future__ import annotations

from ctypes import Structure, byref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.wire.kv_cache import AnyKVCacheSpec
from quire.worker.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, KVCache, view_pages
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import DTYPES, AttentionArgs, with_packed_rows
from quire.worker.kernels.native import NativeKernels


@dataclass(frozen=True)
class NativeAttentionMetadata:
    """The batch's half of the arguments of a step, and the tensors they point to."""

    args: Structure
    """qk_attention_args"""
    query_lens: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_table: Tensor
    slot_mapping: Tensor


class NativeAttentionBackend(AttentionBackend[NativeAttentionMetadata]):
    """A layer's cache is 2 tensors [num_blocks, num_kv_heads, block_size * head_size]: pages in the library's order.

    Blocks need not be adjacent.
    """

    name = "native"

    def __init__(self, kernels: Kernels) -> None:
        assert isinstance(kernels, NativeKernels)
        self.context = kernels.context

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: Kernels) -> bool:
        """Returns True for native kernels and a cache of the model's type."""
        return isinstance(kernels, NativeKernels) and dtype in DTYPES and cache_dtype == dtype

    def view_kv_cache(self, storage: Tensor, spec: AnyKVCacheSpec, num_blocks: int, offset: int = 0) -> KVCache:
        shape = (num_blocks, spec.num_kv_heads, spec.block_size * spec.head_size)
        return KVCache(*(t.view(shape) for t in view_pages(storage, spec, num_blocks, offset)))

    def make_metadata(self, batch: AttentionBatch, spec: AnyKVCacheSpec) -> NativeAttentionMetadata:
        """Returns the batch's half of the arguments."""
        query_lens, seq_lens = (np.ascontiguousarray(a, dtype=np.int64) for a in (batch.query_lens, batch.seq_lens))
        table, slots = with_packed_rows(batch.block_table), batch.slot_mapping.contiguous()
        args = AttentionArgs(
            num_tokens=slots.shape[0],
            num_reqs=len(query_lens),
            block_size=spec.block_size,
            query_lens=query_lens.ctypes.data,
            seq_lens=seq_lens.ctypes.data,
            block_table=table.data_ptr(),
            block_table_stride=table.stride(0),
            slots=slots.data_ptr(),
        )
        return NativeAttentionMetadata(args, query_lens, seq_lens, table, slots)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        metadata: NativeAttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        query = with_packed_heads(query)
        sinks, slopes = (None if t is None else t.float() for t in (sinks, slopes))
        y = torch.empty((*query.shape[:2], spec.value_size), dtype=query.dtype)
        args, growth = metadata.args, spec.scale_growth
        args.dtype = DTYPES[query.dtype]
        args.num_heads, args.num_kv_heads, args.head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
        args.window, args.ahead = spec.sliding_window or 0, -1 if spec.ahead is None else spec.ahead
        args.scale = spec.scale
        args.soft_cap, args.sinks = spec.logits_soft_cap or 0.0, None if sinks is None else sinks.data_ptr()
        args.slopes, args.chunk = None if slopes is None else slopes.data_ptr(), spec.chunk or 0
        args.growth = 0.0 if growth is None else growth.factor
        if growth is not None:
            args.growth_length, args.growth_offset = growth.length, growth.offset
        args.latent_size, args.block_stride = spec.latent_size or 0, kv_cache.key.stride(0)
        args.query, args.query_stride = query.data_ptr(), query.stride(0)
        args.key = args.value = None
        if key is not None:
            key = with_packed_heads(key)
            args.key, args.key_stride = key.data_ptr(), key.stride(0)
        if value is not None:
            value = with_packed_heads(value)
            args.value, args.value_stride = value.data_ptr(), value.stride(0)
        args.key_cache, args.value_cache = kv_cache.key.data_ptr(), kv_cache.value.data_ptr()
        args.y, args.y_stride = y.data_ptr(), y.stride(0)
        self.context.library.cdll.qk_attention(self.context.handle, byref(args))
        return y


def with_packed_heads(x: Tensor) -> Tensor:
    """Returns x: [n, heads, head_size], copied if the heads of a token are not adjacent."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
