"""Docstrings and comments are plain English (tools/prose_lint.py)."""

from __future__ import annotations

from tools.prose_lint import ENFORCED, check_files


def test_no_docstring_or_comment_breaks_a_rule() -> None:
    offences = check_files(ENFORCED)
    assert not offences, "\n".join(map(str, offences))
