"""The public surface equals the recorded one: a rearrangement of the packages must not change what users rely on."""

from __future__ import annotations

import json

import pytest

from .record import HERE, make_surface

RECORDED = json.loads((HERE / "surface.json").read_text(encoding="utf-8"))
SURFACE = json.loads(json.dumps(make_surface(), default=repr))


@pytest.mark.parametrize("part", sorted(RECORDED))
def test_the_surface_equals_its_record(part: str) -> None:
    assert SURFACE[part] == RECORDED[part], (
        "if this is meant: python -m tests.compat.record > tests/compat/surface.json"
    )


def test_the_record_has_every_part_of_the_surface() -> None:
    assert sorted(SURFACE) == sorted(RECORDED)
    assert min(len(part) for part in RECORDED.values()) > 5
