"""Writes to the heartbeat page, and expected durations of steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.core import EngineCore
from quire.engine.heartbeat import UNKNOWN_TOKEN_S, HeartbeatWriter, StepTimes
from quire.wire.heartbeat import Heartbeat, HeartbeatPage, Phase, WorkerEnd

from .harness import ScriptedExecutor, make_config, make_core_request


@pytest.fixture
def page(tmp_path: Path) -> HeartbeatPage:
    return HeartbeatPage.create(tmp_path / "page")


# -- how long a step takes -------------------------------------------------------------------------------------


def test_before_anything_was_measured_a_token_may_take_long() -> None:
    assert StepTimes().predict(4096) == 4096 * UNKNOWN_TOKEN_S
    assert StepTimes().predict(0) == 0


def test_a_size_that_was_measured_is_expected_again() -> None:
    times = StepTimes()
    times.record(100, 2.0)
    assert times.predict(127) == times.predict(64) == 2.0


def test_a_shorter_step_lowers_the_expectation_slowly() -> None:
    times = StepTimes()
    times.record(1, 1.0)
    times.record(1, 0.1)
    assert times.predict(1) == pytest.approx(0.9)
    for _ in range(50):
        times.record(1, 0.1)
    assert times.predict(1) == pytest.approx(0.1)


def test_a_larger_step_is_expected_to_take_at_most_in_proportion() -> None:
    times = StepTimes()
    times.record(1, 0.05)
    assert times.predict(1024) >= 1024 * 0.05
    times.record(1, 100.0)
    assert times.predict(1024) == 1024 * UNKNOWN_TOKEN_S, "but never longer than without a measurement"
    times.record(4096, 3.0)
    assert times.predict(1024) == 3.0, "a larger step took no longer than that"


@given(
    steps=st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-4, 100.0)), max_size=20),
    num_tokens=st.integers(0, 10_000),
)
def test_a_step_just_measured_is_never_a_surprise(steps: list[tuple[int, float]], num_tokens: int) -> None:
    times = StepTimes()
    for size, duration in steps:
        times.record(size, duration)
        assert times.predict(size) >= duration
    assert times.predict(num_tokens) >= 0


# -- the page --------------------------------------------------------------------------------------------------


def test_without_a_page_nothing_happens() -> None:
    heartbeat = HeartbeatWriter()
    for say in (
        heartbeat.starting,
        heartbeat.idle,
        heartbeat.input,
        heartbeat.schedule,
        heartbeat.update,
        heartbeat.stopped,
    ):
        say()
    heartbeat.execute(["a"], 1)
    heartbeat.note_worker_end(WorkerEnd.KILLED)


def test_the_end_of_a_worker_stays_on_the_page_until_the_next_start(page: HeartbeatPage) -> None:
    heartbeat = HeartbeatWriter(page)
    heartbeat.execute(["a"], 1)
    page.begin_intake("b" * 5000)
    assert page.get_heartbeat().worker_end is WorkerEnd.NONE
    heartbeat.note_worker_end(WorkerEnd.KILLED)
    heartbeat.update()
    assert page.get_heartbeat().worker_end is WorkerEnd.KILLED
    assert page.event_sequence == 0
    assert set(page.get_heartbeat().intake_id) == {"b"}
    heartbeat.starting()
    heartbeat.started()
    assert page.get_heartbeat().worker_end is WorkerEnd.NONE


def test_the_first_steps_are_measured_against_one_of_nobody(page: HeartbeatPage) -> None:
    heartbeat, ran = HeartbeatWriter(page), []
    heartbeat.calibrate(lambda: ran.append(1))
    heartbeat.execute(["a"], 1000)
    assert ran == [1]
    assert page.get_heartbeat().expected_s < 1000 * UNKNOWN_TOKEN_S
    HeartbeatWriter().calibrate(lambda: ran.append(1))
    assert ran == [1], "nobody would look at it"


def test_each_phase_is_on_the_page(page: HeartbeatPage) -> None:
    heartbeat = HeartbeatWriter(page)
    phases = []
    for say in (
        heartbeat.starting,
        heartbeat.idle,
        heartbeat.input,
        heartbeat.schedule,
        heartbeat.update,
        heartbeat.stopped,
    ):
        say()
        phases.append(page.get_heartbeat().phase)
    assert phases == [Phase.STARTING, Phase.IDLE, Phase.INPUT, Phase.SCHEDULE, Phase.UPDATE, Phase.STOPPED]
    heartbeat.input(120.0)
    assert page.get_heartbeat().expected_s == 120.0


def test_a_step_is_measured_from_execute_to_update(page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("quire.engine.heartbeat.time", SimpleNamespace(monotonic=lambda: now[0]))
    heartbeat = HeartbeatWriter(page)
    heartbeat.execute(["a", "b"], 8)
    first = page.get_heartbeat()
    assert (first.phase, first.step, first.request_ids) == (Phase.EXECUTE, 1, ("a", "b"))
    assert first.expected_s == 8 * UNKNOWN_TOKEN_S
    now[0] = 103.0
    heartbeat.update()
    now[0] = 150.0
    heartbeat.update()  # of a step that was not announced: not measured
    heartbeat.execute(["a"], 9)
    assert page.get_heartbeat().expected_s == 3.0


class Watched(ScriptedExecutor):
    """Reads the page whenever it gets a step."""

    seen: list[Heartbeat]
    page: HeartbeatPage

    def execute_model(self, *args: object, **kwargs: object) -> object:
        self.seen.append(self.page.get_heartbeat())
        return super().execute_model(*args, **kwargs)  # type: ignore[arg-type]


class WatchedPipeline(Watched):
    """Steps are not waited for."""

    max_batches = 3
    hold = True


@pytest.mark.parametrize("executor_class", [Watched, WatchedPipeline])
def test_the_page_names_all_whose_steps_are_under_way(
    page: HeartbeatPage, executor_class: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Heartbeat] = []
    monkeypatch.setattr(executor_class, "seen", seen, raising=False)
    monkeypatch.setattr(executor_class, "page", page, raising=False)
    core = EngineCore(make_config(), executor_class, False, heartbeat=HeartbeatWriter(page))
    assert isinstance(core.executor, Watched)
    for name in ("a", "b"):
        core.add_request(*core.preprocess_add_request(make_core_request(name, 4, max_tokens=2)))
        core.step_fn()
    assert [(beat.phase, beat.step) for beat in seen] == [(Phase.EXECUTE, 1), (Phase.EXECUTE, 2)]
    assert seen[0].request_ids == ("a",)
    assert sorted(seen[1].request_ids) == ["a", "b"]
    core.shutdown()


def test_a_step_that_fails_stays_on_the_page(page: HeartbeatPage) -> None:
    core = EngineCore(make_config(), ScriptedExecutor, False, heartbeat=HeartbeatWriter(page))
    assert isinstance(core.executor, ScriptedExecutor)
    core.add_request(*core.preprocess_add_request(make_core_request("a")))
    core.executor.failures.append(RuntimeError("the worker is lost"))
    with pytest.raises(RuntimeError, match="the worker is lost"):
        core.step_fn()
    beat = page.get_heartbeat()
    assert (beat.phase, beat.request_ids) == (Phase.EXECUTE, ("a",))
    core.shutdown()
