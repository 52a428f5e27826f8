"""Tests of what shares tests among processes (tests/workers.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONFTEST = """
import pytest
from tests.times import Times
from tests.workers import Workers

def pytest_configure(config):
    config.pluginmanager.register(times := Times(config), "times")
    config.pluginmanager.register(Workers(config, 2))

def pytest_addoption(parser):
    parser.addoption("--times")
    parser.addoption("--store-times")

@pytest.fixture(scope="session")
def whole():
    yield
"""
TESTS = """
import os, signal
import pytest

def test_first(tmp_path, whole):
    (tmp_path / "file").touch()

def test_deadly():
    if DEADLY: os.kill(os.getpid(), signal.SIGKILL)

def test_output(capfd, whole):
    os.system("echo written")
    assert capfd.readouterr().out == "written\\n"

@pytest.mark.skip(reason="not now")
def test_skipped():
    pass

def test_wrong(whole):
    print("before")
    assert 1 == 2
"""


def test_reports_come_from_all_workers_and_a_death_costs_one_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, is_deadly in (("a", True), ("b", False), ("c", False)):
        (tmp_path / f"test_{name}.py").write_text(TESTS.replace("DEADLY", str(is_deadly)))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rfs"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run([*command, "."], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "4 failed, 8 passed, 3 skipped" in done.stdout, done.stdout
    assert "FAILED test_a.py::test_deadly - worker" in done.stdout
    assert "was ended by SIGKILL while it ran this test" in done.stdout
    assert done.stdout.count("Captured stdout call") == 3
    assert "not now" in done.stdout
    assert not done.stderr
