"""Paged attention against a dense oracle written in numpy float64, one query at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from quire.errors import ConfigError
from quire.wire.kv_cache import AnyKVCacheSpec, ChunkedSpec, FullAttentionSpec, LatentSpec, SlidingWindowSpec
from quire.worker.attention import torch_backend
from quire.worker.attention.backend import AttentionBatch, AttentionSpec, KVCache, ScaleGrowth
from quire.worker.attention.registry import make_attention_backend
from quire.worker.attention.torch_backend import TorchAttentionBackend, bucket_by_length
from tests.seeds import examples


def dense_attention(q, k, v, first_position, spec: AttentionSpec, sinks, slopes) -> np.ndarray:
    """q: [queries, num_heads, d]; k, v: [keys, num_kv_heads, d], all positions from 0. Float64, no tricks."""
    v = v if spec.latent_size is None else k[..., : spec.latent_size]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for i in range(q.shape[0]):
        position = first_position + i
        start = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        if spec.chunk is not None:
            start = position // spec.chunk * spec.chunk
        scale, growth = spec.scale, spec.scale_growth
        if growth is not None:
            scale *= 1 + growth.factor * np.log(1 + (position + growth.offset) // growth.length)
        for h in range(spec.num_heads):
            kv_head = h // spec.group_size
            scores = k[start : position + 1, kv_head] @ q[i, h] * scale
            if spec.logits_soft_cap is not None:
                scores = spec.logits_soft_cap * np.tanh(scores / spec.logits_soft_cap)
            if slopes is not None:
                scores = scores - slopes[h] * (position - np.arange(start, position + 1))
            sink = [] if sinks is None else [sinks[h]]
            weights = np.exp(np.concatenate([scores, sink]) - max([*scores, *sink]))
            out[i, h] = (weights / weights.sum())[: len(scores)] @ v[start : position + 1, kv_head]
    return out


@dataclass
class Case:
    """Requests as (tokens already cached, tokens in this step)."""

    spec: AttentionSpec
    requests: list[tuple[int, int]]
    block_size: int
    sinks: np.ndarray | None
    seed: int
    slopes: np.ndarray | None = None
    stride: int = 1
    """Blocks of memory for each block of the cache."""

    def kv_spec(self, dtype: torch.dtype) -> AnyKVCacheSpec:
        s = self.spec
        sizes = (self.block_size, s.num_kv_heads, s.head_size, str(dtype).removeprefix("torch."))
        if s.latent_size is not None:
            return LatentSpec(*sizes)
        if s.chunk is not None:
            return ChunkedSpec(*sizes, s.chunk)
        return FullAttentionSpec(*sizes) if s.sliding_window is None else SlidingWindowSpec(*sizes, s.sliding_window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, group, d = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([4, 8])),
    )
    kind = draw(st.sampled_from(["full", "sliding", "chunked", "latent"]))
    spec = AttentionSpec(
        kv_heads * group,
        kv_heads,
        d,
        scale=draw(st.sampled_from([d**-0.5, 0.3])),
        sliding_window=draw(st.integers(1, 40)) if kind == "sliding" else None,
        logits_soft_cap=draw(st.none() | st.sampled_from([1.0, 20.0])),
        chunk=draw(st.integers(1, 40)) if kind == "chunked" else None,
        scale_growth=draw(st.none() | st.builds(ScaleGrowth, st.just(0.5), st.integers(1, 60), st.integers(0, 1))),
        latent_size=d // 2 if kind == "latent" else None,
    )
    one = st.tuples(st.integers(0, 70), st.just(1) | st.integers(1, 30))
    return Case(
        spec,
        requests=draw(st.lists(one, min_size=1, max_size=6)),
        block_size=draw(st.sampled_from([1, 4, 16])),
        sinks=np.linspace(-1, 2, spec.num_heads) if draw(st.booleans()) else None,
        seed=draw(st.integers(0, 2**32 - 1)),
        slopes=np.linspace(0.02, 0.5, spec.num_heads) if draw(st.booleans()) else None,
        stride=draw(st.sampled_from([1, 2])),
    )


def run_paged(
    case: Case, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, np.ndarray]:
    """The backend's output and the oracle's, over a cache that held NaN wherever no request wrote.

    Inputs are rounded to `cache_dtype` (that of the activations unless given) for both sides.
    """
    cache_dtype = cache_dtype or dtype
    rng, spec, bs = np.random.default_rng(case.seed), case.spec, case.block_size
    seq_lens = [cached + new for cached, new in case.requests]
    blocks_per_req = [-(-n // bs) for n in seq_lens]
    num_blocks = sum(blocks_per_req) + 3
    ids = rng.permutation(np.arange(1, num_blocks))
    table = np.full((len(seq_lens), max(blocks_per_req) + 2), num_blocks - 1, np.int32)  # what is past the end: junk
    shape = (num_blocks, case.stride, bs, spec.num_kv_heads, spec.head_size)
    key, value = torch.full((2, *shape), torch.nan, dtype=cache_dtype)[:, :, -1]
    cache = KVCache(key, value if spec.latent_size is None else key)
    queries, keys, values, slots, expected = [], [], [], [], []
    for i, (cached, new) in enumerate(case.requests):
        table[i, : blocks_per_req[i]], ids = ids[: blocks_per_req[i]], ids[blocks_per_req[i] :]
        q = rng.standard_normal((new, spec.num_heads, spec.head_size))
        k, v = rng.standard_normal((2, cached + new, spec.num_kv_heads, spec.head_size))
        q, k, v = (torch.tensor(x).to(cache_dtype).double().numpy() for x in (q, k, v))
        positions = np.arange(cached + new)
        slot = table[i, positions // bs] * bs + positions % bs
        for store, x in ((cache.value, v), (cache.key, k)):
            store[slot[:cached] // bs, slot[:cached] % bs] = torch.tensor(x[:cached]).to(cache_dtype)
        slots.append(slot[cached:])
        queries.append(q)
        keys.append(k[cached:])
        values.append(v[cached:])
        expected.append(dense_attention(q, k, v, cached, spec, case.sinks, case.slopes))
    backend = TorchAttentionBackend()
    batch = AttentionBatch(
        np.array([new for _, new in case.requests], np.int64),
        np.array(seq_lens, np.int64),
        torch.from_numpy(table),
        torch.from_numpy(np.concatenate(slots).astype(np.int64)),
    )
    q, k, v = (torch.tensor(np.concatenate(x)).to(dtype) for x in (queries, keys, values))
    sinks = None if case.sinks is None else torch.tensor(case.sinks).to(dtype)
    slopes = None if case.slopes is None else torch.tensor(case.slopes).float()
    metadata = backend.make_metadata(batch, case.kv_spec(cache_dtype))
    given = None if spec.latent_size is not None else v
    out = backend.forward(q, k, given, cache, metadata, spec, sinks, slopes)
    return out, np.concatenate(expected)


@settings(max_examples=examples(50))
@given(cases())
def test_equals_dense_attention(case: Case) -> None:
    out, expected = run_paged(case)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=examples(25))
@given(cases())
def test_bfloat16_accumulates_in_float32(case: Case) -> None:
    """Inputs are rounded to bfloat16 for both sides, so what is left is the rounding of weights and output."""
    out, expected = run_paged(case, torch.bfloat16)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("group_size", [1, 4])
def test_scores_of_a_decode_are_not_rounded_to_bfloat16(group_size: int) -> None:
    """Scores of around 60: in bfloat16, with steps of a quarter, the weights would be off by tens of percent."""
    spec = AttentionSpec(2 * group_size, 2, 64, 2.0)
    out, expected = run_paged(Case(spec, [(200, 1), (37, 1), (700, 1)], 16, None, seed=6), torch.bfloat16)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("dtype", "is_fused"), [(torch.float32, True), (torch.float16, True), (torch.bfloat16, False)])
def test_only_bfloat16_decodes_by_matrix_products(
    dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", attend)
    run_paged(Case(AttentionSpec(4, 2, 8, 0.35), [(37, 1), (100, 1)], 16, None, seed=5), dtype)
    assert bool(calls) == is_fused


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_query_tiles_change_nothing(
    window: int | None, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec(4, 2, 8, 0.35, window, soft_cap)
    case = Case(spec, [(37, 100), (0, 64), (5, 1)], 16, None, seed=1)
    monkeypatch.setattr(torch_backend, "SCORES_PER_TILE", 1)  # the smallest tile: 16 queries
    out, expected = run_paged(case)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=2e-5, atol=2e-5)


def test_a_cache_of_another_type_than_the_activations() -> None:
    case = Case(AttentionSpec(4, 2, 8, 0.35, 20), [(37, 100), (9, 1)], 16, None, seed=3)
    out, expected = run_paged(case, cache_dtype=torch.bfloat16)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=2e-5, atol=2e-5)


def test_a_window_far_shorter_than_the_chunk() -> None:
    """Whole blocks of keys that a fused kernel takes at once are masked for the later queries."""
    case = Case(AttentionSpec(2, 1, 8, 0.35, 20), [(0, 1300)], 16, None, seed=4)
    out, expected = run_paged(case)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=2e-5, atol=2e-5)


def test_long_and_short_decodes_are_split_in_buckets() -> None:
    case = Case(AttentionSpec(4, 2, 8, 0.35), [(1500, 1), (3, 1), (600, 1), (0, 7), (700, 1)], 16, None, seed=2)
    out, expected = run_paged(case)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=2e-5, atol=2e-5)


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_buckets_hold_each_request_once_and_bound_the_padding(lens: list[int]) -> None:
    array = np.array(lens, np.int64)
    buckets = bucket_by_length(np.arange(len(lens)), array)
    assert sorted(i for b in buckets for i in b.tolist()) == list(range(len(lens)))
    for bucket in buckets:
        longest = array[bucket].max()
        assert longest <= torch_backend.MIN_BUCKET_LEN or (2 * array[bucket] > longest).all()


def test_storage_is_shared_by_layers_of_any_kind() -> None:
    """Two groups may see one storage: block b must own the same bytes in both."""
    backend = TorchAttentionBackend()
    full = FullAttentionSpec(4, 2, 8, "float32")
    sliding = SlidingWindowSpec(8, 1, 8, "float32", 5)
    storage = torch.zeros(6 * full.page_size_bytes, dtype=torch.uint8)
    a, b = (backend.view_kv_cache(storage, spec, 6) for spec in (full, sliding))
    a.key[3], a.value[5] = 1.0, 2.0
    assert (b.key[3] == 1).all()
    assert (b.value[5] == 2).all()
    assert b.key.sum() == b.key[3].numel()
    assert b.value.sum() == 2 * b.value[5].numel()


def test_registry_finds_a_backend_or_says_what_to_change() -> None:
    cpu = torch.device("cpu")
    assert make_attention_backend(cpu, torch.float32, torch.bfloat16).name == "torch"
    with pytest.raises(ConfigError, match=r"no attention backend.*tried native, torch.*--kv-cache-dtype"):
        make_attention_backend(cpu, torch.float32, torch.int8)
