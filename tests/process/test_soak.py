"""Promise P5 over time: memory, file descriptors and threads of both processes stay flat over many requests, aborts and
restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
ROOT = Path(__file__).parents[2]


def _soak(**numbers: float) -> None:
    flags = [f"--{name.replace('_', '-')}={number}" for name, number in numbers.items()]
    command = [sys.executable, "-m", "tests.process.soak", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_short_soak() -> None:
    _soak(rounds=2, requests=64, restarts=1, max_growth_mib=4.0)


@pytest.mark.slow
def test_a_long_soak() -> None:
    _soak(deadline_s=7200, rounds=300, requests=640, restarts=200, max_growth_mib=16.0)
