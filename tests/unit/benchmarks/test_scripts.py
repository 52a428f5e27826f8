"""Benchmarks that no other test calls run at all, each on next to nothing: their numbers here mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.kernels.library import native_library

pytestmark = pytest.mark.scripts
ROOT = Path(__file__).resolve().parents[3]
needs_kernels = pytest.mark.skipif(native_library() is None, reason="the native kernels are not built")


def run(*words: str) -> str:
    """Returns what a program of the benchmarks prints, started as their pages say."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "QUIRE_ENABLE_MULTIPROCESSING": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_error_of_a_plan() -> None:
    assert "| TTFT p50, ms |" in run("-m", "benchmarks.plan", "--rounds=1", "--requests=30")


def test_what_metrics_cost() -> None:
    assert "cpu_share_at_20_hz" in run("-m", "benchmarks.metrics_cost", "--requests=4", "--scrapes=4", "--steps=8")


def test_a_step_of_the_scheduler() -> None:
    assert "4 decoding requests" in run("benchmarks/scheduler_step.py", "--requests=4", "--steps=8")


@needs_kernels
def test_a_step_of_the_model() -> None:
    assert "ratio of medians" in run("benchmarks/forward.py", "--reqs=1", "--seconds=0.01", "--threads=1")


def test_where_a_first_token_s_time_goes() -> None:
    model = str(ROOT / "src" / "quire" / "assets" / "demo")
    table = run("-m", "benchmarks.first_token", "--model", model, "--reps=2", "--pause-ms=1")
    assert "| 2 process(es), median |" in table
    assert "| 1 process(es), best |" in table


def test_what_large_bodies_do() -> None:
    assert "| a schema |" in run("-m", "benchmarks.large_bodies", "--only", "a schema", "--seconds=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("benchmarks/snapshot_cost.py",),
        ("benchmarks/attention_decode.py", "--reps=1"),
        ("-m", "benchmarks.scrapes", "--processes=1", "--requests=4", "--seconds=1", "--body-mb=0.1"),
        ("-m", "benchmarks.what_if", "--rounds=1", "--num-prompts=60", "--load=at once"),
        pytest.param(("benchmarks/sampling.py", "--reps=1"), marks=needs_kernels),
        pytest.param(("benchmarks/kernel_speed.py", "--shapes=tiny", "--rows=1", "--threads=1"), marks=needs_kernels),
        pytest.param(
            ("benchmarks/kernel_speed.py", "--shapes=tiny", "--rows=1", "--threads=1", "--only=quantized,rows"),
            marks=needs_kernels,
        ),
    ],
)
def test_the_other_benchmarks_run(words: tuple[str, ...]) -> None:
    assert run(*words)
