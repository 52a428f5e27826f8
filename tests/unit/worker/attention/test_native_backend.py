"""Native paged attention: near the torch backend, and each token has the same bits however its request is scheduled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.wire.kv_cache import AnyKVCacheSpec, ChunkedSpec, FullAttentionSpec, LatentSpec, SlidingWindowSpec
from quire.worker.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, KVCache, ScaleGrowth
from quire.worker.attention.layer import alibi_slopes
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.attention.torch_backend import TorchAttentionBackend
from tests.seeds import seeds

from ..conftest import MakeKernels

LENGTHS = [1, 5, 17, 40, 100, 257, 520]
"""Around groups of 16 keys and chunks of 256."""
Schedule = list[list[tuple[int, int]]]
"""Steps of (request, number of its tokens)."""


@dataclass
class Scene:
    """Some requests: the queries, keys and values of each, [length, heads, head_size]."""

    spec: AttentionSpec
    block_size: int
    dtype: torch.dtype
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    sinks: Tensor | None
    slopes: Tensor | None
    padding: int
    """Bytes of each block before and after the layer's part."""
    is_shared: bool
    """Another layer stores the keys and values, in the same step."""

    @property
    def lengths(self) -> list[int]:
        return [len(q) for q in self.q]

    @property
    def kv_spec(self) -> AnyKVCacheSpec:
        name = str(self.dtype).removeprefix("torch.")
        args = (self.block_size, self.spec.num_kv_heads, self.spec.head_size, name)
        window, chunk = self.spec.sliding_window, self.spec.chunk
        if self.spec.latent_size is not None:
            return LatentSpec(*args)
        if chunk is not None:
            return ChunkedSpec(*args, chunk)
        return FullAttentionSpec(*args) if window is None else SlidingWindowSpec(*args, window)


def make_scene(seed: int, **fixed: Any) -> Scene:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    choices: dict[str, list[Any]] = {
        "kv_heads": [1, 2, 3],
        "group": [1, 2, 4, 7],
        "head_size": [4, 12, 16, 32, 64, 80, 128],
        "block_size": [1, 4, 16, 16, 32],
        "dtype": [torch.bfloat16, torch.float32],
        "window": [None, None, 20, 300],
        "soft_cap": [None, None, 5.0],
        "sinks": [False, False, True],
        "slopes": [False, False, True],
        "chunk": [None, None, 21, 300],
        "growth": [None, None, ScaleGrowth(0.3, 20), ScaleGrowth(0.1, 90, 1)],
        "latent": [None, None, 0.5, 0.75],
        "padding": [0, 0, 64],
        "shared": [False, False, True],
    }
    c = {name: fixed.get(name, rng.choice(values)) for name, values in choices.items()}
    heads, size, dtype = c["kv_heads"] * c["group"], c["head_size"], c["dtype"]
    lengths = fixed.get("lengths") or rng.choices(LENGTHS, k=rng.randint(1, 4))
    latent = None if c["latent"] is None else int(size * c["latent"])
    window, chunk = (None, None) if latent is not None else (c["window"], None if c["window"] else c["chunk"])

    def randn(num_heads: int) -> list[Tensor]:
        return [torch.randn(n, num_heads, size, generator=generator).to(dtype) for n in lengths]

    return Scene(
        AttentionSpec(
            heads,
            c["kv_heads"],
            size,
            size**-0.5,
            window,
            c["soft_cap"],
            chunk=chunk,
            scale_growth=c["growth"],
            latent_size=latent,
        ),
        c["block_size"],
        dtype,
        randn(heads),
        randn(c["kv_heads"]),
        randn(c["kv_heads"]),
        torch.randn(heads, generator=generator) if c["sinks"] else None,
        torch.rand(heads, generator=generator) / 4 if c["slopes"] else None,
        c["padding"],
        c["shared"],
    )


class PagedRun:
    """Runs a schedule over a cache in which everything unwritten is NaN, and everything given back is, too."""

    def __init__(self, backend: AttentionBackend[Any], scene: Scene, seed: int) -> None:
        self.backend, self.scene, self.size = backend, scene, scene.block_size
        num_blocks = [-(-n // self.size) for n in scene.lengths]
        ids = list(range(1, sum(num_blocks) + 3))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(n)] for n in num_blocks]
        self.num_blocks = sum(num_blocks) + 3
        block_bytes = scene.kv_spec.page_size_bytes + 2 * scene.padding
        storage = torch.zeros(self.num_blocks * block_bytes, dtype=torch.uint8)
        self.cache: KVCache = backend.view_kv_cache(storage, scene.kv_spec, self.num_blocks, scene.padding)
        self.cache.key.fill_(torch.nan)
        self.cache.value.fill_(torch.nan)
        self.done = [0] * len(scene.lengths)
        self.outputs: list[list[Tensor]] = [[] for _ in scene.lengths]

    def run(self, schedule: Schedule) -> list[Tensor]:
        """The outputs of each request."""
        for step in schedule:
            self._step(step)
        return [torch.cat(outputs) for outputs in self.outputs]

    def _step(self, step: list[tuple[int, int]]) -> None:
        table = torch.zeros(len(step), max(map(len, self.tables)), dtype=torch.int32)
        slots, ends = [], []
        for i, (r, n) in enumerate(step):
            table[i, : len(self.tables[r])] = torch.tensor(self.tables[r], dtype=torch.int32)
            positions = range(self.done[r], self.done[r] + n)
            slots += [self.tables[r][p // self.size] * self.size + p % self.size for p in positions]
            ends.append(self.done[r] + n)
        lens = np.array([n for _, n in step])
        batch = AttentionBatch(lens, np.array(ends), table, torch.tensor(slots))
        metadata = self.backend.make_metadata(batch, self.scene.kv_spec)
        q, k, v = (
            torch.cat([x[r][self.done[r] : self.done[r] + n] for r, n in step])
            for x in (self.scene.q, self.scene.k, self.scene.v)
        )
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)  # as a model has them: views of one matrix
        views = [
            x.view(y.shape) for x, y in zip(qkv.split([x[0].numel() for x in (q, k, v)], dim=1), (q, k, v), strict=True)
        ]
        spec, biases = self.scene.spec, (self.scene.sinks, self.scene.slopes)
        q, k, v = views[0], views[1], None if spec.latent_size is not None else views[2]
        if self.scene.is_shared:
            self.backend.forward(-q, k, v, self.cache, metadata, spec)
            k = v = None
        out = self.backend.forward(q, k, v, self.cache, metadata, spec, *biases)
        for (r, _), end, rows in zip(step, ends, out.split(lens.tolist()), strict=True):
            self.outputs[r].append(rows)
            self.done[r] = end
            self._give_back(r)

    def _give_back(self, r: int) -> None:
        """Blocks that no later query sees."""
        for i in range(self.scene.spec.first_key(self.done[r]) // self.size):
            block = self.tables[r][i]
            self.cache.key[block] = torch.nan
            self.cache.value[block] = torch.nan
            self.tables[r][i] = 0


def one_by_one(scene: Scene) -> Schedule:
    """Each request alone, its whole prompt in one step."""
    return [[(r, n)] for r, n in enumerate(scene.lengths)]


def at_random(scene: Scene, seed: int) -> Schedule:
    """Chunks of all sizes in all company, single tokens most of all."""
    rng, left, schedule = random.Random(seed), list(scene.lengths), []
    while any(left):
        step = []
        for r in rng.sample(range(len(left)), len(left)):
            if left[r] and rng.random() < 0.8:
                n = left[r] if len(schedule) > 40 else min(left[r], rng.choice([1, 1, 3, 16, 50, 200]))
                left[r] -= n
                step.append((r, n))
        if step:
            schedule.append(step)
    return schedule


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(12))
def test_near_the_reference_and_the_same_bits_under_every_schedule(make_kernels: MakeKernels, seed: int) -> None:
    scene = make_scene(seed)
    expected = PagedRun(TorchAttentionBackend(), scene, seed).run(one_by_one(scene))
    found = PagedRun(NativeAttentionBackend(make_kernels(1)), scene, seed).run(one_by_one(scene))
    tolerance = 0.02 if scene.dtype == torch.bfloat16 else 2e-5
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)
    for num_threads in (1, 2, 3):
        backend = NativeAttentionBackend(make_kernels(num_threads))
        again = PagedRun(backend, scene, seed + num_threads).run(at_random(scene, seed + num_threads))
        assert all(torch.equal(a, f) for a, f in zip(again, found, strict=True)), num_threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fixed",
    [
        {"slopes": True, "soft_cap": 5.0, "group": 7},
        {"chunk": 21, "block_size": 16},
        {"chunk": 300, "growth": ScaleGrowth(0.3, 20)},
        {"latent": 0.75, "head_size": 64, "block_size": 16, "kv_heads": 1},
        {"latent": 0.5, "head_size": 24, "block_size": 4, "kv_heads": 1},
        {"shared": True, "window": 20, "padding": 64},
    ],
    ids=["slopes", "short chunks", "long chunks", "latent", "odd latent", "shared"],
)
def test_each_way_to_attend(make_kernels: MakeKernels, fixed: dict[str, Any], dtype: torch.dtype) -> None:
    plain: dict[str, Any] = {"window": None, "soft_cap": None, "sinks": False, "slopes": False, "chunk": None}
    plain |= {"growth": None, "latent": None, "padding": 0, "shared": False, "lengths": [300, 5, 40]}
    scene = make_scene(7, **{**plain, "dtype": dtype, **fixed})
    expected = PagedRun(TorchAttentionBackend(), scene, 1).run(one_by_one(scene))
    found = PagedRun(NativeAttentionBackend(make_kernels(1)), scene, 1).run(one_by_one(scene))
    tolerance = 0.02 if dtype == torch.bfloat16 else 2e-5
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)
    again = PagedRun(NativeAttentionBackend(make_kernels(3)), scene, 2).run(at_random(scene, 2))
    assert all(torch.equal(a, f) for a, f in zip(again, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_context_split_among_threads(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    scene = make_scene(
        1, kv_heads=2, group=2, head_size=64, block_size=16, dtype=dtype, window=None, sinks=False, lengths=[1420, 3]
    )
    schedule = [[(0, 1400)], *([[(0, 1), (1, 1)]] * 3), *([[(0, 1)]] * 17)]
    whole = PagedRun(NativeAttentionBackend(make_kernels(1)), scene, 0).run(one_by_one(scene))
    for num_threads in (1, 3):
        parts = PagedRun(NativeAttentionBackend(make_kernels(num_threads)), scene, 5).run(schedule)
        assert all(torch.equal(p, w) for p, w in zip(parts, whole, strict=True))


def test_storage_is_shared_by_layers_of_any_kind(make_kernels: MakeKernels) -> None:
    """Block b owns the same bytes in each."""
    backend = NativeAttentionBackend(make_kernels(1))
    full, sliding = FullAttentionSpec(4, 2, 8, "float32"), SlidingWindowSpec(8, 1, 8, "float32", 5)
    storage = torch.zeros(6 * full.page_size_bytes, dtype=torch.uint8)
    a, b = (backend.view_kv_cache(storage, spec, 6) for spec in (full, sliding))
    a.key[3], a.value[5] = 1.0, 2.0
    assert (b.key[3] == 1).all()
    assert (b.value[5] == 2).all()
    assert b.key.sum() == b.key[3].numel()


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 20, 71])
def test_slopes_are_those_of_bloom(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    expected = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), expected)
