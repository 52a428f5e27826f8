"""Every rule that ends a sequence, their order, and repetition against brute force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.engine.request import RequestStatus
from quire.engine.sched.stop import Stop, check_stop, ends_in_repetition, z_function
from quire.sampling_params import RepetitionDetectionParams

from ..harness import make_request

EOS = 99
STOPPED, LENGTH, REPETITION = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def verdict(outputs: list[int], max_model_len: int = 1000, **params: Any) -> Stop | None:
    request = make_request("a", 3, output_token_ids=outputs, **{"eos_token_id": EOS, "ignore_eos": False, **params})
    before = repr(request)
    stop = check_stop(request, max_model_len)
    assert repr(request) == before, "the check is pure"
    return stop


def test_an_ordinary_token_goes_on() -> None:
    assert verdict([1]) is None
    assert verdict([EOS, 1]) is None, "only the last token counts"


def test_end_of_sequence() -> None:
    assert verdict([1, EOS]) == Stop(STOPPED, None)
    assert verdict([1, EOS], ignore_eos=True) is None
    assert verdict([1, EOS], eos_token_id=None) is None


def test_stop_token_ids_are_reported() -> None:
    assert verdict([1, 7], stop_token_ids=[5, 7]) == Stop(STOPPED, 7)
    assert verdict([7, 1], stop_token_ids=[5, 7]) is None
    assert verdict([1, EOS], stop_token_ids=[EOS]) == Stop(STOPPED, None), "as the end of sequence"
    assert verdict([1, EOS], stop_token_ids=[EOS], ignore_eos=True) == Stop(STOPPED, EOS)


def test_max_tokens_ends_a_request() -> None:
    assert verdict([1, 2], max_tokens=3) is None
    assert verdict([1, 2, 3], max_tokens=3) == Stop(LENGTH)
    assert verdict([1, 2, 3], max_tokens=None) is None


def test_max_model_len_counts_the_prompt() -> None:
    assert verdict([1, 2], max_model_len=6, max_tokens=None) is None
    assert verdict([1, 2, 3], max_model_len=6, max_tokens=None) == Stop(LENGTH)


@pytest.mark.parametrize(
    "params",
    [{}, {"stop_token_ids": [EOS], "ignore_eos": True}, {"repetition_detection": RepetitionDetectionParams(1, 1, 2)}],
)
def test_min_tokens_holds_back_what_the_tokens_say(params: dict[str, Any]) -> None:
    params = {**params, "min_tokens": 3, "max_tokens": 10}
    assert verdict([EOS, EOS], **params) is None
    assert verdict([EOS, EOS, EOS], **params) is not None


def test_min_tokens_does_not_hold_back_the_context() -> None:
    assert verdict([1, 2], min_tokens=5, max_tokens=10, max_model_len=5) == Stop(LENGTH)


def test_the_order_of_the_reasons() -> None:
    detection = RepetitionDetectionParams(1, 1, 2)
    everything: dict[str, Any] = {"max_tokens": 2, "stop_token_ids": [EOS, 7], "repetition_detection": detection}
    assert verdict([EOS, EOS], **everything) == Stop(STOPPED, None)
    assert verdict([7, 7], **everything) == Stop(STOPPED, 7)
    assert verdict([8, 8], **everything) == Stop(LENGTH)
    assert verdict([8, 8], **{**everything, "max_tokens": 9}) == Stop(REPETITION)


def test_repetition_looks_at_outputs_only() -> None:
    request = make_request(
        "a", [7, 7, 7], output_token_ids=[7], repetition_detection=RepetitionDetectionParams(1, 1, 2)
    )
    assert check_stop(request, 1000) is None


@pytest.mark.parametrize(
    ("tokens", "size", "count", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], (2, 2), 3, True),
        ([9, 1, 2, 1, 2, 1, 2], (2, 2), 3, True),
        ([1, 2, 1, 2, 1, 2, 9], (2, 2), 3, False),
        ([1, 2, 1, 2], (2, 2), 3, False),
        ([1, 1, 1, 1], (2, 4), 2, True),  # one token repeated is also a pattern of two, repeated
        ([5, 5, 5], (1, 1), 3, True),
        ([5, 5, 5], (0, 1), 3, True),
        ([5, 5, 5], (2, 2), 3, False),
        ([1, 2, 3, 1, 2, 3], (1, 2), 2, False),
        ([1, 2, 3, 1, 2, 3], (1, 3), 2, True),
        ([], (1, 3), 2, False),
    ],
)
def test_a_repeated_pattern_is_found(tokens: list[int], size: tuple[int, int], count: int, expected: bool) -> None:
    smallest, largest = size
    assert ends_in_repetition(tokens, RepetitionDetectionParams(largest, smallest, count)) is expected


def test_repetition_is_off_by_default() -> None:
    assert not ends_in_repetition([1] * 50, RepetitionDetectionParams())


def brute_force(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        length = size * params.min_count
        if length <= len(tokens) and tokens[-length:] == tokens[-size:] * params.min_count:
            return True
    return False


@given(
    head=st.lists(st.integers(0, 2), max_size=12),
    pattern=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    repeats=st.integers(0, 6),
    tail=st.lists(st.integers(0, 2), max_size=4),
    largest=st.integers(1, 8),
    smallest=st.integers(0, 8),
    count=st.integers(2, 6),
)
@example(head=[], pattern=[1], repeats=2, tail=[], largest=1, smallest=1, count=2)
def test_repetition_agrees_with_brute_force(
    head: list[int], pattern: list[int], repeats: int, tail: list[int], largest: int, smallest: int, count: int
) -> None:
    tokens = head + pattern * repeats + tail
    params = RepetitionDetectionParams(largest, min(smallest, largest), count)
    assert ends_in_repetition(tokens, params) == brute_force(tokens, params)


@given(st.lists(st.integers(0, 1), max_size=40))
def test_z_function_agrees_with_its_definition(items: list[int]) -> None:
    def shared_prefix(i: int) -> int:
        return next((k for k in range(len(items) - i) if items[k] != items[i + k]), len(items) - i)

    assert z_function(items) == [shared_prefix(i) for i in range(len(items))]


class CountingList(list[int]):
    """Counts how often an item is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("items", [[1] * 3000, [1, 2] * 1500, [1, 1, 2] * 1000, ([1] * 50 + [2]) * 60])
def test_z_function_is_linear_on_its_worst_inputs(items: list[int]) -> None:
    counting = CountingList(items)
    z_function(counting)
    assert counting.reads <= 4 * len(items)  # two items per comparison, at most two comparisons per item
