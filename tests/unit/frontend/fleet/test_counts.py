"""Limits that hold for several processes together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import OverloadedError, QuotaExceededError
from quire.frontend.admission import DRAIN_MEMORY_S, QUEUED_REQS, AdmissionControl, Quota, SharedQuota
from quire.frontend.fleet.counts import FleetCounts
from quire.frontend.http.auth import Tenants
from quire.wire.peers import SharedCounts

from ..shares import release, take_share

KEYS = (b"a" * 32, b"b" * 32)


@pytest.fixture
def counts(tmp_path: Path) -> Callable[[int], FleetCounts]:
    """The page as process 1 or 2 sees it; 0 is the parent."""
    parent = FleetCounts.create(tmp_path / "counts", 2, KEYS)
    return lambda index: FleetCounts.attach(tmp_path / "counts", index, KEYS) if index else parent


def test_a_queue_is_full_for_all(counts: Callable[[int], FleetCounts]) -> None:
    controls = [AdmissionControl(3, 100, 1000) for _ in range(2)]
    for index, control in enumerate(controls, start=1):
        counts(index).share_admission(control)
    first = controls[0].reserve(2, 10, 20)
    second = controls[1].reserve(1, 10, 20)
    for control in controls:
        assert (control.num_reqs, control.num_tokens, control.num_reserved_tokens) == (3, 30, 90)
        with pytest.raises(OverloadedError, match="3 requests wait for their first token, 1 more are too many"):
            control.reserve(1, 1)
    second.stop_waiting()
    controls[0].check_admission()
    first.release()
    second.release()
    assert [control.num_reserved_tokens for control in controls] == [0, 0]


def test_what_a_dead_process_had_is_free(counts: Callable[[int], FleetCounts]) -> None:
    controls = [AdmissionControl(2) for _ in range(2)]
    for index, control in enumerate(controls, start=1):
        counts(index).share_admission(control)
    controls[0].reserve(1, 1)
    controls[1].reserve(1, 1)
    counts(1).in_flight.put(7)
    with pytest.raises(OverloadedError):
        controls[1].reserve(1, 1)
    counts(0).clear(1)
    assert counts(2).in_flight.others() == 0
    assert controls[1].num_reqs == 1
    controls[1].reserve(1, 1)


def test_the_parent_sees_whether_requests_live(counts: Callable[[int], FleetCounts]) -> None:
    """Not whether they wait: a core that dies while they are answered is needed, too."""
    control = AdmissionControl()
    counts(1).share_admission(control)
    assert not counts(0).are_others_busy()
    reservation = control.reserve(1, 10, 20)
    reservation.stop_waiting()
    assert counts(0).are_others_busy()
    reservation.end_one(waits=False)
    assert not counts(0).are_others_busy()
    control.reserve(1, 1)
    counts(0).clear(1)
    assert not counts(0).are_others_busy()


def test_a_key_has_its_share_once(counts: Callable[[int], FleetCounts]) -> None:
    tenants = [Tenants(2, None, counts(index).rooms_of_keys) for index in (1, 2)]
    place = take_share(tenants[0], KEYS[0], 1, 5)
    take_share(tenants[1], KEYS[0], 1, 5)
    for one in tenants:
        with pytest.raises(QuotaExceededError, match="2 requests of this key are under way"):
            take_share(one, KEYS[0], 1, 5)
        take_share(one, KEYS[1], 1, 5)
    release(place)
    take_share(tenants[1], KEYS[0], 1, 5)


def test_the_speed_of_all_makes_the_time_to_wait(tmp_path: Path) -> None:
    """Room that another process gives back comes free for us, too."""
    now = 0.0
    page = SharedCounts.create(tmp_path / "one", 2, 2)
    pages = [page, SharedCounts.attach(tmp_path / "one", 2, 1)]
    rooms = [Quota(QUEUED_REQS, 100, lambda: now) for _ in pages]
    for room, one in zip(rooms, pages, strict=True):
        room.share(SharedQuota(one.column(0), one.column(1)))
    alone = Quota(QUEUED_REQS, 100, lambda: now)
    alone.change(100)
    rooms[0].change(50)
    rooms[1].change(50)
    for _ in range(20):
        now += DRAIN_MEMORY_S / 20
        for room in (*rooms, alone):
            room.change(-1)
        alone.change(-1)
    assert rooms[0].taken == alone.taken == 60
    assert rooms[0].retry_after_s(40) == pytest.approx(alone.retry_after_s(40), abs=1)
    page.clear_row(1)
    before = rooms[0].retry_after_s(40)
    assert rooms[0].retry_after_s(40) == before, "a process that has died frees what it had, not what it had given back"
