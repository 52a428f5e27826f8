"""Orders the tests of one run for the workers that share them (pytest-xdist; `scripts/test` starts two).

A file is run by one worker, so that its fixtures are made once, and a worker that has no file left takes the next one.
Long files come first, and files whose tests start servers alternate with the others: most of the time one worker waits
for servers while the other computes, and what is left at the end is short.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests import times

SERVERS = "tests/process"
"""Folder whose tests start processes that compute."""


def file_order(seconds: dict[str, float]) -> list[str]:
    """Returns the files of `seconds`: always the longest one left of the kind that had less time so far."""
    longest_first = sorted(seconds, key=lambda file: -seconds[file])
    kinds = [[file for file in longest_first if _starts_servers(file) is kind] for kind in (True, False)]
    taken, order = [0.0, 0.0], []
    while left := [kind for kind in (0, 1) if kinds[kind]]:
        kind = min(left, key=taken.__getitem__)
        order.append(file := kinds[kind].pop(0))
        taken[kind] += seconds[file]
    return order


def in_file_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests in the order in which workers should take their files."""
    stored = times.stored_seconds()
    seconds = {file: stored.get(file, 1.0) for file in map(_file_of, items)}
    place = {file: number for number, file in enumerate(file_order(seconds))}
    return sorted(items, key=lambda item: place[_file_of(item)])


def _starts_servers(file: str) -> bool:
    return PurePosixPath(file).is_relative_to(SERVERS)


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
