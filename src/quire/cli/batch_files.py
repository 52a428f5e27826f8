"""The two files of `quire batch`: requests are read line by line, results appended so that a rerun can continue."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError, ValidationError

MAX_LINE_BYTES = 64 << 20
"""A request line longer than this is refused: no context holds so much text."""
MAX_RESULT_BYTES = 1 << 29
"""A line of an existing output file that is longer is not a result."""
STANDARD = "-"
"""File name that means standard input or output."""


@dataclass(frozen=True)
class InputRow:
    """One non-empty line. `error` is set instead of `content` where it is not a JSON object."""

    line_number: int
    content: dict[str, Any]
    error: ValidationError | None = None

    @property
    def key(self) -> str:
        """Returns what identifies the row in a rerun: its custom_id, or its line number."""
        custom_id = self.content.get("custom_id")
        return custom_id if isinstance(custom_id, str) else row_id(self.line_number)


def row_id(line_number: int) -> str:
    """Returns the `id` of a result whose request has no custom_id."""
    return f"batch_req_line_{line_number}"


@contextmanager
def open_input(name: str) -> Iterator[Path]:
    """Yields the path of the requests; those of standard input are copied to a file, because they are read twice."""
    if name != STANDARD:
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="quire-batch-", suffix=".jsonl") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def read_rows(path: Path) -> Iterator[InputRow]:
    """Yields the rows of a JSONL file. Raises ConfigError if it cannot be read, or not twice."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file, and a batch reads its requests twice; pipe it into -i -")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if line.strip():
                    yield _parse_row(number, line)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}") from None


def _parse_row(number: int, line: bytes) -> InputRow:
    if len(line) > MAX_LINE_BYTES:
        return InputRow(number, {}, ValidationError(f"line {number} is longer than {MAX_LINE_BYTES} bytes"))
    try:
        content = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        return InputRow(number, {}, ValidationError(f"line {number} is not valid JSON: {e}"))
    if not isinstance(content, dict):
        return InputRow(number, {}, ValidationError(f"line {number} holds a {type(content).__name__}, not an object"))
    return InputRow(number, content)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class ResultFile:
    """The output. Opening it reads the results of an earlier run and cuts off a line that was left half written.

    `done` maps the key of every finished row to whether it failed. Only a regular file is read and resumed: a device
    or a pipe is written from its beginning, and so is stdout (`-`). Raises ConfigError when the file holds something
    else than results, so that a wrong -o never damages anything.
    """

    def __init__(self, path: Path) -> None:
        self.name = "stdout" if str(path) == STANDARD else str(path)
        self.can_resume = self.name != "stdout" and (not path.exists() or path.is_file())
        self.done: dict[str, bool] = {}
        try:
            if self.name == "stdout":
                sys.stdout.flush()
                self._file = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
            elif self.can_resume:
                end = self._read_existing(path)
                self._file = path.open("ab", buffering=0)
                if self._file.tell() != end:
                    self._file.truncate(end)
            else:
                self._file = path.open("wb", buffering=0)
        except OSError as e:
            raise ConfigError(f"-o {path}: {e.strerror or e}") from None

    def _read_existing(self, path: Path) -> int:
        """Fills `done`. Returns the length of the file up to its last whole line."""
        end = 0
        if not path.exists():
            return end
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_RESULT_BYTES), b""), start=1):
                if not line.endswith(b"\n") and len(line) < MAX_RESULT_BYTES:
                    break
                self._note(number, line)
                end += len(line)
        return end

    def _note(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            key = row["custom_id"] if isinstance(row["custom_id"], str) else row["id"]
            self.done[str(key)] = row["error"] is not None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"-o {self.name} exists and its line {number} is not a batch result; give another file"
            ) from None

    def write(self, key: str, row: dict[str, Any]) -> None:
        """Appends one result, which may hold `msgspec.Raw`, and passes it to the system at once. Raises ConfigError,
        for a full disk among others."""
        try:
            line = msgspec.json.encode(row)
        except UnicodeEncodeError:  # a custom_id may hold half a surrogate pair, which only an escape can write
            line = json.dumps(row, default=lambda raw: json.loads(bytes(raw))).encode()
        left = memoryview(line + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except BrokenPipeError:
            raise
        except OSError as e:
            raise ConfigError(f"-o {self.name} cannot be written: {e.strerror or e}") from None
        self.done[key] = row["error"] is not None

    def close(self) -> None:
        """Has the system store what was written. There is no buffer here, so a failed write is not repeated."""
        try:
            if self.can_resume:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
