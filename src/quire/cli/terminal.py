"""Terminal output: colours on a terminal only, and numbers in readable units."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TextIO

from quire.errors import ConfigError

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Style:
    """Colours text for one stream: only on a terminal, and only without NO_COLOR."""

    def __init__(self, stream: TextIO) -> None:
        self.is_terminal = stream.isatty()
        self._has_colour = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def paint(self, text: str, colour: str) -> str:
        """Returns `text` in a colour of `_CODES`, or unchanged."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._has_colour and text else text

    def printable(self, text: str) -> str:
        """Returns `text` without the control characters with which a model's output could steer a terminal."""
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if self.is_terminal else text


def write_file(path: str | Path, text: str, flag: str) -> None:
    """Writes the file that `flag` names. Raises ConfigError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror or e}") from None


def human_bytes(count: float) -> str:
    """Returns "1.5 KiB" for 1536."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def file_bytes(num_bytes: int) -> str:
    """Returns "1.50 GiB" or "3.2 MiB": the size of large files."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"


def human_count(count: float) -> str:
    """Returns "1.24 B" (billions) for 1236000000; numbers below 10,000 in full."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.2f} {letter}"
    return f"{count:,.0f}"
