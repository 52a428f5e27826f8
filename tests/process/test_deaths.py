"""Promises P1, P2 and P3: every way a core can die or hang, by failpoint, and the one request that is to blame."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import EngineDeadError
from quire.failpoints import FAILPOINTS
from quire.frontend.supervision import supervisor
from quire.frontend.supervision.supervisor import WATCH_INTERVAL_S
from quire.sampling_params import SamplingParams
from quire.testing.history import History

from .harness import Engine, FakeLoad, fake_args, read, running

HANG_TIMEOUT_S = 2.0
"""Not the least that can be set: a machine that gives a core nothing to run on for a second is no hang."""
PATIENCE_S = 60.0
"""Where no hang is expected."""
NUM_NEIGHBOURS = 31


class Faults:
    """The faults in QUIRE_FAILPOINTS of the cores started from now on, and how often they have fired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self._monkeypatch = monkeypatch
        self._tally = directory / "tally"

    def set(self, fault: str) -> None:
        """Firings are counted over all cores."""
        self._monkeypatch.setenv("QUIRE_FAILPOINTS", f"{fault},tally={self._tally}")

    @property
    def num_fired(self) -> int:
        return self._tally.stat().st_size if self._tally.exists() else 0


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faults]:
    return Faults(monkeypatch, tmp_path)


async def _read_all(engine: Engine, history: History, load: FakeLoad, num_streams: int) -> None:
    requests = [load.make() for _ in range(num_streams)]
    await asyncio.gather(
        *(read(engine, history, name, {"prompt_token_ids": p}, params) for name, p, params in requests)
    )


def _check(history: History, load: FakeLoad) -> None:
    assert history.problems() == []
    assert history.token_differences(load.expected) == []
    assert len(history.streams) == len(load.expected)


# -- one death, everywhere -----------------------------------------------------------------------------------------

LIVE_CORE = [
    name
    for name in FAILPOINTS
    if name.startswith("core.") and name not in ("core.start", "core.ready", "core.shutdown", "core.step.draft")
]
"""Failpoints that a serving core passes without speculation."""
EACH_THREAD = ["core.input.decode", "core.step.execute", "core.output.send"]
"""A place in each thread of the core."""


def _survive(faults: Faults, fault: str, num_deaths: int = 1, hang_timeout_s: float = PATIENCE_S) -> None:
    """Streams end as they should although the fault has come to pass, and cost so many cores."""
    faults.set(fault)
    history, load = History(), FakeLoad(random.Random(fault))

    async def run() -> int:
        async with running(fake_args(core_hang_timeout_s=hang_timeout_s)) as engine:
            await _read_all(engine, history, load, 16)
            assert engine.counts["poisoned_requests"] == 0
            return engine.counts["deaths"]

    assert asyncio.run(run()) == num_deaths
    _check(history, load)
    assert faults.num_fired >= 1


def _survive_each(
    monkeypatch: pytest.MonkeyPatch, directory: Path, row: list[str], hang_timeout_s: float = PATIENCE_S, **fields: Any
) -> None:
    """One engine, and 16 streams for each fault of the row: it comes to pass among them, costs one core, and no token.

    Every core is started with all faults. Each fault waits for a file, which is made when its streams begin.
    """
    armed, fired = ([directory / f"{what}-{i}" for i in range(len(row))] for what in ("armed", "fired"))
    faults = (f"{fault},skip=7,times=1,after={armed[i]},tally={fired[i]}" for i, fault in enumerate(row))
    monkeypatch.setenv("QUIRE_FAILPOINTS", ";".join(faults))
    history, load = History(), FakeLoad(random.Random(row[0]))

    async def run() -> None:
        async with running(fake_args(core_hang_timeout_s=hang_timeout_s, **fields)) as engine:
            for i, fault in enumerate(row):
                armed[i].touch()
                await _read_all(engine, history, load, 16)
                assert fired[i].exists(), f"{fault} did not come to pass"
                assert engine.counts["deaths"] == i + 1, fault
                assert history.problems() == [], fault
                assert history.token_differences(load.expected) == [], fault
            assert engine.counts["poisoned_requests"] == 0

    asyncio.run(run())
    _check(history, load)


@pytest.mark.parametrize(
    ("action", "places"),
    [
        ("kill", LIVE_CORE),
        pytest.param("raise", [place for place in LIVE_CORE if place not in EACH_THREAD], marks=pytest.mark.slow),
    ],
    ids=["kill", "raise elsewhere"],
)
def test_a_death_anywhere_is_not_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, action: str, places: list[str]
) -> None:
    _survive_each(monkeypatch, tmp_path, [f"{place}={action}" for place in places])


KINDS = ["exit(0)", "segv", *(["memory(32)"] if sys.platform.startswith("linux") else [])]  # RLIMIT_AS is Linux's


@pytest.mark.parametrize(
    "row",
    [
        [*(f"{place}=raise" for place in EACH_THREAD), *(f"core.step.execute={kind}" for kind in KINDS)],
        pytest.param(["core.step.execute=exit(3)", "core.step.execute=abort"], marks=pytest.mark.slow),
    ],
    ids=["usual", "rarer"],
)
def test_a_death_of_any_kind_is_not_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: list[str]) -> None:
    _survive_each(monkeypatch, tmp_path, row)


HANGS = [
    *("core.step.execute=hang", "core.output.send=sleep(600)"),  # unlike a hang, a sleep leaves the processor alone
]
RARER_HANGS = [
    *("core.step.schedule=stop", "core.input.decode=sleep(600)"),
    *("core.step.execute=freeze", "core.step.update=hang", "core.loop.input=hang", "core.output.send=hang"),
    *("core.output.send=freeze", "core.input.queued=hang", "core.input.decode=hang"),
]


@pytest.mark.parametrize("row", [HANGS, pytest.param(RARER_HANGS, marks=pytest.mark.slow)], ids=["usual", "rarer"])
def test_a_hang_anywhere_is_not_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: list[str]) -> None:
    _survive_each(monkeypatch, tmp_path, row, hang_timeout_s=HANG_TIMEOUT_S)


def test_an_idle_core_that_is_stopped_is_replaced(faults: Faults) -> None:
    history, load = History(), FakeLoad(random.Random(1))

    async def run() -> None:
        async with running(fake_args(core_hang_timeout_s=HANG_TIMEOUT_S)) as engine:
            await _read_all(engine, history, load, 4)
            stopped = engine.signal_core(19)
            await _read_all(engine, history, load, 4)
            assert engine.counts["deaths"] == 1
            assert engine.core_pid != stopped

    asyncio.run(run())
    _check(history, load)


def test_a_slow_step_is_no_hang(faults: Faults) -> None:
    """The step takes longer than the time between two looks."""
    _survive(faults, f"core.step.execute=sleep({1.2 * WATCH_INTERVAL_S}),times=4", num_deaths=0, hang_timeout_s=20.0)


def test_a_core_that_stands_still_while_it_starts_again_is_replaced(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MIN_STAGE_S", 2.0)
    monkeypatch.setattr(supervisor, "STAGE_FACTOR", 5.0)
    death = tmp_path / "death"
    faults.set(f"core.step.execute=kill,skip=7,times=1,tally={death};core.ready=stop,after={death},times=1")
    history, load = History(), FakeLoad(random.Random("start"))

    async def run() -> dict[str, int]:
        async with running(fake_args(core_hang_timeout_s=PATIENCE_S)) as engine:
            await _read_all(engine, history, load, 16)
            return dict(engine.counts)

    assert asyncio.run(run())["deaths"] == 2
    _check(history, load)
    assert faults.num_fired == 1


def test_a_core_that_dies_over_its_own_restart_is_tried_again(faults: Faults, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    faults.set(
        f"core.start=exit(3),after={tmp_path / 'tally'},times=2,tally={starts};core.step.execute=kill,skip=5,times=1"
    )
    history, load = History(), FakeLoad(random.Random(2))

    async def run() -> None:
        async with running(fake_args()) as engine:
            await _read_all(engine, history, load, 16)

    asyncio.run(run())
    _check(history, load)
    assert (faults.num_fired, starts.stat().st_size) == (1, 2)


# -- speculation ---------------------------------------------------------------------------------------------------

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
"""The fake executor drafts what the model will draw: each step verifies."""


def test_a_death_among_drafts_is_not_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it drafts, while it verifies, with verified drafts that it has not taken in, and with tokens it has not
    sent."""
    places = "step.draft", "step.execute", "step.update", "output.queued"
    _survive_each(monkeypatch, tmp_path, [f"core.{place}=kill" for place in places], **DRAFTS)


@pytest.mark.parametrize(
    "action",
    ["kill", *(pytest.param(action, marks=pytest.mark.slow) for action in ("sleep(600)", "hang", "raise"))],
    ids=["kill", "stuck", "hang", "raise"],
)
def test_a_second_death_while_drafting_ends_speculation(
    faults: Faults, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is blamed or loses a token, the third core works without drafts, and the log and a gauge say so."""
    faults.set(f"core.step.draft={action},skip=5")
    history, load = History(), FakeLoad(random.Random(action))
    hang_timeout_s = HANG_TIMEOUT_S if action in ("hang", "sleep(600)") else PATIENCE_S

    def enabled(engine: Engine) -> float | None:
        metrics = engine.llm.pipeline.stats.metrics
        assert metrics is not None
        return metrics.snapshot().value("quire_spec_decode_enabled")

    async def run() -> None:
        async with running(fake_args(core_hang_timeout_s=hang_timeout_s, **DRAFTS)) as engine:
            assert enabled(engine) == 1
            await _read_all(engine, history, load, 16)
            await _read_all(engine, history, load, 16)
            assert enabled(engine) == 0
            assert engine.counts["deaths"] == 2
            assert engine.counts["poisoned_requests"] == 0

    asyncio.run(run())
    _check(history, load)
    assert faults.num_fired == 2
    assert "starting engine core 2, without speculation" in caplog.text
    assert "starting engine core 1, without" not in caplog.text


# -- poison --------------------------------------------------------------------------------------------------------


POISONS = {
    "core.step.execute=raise,skip=3": 5,  # only some steps after each restart
    "core.step.execute=kill": 4,  # nothing blames the request at first: an operator may have done it, or the system
}
"""Fault -> how many cores it may cost until the request that causes it is isolated."""
RARER_POISONS = {
    "core.step.execute=raise": 2,
    "core.step.execute=stop": 2,
    "core.step.execute=segv": 2,
    "core.input.queued=segv": 2,
    "core.step.execute=memory(32)": 2,
    "core.step.execute=freeze": 2,
    "core.step.execute=abort": 2,
    "core.step.execute=exit(0)": 4,
    "core.step.execute=hang": 2,
}
"""Kinds that the supervisor treats as one of those above."""


@pytest.mark.parametrize(
    "poisons", [POISONS, pytest.param(RARER_POISONS, marks=pytest.mark.slow)], ids=["usual", "rarer"]
)
def test_a_poison_fails_alone(monkeypatch: pytest.MonkeyPatch, poisons: dict[str, int]) -> None:
    """One request among 32 kills every core that computes it: it gets an error that says so, the others all they
    asked for. One engine meets each kind of poison."""
    faults = []
    for name, fault in zip(map("poison-{}-".format, range(len(poisons))), poisons, strict=False):
        action, comma, options = fault.partition(",")
        faults.append(f"{action},key={name}{comma}{options}")
    monkeypatch.setenv("QUIRE_FAILPOINTS", ";".join(faults))
    history, load = History(), FakeLoad(random.Random(3))

    async def run() -> None:
        async with running(fake_args(core_hang_timeout_s=HANG_TIMEOUT_S)) as engine:
            await _read_all(engine, history, load, NUM_NEIGHBOURS)  # so that it knows how long a step takes
            for i, (fault, max_deaths) in enumerate(poisons.items()):
                name, poisoned, before = f"poison-{i}-", History(), engine.counts["deaths"]
                poison = read(engine, poisoned, name, {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=50))
                await asyncio.gather(_read_all(engine, history, load, NUM_NEIGHBOURS), poison)
                await _read_all(engine, history, load, 2)  # and life goes on
                assert engine.counts["poisoned_requests"] == i + 1, fault
                assert 2 <= engine.counts["deaths"] - before <= max_deaths, fault
                assert list(poisoned.problems()) == [f"{name}: {poisoned.errors[name]}"], fault
                for words in (name, "alone", "do not send it again"):
                    assert words in str(poisoned.errors[name]), fault

    asyncio.run(run())
    _check(history, load)


# -- the end of the budget -----------------------------------------------------------------------------------------


def test_past_the_budget_the_engine_answers_with_errors_and_stays_up(faults: Faults) -> None:
    faults.set("core.step.execute=kill,skip=3")
    history = History()

    async def run() -> None:
        args = fake_args(core_restart_limit=2, core_restart_window_s=60.0)
        async with running(args) as engine:
            requests = [("a", 100), ("b", 200)]
            reads = (
                read(engine, history, i, {"prompt_token_ids": [1]}, SamplingParams(max_tokens=n, ignore_eos=True))
                for i, n in requests
            )
            await asyncio.gather(*reads)
            assert not engine.llm.is_ready
            with pytest.raises(EngineDeadError):
                await engine.llm.check_health()
            with pytest.raises(EngineDeadError, match="2 restarts in 60 s"):
                await read(engine, history, "late", {"prompt_token_ids": [1]}, SamplingParams())

    asyncio.run(run())
    for request_id in ("a", "b"):
        assert "--core-restart-limit" in str(history.errors[request_id])
        assert history.streams[request_id, 0].token_ids, "it had got something before"
