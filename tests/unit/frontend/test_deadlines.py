from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from quire.errors import DeadlineExceededError, QuireError, SlowClientError
from quire.frontend.output_handler import RequestOutputCollector
from quire.frontend.request_intake import SWEEPS_PER_TIMEOUT, Expired, RequestTimers
from quire.frontend.request_pipeline import MIN_COMPACTION, Deadlines
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind

from .virtual_loop import run_virtually


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


def output(finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], None, [CompletionOutput(0, "a", [1], None, None)], finished)


def collector(name: str) -> RequestOutputCollector:
    return RequestOutputCollector(RequestOutputKind.DELTA, name)


class Log:
    """Requests that have expired, and the times."""

    def __init__(self, slow_client_timeout_s: float = 0.0) -> None:
        self.timers = RequestTimers(slow_client_timeout_s, self._note)
        self.seen: list[tuple[str, float, QuireError]] = []
        self.start = asyncio.get_running_loop().time()

    def _note(self, expired: Expired) -> None:
        now = asyncio.get_running_loop().time()
        for one, error in expired:
            one.put(error)
            self.seen.append((one.request_id, round(now - self.start, 3), error))

    @property
    def times(self) -> list[tuple[str, float]]:
        return [(name, when) for name, when, _ in self.seen]

    def watch(self, name: str, timeout_s: float | None = None) -> RequestOutputCollector:
        one = collector(name)
        self.timers.watch(one, asyncio.get_running_loop().time(), timeout_s)
        return one


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtually(test())

    run.__name__ = test.__name__
    return run


@virtual
async def test_deadlines_are_kept_to_the_moment() -> None:
    log = Log()
    for name, timeout_s in (("b", 20.0), ("a", 5.0), ("c", 30.0), ("never", None)):
        log.watch(name, timeout_s)
    done = log.watch("done", 10.0)
    done.put(output(finished=True))
    await asyncio.sleep(100)
    assert log.times == [("a", 5.0), ("b", 20.0), ("c", 30.0)]
    error = log.seen[0][2]
    assert isinstance(error, DeadlineExceededError)
    assert error.status_code == 504
    assert "deadline_exceeded" in str(error)
    assert "5 s" in str(error)


@virtual
async def test_a_reader_that_takes_nothing_is_cut() -> None:
    log = Log(60.0)
    stalled, reading, waiting, late = (log.watch(name) for name in ("stalled", "reading", "waiting", "late"))
    stalled.put(output())
    for second in range(200):
        reading.put(output())
        if second % 59 == 58:
            reading.get_nowait()
        if second == 100:
            late.put(output())
        await asyncio.sleep(1)
    limit = 60 * (1 + 2 / SWEEPS_PER_TIMEOUT)
    assert [name for name, _ in log.times] == ["stalled", "late"]
    assert 60 <= log.times[0][1] <= limit
    assert 160 <= log.times[1][1] <= 100 + limit
    assert isinstance(log.seen[0][2], SlowClientError)
    assert "slow_client" in str(log.seen[0][2])
    assert not waiting.is_final


@virtual
async def test_a_finished_request_may_lie() -> None:
    log = Log(60.0)
    log.watch("done").put(output(finished=True))
    await asyncio.sleep(1000)
    assert not log.seen


@virtual
async def test_no_timer_rings_when_nothing_is_watched() -> None:
    log = Log(60.0)
    log.watch("a", 5.0).put(output(finished=True))
    await asyncio.sleep(30)
    loop: Any = asyncio.get_running_loop()
    assert [handle for handle in loop._scheduled if not handle.cancelled()] == []
    log.watch("b", 5.0)
    await asyncio.sleep(5.5)
    assert log.times == [("b", 35.0)]


@virtual
async def test_stop() -> None:
    log = Log(60.0)
    log.watch("a", 5.0).put(output())
    log.timers.stop()
    await asyncio.sleep(500)
    assert not log.seen


def test_the_loop_is_what_it_says() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="will not happen"):
        run_virtually(stuck())


def test_a_request_that_comes_when_the_clock_is_about_to_ring_on_uvloop() -> None:
    """Its loop makes no timer of a moment that has come, only a call, which does not know when."""

    async def run() -> None:
        log = Log(60.0)
        for name in "abc":
            log.timers.watch(collector(name), asyncio.get_running_loop().time() - 1.0, 1.0)
        while len(log.seen) < 3:
            await asyncio.sleep(0)
        log.timers.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
