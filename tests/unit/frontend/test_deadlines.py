from __future__ import annotations

import random

from quire.frontend.deadlines import MIN_COMPACTION, Deadlines


def test_earliest_first_and_once() -> None:
    over: set[str] = set()
    deadlines: Deadlines[str] = Deadlines(over.__contains__)
    assert deadlines.next_due is None
    for name, due in (("b", 2.0), ("a", 1.0), ("c", 3.0), ("b2", 2.0)):
        deadlines.add(name, due)
    assert deadlines.next_due == 1.0
    assert deadlines.take_due(0.5) == []
    over.add("a")
    assert deadlines.next_due == 2.0
    assert deadlines.take_due(2.0) == ["b", "b2"]
    over.add("c")
    assert deadlines.take_due(9.0) == []
    assert deadlines.next_due is None


def test_against_a_list_and_within_its_memory() -> None:
    rng = random.Random(7)
    over: set[int] = set()
    live: dict[int, float] = {}
    deadlines: Deadlines[int] = Deadlines(over.__contains__)
    now, most_live = 0.0, 0
    for number in range(20_000):
        due = now + rng.random() * 100
        deadlines.add(number, due)
        live[number] = due
        while len(live) > 50 or (live and rng.random() < 0.3):
            gone = rng.choice(list(live))
            del live[gone]
            over.add(gone)
        most_live = max(most_live, len(live))
        assert len(deadlines) <= max(MIN_COMPACTION, 2 * (most_live + 1)) + 1
        if rng.random() < 0.2:
            now += rng.random()
            expected = sorted((due, item) for item, due in live.items() if due <= now)
            assert deadlines.take_due(now) == [item for _, item in expected]
            for _, item in expected:
                del live[item]
