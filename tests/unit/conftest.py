"""Conditions of every unit test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that a unit test makes has its core in the test's process: quick to start, and open to inspection."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
