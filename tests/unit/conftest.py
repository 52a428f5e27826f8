"""Conditions of every unit test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_second_process() -> Iterator[None]:
    """An engine that a unit test makes has its core in the test's process: quick to start, and open to inspection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
        yield
