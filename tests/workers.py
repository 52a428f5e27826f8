"""Shares the files of tests among the workers of one run (pytest-xdist; `scripts/test` starts three).

A file is run by one worker, so that its fixtures are made once; a worker that has no file left takes the next one, long
files first. Tests that start servers wait more than they compute: two workers begin with them, and the others take
files that start none. So two processors are busy to the end, and never are there servers of three tests at once.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from tests import times

SERVERS = "tests/process"
"""Folder whose tests start processes that compute."""
NUM_SERVER_WORKERS = 2
"""Number of workers whose tests may start servers."""


def starts_servers(file: str) -> bool:
    """Returns whether the tests of a file start processes that compute."""
    return PurePosixPath(file).is_relative_to(SERVERS)


def next_file(files: list[str], worker: int) -> str | None:
    """Returns the first of `files` that worker number `worker` may take; None if there is none."""
    return next((file for file in files if worker < NUM_SERVER_WORKERS or not starts_servers(file)), None)


def in_file_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests by files: first those that start servers; of each kind first those that took the longest when
    times were stored."""
    stored = times.stored_seconds()

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        file = item.nodeid.partition("::")[0]
        return not starts_servers(file), -stored.get(file, 1.0), file

    return sorted(items, key=place)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns a scheduler of pytest-xdist that gives out files by `next_file`."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            file = next_file(list(self.workqueue), self.nodes.index(node))
            if file is None:
                node.shutdown()
            else:
                self.workqueue.move_to_end(file, last=False)
                super()._assign_work_unit(node)

    return Files(config, log)
