"""A ring of messages in shared memory: one process writes, one or several read, and each reads every message.

A message is written in chunks, each into a slot; a slot is free again when every reader has passed it, so a message may
be larger than the ring. A reader that has nothing to read sets a flag in the ring and sleeps: on its end of a pair of
sockets, to which the writer sends one byte, or on a bell, by which one call of the system wakes all readers that sleep.
(Woken one after the other, readers would also run one after the other where the first takes the writer's processor.) A
reader looks by itself twice a second.

Words are written and read whole (aligned, of 8 bytes). Between its flag and its second look a reader passes a memory
barrier, as the writer does between its word and the flag: one of the two sees the other.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import ServerError
from quire.wire.serial import Frame
from quire.wire.shared_memory import make_shared_file
from quire.wire.worker_link import WorkerNetwork

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
_WHOLE_HEADS = [struct.Struct(f"<II{1 + count}Q") for count in range(16)]
"""Both, before a message of one chunk."""
_WHOLE = struct.Struct("<IIQ")
"""Their first values: the bytes, 1, and the number of frames."""


NO_BELL = -1
_BY_BYTE, _BY_BELL = 1, 2
"""Flags of a reader that sleeps: how it is woken."""


def make_bell() -> int:
    """Returns the descriptor of a new bell, which rings of several processes may share; NO_BELL: the system has none.

    It is never read. Each `Waiter` is woken once by each ring of it, as epoll is by an edge.
    """
    if sys.platform == "linux":
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    else:
        return NO_BELL


def _ring_bell(bell: int) -> None:
    if sys.platform == "linux":
        os.eventfd_write(bell, 1)


class Waiter:
    """Waits for a bell and for descriptors that can be read."""

    def __init__(self, bell: int, fds: Sequence[int] = ()) -> None:
        """`bell`: may be NO_BELL."""
        self.bell = bell
        self._wait: Callable[[float], list[tuple[int, int]]]
        self.watch: Callable[[int], None]
        """Waits for this descriptor, too."""
        self.close: Callable[[], None] = lambda: None
        """Releases what the system keeps for it."""
        if sys.platform == "linux" and bell != NO_BELL:
            epoll = select.epoll()
            epoll.register(bell, select.EPOLLIN | select.EPOLLET)
            self._wait, self.watch, self.close = epoll.poll, lambda fd: epoll.register(fd, select.EPOLLIN), epoll.close
        else:
            poll = select.poll()
            self._wait = lambda timeout_s: poll.poll(1e3 * timeout_s)
            self.watch = lambda fd: poll.register(fd, select.POLLIN)
        for fd in fds:
            self.watch(fd)

    def wait(self, timeout_s: float) -> list[int]:
        """Returns the descriptors that can be read, the bell among them if it has been rung; none after the timeout."""
        return [fd for fd, _ in self._wait(timeout_s)]


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
        self._first_slot = (1 + num_readers) * LINE_BYTES
        self._fence = threading.Lock()
        """Taking it is a memory barrier."""

    def _slot(self, chunk: int) -> int:
        return self._first_slot + chunk % self._num_slots * self._slot_bytes

    def close(self) -> None:
        """Unmaps the memory."""
        self._words.release()
        self._memory.close()


class RingWriter(_Ring):
    """The writing end. `wakers` are sockets, one for each reader; `bell` is that of the readers which have one."""

    def __init__(
        self,
        fd: int,
        wakers: Sequence[socket.socket],
        *,
        bell: int = NO_BELL,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        super().__init__(fd, len(wakers), num_slots, slot_bytes)
        self._wakers, self._bell = wakers, bell
        self._flags = [(1 + reader) * _LINE_WORDS + 1 for reader in range(len(wakers))]
        self._written = 0
        self._has_room_until = num_slots
        """Number of chunks before which no reader has to be looked at."""

    def send(self, frames: Sequence[Frame], check: Callable[[], None] = lambda: None) -> None:
        """Writes a message. While the ring is full it calls `check`, which raises if a reader is gone."""
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        count, room = len(sizes), self._slot_bytes - _CHUNK.size
        left = _WORD_BYTES * (1 + count) + sum(sizes)
        if left <= room and count < len(_WHOLE_HEADS):  # most messages
            if self._written >= self._has_room_until:
                self._await_room(check)
            place = self._first_slot + self._written % self._num_slots * self._slot_bytes
            data = b"".join((_WHOLE_HEADS[count].pack(left, 1, count, *sizes), *frames))
            self._memory[place : place + len(data)] = data
            self._publish()
            return
        head = _head_of(count).pack(count, *sizes)
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
        """Makes the chunk visible that was written, and wakes the readers that sleep."""
        words = self._words
        self._written += 1
        words[0] = self._written
        with self._fence:
            pass
        is_rung = False
        for reader, flag in enumerate(self._flags):
            if how := words[flag]:
                words[flag] = 0  # before it is woken, and may sleep again
                if how == _BY_BELL:
                    is_rung = True
                else:
                    self._send_byte(self._wakers[reader])
        if is_rung:
            _ring_bell(self._bell)

    def _send_byte(self, waker: socket.socket) -> None:
        try:
            waker.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # bytes are waiting there
        except OSError:
            pass  # a reader that is gone is noticed elsewhere

    def end(self) -> None:
        """Unmaps the memory and closes the sockets."""
        self.close()
        for waker in self._wakers:
            waker.close()

    def _await_room(self, check: Callable[[], None]) -> None:
        while self._written >= self._has_room_until:
            least = min(self._words[(1 + reader) * _LINE_WORDS] for reader in range(self._num_readers))
            self._has_room_until = least + self._num_slots
            if self._written >= self._has_room_until:
                check()
                time.sleep(FULL_LOOK_S)


class RingReader(_Ring):
    """The reading end number `index` of `num_readers`. It sleeps by the bell if it has one, and else by `waker`."""

    def __init__(
        self,
        fd: int,
        waker: socket.socket,
        index: int = 0,
        num_readers: int = 1,
        *,
        bell: int = NO_BELL,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        super().__init__(fd, num_readers, num_slots, slot_bytes)
        self.waker, self._bell = waker, bell
        self._place, self._flag = (1 + index) * _LINE_WORDS, (1 + index) * _LINE_WORDS + 1
        """Indexes of its words: the number of chunks it has read, and its flag."""
        self._read = 0
        self._way = _BY_BYTE if bell == NO_BELL else _BY_BELL
        self._waiter: Waiter | None = None

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

    def end(self) -> None:
        """Unmaps the memory and closes the socket."""
        self.close()
        self.waker.close()

    def close(self) -> None:
        super().close()
        if self._waiter is not None:
            self._waiter.close()

    def is_ready(self) -> bool:
        """Returns whether a message has begun to arrive."""
        return self._words[0] > self._read

    def begin_sleep(self) -> bool:
        """Asks to be woken when there is a message: by the bell, or a byte on `waker`. Returns False if there is one
        already."""
        self._words[self._flag] = self._way
        with self._fence:
            pass
        if self._words[0] > self._read:
            self._words[self._flag] = 0
            return False
        return True

    def end_sleep(self) -> bool:
        """Asks to be woken no more, and takes the bytes that have come. Returns False if the writer is gone."""
        self._words[self._flag] = 0
        return self._way == _BY_BELL or self._take_bytes()

    def _take_bytes(self) -> bool:
        try:
            return bool(self.waker.recv(64, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _sleep(self, timeout_s: float | None) -> bool:
        """Returns False if the writer is gone."""
        if self._waiter is None:
            self._waiter = Waiter(self._bell, [self.waker.fileno()])
        if not self.begin_sleep():
            return True
        ready = self._waiter.wait(LOOK_S if timeout_s is None else min(timeout_s, LOOK_S))
        self._words[self._flag] = 0
        return not ready or ready == [self._bell] or self._take_bytes() or self.is_ready()

    def take(self) -> list[memoryview]:
        """Returns the frames of the message that has begun to arrive. Raises RingBrokenError if its rest does not."""
        place = self._first_slot + self._read % self._num_slots * self._slot_bytes
        size, is_last, count = _WHOLE.unpack_from(self._memory, place)
        data = self._memory[place + _CHUNK.size : place + _CHUNK.size + size]
        self._read += 1
        self._words[self._place] = self._read
        if not is_last:
            data += self._take_rest()
        view, start, frames = memoryview(data), _WORD_BYTES * (1 + count), list[memoryview]()
        for size in _head_of(count).unpack_from(data)[1:]:
            frames.append(view[start : start + size])
            start += size
        return frames

    def _take_rest(self) -> bytes:
        """Returns the bytes of the other chunks of a message."""
        parts, is_last = list[bytes](), 0
        while not is_last:
            while not self.is_ready():
                if not self._sleep(60.0):
                    raise RingBrokenError("the process that writes has ended in the middle of a message")
            place = self._slot(self._read)
            size, is_last = _CHUNK.unpack_from(self._memory, place)
            parts.append(self._memory[place + _CHUNK.size : place + _CHUNK.size + size])
            self._read += 1
            self._words[self._place] = self._read
        return b"".join(parts)


def _head_of(count: int) -> struct.Struct:
    return _HEADS[count] if count < len(_HEADS) else struct.Struct(f"<{1 + count}Q")


class WorkerLinks(NamedTuple):
    """Links of a worker with the other workers of its engine."""

    shared_file: int
    """Descriptor of the file that all of them map."""
    inlet: RingReader | None = None
    """Brings the hidden states of the stage before; None: this is the first."""
    outlet: RingWriter | None = None
    """Takes hidden states to the stage after; None: this is the last, or another worker of the stage sends them."""
    ranks: range = range(0)
    """Workers of the engine on this machine; empty: all."""
    network: WorkerNetwork | None = None
    """Leads to the workers on other machines; None: there are none."""
