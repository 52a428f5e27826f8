"""Addresses that could not be used rest for longer and longer."""

from __future__ import annotations

import pytest

from quire.kv_store.peer import rests as rests_module
from quire.kv_store.peer.rests import Rests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(rests_module.time, "monotonic", lambda: now[0])
    return now


def test_each_fault_makes_the_next_rest_twice_as_long(clock: list[float]) -> None:
    rests, lengths = Rests(), list[float]()
    assert not rests.is_resting("a")
    for _ in range(6):
        lengths.append(rests.note_fault("a"))
        assert rests.seconds_left("a") == lengths[-1]
        clock[0] += lengths[-1] / 2
        assert rests.note_fault("a") == lengths[-1], "it rests already"
        assert rests.is_resting("a")
        clock[0] += lengths[-1] / 2
        assert not rests.is_resting("a")
    assert lengths == [5, 10, 20, 40, 60, 60]
    assert not rests.is_resting("b")
    rests.note_good("a")
    assert rests.note_fault("a") == 5


def test_a_success_ends_a_rest(clock: list[float]) -> None:
    rests = Rests()
    rests.note_fault("a")
    rests.note_good("a")
    rests.note_good("never seen")
    assert not rests.is_resting("a")


def test_addresses_are_bounded(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests_module, "MAX_ADDRESSES", 2)
    rests = Rests()
    for address in "abcb":
        rests.note_fault(address)
    assert [rests.is_resting(address) for address in "abc"] == [False, True, True]
