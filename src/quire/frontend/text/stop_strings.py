"""Stop strings: where a growing text must end, and how much of it may be shown meanwhile. Pure text, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string and where it lies in the text: text[start:end] == stop."""

    stop: str
    start: int
    end: int


class StopStrings:
    """The stop strings of a request. False if there are none."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_held = max(map(len, stops), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, text: str, start: int = 0) -> StopMatch | None:
        """The stop string that a reader of text[start:] would be the first to have read completely.

        Of several that end at the same character the longest counts. So the answer does not depend on the order of the
        stop strings, nor on how the text was cut into tokens.
        """
        best: StopMatch | None = None
        for stop in self._stops:
            at = text.find(stop, start)
            if at >= 0 and (best is None or (at + len(stop), at) < (best.end, best.start)):
                best = StopMatch(stop, at, at + len(stop))
        return best

    def held_back(self, text: str, start: int = 0) -> int:
        """How many characters at the end of text[start:] may be the beginning of a stop string: not shown yet."""
        for at in range(max(start, len(text) - self._max_held), len(text)):
            if text[at] in self._first_chars:
                tail = text[at:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
