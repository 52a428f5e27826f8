"""The kernels on arm64: cross-built, and run under an emulator, beside plain loops (csrc/check.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "scripts" / "arm64_check"
MISSING = 77


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_are_right_on_arm64(tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    if done.returncode == MISSING:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "portable, 3 threads: checked" in done.stdout
    assert "warning:" not in done.stderr


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "ARM64_CXX": "no-such-compiler"}
    done = subprocess.run([str(SCRIPT), str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == MISSING
    assert "there is no " in done.stdout
