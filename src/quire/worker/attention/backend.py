"""The interface of an attention backend, and the context of a forward pass, from which attention layers get theirs.

A backend lays out a layer's share of the KV cache, turns a step's batch into the metadata its kernels need (once per
step and KV cache group), and computes attention (once per layer). It knows nothing of requests or models. To add one:
a module here and a row in `registry.py`.

Attention layers sit deep in a model. `ForwardContext` spares every module between them and the runner a parameter: it
is set around the forward pass and read by the layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.wire.kv_cache import DTYPE_BYTES, AnyKVCacheSpec, LatentSpec
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.reference import TORCH_KERNELS


@dataclass(frozen=True)
class ScaleGrowth:
    """A factor of the scale that grows with the query's position: 1 + factor * ln(1 + floor((position + offset) /
    length))."""

    factor: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer. Query head h reads key/value head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Factor of the query-key products."""
    sliding_window: int | None = None
    """Keys a query sees up to its own, which is included; None for all before it."""
    logits_soft_cap: float | None = None
    """c: scores become c * tanh(scores / c) before the mask (Gemma 2)."""
    ahead: int | None = 0
    """Keys after its own that a query sees, too; None for all. Not 0: the step holds whole sequences."""
    chunk: int | None = None
    """A query at position i sees keys from the last multiple of `chunk` up to i only (Llama 4); None for no limit."""
    scale_growth: ScaleGrowth | None = None
    latent_size: int | None = None
    """A value is the first `latent_size` elements of its key, and only keys are stored (DeepSeek's latent attention);
    None: values have `head_size` elements and are stored, too."""

    @property
    def group_size(self) -> int:
        """Query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_size(self) -> int:
        """Elements of a value, and of a head's output."""
        return self.head_size if self.latent_size is None else self.latent_size

    def first_key(self, position: int) -> int:
        """Returns the position of the first key that a query sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)


class KVCache(NamedTuple):
    """One layer's cache, in the layout of the backend that made it."""

    key: Tensor
    value: Tensor
    """A view of `key` where values are parts of keys."""


@dataclass(frozen=True)
class AttentionBatch:
    """The requests of a step in one KV cache group. Lengths are numpy arrays: a backend plans on the host."""

    query_lens: npt.NDArray[np.int64]
    """[num_reqs] tokens of each request in this step, in the order of the flat batch."""
    seq_lens: npt.NDArray[np.int64]
    """[num_reqs] tokens of each request once this step is done: what its last query sees."""
    block_table: Tensor
    """[num_reqs, max_blocks] int32; only the first ceil(seq_len / block_size) of a row are valid."""
    slot_mapping: Tensor
    """[num_tokens] int64: block id * block_size + offset at which each token's key and value are stored."""


def view_pages(storage: Tensor, spec: AnyKVCacheSpec, num_blocks: int, offset: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of all blocks, [num_blocks, elements of a page] each: `AttentionBackend.
    view_kv_cache` with the keys in the first half of the storage and the values in the second. A latent cache has keys
    only."""
    halves = 1 if isinstance(spec, LatentSpec) else 2
    elements, itemsize = spec.page_size_bytes // DTYPE_BYTES[spec.dtype], DTYPE_BYTES[spec.dtype]
    start = offset // itemsize // halves
    parts = storage.view(getattr(torch, spec.dtype)).view(halves, num_blocks, -1)
    pages = parts[..., start : start + elements // halves]
    return pages[0], pages[-1]


Metadata = TypeVar("Metadata")
States = Tensor | tuple[Tensor, ...]
"""Hidden states, [n, dim]; or several, each with a row for every token."""
Forward = Callable[..., States]
"""A model: ids and positions, [n] int64 each, and other tensors of n rows, to its states. Needs a forward context."""


class AttentionBackend(ABC, Generic[Metadata]):
    """Computes attention over a paged KV cache. `Metadata` is its own type and opaque to all others."""

    name: ClassVar[str]

    def __init__(self, kernels: Kernels = TORCH_KERNELS) -> None:
        """`kernels`: the kernels of the model."""
        self.kernels = kernels

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: Kernels) -> bool:
        """Returns True if this backend can run with `kernels`, activations of `dtype` and a cache of `cache_dtype`."""

    @abstractmethod
    def view_kv_cache(self, storage: Tensor, spec: AnyKVCacheSpec, num_blocks: int, offset: int = 0) -> KVCache:
        """Returns a view of a part of `storage` (uint8) as one layer's keys and values.

        `storage` has the same number of bytes for each block, at least `spec.page_size_bytes`; the layer's part begins
        `offset` bytes after the first. Layers of different kinds share a storage, so block b must own the same bytes
        for every kind.
        """

    def block_views(self, kv_cache: KVCache) -> list[npt.NDArray[np.uint8]]:
        """Returns the bytes of a layer's cache in main memory: keys, then values, unless they are parts of keys. Row b
        of each, [num_blocks, bytes], is block b's."""
        parts = (kv_cache.key,) if kv_cache.value.data_ptr() == kv_cache.key.data_ptr() else kv_cache
        return [part.view(part.shape[0], -1).view(torch.uint8).numpy() for part in parts]

    @abstractmethod
    def make_metadata(self, batch: AttentionBatch, spec: AnyKVCacheSpec) -> Metadata:
        """Returns the inputs of `forward` that all layers of a group share in this step."""

    def plan_steps(self, model: Forward) -> Forward:
        """Returns `model`, with a quicker way for short steps if there is one. Its bits must be the same."""
        return model

    def for_one_worker(self) -> AttentionBackend[Any]:
        """Returns a backend for a model that this worker computes alone, whatever it shares with others."""
        return self

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        metadata: Metadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Stores `key` and `value` in the cache, then attends. Exact up to float rounding.

        query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size], both None if
        another layer has stored them, `value` also if it is part of the key; sinks: [num_heads] scores of a key that
        every query sees and whose value is zero; slopes: [num_heads], a score grows by slope * (position of the key -
        position of the query) (ALiBi). Returns [num_tokens, num_heads, value_size].
        """


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The context of one step. `metadata` has an entry for each KV cache group; `layer_groups` maps layers to
    groups."""

    backend: AttentionBackend[Any]
    metadata: Sequence[Any]
    layer_groups: Mapping[str, int]
    kv_caches: Mapping[str, KVCache]
    segments: Tensor | None = None
    """[num_tokens] int64, 1 for tokens of the second text of a pair; None if there is no such pair."""
    embeds: tuple[Tensor, Tensor] | None = None
    """Tokens that are embeddings, [n] int64, and their rows, [n, hidden_size] float32; None: there are none."""


_current: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` current inside the block, in this thread only."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """Returns the context of the running forward pass. Raises LookupError outside of one."""
    return _current.get()
