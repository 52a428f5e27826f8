"""Predictions: exact where the recorded engine is one whose step times are known."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quire.engine.recording.format import AnyEvent, Header
from quire.engine.request import RequestStatus
from quire.errors import ConfigError
from quire.replay.figures import Figures, measure
from quire.replay.step_times import Pace, StepTimes, StepWork, fit_step_times, solve_nnls
from quire.replay.study import study
from quire.replay.what_if import Changes, predict
from tests.unit.engine.harness import Engine, make_request, make_scheduler
from tests.unit.engine.recording.recorded import make_header, watch


def test_nnls_finds_what_is_there() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        matrix = rng.random((30, 6)) * rng.random(6) * 1000
        right = np.maximum(rng.normal(size=6), 0)
        assert solve_nnls(matrix, matrix @ right) == pytest.approx(right, abs=1e-6)


def test_nnls_is_never_negative_and_never_worse_than_clipping() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        matrix, target = rng.normal(size=(20, 5)), rng.normal(size=20)
        found = solve_nnls(matrix, target)
        clipped = np.maximum(np.linalg.lstsq(matrix, target, rcond=None)[0], 0)
        assert (found >= 0).all()
        assert np.linalg.norm(matrix @ found - target) <= np.linalg.norm(matrix @ clipped - target) + 1e-9


def test_step_times_are_learned() -> None:
    rng = random.Random(0)
    works = [StepWork(t := rng.randint(1, 200), rng.randint(1, t), rng.randint(0, 9000), 0) for _ in range(400)]
    truth = StepTimes((2e-3, 1e-5, 0.0, 2e-4, 0.0, 3e-5, 1e-7, 0.0), 0, 0.0, 0.0, 0.0)
    steps = [(work, truth.predict(work)) for work in works]
    times = fit_step_times(steps)
    assert times is not None
    assert times.error < 1e-6
    assert times.held_out_error < 1e-6
    slow = [(work, seconds * (30 if i % 40 == 7 else 1)) for i, (work, seconds) in enumerate(steps)]
    robust = fit_step_times(slow)
    assert robust is not None
    assert robust.predict(works[0]) == pytest.approx(truth.predict(works[0]), rel=0.02)
    assert fit_step_times(steps[:5]) is None


def test_the_pace_is_what_the_model_leaves_over() -> None:
    """Moment times chance is the recorded time, step by step; where nothing was recorded the model alone counts."""
    times = StepTimes((1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0, 0.0, 0.0, 0.0)
    rng, end, steps, ends = random.Random(4), 0.0, [], []
    for number in range(300):
        seconds = 1e-3 * rng.choice((0.5, 1.0, 4.0)) * (5 if number < 50 else 1)
        end += seconds
        steps.append((StepWork(3, 1, 0, 0), seconds))
        ends.append(end)
    steps.append((StepWork(0, 0, 0, 0), 0.5))  # nothing was computed
    ends.append(end)
    pace = Pace(times, steps, ends)
    for number, ((_, seconds), end_s) in enumerate(zip(steps[:-1], ends, strict=False)):
        assert 1e-3 * pace.of(number, end_s) == pytest.approx(seconds)
    assert sum(pace.of(number, 1e6) for number in range(300)) / 300 == pytest.approx(1.0, rel=0.05)
    assert Pace(times, [], []).of(7, 0.0) == 1.0


def test_slow_first_steps_are_slow_again() -> None:
    """An engine whose first steps take five times as long: a model of all steps together would make the first
    requests wait too little."""
    engine = TimedEngine()
    engine.slow_until_s = 0.4
    engine.serve([(0.0, fields) for _, fields in load(random.Random(3))])
    seen = study(engine.header, engine.events)
    times = fit_step_times(seen.steps)
    assert times is not None
    recorded, predicted = measure(seen), predict(seen, times)
    assert predicted.ttft_ms["mean"] == pytest.approx(recorded.ttft_ms["mean"], rel=0.03)
    assert predicted.duration_s == pytest.approx(recorded.duration_s, rel=0.03)


class TimedEngine:
    """An engine whose steps take what a formula says, on a clock of its own."""

    TIMES = StepTimes((4e-3, 2e-4, 0.0, 0.0, 0.0, 1e-4, 1e-6, 0.0), 0, 0.0, 0.0, 0.0)

    lag_s = 0.0
    """Returns the time between a request's arrival and its arrival at the engine."""

    slow_until_s = 0.0
    """Steps that begin before that take five times as long."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {"enable_caching": True, "num_blocks": 60, "max_num_batched_tokens": 16, **fields}
        self.now = 0.0
        self.scheduler, self.events = watch(make_scheduler(**self.fields), clock=self)
        self.engine = Engine(self.scheduler)  # type: ignore[arg-type]

    def __next__(self) -> float:
        return self.now

    @property
    def header(self) -> Header:
        return make_header(self.scheduler.observed, self.fields)  # type: ignore[arg-type]

    def serve(self, arrivals: list[tuple[float, dict[str, Any]]], aborts: dict[str, float] | None = None) -> None:
        """Serves requests; one that arrives during a step is taken in after it."""
        arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        while arrivals or self.scheduler.has_requests():
            if not self.scheduler.has_requests():
                self.now = max(self.now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= self.now:
                at, fields = arrivals.pop(0)
                self.engine.add(make_request(arrival_time=at - self.lag_s, **fields))
            for request_id, at in (aborts or {}).items():
                if at <= self.now:
                    self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            if self.scheduler.has_requests():
                output = self.engine.schedule()
                if output.num_scheduled_tokens:
                    self.now += self.TIMES.predict(StepWork.of(output)) * (5 if self.now < self.slow_until_s else 1)
                self.engine.update(output)


def load(rng: random.Random, count: int = 40) -> list[tuple[float, dict[str, Any]]]:
    return [
        (
            rng.uniform(0, 0.5),
            {
                "request_id": f"r{i}",
                "prompt": [rng.choice([1, 2])] * rng.randint(4, 40) + [i],
                "max_tokens": rng.randint(1, 20),
                "priority": rng.randint(0, 2),
            },
        )
        for i in range(count)
    ]


def run(fields: dict[str, Any], seed: int = 3) -> tuple[Header, list[AnyEvent]]:
    engine = TimedEngine(**fields)
    engine.serve(load(random.Random(seed)))
    return engine.header, engine.events


def near(one: Figures, other: Figures) -> bool:
    return (
        one.output_tokens == other.output_tokens
        and one.num_steps == other.num_steps
        and one.num_preemptions == other.num_preemptions
        and one.cached_tokens == other.cached_tokens
        and one.duration_s == pytest.approx(other.duration_s, rel=0.01)
        and one.ttft_ms == pytest.approx(other.ttft_ms, rel=0.02, abs=0.5)
        and one.tpot_ms == pytest.approx(other.tpot_ms, rel=0.02, abs=0.1)
    )


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {}, Changes()),
        ({}, {"max_num_batched_tokens": 48}, Changes(max_num_batched_tokens=48)),
        ({}, {"max_num_seqs": 3}, Changes(max_num_seqs=3)),
        ({}, {"num_blocks": 25}, Changes(num_gpu_blocks=25)),
        ({"num_blocks": 25}, {"num_blocks": 100}, Changes(num_gpu_blocks=100)),
        (
            {"num_blocks": 30},
            {"num_blocks": 30, "scheduling_policy": "priority"},
            Changes(scheduling_policy="priority"),
        ),
        ({}, {"enable_caching": False}, Changes(enable_prefix_caching=False)),
        ({}, {"long_prefill_token_threshold": 5}, Changes(long_prefill_token_threshold=5)),
    ],
)
def test_what_is_predicted_is_what_happens(before: dict[str, Any], after: dict[str, Any], changes: Changes) -> None:
    recorded = study(*run(before))
    assert recorded.difference is None
    times = fit_step_times(recorded.steps)
    assert times is not None
    assert times.error < 0.005
    real = measure(study(*run(after)))
    assert near(predict(recorded, times, changes), real), (predict(recorded, times, changes), real)
    if changes.any:
        assert real != measure(recorded)


def test_requests_that_were_given_up() -> None:
    """One is aborted after some tokens, as one whose client found a stop string; one before its first."""
    engine = TimedEngine(max_num_seqs=2)
    long = [(0.0, {"request_id": f"r{i}", "prompt": 8, "max_tokens": 30}) for i in range(3)]
    engine.serve(long, {"r0": 0.08, "r2": 0.05})
    recorded = study(engine.header, engine.events)
    assert [request.num_outputs for request in recorded.requests][2] == 0
    times = fit_step_times(recorded.steps)
    assert times is not None
    figures = predict(recorded, times)
    assert figures.output_tokens == measure(recorded).output_tokens
    assert figures.duration_s == pytest.approx(measure(recorded).duration_s, rel=0.01)


def test_a_recording_without_prefix_caching_knows_no_prefixes() -> None:
    recorded = study(*run({"enable_caching": False}))
    times = fit_step_times(recorded.steps)
    assert times is not None
    with pytest.raises(ConfigError, match="made without"):
        predict(recorded, times, Changes(enable_prefix_caching=True))


def test_changes_that_make_no_engine_are_refused() -> None:
    recorded = study(*run({}))
    times = fit_step_times(recorded.steps)
    assert times is not None
    with pytest.raises(ConfigError, match="chunked prefill is off"):
        predict(recorded, times, Changes(enable_chunked_prefill=False))


@pytest.mark.parametrize("changes", [Changes(), Changes(max_num_seqs=48)])
def test_what_a_request_takes_to_the_engine_is_waited_for_again(changes: Changes) -> None:
    """A frontend that needs 80 ms for each: no other setting of the scheduler makes that shorter."""
    figures = []
    for lag_s in (0.0, 0.08):
        engine = TimedEngine()
        engine.lag_s = lag_s
        engine.serve([(at + 1.0, fields) for at, fields in load(random.Random(3))])
        seen = study(engine.header, engine.events)
        times = fit_step_times(seen.steps)
        assert times is not None
        figures.append(predict(seen, times, changes))
        if not changes.any:
            assert figures[-1].ttft_ms["mean"] == pytest.approx(measure(seen).ttft_ms["mean"], rel=0.05)
    late, longer = figures[1], figures[0].ttft_ms["mean"] + 80
    longest_step_ms = 15
    assert late.ttft_ms["mean"] == pytest.approx(longer, abs=longest_step_ms)
