from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ConfigError
from quire.frontend.metrics.catalog.spec import FAMILIES, TOKENS, make_bounds, token_bounds


@pytest.mark.parametrize(
    ("max_model_len", "last"), [(1, 1), (9, 5), (10, 10), (49, 20), (4096, 2000), (131072, 100000)]
)
def test_token_bounds_end_at_the_context(max_model_len: int, last: int) -> None:
    bounds = token_bounds(max_model_len)
    assert bounds[-1] == last
    assert bounds == tuple(sorted(set(bounds)))
    assert bounds[:3] == (1.0, 2.0, 5.0)[: len(bounds)]


def test_custom_bounds_replace_one_family() -> None:
    bounds = make_bounds(100, {"iteration_tokens": [1, 10.5]})
    assert bounds["iteration_tokens"] == (1.0, 10.5)
    assert bounds["request_latency"] == FAMILIES["request_latency"]
    assert bounds[TOKENS] == token_bounds(100)


@pytest.mark.parametrize(
    "value", ["1,2", [], [2, 1], [1, 1], [1, "2"], [True, 2], [float("inf")], list(range(101)), None]
)
def test_bounds_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigError, match="iteration_tokens"):
        make_bounds(100, {"iteration_tokens": value})


def test_a_family_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="there is no 'ttft'; there is request_latency"):
        make_bounds(100, {"ttft": [1]})
