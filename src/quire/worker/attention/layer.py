"""The attention layer as models use it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, SlidingWindowSpec
from quire.worker.attention.backend import AttentionSpec, get_forward_context


class Attention(nn.Module):
    """Causal attention of one layer over the paged KV cache.

    Owns its spec (and sinks, if the model has them). Requests, blocks and the backend come with the forward context of
    the step. `layer_name` must be unique in the model; it names the layer's part of the cache.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        layer_name: str,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.spec = AttentionSpec(num_heads, num_kv_heads, head_size, scale, sliding_window, logits_soft_cap)
        self.sinks = sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores the keys and values of the step's tokens and attends.

        query: [num_tokens, num_heads * head_size]; key, value: [num_tokens, num_kv_heads * head_size].
        Returns the shape of `query`.
        """
        spec, context = self.spec, get_forward_context()
        num_tokens = query.shape[0]
        output = context.backend.forward(
            query.view(num_tokens, spec.num_heads, spec.head_size),
            key.view(num_tokens, spec.num_kv_heads, spec.head_size),
            value.view(num_tokens, spec.num_kv_heads, spec.head_size),
            context.kv_caches[self.layer_name],
            context.metadata[context.layer_groups[self.layer_name]],
            spec,
            self.sinks,
        )
        return output.reshape(num_tokens, spec.num_heads * spec.head_size)

    @property
    def is_cached(self) -> bool:
        """True if later steps need its keys and values."""
        return True

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> AnyKVCacheSpec:
        """Returns the cache spec of this layer, with blocks of `block_size` tokens and elements of `dtype`."""
        spec, name = self.spec, str(dtype).removeprefix("torch.")
        if spec.sliding_window is None:
            return FullAttentionSpec(block_size, spec.num_kv_heads, spec.head_size, name)
        return SlidingWindowSpec(block_size, spec.num_kv_heads, spec.head_size, name, spec.sliding_window)


class EncoderAttention(Attention):
    """Attention in both directions, among the tokens of a text that is computed whole. Nothing is stored.

    A query sees `reach` tokens on either side, or all.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        layer_name: str,
        reach: int | None = None,
    ) -> None:
        window = None if reach is None else reach + 1
        super().__init__(num_heads, head_size, scale, num_kv_heads, layer_name=layer_name, sliding_window=window)
        self.spec = dataclasses.replace(self.spec, ahead=reach)

    @property
    def is_cached(self) -> bool:
        return False
