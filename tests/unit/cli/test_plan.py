"""`quire plan`: its table, the search for the fewest engines, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from tests.unit.engine.recording.recorded import encode
from tests.unit.replay.test_what_if import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "rec"
    path.write_bytes(encode(*run({})))
    return path


def test_sizes_are_compared(recording: Path, capsys: Capture) -> None:
    assert main(["plan", str(recording), "--engines", "1,3", "--outage", "0@0.1", "--restart-s", "0.2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("40 requests of test in ")
    assert [line.split()[:2] for line in lines[3:]] == [["1", "40/40"], ["3", "40/40"]]
    assert "fewest" not in lines[-1]


def test_the_fewest_engines_are_searched_for(recording: Path, capsys: Capture) -> None:
    limits = ["--slo-ttft-ms", "40", "--rate", "4", "--slo-share", "0.9"]
    assert main(["plan", str(recording), *limits, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    shares = {one["engines"]: one["share_within_slo"] for one in report["plans"]}
    fewest = report["fewest_engines"]
    assert shares[fewest] >= 0.9 > shares[fewest - 1]
    assert main(["plan", str(recording), *limits]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"fewest engines: {fewest}"
    assert main(["plan", str(recording), *limits, "--engines", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 engines are not enough"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "0"], "a plan has 1 to 64 engines"),
        (["--engines", "two"], "give numbers of engines"),
        (["--outage", "0"], "give an engine and a time"),
        (["--outage=-1@3"], "count from 0"),
        (["--outage", "3@1", "--engines", "2"], "there is no engine 3 of 2"),
        (["--rate", "0"], "--rate 0 must be above 0"),
        (["--slo-share", "1.5"], "1 at most"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0 is below"),
    ],
)
def test_what_makes_no_plan_is_refused(recording: Path, capsys: Capture, flags: list[str], message: str) -> None:
    assert main(["plan", str(recording), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_recording_is_needed(tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan"]) == 2
    assert "which recording? quire plan FILE" in capsys.readouterr().err
    path = tmp_path / "short"
    header, events = run({})
    path.write_bytes(encode(header, events[:10]))
    assert main(["plan", str(path)]) == 2
    assert "too few to learn" in capsys.readouterr().err
