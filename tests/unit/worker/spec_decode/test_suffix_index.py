"""Suffix indexes: the native store gives the drafts of the plain one, in bounded memory."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

from quire.worker.kernels.library import native_library
from quire.worker.spec_decode.suffix_index import (
    NativeSuffixStore,
    PlainSuffixStore,
    SuffixRules,
    SuffixStore,
    make_suffix_store,
)

ROOT = Path(__file__).parents[4]
ROOMY = 1 << 30
RULES = SuffixRules(1.0, 0.1)

needs_library = pytest.mark.skipif(native_library() is None, reason="there is no native library")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture(params=[PlainSuffixStore, pytest.param(NativeSuffixStore, marks=needs_library)])
def make_store(request: pytest.FixtureRequest) -> type[SuffixStore]:
    return request.param


def opened(store: SuffixStore, *tokens: int) -> int:
    index = store.open()
    assert index is not None
    assert store.extend(index, ids(*tokens)) == len(tokens)
    return index


def test_what_followed_most_often_is_drafted(make_store: type[SuffixStore]) -> None:
    store = make_store(8, ROOMY)
    index = opened(store, 1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1, 2)
    drafts = store.propose(index, None, 10, RULES)
    assert drafts.token_ids == [3, 9]  # of 3, 1 and 3, 9 the latter came last; as many as tokens agree
    assert drafts.confidences == [5, 4]  # two of three, then one of two
    assert drafts.score == 2 / 3 + 2 / 3 * 0.5


def test_of_equals_the_latest_wins(make_store: type[SuffixStore]) -> None:
    store = make_store(8, ROOMY)
    index = opened(store, 5, 7, 5, 8, 5)
    assert store.propose(index, None, 4, RULES).token_ids == [8]


def test_limits_of_drafts(make_store: type[SuffixStore]) -> None:
    store = make_store(8, ROOMY)
    index = opened(store, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3)
    assert store.propose(index, None, 2, RULES).token_ids == [4, 5]
    assert store.propose(index, None, 99, SuffixRules(1.5, 0.1)).token_ids == [4, 5, 6, 7]
    assert store.propose(index, None, 99, SuffixRules(0.3, 0.1)).token_ids == []
    assert store.propose(index, ids(9, 9), 9, RULES).token_ids == []
    assert store.propose(index, ids(), 9, RULES).token_ids == []
    again = opened(store, 1, 2, 1, 3, 1)
    assert store.propose(again, None, 9, SuffixRules(1.0, 0.5)).token_ids == [3]
    assert store.propose(again, None, 9, SuffixRules(1.0, 0.51)).token_ids == []


def test_drafts_reach_beyond_the_depth(make_store: type[SuffixStore]) -> None:
    store = make_store(4, ROOMY)
    index = opened(store, *range(100, 140), *range(100, 110))
    assert store.propose(index, None, 99, SuffixRules(8.0, 0.1)).token_ids == list(range(110, 134))


def test_nothing_follows_the_end_of_a_text(make_store: type[SuffixStore]) -> None:
    store = make_store(8, ROOMY)
    index = opened(store, 1, 2, 3)
    store.end(index)
    store.extend(index, ids(4, 5, 1, 2))
    assert store.propose(index, None, 9, RULES).token_ids == [3]  # 3 was followed by no 4
    assert store.propose(index, ids(2, 3), 9, RULES).token_ids == []


def test_closed_indexes_give_their_memory_back(make_store: type[SuffixStore]) -> None:
    store = make_store(8, ROOMY)
    rng = np.random.default_rng(1)
    first = opened(store, *rng.integers(0, 4, 500).tolist())
    before, num_bytes = store.num_nodes, store.num_bytes
    for _ in range(20):
        store.close(opened(store, *rng.integers(0, 4, 300).tolist()))
    assert store.num_nodes == before
    assert store.num_bytes < 2 * num_bytes
    store.close(first)
    assert store.num_nodes == 0


def test_memory_is_bounded(make_store: type[SuffixStore]) -> None:
    store = make_store(8, 100_000)
    rng = np.random.default_rng(1)
    index = opened(store)
    taken = store.extend(index, rng.integers(0, 50, 100_000).astype(np.int32))
    assert 50 < taken < 100_000
    assert store.num_bytes <= 100_000
    assert store.extend(index, ids(1)) == 0
    store.close(index)
    assert opened(store, *rng.integers(0, 50, taken // 2).tolist()) is not None


def expected_drafts(
    texts: list[list[int]], context: list[int], depth: int, limit: int, rules: SuffixRules
) -> list[int]:
    """Returns drafts by looking through the texts again for every token."""
    context, drafts, probability, most = list(context), [], 1.0, None
    while True:
        found, length = Counter[int](), 0
        for length in range(min(depth - 1, len(context)), 0, -1):
            found, latest, when = Counter(), {}, 0
            for text in texts:
                for at in range(len(text) - length):
                    if text[at : at + length] == context[-length:]:
                        found[text[at + length]] += 1
                        latest[text[at + length]] = when + at
                when += len(text)
            if found:
                break
        if most is None:
            most = int(min(limit, rules.max_spec_factor * length)) if found else 0
        if not found or len(drafts) >= most:
            return drafts
        token = max(found, key=lambda token: (found[token], latest[token]))
        probability *= found[token] / found.total()
        if probability < rules.min_token_prob:
            return drafts
        drafts.append(token)
        context.append(token)


@pytest.mark.parametrize("seed", range(12))
def test_drafts_are_those_of_a_search_through_the_texts(make_store: type[SuffixStore], seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.choice([2, 3, 5, 8])
    store = make_store(depth, ROOMY)
    index = opened(store)
    texts: list[list[int]] = [[]]
    vocab = rng.randint(1, 4)
    for _ in range(100):
        match rng.randrange(8):
            case 0:
                store.end(index)
                texts.append([])
            case 1 if len(texts) > 1:
                store.drop_first(index)
                texts.pop(0)
            case _:
                token = rng.randrange(vocab)
                store.extend(index, ids(token))
                texts[-1].append(token)
        rules = SuffixRules(rng.choice([0.5, 1.0, 4.0]), rng.choice([0.0, 0.3]))
        context = [rng.randrange(vocab) for _ in range(rng.randrange(8))]
        assert store.propose(index, None, 6, rules).token_ids == expected_drafts(texts, texts[-1], depth, 6, rules)
        assert store.propose(index, ids(*context), 6, rules).token_ids == expected_drafts(
            texts, context, depth, 6, rules
        )


def random_operations(stores: list[SuffixStore], rng: random.Random, count: int) -> None:
    """Does the same to all stores, and compares what they draft."""
    indexes: dict[int, deque[int]] = {}  # lengths of ended texts
    vocab = rng.choice([1, 2, 3, 10])
    for _ in range(count):
        slot = rng.choice(sorted(indexes)) if indexes and rng.random() < 0.9 else None
        if slot is None:
            [new] = {store.open() for store in stores}
            assert new is not None
            indexes[new] = deque()
        elif rng.random() < 0.7:
            motif = [rng.randrange(vocab) for _ in range(rng.randint(1, 5))]
            tokens = ids(*(motif * rng.randint(1, 6)))
            assert {store.extend(slot, tokens) for store in stores} == {len(tokens)}
        elif rng.random() < 0.5:
            assert {store.end(slot) for store in stores} == {True}
            indexes[slot].append(0)
        elif indexes[slot]:
            indexes[slot].popleft()
            for store in stores:
                store.drop_first(slot)
        elif rng.random() < 0.3:
            del indexes[slot]
            for store in stores:
                store.close(slot)
        if slot in indexes:
            rules = SuffixRules(rng.choice([1.0, 3.0]), rng.choice([0.0, 0.2]))
            context = None if rng.random() < 0.5 else ids(*(rng.randrange(vocab) for _ in range(rng.randrange(30))))
            drafts = [store.propose(slot, context, 40, rules) for store in stores]
            assert drafts.count(drafts[0]) == len(drafts)
    for slot in indexes:
        for store in stores:
            store.close(slot)
    assert {store.num_nodes for store in stores} == {0}


class NumberedAlike(PlainSuffixStore):
    """A plain store that numbers its indexes as the native one does: by the first free number."""

    def open(self) -> int | None:
        index = super().open()
        assert index is not None
        first = min(set(range(len(self._indexes) + 1)) - (self._indexes.keys() - {index}))
        self._indexes[first] = self._indexes.pop(index)
        self._num_opened = 1_000_000
        return first


@needs_library
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 400))])
def test_native_drafts_are_the_plain_ones(seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.choice([2, 3, 4, 7, 24])
    random_operations([NativeSuffixStore(depth, ROOMY), NumberedAlike(depth, ROOMY)], rng, 150)


@needs_library
def test_the_native_store_is_chosen() -> None:
    assert isinstance(make_suffix_store(24, ROOMY), NativeSuffixStore)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_the_native_store_is_clean_under_sanitizers(tmp_path: Path) -> None:
    program = tmp_path / "fuzz"
    sources = [Path(__file__).with_name("fuzz_suffix.cpp"), ROOT / "csrc" / "suffix.cpp"]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    headers = f"-I{ROOT / 'src/quire/worker/kernels'}"
    subprocess.run(["g++", *flags, headers, *map(str, sources), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
