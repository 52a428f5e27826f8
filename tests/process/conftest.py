from __future__ import annotations

from pathlib import Path

import pytest

from . import harness
from .pace import Pace


@pytest.fixture(autouse=True)
def _time_for_slow_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is not None:
        monkeypatch.setattr(harness, "DEADLINE_S", 4 * 3600.0)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pace:
    """Returns the pace of the cores that the test starts."""
    made = Pace(tmp_path / "pace")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made
