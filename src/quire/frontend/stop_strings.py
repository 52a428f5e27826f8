"""Stop strings: where a growing text must end, and how much of it may be shown meanwhile. Pure text, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string and where it lies in the text: text[start:end] == stop."""

    stop: str
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> StopMatch | None:
    """The stop string that a reader of text[start:] would be the first to have read completely.

    Of several that end at the same character the longest counts. So the answer does not depend on the order of `stops`,
    nor on how the text was cut into tokens.
    """
    matches = (StopMatch(stop, at, at + len(stop)) for stop in stops if (at := text.find(stop, start)) >= 0)
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def held_back(text: str, stops: Sequence[str], start: int = 0) -> int:
    """How many characters at the end of text[start:] may be the beginning of a stop string: they are not shown yet."""
    longest = max(map(len, stops), default=1) - 1
    for at in range(max(start, len(text) - longest), len(text)):
        tail = text[at:]
        if any(len(tail) < len(stop) and stop.startswith(tail) for stop in stops):
            return len(tail)
    return 0
