"""Several simulated engines: each behaves as one alone, and no request is lost when one dies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.frontend.routing.policy import ROUTING_POLICIES
from quire.frontend.routing.router import Router
from quire.replay.figures import share_within
from quire.replay.fleet import Fleet, Outage
from quire.replay.step_times import StepTimes, fit_step_times
from quire.replay.study import Study, study
from quire.replay.what_if import predict

from .test_what_if import TimedEngine, run


@pytest.fixture(scope="module")
def recorded() -> tuple[Study, StepTimes]:
    seen = study(*run({}))
    times = fit_step_times(seen.steps)
    assert times is not None
    return seen, times


def make_fleet(recorded: tuple[Study, StepTimes], policy: str = "least_wait", **fields: Any) -> Fleet:
    seen, times = recorded
    fields.setdefault("num_engines", 2)
    return Fleet(seen, seen.header, times, placement=Router(ROUTING_POLICIES[policy]()), **fields)


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_one_engine_behind_a_router_is_the_engine(recorded: tuple[Study, StepTimes], policy: str) -> None:
    assert make_fleet(recorded, policy, num_engines=1).run() == predict(*recorded)


def test_engines_in_turn_are_two_engines_with_half_the_load_each(recorded: tuple[Study, StepTimes]) -> None:
    seen, times = recorded
    seen = replace(seen, step_ends_s=[], steps=[])  # all steps at the fitted pace
    both = make_fleet((seen, times), "round_robin")
    both.run()
    order = sorted(range(len(seen.requests)), key=lambda i: (seen.requests[i].reached_s, i))
    for half in (order[::2], order[1::2]):
        alone = Fleet(replace(seen, requests=[seen.requests[i] for i in half]), seen.header, times)
        alone.run()
        for mine, i in zip(alone.requests, half, strict=True):
            theirs = both.requests[i]
            assert (mine.first_token_s, mine.last_token_s) == (theirs.first_token_s, theirs.last_token_s)
    assert both.num_placed == [20, 20]


def test_more_engines_are_quicker_and_give_the_same_tokens(recorded: tuple[Study, StepTimes]) -> None:
    figures = [make_fleet(recorded, num_engines=n).run() for n in (1, 2, 4)]
    assert len({one.output_tokens for one in figures}) == 1
    assert figures[0].ttft_ms["mean"] > figures[1].ttft_ms["mean"] > figures[2].ttft_ms["mean"]
    assert figures[2].num_finished == figures[2].num_requests


def test_requests_of_an_engine_that_dies_go_on(recorded: tuple[Study, StepTimes]) -> None:
    whole = make_fleet(recorded).run()
    fleet = make_fleet(recorded, outages=[Outage(0, 0.2, 0.3)])
    figures = fleet.run()
    assert fleet.num_moved > 0
    assert figures.output_tokens == whole.output_tokens
    assert figures.num_finished == figures.num_requests
    assert figures.ttft_ms["mean"] > whole.ttft_ms["mean"]
    assert [r.num_outputs for r in fleet.requests] == [r.num_outputs for r in recorded[0].requests]


def test_without_any_engine_requests_wait(recorded: tuple[Study, StepTimes]) -> None:
    fleet = make_fleet(recorded, outages=[Outage(0, 0.06, 5.0), Outage(1, 0.06, 4.0), Outage(1, 0.2, 9.0)])
    figures = fleet.run()
    assert figures.num_finished == figures.num_requests
    assert 3.9 < fleet.longest_gap_s < 5.1, "the first engine that is back goes on with all"


def test_twice_the_rate_is_half_the_time_between_arrivals(recorded: tuple[Study, StepTimes]) -> None:
    once, twice = make_fleet(recorded, num_engines=4), make_fleet(recorded, num_engines=4, rate=2.0)
    assert once.run().output_tokens == twice.run().output_tokens
    for one, other in zip(once.requests, twice.requests, strict=True):
        assert other.arrival_s == pytest.approx(one.arrival_s / 2)
    assert share_within(once.requests, 0.02, None) >= share_within(twice.requests, 0.02, None)


def test_a_prefix_is_found_where_it_was_computed() -> None:
    """Prompts that begin alike, far apart in time: `least_wait` sends them to the engine that has them cached."""
    arrivals = [
        (i * 0.5, {"request_id": f"r{i}", "prompt": [1 + i % 2] * 30 + [i], "max_tokens": 2}) for i in range(20)
    ]
    engine = TimedEngine()
    engine.serve(arrivals)
    seen = study(engine.header, engine.events)
    times = fit_step_times(seen.steps)
    assert times is not None
    cached = {
        policy: make_fleet((seen, times), policy, num_engines=3).run().cached_tokens for policy in ROUTING_POLICIES
    }
    assert cached["least_wait"] == predict(seen, times).cached_tokens
    assert cached["least_wait"] > cached["round_robin"]


def test_the_share_within_limits() -> None:
    seen = study(*run({}))
    assert share_within(seen.requests, None, None) == 1.0
    assert share_within(seen.requests, 0.0, None) == 0.0
    assert share_within([], 0.0, None) == 1.0
    ttft = sorted(r.first_token_s - r.arrival_s for r in seen.requests if r.first_token_s is not None)
    assert share_within(seen.requests, ttft[len(ttft) // 2 - 1], None) == 0.5
