"""The prose lint finds what it is for, and leaves plain English alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.prose_lint import (
    ROOT,
    check_prose,
    check_source,
)

FIELD = '"""A module."""\n\nclass Limits:\n    """Limits of a queue."""\n\n    size: int\n    """{}"""\n'


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("That of this user.", "opening"),
        ("Of what is made one by one.", "opening"),
        ("It says more.", "opening"),
        ("Whether it is there.", "opening"),
        ("Says what is left.", "verb"),
        ("See the base class.", "reference"),
        ("As LLM.generate.", "reference"),
        ("Aborts the request of whoever has left.", "pronoun"),
        ("Returns the process who owns the socket.", "who"),
        ("Returns what the core is told.", "telling"),
        ("Keeps the response on its shelf.", "metaphor"),
        ("Returns the blocks of a request (S1-KV-033).", "checklist"),
    ],
)
def test_a_rule_finds_its_offence(text: str, rule: str) -> None:
    assert [found for found, _ in check_prose(text)] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "Returns the blocks of a request, last first.",
        "Maximum number of queued requests; None: unlimited.",
        "Requests of clients who left are aborted.",
        "Formats of two versions, which can be told apart by their first byte.",
        "See the table below.\n\nMore lines.",
        "Italics are dropped.",
    ],
)
def test_plain_english_passes(text: str) -> None:
    assert list(check_prose(text)) == []


def test_every_kind_of_prose_is_read() -> None:
    """Strings under fields, comments and names count like docstrings, with the line they stand on."""
    path = Path("module.py")
    assert [(o.line, o.rule) for o in check_source(FIELD.format("What fits."), path)] == [(7, "opening")]
    assert [(o.line, o.rule) for o in check_source('"""M."""\nx = 1  # nobody reads this\n', path)] == [(2, "pronoun")]
    assert [(o.line, o.rule) for o in check_source('"""M."""\n\nclass Pulse:\n    """A heartbeat."""\n', path)] == [
        (3, "name")
    ]
    assert check_source(FIELD.format("Number of requests that fit."), path) == []


GENERATED = {"compat.md", "http_fields.md"}


def test_pages_are_plain_english() -> None:
    """CONTRIBUTING.md names the words; code in backticks does not count."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy/README.md", ROOT / "examples/README.md"]
    found = [
        f"{page.relative_to(ROOT)}: {rule}: {text}"
        for page in pages
        if page.name not in GENERATED and page != ROOT / "CONTRIBUTING.md"
        for rule, text in check_prose(re.sub(r"`[^`\n]*`", "`x`", page.read_text(encoding="utf-8")), is_docstring=False)
        if rule != "checklist"
    ]
    assert not found, "\n".join(found)
