from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.text.stop_strings import StopMatch, StopStrings

TEXT = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "stops", "start", "match"),
    [
        ("hello", ["x"], 0, None),
        ("hello", ["ll"], 0, StopMatch("ll", 2, 4)),
        ("hello", ["lo", "ll"], 0, StopMatch("ll", 2, 4)),  # the one that is complete first, whatever the order
        ("hello", ["l", "hel"], 0, StopMatch("hel", 0, 3)),  # complete at the same character: the longest
        ("abc", ["abc", "b"], 0, StopMatch("b", 1, 2)),
        ("aa", ["a"], 1, StopMatch("a", 1, 2)),
        ("aa", ["aa"], 1, None),
        ("", ["a"], 0, None),
        ("abc", [], 0, None),
    ],
)
def test_find(text: str, stops: list[str], start: int, match: StopMatch | None) -> None:
    assert StopStrings(stops).find(text, start) == match


@given(text=TEXT, stops=STOPS, start=st.integers(0, 12))
def test_find_is_what_a_reader_character_by_character_finds(text: str, stops: list[str], start: int) -> None:
    expected = None
    for end in range(start, len(text) + 1):
        read = text[start:end]
        ending = [stop for stop in stops if read.endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            expected = StopMatch(longest, end - len(longest), end)
            break
    assert StopStrings(stops).find(text, start) == expected


@given(text=TEXT, stops=STOPS, start=st.integers(0, 12))
def test_held_back_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str], start: int) -> None:
    tail = text[start:]
    expected = max(
        (n for n in range(len(tail) + 1) if any(n < len(s) and s.startswith(tail[len(tail) - n :]) for s in stops)),
        default=0,
    )
    assert StopStrings(stops).held_back(text, start) == expected


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [("ab", ["abc"], 2), ("ab", ["bcd"], 1), ("ab", ["ab"], 0), ("", ["a"], 0), ("ab", [], 0), ("aab", ["aabaa"], 3)],
)
def test_held_back_examples(text: str, stops: list[str], held: int) -> None:
    assert StopStrings(stops).held_back(text) == held


def test_no_stop_strings_are_false() -> None:
    assert not StopStrings([])
    assert StopStrings(["a"])
