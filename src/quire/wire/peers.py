"""Messages and counts that the processes of one server share.

Messages pass over a pair of connected Unix sockets, one of which is the process's standard input: a message is its
length and msgpack. When one of the two processes ends, the connection ends, and the other notices.

Counts are rows of a small shared file, one row per process. A process writes its own row only, so no update is lost and
no lock is needed; a total is the sum of a column. The supervising process clears the row of a dead one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.wire.handshake import PROTOCOL_VERSION, ClientAddresses

_WORD_BYTES = 8
"""Size of a number, which is read and written as one aligned word."""


class SharedCounts:
    """The file, for the process of row `row`."""

    def __init__(self, memory: mmap.mmap, num_columns: int, row: int) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._table = np.frombuffer(memory, np.int64).reshape(-1, num_columns)
        self._num_columns = num_columns
        self._row = row

    @classmethod
    def create(cls, path: Path, num_rows: int, num_columns: int) -> SharedCounts:
        """Makes a new file, all zero. Its maker has row 0."""
        path.write_bytes(b"\0" * (num_rows * num_columns * _WORD_BYTES))
        path.chmod(0o600)
        return cls.attach(path, num_columns, 0)

    @classmethod
    def attach(cls, path: Path, num_columns: int, row: int) -> SharedCounts:
        """Opens an existing file. Raises OSError or ValueError if there is none with such a row."""
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        if len(memory) % (num_columns * _WORD_BYTES) or len(memory) <= row * num_columns * _WORD_BYTES:
            raise ValueError(f"{path} has no row {row} of {num_columns} columns")
        return cls(memory, num_columns, row)

    def column(self, index: int) -> SharedCount:
        """Returns one number of each process."""
        if not 0 <= index < self._num_columns:
            raise IndexError(f"column {index} of {self._num_columns}")
        return SharedCount(self._words[index :: self._num_columns], self._row)

    @property
    def row(self) -> int:
        """Number of this process's row."""
        return self._row

    @property
    def num_rows(self) -> int:
        """Number of processes."""
        return len(self._words) // self._num_columns

    def get(self, row: int, start: int, stop: int) -> list[int]:
        """Returns the numbers of a process in columns `start` to `stop`, without the last."""
        base = row * self._num_columns
        return self._words[base + start : base + stop].tolist()

    def sum_others(self, stop: int) -> list[int]:
        """Returns the sums of the other processes' numbers in the columns before `stop`."""
        table = self._table[:, :stop]
        sums: list[int] = (table.sum(axis=0) - table[self._row]).tolist()
        return sums

    def put(self, start: int, values: Sequence[int]) -> None:
        """Sets this process's numbers in the columns from `start`."""
        base = self._row * self._num_columns + start
        for i, value in enumerate(values):
            self._words[base + i] = value

    def clear_row(self, row: int) -> None:
        """Sets the row of a process that has ended to zero."""
        for index in range(self._num_columns):
            self._words[row * self._num_columns + index] = 0


class SharedCount:
    """One column: this process's number, and those of the others."""

    __slots__ = ("_column", "_row")

    def __init__(self, column: memoryview[int], row: int) -> None:
        self._column = column
        self._row = row

    def put(self, value: int) -> None:
        """Sets this process's number."""
        self._column[self._row] = value

    def others(self) -> int:
        """Returns the sum of the other processes' numbers."""
        return sum(self._column) - self._column[self._row]


LENGTH = struct.Struct("<I")
"""Number of bytes of a message; sent before it."""
MAX_PEER_BYTES = 1 << 29
"""Longest message that is accepted."""
PARENT = 0
"""The target that is the parent; the API processes are numbered from 1, as clients of the core are."""
EVERYBODY = -1
"""The target of all other API processes."""


class ApiLaunch(msgspec.Struct, frozen=True):
    """The first message to an API process. Every field is sent."""

    index: int
    """From 1: its number among the processes, and as a client of the core."""
    num_processes: int
    parent_pid: int
    engine_config: bytes
    """Result of `quire.config.server.encode_config`."""
    server_config: bytes
    """Encoded `ServerConfig`, without keys."""
    key_digests: tuple[bytes, ...]
    salt_secret: bytes
    """Secret for cache salts: the same in all processes, so that they share cached prefixes."""
    created: int
    """Start of the server, as shown by /v1/models."""
    client: ClientAddresses
    listener: int
    """Descriptor of the listening socket, which all processes share."""
    admin_listener: int | None
    urls: tuple[str, str | None]
    """URLs of the server, for messages."""
    counts_path: str
    """Path of the `SharedCounts`."""
    metrics_path: str = ""
    """Unused: metrics are calls like all others. The field goes when the protocol version next changes."""
    protocol_version: int = PROTOCOL_VERSION


class PeerMessage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A call, with a `method`, or the answer to one, without. A call of number 0 is not answered."""

    call_id: int
    method: str = ""
    target: int = PARENT
    """Target of a call of an API process."""
    args: tuple[Any, ...] = ()
    result: Any = None
    error_type: str = ""
    """With an error: name of its class in `quire.errors`; empty for another error."""
    error: str = ""
    """Reason of a failed call; empty otherwise."""


def encode_peer(message: ApiLaunch | PeerMessage) -> bytes:
    """Returns the bytes of a message."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
