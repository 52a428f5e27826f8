"""The attention layer as models use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.wire.kv_cache import AnyKVCacheSpec, ChunkedSpec, FullAttentionSpec, LatentSpec, SlidingWindowSpec
from quire.worker.attention.backend import AttentionSpec, get_forward_context


class Attention(nn.Module):
    """Attention of one layer over the paged KV cache.

    Owns its spec (and sinks, if the model has them). Requests, blocks and the backend come with the forward context of
    the step. `layer_name` must be unique in the model; it names the layer's part of the cache.

    slopes: a score of head h grows by slopes[h] * (position of the key - position of the query) (ALiBi).
    kv_from: name of the layer before it whose keys and values it reads; it has and stores none.
    is_encoder: texts are computed whole, and nothing is stored.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layer_name: str,
        *,
        slopes: Sequence[float] | None = None,
        kv_from: str | None = None,
        is_encoder: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.is_encoder = spec, is_encoder
        self.layer_name = layer_name
        self.cache_name = layer_name if kv_from is None else kv_from
        """Name of the layer whose part of the cache it reads."""
        self.sinks: Tensor | None = None
        with torch.device("cpu"):  # a model is built on the meta device; these few numbers must be real
            self.slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves the slopes to the device of the model."""
        self.slopes = None if self.slopes is None else self.slopes.to(device)

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Stores the keys and values of the step's tokens and attends.

        query: [num_tokens, num_heads * head_size]; key, value: [num_tokens, num_kv_heads * head_size]. A latent layer
        has no `value`, one that reads another layer's cache none of both. Returns [num_tokens, num_heads * value_size].
        """
        spec, context = self.spec, get_forward_context()
        num_tokens = query.shape[0]
        kv_shape = (num_tokens, spec.num_kv_heads, spec.head_size)
        output = context.backend.forward(
            query.view(num_tokens, spec.num_heads, spec.head_size),
            None if key is None else key.view(kv_shape),
            None if value is None else value.view(kv_shape),
            context.kv_caches[self.cache_name],
            context.metadata[context.layer_groups[self.cache_name]],
            spec,
            self.sinks,
            self.slopes,
        )
        return output.reshape(num_tokens, spec.num_heads * spec.value_size)

    @property
    def is_cached(self) -> bool:
        """True if later steps need its keys and values."""
        return self.cache_name == self.layer_name and not self.is_encoder

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> AnyKVCacheSpec:
        """Returns the cache spec of this layer, with blocks of `block_size` tokens and elements of `dtype`."""
        spec = self.spec
        sizes = (block_size, spec.num_kv_heads, spec.head_size, str(dtype).removeprefix("torch."))
        if spec.latent_size is not None:
            return LatentSpec(*sizes)
        if spec.chunk is not None:
            return ChunkedSpec(*sizes, spec.chunk)
        return (
            FullAttentionSpec(*sizes) if spec.sliding_window is None else SlidingWindowSpec(*sizes, spec.sliding_window)
        )


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Returns the slope of each head (Press et al. 2022): powers of one number if the number of heads is a power of
    two; otherwise those of the next smaller power of two, then every second of the next larger one."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-max_bias * i / power) for i in range(1, power + 1)]
    return tuple(slopes) if power == num_heads else tuple(slopes[1::2] + slopes[::2])[:num_heads]
