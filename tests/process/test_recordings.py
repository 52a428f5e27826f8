"""A recording of a real engine: replayed, and served again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_a_bench_is_recorded_replayed_and_served_again(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded in a core of its own, and served again by one in this process."""
    path = tmp_path / "rec"
    bench = ["bench", "throughput", "--workload", "uniform", "--num-prompts", "12", "--input-len", "40"]
    bench += ["--output-len", "12", "--num-iters", "2", "--num-iters-warmup", "0", "--max-num-seqs", "8"]
    subprocess.run([sys.executable, "-m", "quire", *bench, "--record", str(path)], check=True, capture_output=True)
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    assert main(["replay", str(path), "--json", "--rerun", "demo", "--max-num-seqs", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reproduced"] is True
    assert report["torn_bytes"] == 0
    assert report["requests"] == 24
    for figures in ("recorded", "predicted", "what_if", "rerun"):
        assert report[figures]["output_tokens"] == 24 * 12
        assert report[figures]["num_finished"] == 24
    assert set(report["prediction_error"]) >= {"throughput", "TTFT mean", "TPOT mean"}
    assert main([*bench, "--record", str(path)]) == 2
    assert "the file exists" in capsys.readouterr().err
