"""Paged attention in plain torch, on any device: the reference for other backends.

Keys and values are always written to the cache through the slot mapping and read back through the block table, even
where the step's own tensors hold the same numbers. There are two shapes of work:

* requests with one new token (decoding) are gathered into one padded batch per bucket of similar lengths;
* requests with several (a prompt chunk) are computed one by one, in tiles of queries.

Grouped-query attention needs no copies of the keys: the query heads that share a key head become query positions when
decoding, and a batch dimension over which the keys are broadcast in a chunk.

Scores and sums are float32 (torch's fused kernels do so internally for every dtype). Slots that no request wrote are
never read: padding repeats a request's own last slot and is masked, so that even NaNs there do no harm.

Decoding in bfloat16 on a CPU reads the cache head by head, so that a head's keys are one matrix and attention is plain
matrix products. The fused kernel is made for many queries, and takes up to five times as long there
(docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.wire.kv_cache import AnyKVCacheSpec
from quire.worker.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    ScaleGrowth,
    view_pages,
)
from quire.worker.kernels.base import Kernels

SCORES_PER_TILE = 1 << 24
"""Query tiles are cut so that the scores of all heads stay below this: 64 MiB in float32."""
MIN_BUCKET_LEN = 256
"""Decoding requests shorter than this share one padded batch: splitting it further costs more than the padding."""


@dataclass(frozen=True)
class DecodeBucket:
    """Requests with one query each and similar lengths."""

    rows: Tensor | None
    """[n] rows of the flat batch; None for all of them, in order."""
    slots: Tensor
    """[n, width] cache slots to read, or [n, num_kv_heads, width] rows of a cache that is read head by head."""
    mask: Tensor | None
    """[n, 1, 1, width], False on padding; None where there is none."""
    distances: Tensor
    """[n, width] position of each key less that of the query."""


@dataclass(frozen=True)
class PrefillChunk:
    """One request with several queries: rows `start:end` of the flat batch."""

    start: int
    end: int
    first_position: int
    """Position of the first query."""
    first_key: int
    """Position of the first key any of the queries sees."""
    slots: Tensor
    """[num_keys] cache slots of positions first_key, first_key + 1, …"""


@dataclass(frozen=True)
class TorchAttentionMetadata:
    """A step, in the form the torch backend computes it."""

    slot_mapping: Tensor
    positions: Tensor
    """[num_tokens] of the flat batch."""
    decodes: list[DecodeBucket]
    prefills: list[PrefillChunk]


class TorchAttentionBackend(AttentionBackend[TorchAttentionMetadata]):
    """The reference. A layer's cache is two tensors [num_blocks, block_size, num_kv_heads, head_size]."""

    name = "torch"

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: Kernels) -> bool:
        """Returns True: torch computes with everything."""
        return dtype.is_floating_point and cache_dtype.is_floating_point

    def view_kv_cache(self, storage: Tensor, spec: AnyKVCacheSpec, num_blocks: int, offset: int = 0) -> KVCache:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        return KVCache(*(t.view(shape) for t in view_pages(storage, spec, num_blocks, offset)))

    def make_metadata(self, batch: AttentionBatch, spec: AnyKVCacheSpec) -> TorchAttentionMetadata:
        """Splits the batch into decodes and chunks, and looks up the slots each will read."""
        ends = np.cumsum(batch.query_lens, dtype=np.int64)
        decoding = batch.query_lens == 1
        first_keys = spec.first_token_read(batch.seq_lens - batch.query_lens)  # [num_reqs], that any query sees
        prefills = [
            _make_chunk(batch, int(i), int(ends[i]), spec.block_size, int(first_keys[i]))
            for i in np.flatnonzero(~decoding)
        ]
        visible = batch.seq_lens - first_keys
        decodes = [
            _make_bucket(batch, indices, ends[indices] - 1, visible[indices], spec)
            for indices in bucket_by_length(np.flatnonzero(decoding), visible)
        ]
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - batch.query_lens, batch.query_lens)
        positions = torch.from_numpy(np.repeat(batch.seq_lens - batch.query_lens, batch.query_lens) + within)
        return TorchAttentionMetadata(batch.slot_mapping, positions.to(batch.slot_mapping.device), decodes, prefills)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        metadata: TorchAttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        for cache, new in zip(kv_cache, (key, value), strict=True):
            if new is not None:
                _store(cache, metadata.slot_mapping, new)
        if spec.scale_growth is not None:
            query = (query.float() * _growth(spec.scale_growth, metadata.positions)).to(query.dtype)

        output = query.new_empty((*query.shape[:2], spec.value_size))
        for bucket in metadata.decodes:
            keys, values = (_gather_heads(c, bucket.slots, spec).to(query.dtype) for c in kv_cache)
            values = values[..., : spec.value_size]
            if bucket.rows is None:
                output = _attend_decodes(query, keys, values, bucket, spec, sinks, slopes)
            else:
                rows = query.index_select(0, bucket.rows)
                attended = _attend_decodes(rows, keys, values, bucket, spec, sinks, slopes)
                output.index_copy_(0, bucket.rows, attended)
        for chunk in metadata.prefills:
            keys, values = (_take(c, chunk.slots).to(query.dtype) for c in kv_cache)
            _attend_chunk(query, keys, values[..., : spec.value_size], chunk, spec, sinks, slopes, out=output)
        return output


def _growth(growth: ScaleGrowth, positions: Tensor) -> Tensor:
    """Returns the factor of each query, [num_tokens, 1, 1]."""
    times = (positions + growth.offset) // growth.length
    return (1.0 + growth.factor * torch.log1p(times.float()))[:, None, None]


# -- planning -------------------------------------------------------------------------------------------------------


def bucket_by_length(indices: npt.NDArray[np.int64], lens: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Cuts `indices` into sets in which no length is below half the longest, so that padding at most doubles the work.

    Everything up to MIN_BUCKET_LEN is one set. Within a set the order of `indices` is kept.
    """
    if not len(indices):
        return []
    longest = np.maximum(lens[indices], MIN_BUCKET_LEN)
    exponents = np.ceil(np.log2(longest / MIN_BUCKET_LEN)).astype(np.int64)
    return [indices[exponents == e] for e in np.unique(exponents)]


def _make_bucket(
    batch: AttentionBatch,
    indices: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    visible: npt.NDArray[np.int64],
    spec: AnyKVCacheSpec,
) -> DecodeBucket:
    """`visible`: number of keys that each of the requests `indices` sees, the last ones of its sequence."""
    device = batch.block_table.device
    width = int(visible.max())
    counts = torch.from_numpy(visible).to(device)[:, None]  # [n, 1]
    last = torch.from_numpy(batch.seq_lens[indices]).to(device)[:, None] - 1
    offsets = torch.arange(width, device=device)
    positions = torch.minimum(last - counts + 1 + offsets, last)  # [n, width]
    all_rows = len(indices) == len(batch.query_lens)
    table = batch.block_table if all_rows else batch.block_table[torch.from_numpy(indices).to(device)]
    slots = table.gather(1, positions // spec.block_size) * spec.block_size + positions % spec.block_size
    if device.type == "cpu" and spec.dtype == "bfloat16":
        slots = slots[:, None] * spec.num_kv_heads + torch.arange(spec.num_kv_heads)[:, None]
    mask = None if visible.min() == width else (offsets < counts)[:, None, None, :]
    return DecodeBucket(None if all_rows else torch.from_numpy(rows).to(device), slots, mask, positions - last)


def _make_chunk(batch: AttentionBatch, index: int, end: int, block_size: int, first_key: int) -> PrefillChunk:
    query_len, seq_len = int(batch.query_lens[index]), int(batch.seq_lens[index])
    first_position = seq_len - query_len
    positions = torch.arange(first_key, seq_len, device=batch.block_table.device)
    slots = batch.block_table[index][positions // block_size] * block_size + positions % block_size
    return PrefillChunk(end - query_len, end, first_position, first_key, slots)


# -- arithmetic -----------------------------------------------------------------------------------------------------


def _store(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Writes keys or values, [num_tokens, num_kv_heads, head_size], into their slots. cache: [num_blocks, block_size,
    num_kv_heads, head_size], its blocks not always adjacent."""
    new = new.to(cache.dtype)
    if cache.is_contiguous():
        cache.flatten(0, 1).index_copy_(0, slots, new)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = new


def _take(cache: Tensor, slots: Tensor) -> Tensor:
    """Returns the keys or values of `slots`, [*slots.shape, num_kv_heads, head_size]. cache: as in `_store`."""
    if cache.is_contiguous():
        return cache.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[2:])
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def _gather_heads(cache: Tensor, slots: Tensor, spec: AttentionSpec) -> Tensor:
    """Returns a bucket's keys or values, [n, num_kv_heads, width, head_size]. cache: as in `_store`."""
    if slots.dim() == 2:
        return _take(cache, slots).transpose(1, 2)
    if cache.is_contiguous():
        return cache.view(-1, spec.head_size).index_select(0, slots.flatten()).view(*slots.shape, spec.head_size)
    return _take(cache, slots[:, 0] // spec.num_kv_heads).transpose(1, 2).contiguous()


def _attend_decodes(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bucket: DecodeBucket,
    spec: AttentionSpec,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """query: [n, num_heads, head_size]; keys: [n, num_kv_heads, width, head_size]; values: the same with value_size.
    Returns [n, num_heads, value_size]."""
    q = query.view(-1, spec.num_kv_heads, spec.group_size, spec.head_size)
    head_shape = (1, spec.num_kv_heads, spec.group_size, 1)
    head_sinks = None if sinks is None else sinks.view(head_shape)
    bias = None if slopes is None else slopes.float().view(head_shape) * bucket.distances[:, None, None]
    # Keys gathered head by head are matrices. Only on CPU and in bfloat16 does the fused kernel lose to their products.
    by_products = query.dtype == torch.bfloat16 and query.device.type == "cpu" and keys.is_contiguous()
    attended = _attend(q, keys, values, bucket.mask, spec, head_sinks, bias, by_products)
    return attended.reshape(-1, spec.num_heads, spec.value_size)


def _attend_chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: PrefillChunk,
    spec: AttentionSpec,
    sinks: Tensor | None,
    slopes: Tensor | None,
    out: Tensor,
) -> None:
    """Writes rows chunk.start:chunk.end of `out`. keys, values: [num_keys, num_kv_heads, head_size or value_size]."""
    # [group_size, num_kv_heads, num_keys, head_size], the first dimension without memory of its own
    k, v = (t.transpose(0, 1).expand(spec.group_size, -1, -1, -1) for t in (keys, values))
    by_group = (spec.num_kv_heads, spec.group_size)
    head_sinks = None if sinks is None else sinks.view(by_group).T[:, :, None, None]
    for rows, visible in _tiles(chunk, spec):
        q = query[rows].view(-1, *by_group, spec.head_size).permute(2, 1, 0, 3)
        mask = _mask(chunk, rows, visible, spec, query.device)
        bias = None
        if slopes is not None:
            bias = slopes.float().view(by_group).T[:, :, None, None] * _distances(chunk, rows, visible, query.device)
        tile = _attend(q, k[:, :, visible], v[:, :, visible], mask, spec, head_sinks, bias)
        out[rows] = tile.permute(2, 1, 0, 3).reshape(-1, spec.num_heads, spec.value_size)


def _tiles(chunk: PrefillChunk, spec: AttentionSpec) -> Iterator[tuple[slice, slice]]:
    """Cuts a chunk into tiles of queries: (rows of the flat batch, number of keys they can see)."""
    step = max(16, SCORES_PER_TILE // (chunk.slots.shape[0] * spec.num_heads))
    for start in range(chunk.start, chunk.end, step):
        end = min(start + step, chunk.end)
        first, last = (chunk.first_position + row - chunk.start for row in (start, end - 1))
        first_key = max(chunk.first_key, spec.first_key(first))
        num_keys = chunk.slots.shape[0]
        end_key = num_keys if spec.ahead is None else min(last + 1 + spec.ahead - chunk.first_key, num_keys)
        yield slice(start, end), slice(first_key - chunk.first_key, end_key)


def _mask(chunk: PrefillChunk, rows: slice, keys: slice, spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """Returns [num_rows, num_keys], True where a query sees a key; None where each sees all."""
    window, ahead = spec.sliding_window, spec.ahead
    if window is None and ahead is None:
        return None
    distances = _distances(chunk, rows, keys, device)
    if ahead is None:
        return distances > -(window or 0)
    mask = distances <= ahead
    if spec.chunk is not None:
        first_query = chunk.first_position - chunk.start
        queries = torch.arange(rows.start + first_query, rows.stop + first_query, device=device)[:, None]
        mask &= distances >= -(queries % spec.chunk)
    return mask if window is None else mask & (distances > -window)


def _distances(chunk: PrefillChunk, rows: slice, keys: slice, device: torch.device) -> Tensor:
    """Returns [num_rows, num_keys], the position of each key less that of each query."""
    first_query = chunk.first_position - chunk.start
    queries = torch.arange(rows.start + first_query, rows.stop + first_query, device=device)[:, None]
    return torch.arange(keys.start + chunk.first_key, keys.stop + chunk.first_key, device=device) - queries


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    sinks: Tensor | None,
    bias: Tensor | None = None,
    by_products: bool = False,
) -> Tensor:
    """Computes softmax attention. q: [a, b, queries, d]; k, v: [a, b, keys, d]; mask, sinks and `bias`, which is added
    to the scores, broadcast to the scores.

    `by_products`: q and k are bfloat16 matrices; multiply them as such.
    """
    if spec.logits_soft_cap is None and sinks is None and bias is None and not by_products:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    products = _products(q, k) if by_products else q.float() @ k.float().transpose(2, 3)
    scores = products * spec.scale  # [a, b, queries, keys]
    if spec.logits_soft_cap is not None:
        scores = (scores / spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v if by_products else (weights @ v.float()).to(q.dtype)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns q k^T of bfloat16 matrices, in float32 and good to 16 bits.

    torch rounds such a product to bfloat16, which keeps 8 bits: too few for scores. The remainder is a product, too (it
    is summed in float32 and rounded at the end), and keeps the next 8.
    """
    rows, columns = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    rounded = torch.bmm(rows, columns)
    remainder = torch.baddbmm(rounded, rows, columns, beta=-1)
    return (rounded.float() + remainder).view(*q.shape[:2], *rounded.shape[1:])
