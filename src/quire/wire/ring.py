"""A ring of messages in shared memory: one process writes, one or several read, and each reads every message.

A message is written in chunks, each into a slot; a slot is free again when every reader has passed it, so a message may
be larger than the ring. A reader that has nothing to read sleeps on its end of a pair of sockets: it sets a flag in the
ring, and the writer sends one byte. A reader looks by itself twice a second.

Words are written and read whole (aligned, of 8 bytes). Between its flag and its second look a reader passes a memory
barrier, as the writer does between its word and the flag: one of the two sees the other.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import ServerError
from quire.wire.serial import Frame
from quire.wire.shared_memory import make_shared_file

NUM_SLOTS = 64
SLOT_BYTES = 64 << 10
LINE_BYTES = 64
FULL_LOOK_S = 0.0005
"""Interval at which a writer looks for room in a ring that is full."""
LOOK_S = 0.5
"""Longest sleep of a reader: not every processor makes a lock a whole memory barrier, and a byte might not be sent."""
CHECK_S = 0.05
"""The same where the reader checks whether it is still wanted."""
_WORD_BYTES = 8
_LINE_WORDS = LINE_BYTES // _WORD_BYTES
_CHUNK = struct.Struct("<II")
"""Before each chunk: its bytes, and 1 if it is the last of its message."""
_HEADS = [struct.Struct(f"<{1 + count}Q") for count in range(16)]
"""Before the frames: their number, and the size of each; by the number, for the usual ones."""


class RingBrokenError(ServerError):
    """The other end of a ring is gone or does not take part any more."""


def make_ring_file(num_readers: int, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> int:
    """Returns the descriptor of the memory of a new ring."""
    return make_shared_file(_size(num_readers, num_slots, slot_bytes))


def _size(num_readers: int, num_slots: int, slot_bytes: int) -> int:
    return LINE_BYTES * (1 + num_readers) + num_slots * slot_bytes


def count_slots(fd: int, num_readers: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Returns the number of slots of a ring that another process has made."""
    return (os.fstat(fd).st_size - LINE_BYTES * (1 + num_readers)) // slot_bytes


class _Ring:
    """The memory: a line with the number of chunks written; of each reader a line with the number it has read, and its
    flag; then slots."""

    def __init__(self, fd: int, num_readers: int, num_slots: int, slot_bytes: int) -> None:
        self._memory = mmap.mmap(fd, _size(num_readers, num_slots, slot_bytes))
        self._words = memoryview(self._memory).cast("Q")
        self._num_readers, self._num_slots, self._slot_bytes = num_readers, num_slots, slot_bytes
        self._fence = threading.Lock()

    def _get(self, line: int, word: int = 0) -> int:
        return self._words[line * _LINE_WORDS + word]

    def _set(self, value: int, line: int, word: int = 0) -> None:
        self._words[line * _LINE_WORDS + word] = value

    def _slot(self, chunk: int) -> int:
        return (1 + self._num_readers) * LINE_BYTES + chunk % self._num_slots * self._slot_bytes

    def _pass_fence(self) -> None:
        with self._fence:  # taking a lock is a memory barrier
            pass

    def close(self) -> None:
        """Unmaps the memory."""
        self._words.release()
        self._memory.close()


class RingWriter(_Ring):
    """The writing end. `wakers` are sockets, one for each reader."""

    def __init__(
        self,
        fd: int,
        wakers: Sequence[socket.socket],
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        super().__init__(fd, len(wakers), num_slots, slot_bytes)
        self._wakers = wakers
        self._written = 0
        self._has_room_until = num_slots
        """Number of chunks before which no reader has to be looked at."""

    def send(self, frames: Sequence[Frame], check: Callable[[], None] = lambda: None) -> None:
        """Writes a message. While the ring is full it calls `check`, which raises if a reader is gone."""
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        head = _pack_head(sizes)
        left, room = len(head) + sum(sizes), self._slot_bytes - _CHUNK.size
        if left <= room:  # most messages
            self._await_room(check)
            place, data = self._slot(self._written), b"".join((_CHUNK.pack(left, 1), head, *frames))
            self._memory[place : place + len(data)] = data
            self._publish()
            return
        views = (memoryview(frame).cast("B") for frame in frames)
        pieces = [memoryview(head), *(view for view in views if len(view))]
        while left:
            size = min(left, room)
            left -= size
            self._await_room(check)
            place = self._slot(self._written)
            _CHUNK.pack_into(self._memory, place, size, not left)
            place += _CHUNK.size
            while size:
                part = pieces[0][:size]
                self._memory[place : place + len(part)] = part
                pieces[0] = pieces[0][len(part) :]
                place, size = place + len(part), size - len(part)
                if not len(pieces[0]):
                    pieces.pop(0)
            self._publish()

    def _publish(self) -> None:
        """Makes the chunk visible that was written."""
        self._written += 1
        self._set(self._written, 0)
        self._wake()

    def _await_room(self, check: Callable[[], None]) -> None:
        while self._written >= self._has_room_until:
            least = min(self._get(1 + reader) for reader in range(self._num_readers))
            self._has_room_until = least + self._num_slots
            if self._written >= self._has_room_until:
                check()
                time.sleep(FULL_LOOK_S)

    def _wake(self) -> None:
        self._pass_fence()
        for reader, waker in enumerate(self._wakers):
            if self._get(1 + reader, 1):
                self._set(0, 1 + reader, 1)
                try:
                    waker.send(b"\0", socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # bytes are waiting there
                except OSError:
                    pass  # a reader that is gone is noticed elsewhere


class RingReader(_Ring):
    """The reading end number `index` of `num_readers`."""

    def __init__(
        self,
        fd: int,
        waker: socket.socket,
        index: int = 0,
        num_readers: int = 1,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        super().__init__(fd, num_readers, num_slots, slot_bytes)
        self._line, self.waker = 1 + index, waker
        self._read = 0
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def receive(
        self, timeout_s: float | None = None, check: Callable[[], None] | None = None
    ) -> list[memoryview] | None:
        """Returns the frames of the next message; None after the timeout, or once the writer is gone. While it waits it
        calls `check`, which raises if the message is not wanted any more."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready():
            left = None if deadline is None else deadline - time.monotonic()
            if check is not None:
                check()
                left = CHECK_S if left is None else min(left, CHECK_S)
            if (left is not None and left <= 0) or not self._sleep(left):
                return None
        return self.take()

    def is_ready(self) -> bool:
        """Returns whether a message has begun to arrive."""
        return self._get(0) > self._read

    def begin_sleep(self) -> bool:
        """Asks for a byte on `waker` when there is a message. Returns False if there is one already."""
        self._set(1, self._line, 1)
        self._pass_fence()
        if self.is_ready():
            self._set(0, self._line, 1)
            return False
        return True

    def cancel_sleep(self) -> None:
        """Asks for no byte any more. One that comes all the same is taken after the next sleep."""
        self._set(0, self._line, 1)

    def end_sleep(self) -> bool:
        """Takes the bytes that have come. Returns False if the writer is gone."""
        self._set(0, self._line, 1)
        try:
            return bool(self.waker.recv(64, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _sleep(self, timeout_s: float | None) -> bool:
        if self.begin_sleep():
            if self._poll.poll(1e3 * (LOOK_S if timeout_s is None else min(timeout_s, LOOK_S))):
                return self.end_sleep()
            self.cancel_sleep()
        return True

    def take(self) -> list[memoryview]:
        """Returns the frames of the message that has begun to arrive. Raises RingBrokenError if its rest does not."""
        parts, is_last = list[bytes](), False
        while not is_last:
            while not self.is_ready():
                if not self._sleep(60.0):
                    raise RingBrokenError("the process that writes has ended in the middle of a message")
            place = self._slot(self._read)
            size, last = _CHUNK.unpack_from(self._memory, place)
            parts.append(self._memory[place + _CHUNK.size : place + _CHUNK.size + size])
            self._read += 1
            self._set(self._read, self._line)
            is_last = bool(last)
        data = memoryview(b"".join(parts) if len(parts) > 1 else parts[0])
        count = int.from_bytes(data[:_WORD_BYTES], "little")
        frames, start = [], _WORD_BYTES * (1 + count)
        for size in _head_of(count).unpack_from(data)[1:]:
            frames.append(data[start : start + size])
            start += size
        return frames


def _head_of(count: int) -> struct.Struct:
    return _HEADS[count] if count < len(_HEADS) else struct.Struct(f"<{1 + count}Q")


def _pack_head(sizes: Sequence[int]) -> bytes:
    return _head_of(len(sizes)).pack(len(sizes), *sizes)


class WorkerLinks(NamedTuple):
    """Links of a worker with the other workers of its engine."""

    shared_file: int
    """Descriptor of the file that all of them map."""
    inlet: RingReader | None = None
    """Brings the hidden states of the stage before; None: this is the first."""
    outlet: RingWriter | None = None
    """Takes hidden states to the stage after; None: this is the last, or another worker of the stage sends them."""
