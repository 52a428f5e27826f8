"""A flag is one documented field: declaration, range, numbers with suffixes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.engine_args import FLAGS
from quire.config.flags import flag, flags_of, parse_human_int
from quire.errors import ConfigError


@dataclass(frozen=True)
class Example:
    size: int = flag(3, "How big.", parse=int, minimum=1, maximum=9)
    loud: bool = flag(False, "Whether.")
    kind: str = flag("a", "Which.", choices=("a", "b"), name="example_kind")
    derived: int = 0


def test_a_documented_field_declares_its_flag() -> None:
    size, loud, kind = flags_of(Example)
    assert (size.name, size.option, size.default, size.is_switch) == ("size", "--size", 3, False)
    assert loud.is_switch
    assert (kind.name, kind.option, kind.field_name) == ("example_kind", "--example-kind", "kind")


def test_range_and_choices() -> None:
    size, _, kind = flags_of(Example)
    size.validate(9)
    size.validate(None)
    kind.validate("b")
    with pytest.raises(ConfigError, match=r"--size 0 is below the minimum of 1"):
        size.validate(0)
    with pytest.raises(ConfigError, match=r"--size 10 is above the maximum of 9"):
        size.validate(10)
    with pytest.raises(ConfigError, match="not one of a, b"):
        kind.validate("c")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2G", 2 * 2**30), ("auto", -1), ("-1", -1)],
        *[("4KiB", 4096), ("1.5MiB", 3 * 2**19), ("10GiB", 10 * 2**30)],
    ],
)
def test_an_integer_may_have_a_unit(text: str, value: int) -> None:
    assert parse_human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "4x", "1.5", "four", "iB", "GiB", "4kiB"])
def test_human_int_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        parse_human_int(text)


@given(st.integers(-(10**12), 10**12))
def test_human_int_reads_any_integer(value: int) -> None:
    assert parse_human_int(str(value)) == value


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_every_flag_is_documented_and_its_default_allowed(name: str) -> None:
    spec = FLAGS[name]
    assert spec.help.endswith("."), spec.help
    assert len(spec.help) < 160
    spec.validate(spec.default)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float) -> None:
    """NaN passes every comparison, so it is refused by name."""
    with pytest.raises(ConfigError, match=r"--watermark (nan|inf|-inf) is not a finite number"):
        FLAGS["watermark"].validate(value)
