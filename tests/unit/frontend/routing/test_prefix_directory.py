"""The directory of the engines' caches, beside a slow one."""

from __future__ import annotations

import random

import pytest

from quire.frontend.routing.prefix_directory import PrefixDirectory


class Slow:
    """The directory of one engine, block by block."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.uses: dict[bytes, tuple[int, int]] = {}
        """Number of the last use of each block, and a smaller number the later it is in its prompt."""
        self.num_uses = 0

    def note_sent(self, hashes: list[bytes]) -> None:
        self.num_uses += 1
        for depth, block in enumerate(hashes):
            self.uses[block] = (self.num_uses, -depth)
        while len(self.uses) > self.limit:
            del self.uses[min(self.uses, key=self.uses.__getitem__)]

    def count_cached(self, hashes: list[bytes]) -> int:
        return next((i for i, block in enumerate(hashes) if block not in self.uses), len(hashes))


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    directory = PrefixDirectory()
    directory.open(0, num_blocks=5)
    first, second = [b"a", b"b"], [b"c", b"d", b"e"]
    directory.note_sent(0, first)
    directory.note_sent(0, second)
    directory.note_sent(0, first)
    assert [directory.count_cached([0], hashes) for hashes in (first, second, [], [b"x"])] == [[2], [3], [0], [0]]
    directory.note_sent(0, [b"f", b"g"])
    assert [directory.count_cached([0], hashes) for hashes in (first, second)] == [[2], [1]]
    directory.close(0)
    assert directory.count_cached([0], first) == [0]
    assert not directory._root.after


def make_prompts(rng: random.Random) -> list[list[bytes]]:
    """Prompts that begin alike and part at any place."""
    prompts: list[list[bytes]] = []
    for number in range(30):
        stem = rng.choice(prompts)[: rng.randrange(6)] if prompts and rng.random() < 0.7 else []
        prompts.append(stem + [f"{number}.{i}".encode() for i in range(rng.randint(0 if stem else 1, 6))])
    return prompts


@pytest.mark.parametrize("limit", [1, 7, 40])
def test_it_knows_of_each_engine_what_a_slow_one_knows(limit: int) -> None:
    rng = random.Random(limit)
    directory, slow = PrefixDirectory(), {engine: Slow(limit) for engine in (0, 2, 70)}
    prompts = make_prompts(rng)
    for engine in slow:
        directory.open(engine, limit)
    for _ in range(400):
        engine, prompt = rng.choice(list(slow)), rng.choice(prompts)
        if rng.random() < 0.03:
            directory.open(engine, limit)
            slow[engine] = Slow(limit)
        directory.note_sent(engine, prompt)
        slow[engine].note_sent(prompt)
        asked = rng.choice(prompts)
        assert directory.count_cached(list(slow), asked) == [each.count_cached(asked) for each in slow.values()]
        cache = directory._caches[engine]
        assert cache.num_blocks == len(slow[engine].uses)
        assert len(cache.ends) <= cache.num_blocks
    for engine in slow:
        directory.close(engine)
    assert not directory._root.after, "nothing is left of engines that are gone"
