"""Which tokens a drafter's keys are there for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.wire.kv_cache import (
    AnyKVCacheSpec,
    ChunkedSpec,
    ExtraKVCacheLayer,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.layer import Attention
from quire.worker.model_runner import ModelRunner
from quire.worker.spec_decode.draft_kv import PREFIX, DraftKV, Span, narrow
from quire.worker.spec_decode.drafter import DraftRow
from tests.unit.worker.toy import BLOCK_SIZE, make_runner

TEXT = list(range(1, 12))
NUM_BLOCKS = 30
DRAFT_SPEC = FullAttentionSpec(BLOCK_SIZE, 1, 16, "float32")


def make_kv(window: int | None = None) -> tuple[DraftKV, ModelRunner]:
    """A drafter of one layer, whose heads are not the target's, beside the toy model."""
    runner = make_runner()
    sizes = (BLOCK_SIZE, 2, 8, "float32")
    spec: AnyKVCacheSpec = FullAttentionSpec(*sizes) if window is None else SlidingWindowSpec(*sizes, window)
    tensors = [KVCacheTensor(NUM_BLOCKS * spec.page_size_bytes, [name]) for name in runner.attention_layers]
    extra = ExtraKVCacheLayer(PREFIX + "layer.0", DRAFT_SPEC, 0)
    tensors.append(KVCacheTensor(NUM_BLOCKS * DRAFT_SPEC.page_size_bytes, [extra.layer_name]))
    groups = [KVCacheGroupSpec(list(runner.attention_layers), spec)]
    runner.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, tensors, groups, [extra]), 128)
    return DraftKV([Attention(AttentionSpec(1, 1, 16, 0.25), "layer.0")], runner), runner


def put(runner: ModelRunner, row: int, block_ids: list[int]) -> None:
    runner.batch.block_tables[0].set_row(row, block_ids)


def text_row(req_id: str, row: int, text: list[int], salt: str | None = None) -> DraftRow:
    return DraftRow(req_id, row, np.array(text, np.int32), 1, len(text) - 1, 4, cache_salt=salt)


def read(kv: DraftKV, row: DraftRow, drafts: list[int] | None = None) -> None:
    """Notes that all the text is read, and `drafts` after it."""
    kv.note(Span(row, kv.num_tokens(row), len(row.token_ids)), drafts or [])


def test_drafts_count_as_far_as_they_became_text() -> None:
    kv, runner = make_kv()
    put(runner, 0, [1, 2, 3, 4, 5])
    row = text_row("a", 0, TEXT)
    assert kv.num_tokens(row) == 0
    read(kv, row, [50, 51, 52])
    assert kv.num_tokens(text_row("a", 0, [*TEXT, 50, 51, 99])) == len(TEXT) + 2
    read(kv, text_row("a", 0, [*TEXT, 50, 51, 99]), [7, 8])
    assert kv.num_tokens(text_row("a", 0, [*TEXT, 50, 51, 99, 6])) == len(TEXT) + 3


def test_the_last_token_is_always_computed() -> None:
    kv, runner = make_kv()
    put(runner, 0, [1, 2])
    read(kv, text_row("a", 0, TEXT[:8]))
    assert kv.num_tokens(text_row("a", 0, TEXT[:8])) == 7


@pytest.mark.parametrize(
    ("block_ids", "text", "salt", "expected"),
    [
        ([1, 2, 9], TEXT, None, 8),  # both full blocks, not the half one
        ([1, 9, 2], TEXT, None, 4),
        ([1, 2, 9], [*TEXT[:4], 77, *TEXT[5:]], None, 4),
        ([1, 2, 9], [77, *TEXT[1:]], None, 0),  # the second block's keys are those of another beginning
        ([1, 2, 9], TEXT, "secret", 0),
    ],
)
def test_blocks_of_another_request_are_used_if_its_text_began_alike(
    block_ids: list[int], text: list[int], salt: str | None, expected: int
) -> None:
    kv, runner = make_kv()
    put(runner, 0, [1, 2, 3])
    read(kv, text_row("a", 0, TEXT), [50])
    kv.forget("a")
    put(runner, 1, block_ids)
    assert kv.num_tokens(text_row("b", 1, text, salt)) == expected


def test_a_block_that_was_overwritten_is_computed_again() -> None:
    kv, runner = make_kv()
    put(runner, 0, [1, 2, 3])
    read(kv, text_row("a", 0, TEXT))
    kv.forget("a")
    put(runner, 1, [2])
    read(kv, text_row("b", 1, [60, 61]))
    put(runner, 0, [1, 2, 3])
    assert kv.num_tokens(text_row("c", 0, TEXT)) == 4


def test_drafts_do_not_stamp_the_blocks_they_fill() -> None:
    kv, runner = make_kv()
    put(runner, 0, [1, 2, 3])
    read(kv, text_row("a", 0, TEXT[:7]), [TEXT[7], 9])
    kv.forget("a")
    assert kv.num_tokens(text_row("b", 0, TEXT)) == 4


def test_with_windows_only_blocks_that_are_left_are_computed() -> None:
    kv, runner = make_kv(window=6)
    put(runner, 0, list(range(1, 11)))
    row = text_row("a", 0, list(range(40)))
    assert kv.num_tokens(row) == 32  # position 39 reads those from 34 on
    read(kv, row)
    assert kv.num_tokens(text_row("a", 0, list(range(41)))) == 40


def test_layers_read_no_more_than_the_group_keeps() -> None:
    layer = AttentionSpec(1, 1, 16, 0.25)
    assert narrow(layer, DRAFT_SPEC) == layer
    sliding = SlidingWindowSpec(BLOCK_SIZE, 2, 8, "float32", 6)
    assert narrow(layer, sliding).sliding_window == 6
    assert narrow(AttentionSpec(1, 1, 16, 0.25, 3), sliding).sliding_window == 3
    assert narrow(layer, ChunkedSpec(BLOCK_SIZE, 2, 8, "float32", 8)).chunk == 8


def test_tokens_are_placed_in_the_requests_blocks_in_the_drafters_shape() -> None:
    kv, runner = make_kv()
    put(runner, 0, [3])
    put(runner, 1, [5, 2])
    assert kv.capacity(text_row("b", 1, TEXT)) == 8
    positions, context = kv.place(np.array([0, 1]), np.array([1, 3]), np.array([1, 3]))
    assert positions.tolist() == [1, 3, 4, 5]
    assert context.metadata[0].slot_mapping.tolist() == [13, 23, 8, 9]
    assert context.kv_caches["layer.0"].key.shape == (NUM_BLOCKS, BLOCK_SIZE, 1, 16)
    assert context.kv_caches["layer.0"].key.dtype == torch.float32
