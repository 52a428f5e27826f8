"""The saturation meter against an engine whose costs are known: where it says 0.95 the engine can do no more."""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.metrics.collect.saturation import (
    AT_THE_KNEE,
    CostModel,
    EngineLimits,
    Saturation,
    SaturationMeter,
    StepCosts,
)

FIXED_S, PER_OUTPUT_S, PER_PROMPT_TOKEN_S = 0.010, 0.0005, 0.0001


def learn(steps: Iterable[tuple[int, int, float]]) -> CostModel:
    """Returns what is made of steps, given as outputs, prompt tokens and seconds."""
    costs, now = StepCosts(), 0.0
    for num_outputs, num_prompt_tokens, duration_s in steps:
        now += duration_s
        costs.add(now, num_outputs, num_prompt_tokens, duration_s)
    return costs.fit()


def test_costs_are_learnt() -> None:
    rng = random.Random(1)
    sizes = [(rng.randrange(20), rng.choice((0, 0, 100, 500))) for _ in range(500)]
    model = learn((o, p, FIXED_S + o * PER_OUTPUT_S + p * PER_PROMPT_TOKEN_S) for o, p in sizes)
    for num_outputs in (0, 3, 17, 64):
        assert model.decoding_step(num_outputs) == pytest.approx(FIXED_S + num_outputs * PER_OUTPUT_S, rel=1e-3)
    assert model.prompt_token == pytest.approx(PER_PROMPT_TOKEN_S, rel=1e-3)
    assert model.prompt_step == pytest.approx(0.0, abs=1e-6)


def test_the_first_rows_may_cost_more() -> None:
    """The machine waits for the weights: the time of many rows does not follow from that of a few."""
    rng = random.Random(1)
    sizes = [(rng.randint(1, 40), rng.choice((0, 0, 0, 50, 300))) for _ in range(2000)]
    model = learn((o, p, 0.001 + min(o, 4) * 0.001 + o * 1e-4 + bool(p) * 0.002 + p * 1e-5) for o, p in sizes)
    for num_outputs in (1, 4, 10, 40):
        right = 0.001 + min(num_outputs, 4) * 0.001 + num_outputs * 1e-4
        assert model.decoding_step(num_outputs) == pytest.approx(right, rel=1e-2)
    assert (model.prompt_step, model.prompt_token) == pytest.approx((0.002, 1e-5), rel=1e-2)


def test_a_full_step_is_remembered_through_quiet_times() -> None:
    def seconds(num_outputs: int) -> float:
        return 0.002 + 0.001 * math.sqrt(num_outputs)

    full = [(n, 0, seconds(n)) for n in range(24, 33)] * 20
    quiet = [(n, 0, seconds(n)) for n in (1, 2, 3)] * 10_000
    assert learn(full + quiet).decoding_step(32) == pytest.approx(seconds(32), rel=0.05)
    assert learn(quiet).decoding_step(32) != pytest.approx(seconds(32), rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5000), st.floats(1e-5, 10.0)), min_size=1, max_size=60))
def test_no_cost_is_negative(steps: list[tuple[int, int, float]]) -> None:
    model = learn(steps)
    assert min(model.coefficients) >= 0
    assert all(map(math.isfinite, model.coefficients))


def test_what_never_varies_is_a_fixed_cost() -> None:
    model = learn([(4, 0, 0.02)] * 100)
    assert model.decoding_step(0) == model.decoding_step(100) == pytest.approx(0.02)
    assert model.prompt_token == 0


def test_nothing_measured_is_nothing_used() -> None:
    meter = SaturationMeter(EngineLimits(max_num_seqs=8, max_num_batched_tokens=100, max_num_queued_tokens=50))
    assert meter.read(0.0) == Saturation()
    assert meter.read(5.0, num_queued_tokens=25).by_resource["queue"] == 0.5
    assert meter.read(5.0, num_queued_tokens=500).value == 1.0


@dataclass
class Shape:
    """Requests of one kind, and an engine of some size."""

    prompt_len: int
    output_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    num_blocks: int = 10_000

    @property
    def blocks_each(self) -> float:
        return (self.prompt_len + self.output_len) / 16

    def serve(self, rate: float, duration_s: float, seed: int = 0) -> tuple[SaturationMeter, float, float]:
        """Offer `rate` requests per second: the meter, the time at the end, and how many were served per second."""
        rng = random.Random(seed)
        limits = EngineLimits(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)
        meter = SaturationMeter(limits)
        now, next_arrival, num_served = 0.0, rng.expovariate(rate), 0
        waiting: deque[int] = deque()
        running: list[list[int]] = []  # [prompt tokens to compute, outputs to come]
        while now < duration_s:
            while next_arrival <= now:
                waiting.append(self.prompt_len)
                next_arrival += rng.expovariate(rate)
            seats = min(self.max_num_seqs, int(self.num_blocks / self.blocks_each))
            while waiting and len(running) < seats:
                running.append([waiting.popleft(), self.output_len])
            if not running:
                now = next_arrival
                continue
            budget, num_outputs, num_prompt = self.max_num_batched_tokens, 0, 0
            for request in running:
                if not request[0] and budget:
                    budget, num_outputs, request[1] = budget - 1, num_outputs + 1, request[1] - 1
            for request in running:
                if request[0]:
                    chunk = min(request[0], budget)
                    budget, num_prompt, request[0] = budget - chunk, num_prompt + chunk, request[0] - chunk
                    request[1] -= not request[0]
            now += FIXED_S + num_outputs * PER_OUTPUT_S + num_prompt * PER_PROMPT_TOKEN_S
            left = [request for request in running if request[1] > 0]
            num_served += len(running) - len(left)
            running = left
            meter.add_step(
                now,
                num_outputs=num_outputs,
                num_prompt_tokens=num_prompt,
                num_running=len(running),
                kv_usage=min(1.0, len(running) * self.blocks_each / self.num_blocks),
                has_work_left=bool(running or waiting),
            )
        return meter, now, num_served / now


@functools.cache
def capacity_of(name: str) -> float:
    """Returns the requests per second that are served when more are offered."""
    _, _, capacity = SHAPES[name].serve(rate=10_000, duration_s=60)
    return capacity


SHAPES = {
    "short prompts, long answers": Shape(16, 64),
    "long prompts, short answers": Shape(600, 4),
    "few seats in the cache": Shape(64, 32, max_num_seqs=64, num_blocks=48),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_knee_is_where_the_meter_says(name: str) -> None:
    """Within 10 %: the most the engine serves, and the rate at which the shares predict 1."""
    shape, capacity = SHAPES[name], capacity_of(name)
    meter, now, served = shape.serve(rate=0.6 * capacity, duration_s=120)
    assert served == pytest.approx(0.6 * capacity, rel=0.1)
    seen = meter.read(now)
    share = seen.by_resource["compute"] / AT_THE_KNEE
    assert served / share == pytest.approx(capacity, rel=0.1)
    assert share == pytest.approx(0.6, abs=0.08)
    tokens_per_s = capacity * (shape.prompt_len + shape.output_len - 1)
    assert seen.limit_tokens_per_s == pytest.approx(tokens_per_s, rel=0.1)


@pytest.mark.parametrize("name", SHAPES)
def test_it_crosses_nine_tenths_about_the_knee(name: str) -> None:
    shape, capacity = SHAPES[name], capacity_of(name)
    values = []
    for share in (0.85, 1.1):
        meter, now, _ = shape.serve(rate=share * capacity, duration_s=120)
        values.append(meter.read(now).by_resource["compute"])
    assert values[0] < 0.9 < values[1]


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_full_when_more_is_offered_than_can_be_done(name: str) -> None:
    meter, now, _ = SHAPES[name].serve(rate=1000, duration_s=60)
    assert meter.read(now).value > 0.9


def test_it_fades_when_nothing_comes() -> None:
    meter, now, _ = SHAPES["short prompts, long answers"].serve(rate=5, duration_s=30)
    meter.add_step(now + 0.01, num_outputs=1, num_prompt_tokens=0, num_running=0, kv_usage=0.0, has_work_left=False)
    busy, later = meter.read(now + 0.01).value, meter.read(now + 60).value
    assert 0 <= later < busy / 10
