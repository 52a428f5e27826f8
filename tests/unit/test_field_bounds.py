"""One bound: what it takes, what it refuses, and how the documentation writes it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import UnknownArgumentError, ValidationError
from quire.field_bounds import FieldBound
from quire.pooling_params import PoolingParams
from quire.sampling_params import SAMPLING_FIELDS, BeamSearchParams, SamplingParams
from quire.structured_outputs import StructuredOutputsParams

BOUNDS = {bound.name: bound for bound in SAMPLING_FIELDS}


@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers())
def test_a_float_field_accepts_exactly_its_range(value: float) -> None:
    inside = math.isfinite(value) and 0 < value <= 1 if isinstance(value, float) else value == 1
    if inside:
        BOUNDS["top_p"].validate(value)
    else:
        with pytest.raises(ValidationError):
            BOUNDS["top_p"].validate(value)


def test_a_range_is_shown_as_an_interval() -> None:
    assert BOUNDS["top_p"].range_text() == "(0, 1]"
    assert BOUNDS["repetition_penalty"].range_text() == "(0, inf)"
    assert BOUNDS["logprobs"].range_text().endswith("or -1")
    assert FieldBound("x", "float").range_text() == "(-inf, inf)"


def test_null_is_refused_unless_optional() -> None:
    with pytest.raises(ValidationError, match="must not be null"):
        BOUNDS["n"].validate(None)
    BOUNDS["seed"].validate(None)


def test_sequences_are_bounded_in_number_and_in_each_item() -> None:
    bound = FieldBound("words", "list[str]", max_len=2, max_item_len=3)
    bound.validate(["abc", "d"])
    with pytest.raises(ValidationError, match="words has 3 items; at most 2"):
        bound.validate(["a", "b", "c"])
    with pytest.raises(ValidationError, match="words holds a string of 4 characters; at most 3"):
        bound.validate(["abcd"])


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ValidationError) as e:
        FieldBound("name", "int").validate("x" * 1000)
    assert len(str(e.value)) < 100


@given(st.lists(st.integers(0, 9), max_size=6))
def test_special_values_lie_outside_the_range(values: list[int]) -> None:
    bound = FieldBound("k", "int", 0, 5, special=(-1,))
    bound.validate(-1)
    for value in values:
        if value <= 5:
            bound.validate(value)
        else:
            with pytest.raises(ValidationError):
                bound.validate(value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (SamplingParams, {"n": 1, "max_token": 5}, "SamplingParams has no field 'max_token'; did you mean max_tokens?"),
        (PoolingParams, {"dimension": 5}, "PoolingParams has no field 'dimension'; did you mean dimensions?"),
        (BeamSearchParams, {"width": 5}, "BeamSearchParams has no field 'width'; did you mean beam_width?"),
        (StructuredOutputsParams, {"zzz": 5}, "has no field 'zzz'; help(StructuredOutputsParams) lists its fields"),
    ],
)
def test_a_misspelt_field_is_answered_with_the_nearest(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=re.escape(message)) as caught:
        kind(**fields)
    assert isinstance(caught.value, TypeError)


def test_other_errors_of_a_constructor_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="Missing required argument 'beam_width'"):
        BeamSearchParams(max_tokens=5)  # type: ignore[call-arg]
