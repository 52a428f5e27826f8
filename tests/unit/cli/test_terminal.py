"""Colours only where they belong; numbers for people."""

from __future__ import annotations

import io

import pytest

from quire.cli.terminal import Style, human_bytes, human_count


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert Style(Terminal()).paint("x", "red") == "\x1b[31mx\x1b[0m"
    assert Style(io.StringIO()).paint("x", "red") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Style(Terminal()).paint("x", "red") == "x"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert Style(Terminal()).paint("x", "red") == "x"


def test_a_model_cannot_steer_the_terminal() -> None:
    hostile = "a\x1b]0;title\x07b\nc\td\x9b2J\r"
    assert Style(Terminal()).printable(hostile) == "a�]0;title�b\nc\td�2J�"
    assert Style(io.StringIO()).printable(hostile) == hostile


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_are_shown_with_a_unit(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (54321, "54,321"), (1.236e9, "1.24 B"), (7e6, "7.00 M")])
def test_counts_are_shown_with_a_unit(count: float, text: str) -> None:
    assert human_count(count) == text
