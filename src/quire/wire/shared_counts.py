"""Counts that several processes keep together: a small shared file of numbers, a row for each process.

A process writes its own row only, so nothing is ever lost between two writers and no lock is needed; a total is the sum
of a column. The row of a process that has died is cleared by whoever looks after it.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_WORD_BYTES = 8
"""Read and written as one aligned word."""


class SharedCounts:
    """The file, as the process of row `row` sees it."""

    def __init__(self, memory: mmap.mmap, num_columns: int, row: int) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._num_columns = num_columns
        self._row = row

    @classmethod
    def create(cls, path: Path, num_rows: int, num_columns: int) -> SharedCounts:
        """A new file, all zero, for its maker, who has row 0."""
        path.write_bytes(b"\0" * (num_rows * num_columns * _WORD_BYTES))
        path.chmod(0o600)
        return cls.attach(path, num_columns, 0)

    @classmethod
    def attach(cls, path: Path, num_columns: int, row: int) -> SharedCounts:
        """An existing one. Raises OSError or ValueError if there is none with such a row."""
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        if len(memory) % (num_columns * _WORD_BYTES) or len(memory) <= row * num_columns * _WORD_BYTES:
            raise ValueError(f"{path} has no row {row} of {num_columns} columns")
        return cls(memory, num_columns, row)

    def column(self, index: int) -> SharedCount:
        """One number of each process."""
        if not 0 <= index < self._num_columns:
            raise IndexError(f"column {index} of {self._num_columns}")
        return SharedCount(self._words[index :: self._num_columns], self._row)

    def clear_row(self, row: int) -> None:
        """The process of this row is gone, and has nothing any more."""
        for index in range(self._num_columns):
            self._words[row * self._num_columns + index] = 0


class SharedCount:
    """One column: our number, and those of the others."""

    __slots__ = ("_column", "_row")

    def __init__(self, column: memoryview[int], row: int) -> None:
        self._column = column
        self._row = row

    def put(self, value: int) -> None:
        """Ours is this now."""
        self._column[self._row] = value

    def others(self) -> int:
        """The sum of the others'."""
        return sum(self._column) - self._column[self._row]
