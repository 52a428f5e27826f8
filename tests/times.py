"""Processor seconds of every test file, and the time budgets of the folders.

Wall time depends on what else a machine does. Counted is processor time, of the process of the tests and of the
processes it has waited for. Machines differ in that, too, by a factor of two where two workers share the caches of one
core. The factor of a run is the median over the files of what they took now to what they took when times were stored,
and the seconds of each folder are divided by it. So a folder that grew is found on any machine, and a machine that is
slow in everything is not reported as a folder that grew.

`--times` prints the seconds of each folder beside its budget and fails the run when one is exceeded. `--store-times`
writes times.json, from which the workers also take what to start first. The budgets are in time_budgets.toml.
"""

from __future__ import annotations

import json
import os
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STORE = Path(__file__).with_name("times.json")
BUDGETS = Path(__file__).with_name("time_budgets.toml")
MARGIN = 2.0
"""A folder may take this much more than its budget before the run fails: no machine is slower in all things alike."""
COVERED = (
    *("tests/unit/engine/", "tests/unit/frontend/client/", "tests/unit/frontend/supervision/"),
    *("tests/unit/frontend/text/", "tests/unit/frontend/test_"),  # not those of HTTP, metrics and the fleet
)
"""Tests of the parts whose branches have a floor (scripts/coverage). Counting takes them twice as long."""
SHORTEST_COMPARED_S = 0.5
"""Files that took less when times were stored say nothing about the machine."""


def stored_seconds() -> dict[str, float]:
    """Returns file -> seconds of the run that was stored last."""
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}


def budgets() -> dict[str, float]:
    """Returns folder -> seconds it may take."""
    return tomllib.loads(BUDGETS.read_text(encoding="utf-8"))["seconds"]


def file_of(item: pytest.Item) -> str:
    """Returns the file of a test, from the root of the project."""
    return item.nodeid.partition("::")[0]


def folder_of(file: str, folders: dict[str, float]) -> str:
    """Returns the longest of the folders with a budget that holds a file; the file's own if there is none."""
    parents = [str(parent) for parent in Path(file).parents]
    return next((parent for parent in parents if parent in folders), parents[0])


def exceeded(seconds: dict[str, float], limits: dict[str, float], *, counts_branches: bool = False) -> list[str]:
    """Returns a sentence for each folder that took more than its budget allows, or has none."""
    factors = {folder: 2 if counts_branches and f"{folder}/".startswith(COVERED) else 1 for folder in seconds}
    return [
        f"{folder} took {spent:.0f} s, and its budget is {limits[folder]:.0f} s"
        if folder in limits
        else f"{folder} has no time budget"
        for folder, spent in seconds.items()
        if spent > MARGIN * factors[folder] * limits.get(folder, 0.0)
    ]


def _spent() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def factor_of(seconds: dict[str, float], stored: dict[str, float]) -> float:
    """Returns how much slower this machine is than the one of the stored times: the median over the files.

    Returns 1.0 where no file was long enough to be compared.
    """
    files = [file for file, before in stored.items() if before >= SHORTEST_COMPARED_S and file in seconds]
    return statistics.median(seconds[file] / stored[file] for file in files) if files else 1.0


class Times:
    """Counts in the process that runs tests; in the one that has started workers, adds up what they counted."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = {}
        """File -> processor seconds, not yet divided by the machine's factor."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        before = _spent()
        result = yield
        file = file_of(item)
        self.seconds[file] = self.seconds.get(file, 0.0) + _spent() - before
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.getoption("--store-times"):
            stored = {file: round(spent, 1) for file, spent in sorted(self.seconds.items())}
            STORE.write_text(json.dumps(stored, indent=0) + "\n", encoding="utf-8")
        elif self.config.getoption("--times") and self._exceeded() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def add(self, seconds: dict[str, float]) -> None:
        """Adds what a worker has counted."""
        for file, spent in seconds.items():
            self.seconds[file] = self.seconds.get(file, 0.0) + spent

    def folder_seconds(self) -> dict[str, float]:
        """Returns folder -> seconds of the machine of the stored times, the folders being those with budgets."""
        limits, total, factor = budgets(), {}, factor_of(self.seconds, stored_seconds())
        for file, spent in self.seconds.items():
            folder = folder_of(file, limits)
            total[folder] = total.get(folder, 0.0) + spent / factor
        return dict(sorted(total.items(), key=lambda pair: -pair[1]))

    def _exceeded(self) -> list[str]:
        counts_branches = bool(self.config.getoption("--cov", None))
        return exceeded(self.folder_seconds(), budgets(), counts_branches=counts_branches)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.config.getoption("--times") or not self.seconds:
            return
        folders, limits = self.folder_seconds(), budgets()
        whole, factor = sum(folders.values()), factor_of(self.seconds, stored_seconds())
        terminalreporter.section(f"processor seconds, divided by this machine's {factor:.2f}")
        for folder, spent in folders.items():
            limit = limits.get(folder)
            terminalreporter.write_line(f"{folder:<32}{spent:>8.1f}{100 * spent / whole:>6.1f} %  of {limit or '?'}")
        terminalreporter.write_line(f"{'all':<32}{whole:>8.1f}")
        for line in self._exceeded():
            terminalreporter.write_line(f"over its budget: {line}", red=True)
