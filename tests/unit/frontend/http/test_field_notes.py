"""Docstrings of fields, found in the source of the structs."""

from __future__ import annotations

import inspect
from types import ModuleType

import msgspec
import pytest

from quire.frontend.http import openapi as module
from quire.frontend.http.openapi import field_notes, structs_of
from quire.sampling_params import SamplingParams


class Inner(msgspec.Struct):
    """In the other."""

    depth: int = 0
    """Depth
    below."""


class Base(msgspec.Struct):
    """Common fields."""

    first: int = 0
    """Base field."""
    second: int = 0
    """Base field."""
    temperature: float = 0
    seed: int = 0
    """Another seed."""


class Outer(Base):
    """A struct."""

    second: int = 1
    """Its own."""
    inner: list[Inner | None] = []
    others: dict[str, Inner] = {}
    KIND = "a constant"
    """No field."""


def test_notes_are_inherited_and_replaced() -> None:
    notes = field_notes(Outer)
    assert notes["first"] == "Base field."
    assert notes["second"] == "Its own."
    assert notes["seed"] == "Another seed."
    assert notes["temperature"] == field_notes(SamplingParams)["temperature"] == "0 means greedy."
    assert "others" not in notes
    assert "KIND" not in notes
    assert field_notes(Base)["second"] == "Base field."
    assert field_notes(Inner) == {"depth": "Depth below."}


def test_structs_within_structs_are_found_once() -> None:
    assert structs_of([Outer, Base]) == [Outer, Inner, Base]


def test_without_sources_there_are_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(_: ModuleType) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", no_source)
    monkeypatch.setattr(module, "_notes_in", module._notes_in.__wrapped__)
    assert field_notes.__wrapped__(Inner) == {}
