"""Tests of the time budgets of the tests themselves (tests/times.py)."""

from __future__ import annotations

import pytest

from tests.times import exceeded, factor_of, folder_of

STORED = {f"tests/{name}/test_it.py": 10.0 for name in "abcdefgh"}
LIMITS = {f"tests/{name}": 10.0 for name in "abcdefgh"}


def _judge(seconds: dict[str, float]) -> list[str]:
    factor = factor_of(seconds, STORED)
    return exceeded({folder_of(file, LIMITS): spent / factor for file, spent in seconds.items()}, LIMITS)


@pytest.mark.parametrize("slower", [0.3, 1.0, 1.7, 5.0])
def test_a_machine_that_is_slow_in_everything_exceeds_no_budget(slower: float) -> None:
    assert _judge({file: slower * spent for file, spent in STORED.items()}) == []


@pytest.mark.parametrize("slower", [0.3, 1.0, 5.0])
def test_a_folder_that_grew_is_reported_on_any_machine(slower: float) -> None:
    seconds = {file: slower * spent for file, spent in STORED.items()}
    seconds["tests/c/test_it.py"] *= 3
    (sentence,) = _judge(seconds)
    assert sentence == "tests/c took 30 s, and its budget is 10 s"


def test_new_files_and_short_ones_say_nothing_about_the_machine() -> None:
    assert factor_of({"tests/new.py": 100.0}, STORED) == 1.0
    assert factor_of({"tests/short.py": 3.0}, {"tests/short.py": 0.1}) == 1.0


def test_a_folder_without_a_budget_is_reported() -> None:
    assert exceeded({"tests/new": 1.0}, LIMITS) == ["tests/new has no time budget"]
