"""`quire replay`: what it says of a recording, of a torn one, of one that is not reproduced."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from quire.cli.main import main
from quire.engine.recording.format import Step
from tests.unit.engine.recording.recorded import encode
from tests.unit.replay.test_what_if import load, run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "rec"
    path.write_bytes(encode(*run({})))
    return path


def test_a_recording_is_replayed_and_predicted(recording: Path, capsys: Capture) -> None:
    assert main(["replay", str(recording)]) == 0
    text = capsys.readouterr().out
    assert "replayed: every decision is the same" in text
    assert "step times: error 0.0% a step" in text
    assert text.splitlines()[4].split() == ["recorded", "predicted"]


def test_a_changed_setting_is_predicted_and_reported(recording: Path, capsys: Capture) -> None:
    code = main(["replay", str(recording), "--json", "--max-num-seqs", "2", "--num-gpu-blocks-override", "30"])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reproduced"] is True
    assert report["rerun"] is report["prediction_error"] is report["first_difference"] is None
    assert len(report["step_times"]["parts"]) == len(report["step_times"]["coefficients"])
    assert report["what_if"]["ttft_ms"]["mean"] > 2 * report["predicted"]["ttft_ms"]["mean"]
    assert report["what_if"]["output_tokens"] == report["recorded"]["output_tokens"]


def test_another_decision_is_said_by_the_exit_code(recording: Path, capsys: Capture) -> None:
    header, events = run({})
    number = next(i for i, event in enumerate(events) if isinstance(event, Step) and i > 20)
    events[number] = msgspec.structs.replace(events[number], digest=1)
    recording.write_bytes(encode(header, events))
    assert main(["replay", str(recording)]) == 1
    assert f"a decision is another one: event {number + 1} (step, 0." in capsys.readouterr().out
    assert main(["replay", str(recording), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"]["number"] == number + 1


def test_a_torn_recording_is_used_as_far_as_it_goes(recording: Path, capsys: Capture) -> None:
    recording.write_bytes(recording.read_bytes()[:-3])
    assert main(["replay", str(recording), "--check"]) == 0
    text = capsys.readouterr().out
    assert "bytes are part of a frame that was not finished" in text
    assert "predicted" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which recording?"),
        (["{tmp}/none"], "No such file"),
        (["{tmp}/text"], "this is no recording"),
        (["{rec}", "--check", "--max-num-seqs", "2"], "--check only replays"),
        (["{rec}", "--dtype", "float32"], "--dtype changes nothing a recording could tell"),
        (["{rec}", "--max-num-seqs", "0"], "below the minimum"),
        (["{rec}", "--model", "demo"], "unknown flag --model"),
    ],
)
def test_a_wrong_argument_is_explained(arguments: list[str], message: str, recording: Path, capsys: Capture) -> None:
    (recording.parent / "text").write_text("no recording")
    words = [word.format(tmp=recording.parent, rec=recording) for word in arguments]
    assert main(["replay", *words]) == 2
    assert message in capsys.readouterr().err


def test_too_few_steps_to_learn_from(tmp_path: Path, capsys: Capture) -> None:
    header, events = run({})
    path = tmp_path / "rec"
    path.write_bytes(encode(header, events[:30]))
    assert main(["replay", str(path)]) == 0
    assert "recorded" in capsys.readouterr().out
    assert main(["replay", str(path), "--max-num-seqs", "2"]) == 2
    assert "too few to learn" in capsys.readouterr().err


def test_the_load_of_these_tests_is_a_load() -> None:
    assert len({at for at, _ in load(random.Random(3))}) == 40
