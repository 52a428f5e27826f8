"""Docstrings and comments are plain English (tools/prose_lint.py): no folder has more offences than its baseline."""

from __future__ import annotations

from tools.prose_lint import PACKAGE, check_files, count_by_folder, exceeded, read_baseline


def test_no_folder_has_more_offences_than_its_baseline() -> None:
    over = exceeded(count_by_folder(check_files([PACKAGE])), read_baseline())
    assert not over, f"run `python -m tools.prose_lint --check` to see the offences: {over}"


def test_one_offence_more_fails() -> None:
    baseline = read_baseline()
    counts = {**baseline, "new": 1, "engine": baseline.get("engine", 0) + 1}
    assert exceeded(counts, baseline) == {"engine": 1, "new": 1}
