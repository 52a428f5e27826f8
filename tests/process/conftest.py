from __future__ import annotations

from pathlib import Path

import pytest

from .pace import Pace


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pace:
    """Returns the pace of the cores that the test starts."""
    made = Pace(tmp_path / "pace")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made
