"""`benchmarks.speculation` without engines: its table, its prompts, and the drafter that repeats answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from benchmarks import speculation
from benchmarks.replay_drafter import ReplayDrafter
from benchmarks.speculation import PAGE_LEN, Row, format_report, merge, misleading, to_copy
from benchmarks.versus.table import BEGIN, END

from quire.worker.spec_decode.drafter import DraftRow

ROWS = [
    Row("G1", "faster", [3.0, 2.0, 4.0], 2.3, detail="4 → 2 ms"),
    Row("G7", "quick", [35.0], 30.0, is_most=True, unit=" µs"),
    Row("G6", "of interest", [0.9]),
    Row("G9", "", [], failure="not installed"),
]
REPORT = {
    "date": "2026-01-02",
    "cpu": "a CPU",
    "cpus": 2,
    "neighbours": {"G1": 0.02, "G6": 0.3},
    "rows": [asdict(row) for row in ROWS],
}


def test_a_goal_is_a_least_or_a_most() -> None:
    assert [row.is_met for row in ROWS] == [True, False, None, None]
    assert ROWS[0].value == 3.0


def test_the_report_names_losses_and_what_is_missing() -> None:
    text = format_report(json.loads(json.dumps(REPORT)))
    assert "| G1 | faster | ≥ 2.3× | 3.00 ± 1.00× | 4 → 2 ms |" in text
    assert "| G7 | quick | ≤ 30 µs | **35.00 µs** |  |" in text
    assert "| G9 |  |  | not installed |  |" in text
    assert text.endswith("Goals that are missed:\n\n* G7: quick")
    assert "G6 30 %" in text
    assert "G1 2 %" not in text


def test_reports_of_two_runs_become_one() -> None:
    newer = {**REPORT, "neighbours": {"G1": 0.0}, "rows": [asdict(Row("G1", "faster", [5.0], 2.3))]}
    merged = merge([cast(Any, REPORT), cast(Any, newer)])
    assert [(row["name"], row["values"]) for row in merged["rows"]] == [
        ("G1", [5.0]), ("G6", [0.9]), ("G7", [35.0]), ("G9", [])
    ]  # fmt: skip


def test_unknown_goals_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speculation.main(["--goals", "G99"])
    assert "G99" in capsys.readouterr().err


def test_the_table_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(REPORT))
    assert speculation.main(["--from-json", str(path)]) == 0
    assert "| G1 | faster |" in capsys.readouterr().out


def test_the_page_of_the_project_has_the_markers() -> None:
    text = speculation.PAGE.read_text(encoding="utf-8")
    assert all(text.count(mark.format("speculation")) == 1 for mark in (BEGIN, END))


def test_a_prompt_to_copy_ends_where_its_page_begins() -> None:
    (request,) = to_copy(3)
    page = request.prompt_token_ids[-1]
    assert page % PAGE_LEN == 0
    assert request.prompt_token_ids[-1 - PAGE_LEN : -1] == list(range(page, page + PAGE_LEN))
    assert request.output_len < PAGE_LEN


def test_two_tokens_of_a_misleading_prompt_are_followed_by_another() -> None:
    (request,) = misleading(3)
    ids = request.prompt_token_ids
    page, followers = ids[-1], {}
    for a, b, c in zip(ids, ids[1:], ids[2:], strict=False):
        followers.setdefault((a, b), []).append(c)
    assert all(followers[i, i + 1] and i + 2 not in followers[i, i + 1] for i in range(page, page + PAGE_LEN - 2))


def test_a_replayed_answer_is_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_ACCURACY", "1")
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(vocab_size=100)))
    drafter = ReplayDrafter(cast(Any, SimpleNamespace(config=config)))

    def propose(req_id: str, *outputs: int) -> list[int]:
        ids = np.array([1, 2, 3, *outputs], np.int32)
        return drafter.propose([DraftRow(req_id, 0, ids, 3, len(ids) - 1, 3)])[0].token_ids

    assert propose("a", 7) == []
    drafter.observe("a", [8, 9], 1)
    drafter.observe("a", [10], 0)
    drafter.forget("a")
    assert propose("b", 7) == [8, 9, 10]
    assert propose("b", 7, 8, 9) == [10]
    assert propose("c", 6) == []
