"""Shares the tests of one run among workers (pytest-xdist; `scripts/test` starts two).

A file is run by one worker, so that its fixtures are made once. Tests that start servers are one group: they run one
after the other, beside tests that are one process, and two cores are enough for both. The longest groups start first.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from tests import times

SERVERS = ("tests/process",)
"""Folders whose tests start processes that compute."""


def group_of(nodeid: str) -> str:
    """Returns the group that a test is run with."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in SERVERS if PurePosixPath(file).is_relative_to(folder)), file)


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests with those groups first that took the longest when times were stored."""
    stored = times.stored_seconds()
    seconds: dict[str, float] = {}
    for file in dict.fromkeys(item.nodeid.partition("::")[0] for item in items):
        seconds[group_of(file)] = seconds.get(group_of(file), 0.0) + stored.get(file, 1.0)
    return sorted(items, key=lambda item: -seconds[group_of(item.nodeid)])


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns the scheduler of pytest-xdist with the groups of this module."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)
