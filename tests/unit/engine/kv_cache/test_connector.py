"""The longest match of a request, beside a search that tries every length."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.kv_cache.connector import find_longest_match
from quire.wire.kv_cache import AnyKVCacheSpec, ChunkedSpec, FullAttentionSpec, SlidingWindowSpec
from tests.seeds import seeds

SIZE = 4


def spec(kind: int) -> AnyKVCacheSpec:
    if kind == 0:
        return FullAttentionSpec(SIZE, 1, 1)
    return SlidingWindowSpec(SIZE, 1, 1, sliding_window=kind) if kind > 0 else ChunkedSpec(SIZE, 1, 1, chunk_size=-kind)


def longest_by_trying(specs: list[AnyKVCacheSpec], start: int, num_tokens: int, stored: set[tuple[int, int]]) -> int:
    """All lengths, and for each all blocks that a token after it reads."""
    best = start
    for stop in range(start + 1, (num_tokens - 1) // SIZE + 1):
        needed = set()
        for group, one in enumerate(specs):
            first = int(one.first_token_read(stop * SIZE)) // SIZE
            needed |= {(group, index) for index in range(max(start, min(first, stop - 1)), stop)}
        if needed <= stored:
            best = stop
    return (best - start) * SIZE


@pytest.mark.fresh
@pytest.mark.parametrize("kinds", [(0,), (6,), (-8,), (0, 5), (0, 1, 9), (5, 12), (0, -12)])
def test_longest_match_is_the_longest(kinds: tuple[int, ...]) -> None:
    specs = [spec(kind) for kind in kinds]
    found = 0
    for seed in seeds(150):
        rng = random.Random(f"{kinds}/{seed}")
        num_tokens, start = rng.randint(1, 60), rng.randint(0, 4)
        num_blocks = num_tokens // SIZE
        stored = {(g, i) for g in range(len(kinds)) for i in range(num_blocks) if rng.random() < 0.85}
        hashes = [bytes([i]) for i in range(num_blocks)]
        request: Any = SimpleNamespace(num_tokens=num_tokens, block_hashes=hashes, lora_request=None)
        match = find_longest_match(specs, request, start * SIZE, lambda g, digest, s=stored: (g, digest[0]) in s)
        right = longest_by_trying(specs, start, num_tokens, stored) if start * SIZE < num_tokens else 0
        assert match == right, f"seed {seed}"
        found += match > 0
    assert found > 20


def test_the_last_token_is_never_matched() -> None:
    request: Any = SimpleNamespace(num_tokens=8, block_hashes=[b"a", b"b"], lora_request=None)
    assert find_longest_match([spec(0)], request, 0, lambda group, digest: True) == 4
