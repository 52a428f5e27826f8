"""The ring: messages of any size, in order, to every reader, whatever the sizes of ring and messages."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from quire.wire.ring import NO_BELL, RingBrokenError, RingReader, RingWriter, Waiter, make_bell, make_ring_file

Ends = tuple[RingWriter, list[RingReader], list[socket.socket]]
Make = Callable[..., Ends]
has_bells = pytest.mark.skipif(sys.platform != "linux", reason="the system has no bells")


@pytest.fixture
def make_ring() -> Iterator[Make]:
    """`make_ring(num_readers, num_slots, slot_bytes)`: the ends, and the sockets of the writer. `has_bell`: the readers
    are woken by a bell."""
    with contextlib.ExitStack() as stack:

        def make(num_readers: int, num_slots: int, slot_bytes: int, has_bell: bool = False) -> Ends:
            bell = make_bell() if has_bell else NO_BELL
            if bell != NO_BELL:
                stack.callback(os.close, bell)
            fd = make_ring_file(num_readers, num_slots=num_slots, slot_bytes=slot_bytes)
            pairs = [socket.socketpair() for _ in range(num_readers)]
            for end in (end for pair in pairs for end in pair):
                stack.callback(end.close)
            sizes = {"num_slots": num_slots, "slot_bytes": slot_bytes}
            writer = RingWriter(fd, [ours for ours, _ in pairs], bell=bell, **sizes)
            readers = [
                RingReader(fd, theirs, i, num_readers, bell=bell, **sizes) for i, (_, theirs) in enumerate(pairs)
            ]
            os.close(fd)
            return writer, readers, [ours for ours, _ in pairs]

        yield make


@pytest.mark.parametrize(("num_readers", "has_bell"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(2, 64), (3, 256), (64, 4096)])
def test_every_reader_gets_every_message(
    make_ring: Make, num_readers: int, num_slots: int, slot_bytes: int, has_bell: bool
) -> None:
    rng, count = random.Random(num_readers * num_slots), 150
    writer, readers, _ = make_ring(num_readers, num_slots, slot_bytes, has_bell)
    messages = [
        [rng.randbytes(rng.choice((0, 1, 7, 60, 300, 1500))) for _ in range(rng.randrange(4))] for _ in range(count)
    ]
    got: list[list[list[bytes]]] = [[] for _ in readers]

    def read(i: int) -> None:
        while len(got[i]) < count and (frames := readers[i].receive(30)) is not None:
            got[i].append([bytes(frame) for frame in frames])

    threads = [threading.Thread(target=read, args=(i,)) for i in range(num_readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.send(message)
    for thread in threads:
        thread.join(60)
    assert all(own == messages for own in got)


def test_a_reader_sleeps_until_there_is_something(make_ring: Make) -> None:
    writer, (reader,), _ = make_ring(1, 4, 256)
    assert reader.receive(0.01) is None
    assert reader.begin_sleep()
    writer.send([b"a"])
    assert reader.waker.recv(8) == b"\0"
    assert not reader.begin_sleep(), "there is something to read"
    assert list(map(bytes, reader.receive(1) or ())) == [b"a"]


@has_bells
def test_one_ring_of_the_bell_wakes_all_that_sleep(make_ring: Make) -> None:
    writer, readers, _ = make_ring(3, 4, 256, True)
    bell = writer._bell
    waiters = [Waiter(bell, []) for _ in readers]
    assert readers[0].begin_sleep()
    assert readers[2].begin_sleep()
    writer.send([b"a"])
    assert [waiter.wait(1) for waiter in waiters] == [[bell]] * 3
    assert [waiter.wait(0) for waiter in waiters] == [[]] * 3, "it wakes once, though it is never read"
    assert readers[0].end_sleep()
    writer.send([b"b"])
    assert waiters[0].wait(0) == [], "nothing sleeps: it is not rung"
    assert [list(map(bytes, reader.receive(1) or ())) for reader in readers] == [[b"a"]] * 3
    for waiter in waiters:
        waiter.close()


@pytest.mark.parametrize("has_bell", [False, True])
def test_a_reader_notices_that_the_writer_is_gone(make_ring: Make, has_bell: bool) -> None:
    writer, (reader,), (ours,) = make_ring(1, 4, 256, has_bell)
    writer.send([b"last"])
    ours.close()
    assert list(map(bytes, reader.receive() or ())) == [b"last"]
    assert reader.receive() is None
    reader.end()


def test_nor_does_it_wait_for_the_rest_of_a_message(make_ring: Make) -> None:
    class GoneError(Exception):
        pass

    def check() -> None:
        ours.close()
        raise GoneError

    writer, (reader,), (ours,) = make_ring(1, 2, 64)
    with pytest.raises(GoneError):
        writer.send([bytes(1000)], check)
    with pytest.raises(RingBrokenError, match="has ended in the middle of a message"):
        reader.receive()
