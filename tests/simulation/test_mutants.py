"""Tests of the test: every planted bug must be noticed. The unmutated code passes the same seeds in test_simulation."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.harness import SimulationError, run_episode
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import EPISODE_OPERATIONS

MAX_OPERATIONS = 50_000


def operations_until_caught() -> tuple[int, SimulationError | None]:
    """Run seeds 0, 1, 2, ... until something is noticed."""
    done = 0
    for seed in range(MAX_OPERATIONS // EPISODE_OPERATIONS):
        try:
            done += run_episode(seed, EPISODE_OPERATIONS)["operations"]
        except SimulationError as error:
            return done + error.operation + 1, error
    return done, None


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    MUTANTS[name](monkeypatch)
    done, error = operations_until_caught()
    assert error is not None, f"{name}: {done} operations noticed nothing"
    with capsys.disabled():
        print(f"\n{name}: {done} operations, {type(error.cause).__name__}: {str(error.cause)[:90]}", end=" ")
