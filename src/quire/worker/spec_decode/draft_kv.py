"""A drafter's part of the KV cache: its layers' memory, and which tokens of which requests are in it.

A drafter's layers use the block ids of one of the target's groups, but the drafter alone writes their tensors, and
later than the target writes its own, if at all. A block that the target finds in its prefix cache may therefore hold no
keys of the drafter, or those of an earlier text. So a block has a *stamp*: the hash of the text up to its end, once the
drafter has written all its slots. Equal stamps mean equal keys, whichever request computed them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from quire.wire.kv_cache import AnyKVCacheSpec, ChunkedSpec
from quire.worker.attention.backend import AttentionBatch, AttentionSpec, ForwardContext
from quire.worker.attention.layer import Attention
from quire.worker.model_runner import ModelRunner
from quire.worker.sample.metadata import Rows
from quire.worker.spec_decode.drafter import DraftRow

PREFIX = "draft."
"""Distinguishes the names of a drafter's layers from those of the target's."""


def draft_kv_cache_specs(layers: Sequence[Attention], block_size: int, dtype: torch.dtype) -> dict[str, AnyKVCacheSpec]:
    """Returns the cache spec of each of a drafter's layers by its name in the `KVCacheConfig`."""
    return {PREFIX + layer.layer_name: layer.kv_cache_spec(block_size, dtype) for layer in layers}


class Span(NamedTuple):
    """Tokens of a request that a drafter computes: those at positions `start` to `stop`."""

    row: DraftRow
    start: int
    stop: int


@dataclass
class _Held:
    """The text of a request, as far as the drafter has computed it."""

    stamps: list[int]
    """A salt, then the stamp of each full block."""
    num_tokens: int = 0
    """Tokens of the text whose keys are there."""
    drafts: list[int] = field(default_factory=list)
    """Tokens after them whose keys are there, and that may turn out wrong."""


class DraftKV:
    """The layers' memory, and books of what is in it."""

    def __init__(self, layers: Sequence[Attention], runner: ModelRunner) -> None:
        """`runner` is the target's. Layers get the window of the group whose blocks they use, if it has one: blocks
        before it are freed."""
        memory = runner.kv_cache
        group = memory.layer_groups[PREFIX + layers[0].layer_name]
        self.memory = memory
        self._spec, self._table = memory.specs[group], runner.batch.block_tables[group]
        self._backend, self._device = runner.backend, runner.device
        self._caches = {layer.layer_name: memory.caches[PREFIX + layer.layer_name] for layer in layers}
        specs: dict[str, AnyKVCacheSpec] = {}
        for layer in layers:
            layer.spec = narrow(layer.spec, self._spec)
            keys = self._caches[layer.layer_name].key
            specs[layer.layer_name] = layer.kv_cache_spec(self._table.block_size, keys.dtype)
        self._kinds = list(dict.fromkeys(specs.values()))
        self._layer_kinds = {name: self._kinds.index(spec) for name, spec in specs.items()}
        self._stamps = [0] * next(iter(self._caches.values())).key.shape[0]
        self._held: dict[str, _Held] = {}

    def num_tokens(self, row: DraftRow) -> int:
        """Returns the number of tokens of `row` whose keys are there, less than all. Drafts that were written count as
        far as they have become text."""
        held, size, text = self._held.get(row.req_id), self._table.block_size, row.token_ids
        if held is None:
            held = self._held[row.req_id] = _Held([hash(row.cache_salt)])
        for draft in held.drafts:
            if held.num_tokens >= len(text) or text[held.num_tokens] != draft:
                break
            held.num_tokens += 1
        held.drafts = []
        num_full = len(text) // size
        for i in range(len(held.stamps) - 1, num_full):
            held.stamps.append(hash((held.stamps[-1], text[i * size : (i + 1) * size].tobytes())))
        first = int(self._spec.first_token_read(row.num_computed_tokens))  # blocks before it may be another request's
        held.num_tokens = max(held.num_tokens, first // size * size)
        block_ids = self._table.block_ids(row.row)
        while (i := held.num_tokens // size) < num_full and self._stamps[block_ids[i]] == held.stamps[i + 1]:
            held.num_tokens = (i + 1) * size
        held.num_tokens = min(held.num_tokens, len(text) - 1)
        return held.num_tokens

    def capacity(self, row: DraftRow) -> int:
        """Returns the number of tokens that the blocks of `row` hold."""
        return len(self._table.block_ids(row.row)) * self._table.block_size

    def place(self, rows: Rows, starts: Rows, query_lens: Rows) -> tuple[torch.Tensor, ForwardContext]:
        """Returns the positions, [num_tokens], and the context of a forward pass over query_lens[i] tokens from
        starts[i] on of the requests in the batch's rows[i], ascending."""
        ends = np.cumsum(query_lens)
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(len(token_rows)) + np.repeat(starts - ends + query_lens, query_lens)
        return self._place(rows, token_rows, positions, query_lens, starts + query_lens)

    def place_one(self, rows: Rows, positions: Rows) -> tuple[torch.Tensor, ForwardContext]:
        """Does the same for one token of each request, at `positions`."""
        return self._place(rows, rows, positions, np.ones_like(rows), positions + 1)

    def _place(
        self, rows: Rows, token_rows: Rows, positions: Rows, query_lens: Rows, seq_lens: Rows
    ) -> tuple[torch.Tensor, ForwardContext]:
        slots = torch.from_numpy(self._table.slots(token_rows, positions)).to(self._device)
        batch = AttentionBatch(query_lens, seq_lens, self._table.rows(rows, self._device), slots)
        metadata = [self._backend.make_metadata(batch, kind) for kind in self._kinds]
        context = ForwardContext(self._backend, metadata, self._layer_kinds, self._caches)
        return torch.from_numpy(positions).to(self._device), context

    def note(self, span: Span, drafts: list[int]) -> None:
        """Notes that the keys of a span were written, and those of `drafts` after it."""
        row, start, stop = span
        held, size, block_ids = self._held[row.req_id], self._table.block_size, self._table.block_ids(row.row)
        for i in range(start // size, -(-(stop + len(drafts)) // size)):
            self._stamps[block_ids[i]] = held.stamps[i + 1] if (i + 1) * size <= stop else 0
        held.num_tokens, held.drafts = stop, drafts

    def forget(self, req_id: str) -> None:
        """Drops a request. The keys of its full blocks stay, for requests that begin alike."""
        self._held.pop(req_id, None)


def narrow(layer: AttentionSpec, group: AnyKVCacheSpec) -> AttentionSpec:
    """Returns a layer's attention without the tokens that the group may have freed."""
    if group.reach is None:
        return layer
    if isinstance(group, ChunkedSpec):
        return dataclasses.replace(layer, chunk=group.chunk_size)
    return dataclasses.replace(layer, sliding_window=min(layer.sliding_window or group.reach, group.reach))
