"""Sources and addresses that could not be used rest for longer and longer."""

from __future__ import annotations

import pytest

from quire.kv_store import rests as rests_module
from quire.kv_store.rests import Rests


def test_each_fault_makes_the_next_rest_twice_as_long() -> None:
    rests, lengths, now = Rests(), list[float](), 50.0
    assert not rests.is_resting("a", now)
    for _ in range(6):
        lengths.append(rests.note_fault("a", now))
        assert rests.seconds_left("a", now) == lengths[-1]
        now += lengths[-1] / 2
        assert rests.note_fault("a", now) == lengths[-1], "it rests already"
        assert rests.is_resting("a", now)
        now += lengths[-1] / 2
        assert not rests.is_resting("a", now)
    assert lengths == [5, 10, 20, 40, 60, 60]
    assert not rests.is_resting("b", now)
    rests.note_good("a")
    assert rests.note_fault("a", now) == 5


@pytest.mark.parametrize("ends_rest", [True, False])
def test_a_success_ends_a_rest_or_shortens_the_next(ends_rest: bool) -> None:
    rests = Rests()
    for now in (0.0, 5.0):
        rests.note_fault("a", now)
    rests.note_good("a", ends_rest=ends_rest)
    rests.note_good("never seen", ends_rest=ends_rest)
    assert rests.is_resting("a", 14.0) != ends_rest
    assert not rests.is_resting("a", 15.0)
    assert rests.note_fault("a", 15.0) == 5


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests_module, "MAX_NAMES", 2)
    rests = Rests()
    for name in "abcb":
        rests.note_fault(name, 50.0)
    assert [rests.is_resting(name, 50.0) for name in "abc"] == [False, True, True]
