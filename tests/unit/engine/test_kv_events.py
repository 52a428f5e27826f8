"""Publishing: frames and sequence numbers, replays, a queue that is full, and addresses that cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.kv_events import KVEventsConfig
from quire.engine.kv_cache.changes import BlockChanges, Change, Cleared, StoredRun, TierBlocks
from quire.engine.kv_cache.stored_blocks import StoredBlocks
from quire.engine.kv_events import EventEncoder, KVEventPublisher, KVEventsObserver
from quire.engine.sched.interface import ObservedScheduler
from quire.errors import ConfigError
from quire.wire.kv_cache import FullAttentionSpec
from quire.wire.kv_events import BlockRemoved, BlockStored, decode_batch, short_hash
from tests.simulation.subscriber import Subscriber

from .driver import Core

SPEC = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=8)
END = b"\xff" * 8
PATIENCE_MS = 120_000


def run(number: int) -> StoredRun:
    stored = StoredRun(0, None)
    stored.append(number.to_bytes(32, "big"), [number, number], None)
    return stored


class Reader:
    """A subscriber's sockets."""

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self.events = context.socket(zmq.SUB)
        self.events.subscribe(b"")
        self.events.connect(f"ipc://{directory}/events")
        self.replays = context.socket(zmq.DEALER)
        self.replays.connect(f"ipc://{directory}/replay")

    def read(self) -> tuple[bytes, int, bytes]:
        """Returns topic, number and payload of the next batch."""
        assert self.events.poll(PATIENCE_MS)
        topic, sequence, payload = self.events.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), payload

    def replay(self, *request: bytes) -> list[int]:
        """Returns the numbers that a request is answered with."""
        self.replays.send_multipart(request)
        numbers = []
        while self.replays.poll(PATIENCE_MS):
            empty, topic, sequence, payload = self.replays.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert topic == payload == b""
                return numbers
            assert topic == b"kv"
            numbers.append(int.from_bytes(sequence, "big"))
        raise AssertionError("a replay did not end")


def config(directory: Path, **values: Any) -> KVEventsConfig:
    endpoints = {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay"}
    return KVEventsConfig.from_json({"enable_kv_cache_events": True, "topic": "kv", **endpoints, **values})


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def reader(context: zmq.Context[Any], tmp_path: Path) -> Reader:
    return Reader(context, tmp_path)


def wait_subscribed(publisher: KVEventPublisher, reader: Reader) -> int:
    """Publishes until the subscription has arrived. Returns the number of the last batch."""
    while not reader.events.poll(10):
        publisher.publish([Cleared.ALL])
    last = -1
    while reader.events.poll(200):
        last = reader.read()[1]
    return last


def test_batches_are_numbered_and_can_be_replayed(tmp_path: Path, reader: Reader) -> None:
    noted: list[int] = []
    publisher = KVEventPublisher(config(tmp_path, buffer_steps=3), [SPEC], first_sequence=5, note_sequence=noted.append)
    try:
        last = wait_subscribed(publisher, reader)
        for number in (1, 2, 3, 4):
            publisher.publish([run(number)])
        subscriber = Subscriber()
        for number in (1, 2, 3, 4):
            topic, sequence, payload = reader.read()
            assert (topic, sequence) == (b"kv", last + number)
            subscriber.apply(payload)
        assert subscriber.hashes() == {(number, 0) for number in (1, 2, 3, 4)}
        assert noted == list(range(6, last + 6)), "a number is noted before its message is sent"
        assert reader.replay(b"", (0).to_bytes(8, "big")) == [last + 2, last + 3, last + 4], "what the buffer has"
        assert reader.replay(b"", (last + 4).to_bytes(8, "big")) == [last + 4]
        assert reader.replay(b"", (2**64 - 1).to_bytes(8, "big")) == []
        reader.replays.send_multipart([b"", b"short"])  # is ignored
        assert reader.replay(b"", (last + 4).to_bytes(8, "big")) == [last + 4]
    finally:
        publisher.close()


def test_whole_digests_are_sent_if_asked_for(tmp_path: Path, reader: Reader) -> None:
    publisher = KVEventPublisher(config(tmp_path), [SPEC], uses_short_hashes=False)
    try:
        wait_subscribed(publisher, reader)
        publisher.publish([run(7)])
        subscriber = Subscriber()
        subscriber.apply(reader.read()[2])
        assert subscriber.hashes() == {((7).to_bytes(32, "big"), 0)}
    finally:
        publisher.close()


def test_an_address_in_use_is_an_error_of_the_configuration(tmp_path: Path, context: zmq.Context[Any]) -> None:
    with context.socket(zmq.PUB) as other:
        address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(ConfigError, match=f"replay_endpoint {address} cannot be bound: Address already"):
            KVEventPublisher(config(tmp_path, replay_endpoint=address), [SPEC])


class FullPublisher:
    """Takes no batch as long as it is full."""

    def __init__(self) -> None:
        self.has_room = True
        self.published: list[list[Change]] = []

    def publish(self, changes: list[Change]) -> None:
        self.published.append(changes)

    def close(self) -> None:
        pass


def test_the_blocks_of_a_store_are_told_apart(tmp_path: Path) -> None:
    changes: list[Change] = [
        TierBlocks(0, [b"a" * 32, b"b" * 32], is_stored=True),
        TierBlocks(0, [b"a" * 32], is_stored=False),
        TierBlocks(0, [b"a" * 32], is_stored=True, locality="REMOTE"),
        TierBlocks(0, [b"a" * 32], is_stored=False, locality="REMOTE"),
    ]
    stored, removed, *elsewhere = decode_batch(EventEncoder([SPEC]).encode(1.0, changes)).events
    names = [short_hash(b"a" * 32), short_hash(b"b" * 32)]
    assert stored == BlockStored(names, None, [], 2, None, "STORAGE", None, group_idx=0, locality="LOCAL")
    assert removed == BlockRemoved(names[:1], "STORAGE", 0, "LOCAL")
    assert elsewhere == [
        msgspec.structs.replace(stored, block_hashes=names[:1], locality="REMOTE"),
        msgspec.structs.replace(removed, locality="REMOTE"),
    ]


def test_a_store_is_told_anew_when_subscribers_forget_everything() -> None:
    driver, publisher, stored = Core(enable_prefix_caching=True), FullPublisher(), StoredBlocks(1)
    driver.core.scheduler.exchange = SimpleNamespace(connector=SimpleNamespace(stored=[stored]))
    observer = KVEventsObserver(publisher)  # type: ignore[arg-type]
    observer.attach(driver.core.scheduler)
    all_stored = TierBlocks(0, [b"a" * 32], is_stored=True)
    stored.update(0, [(0, b"a" * 32)], [])
    observer._publish()
    observer._publish()
    assert publisher.published == [[Cleared.ALL], [all_stored]]
    driver.core.scheduler.kv_cache_manager.reset_prefix_cache()
    observer._publish()
    assert publisher.published[2:] == [[Cleared.ALL, all_stored]]
    publisher.has_room = False
    stored.update(0, [(1, b"a" * 32)], [])
    observer._publish()
    publisher.has_room = True
    observer._publish()
    assert publisher.published[3:] == [[Cleared.ALL, all_stored, TierBlocks(1, [b"a" * 32], is_stored=True)]]


def test_what_is_lost_is_made_good_by_all_that_is_cached() -> None:
    driver, publisher = Core(enable_prefix_caching=True), FullPublisher()
    observer = KVEventsObserver(publisher)  # type: ignore[arg-type]
    driver.core.scheduler = ObservedScheduler(driver.core.scheduler, [observer])
    pool = driver.core.scheduler.observed.kv_cache_manager.block_pool
    assert publisher.published == [[Cleared.ALL]], "the first batch says that nothing is cached"
    driver.add("a", 40, max_tokens=2)
    driver.run()
    num_batches = len(publisher.published)
    assert num_batches > 1
    publisher.has_room = False
    driver.add("b", 60, max_tokens=2)
    driver.run()
    assert len(publisher.published) == num_batches
    changes = pool.changes
    assert isinstance(changes, BlockChanges)
    publisher.has_room = True
    driver.add("c", 1, max_tokens=1)
    driver.run()
    first, *runs = publisher.published[num_batches]
    assert first is Cleared.ALL
    stored = {digest for each in runs if isinstance(each, StoredRun) for digest in each.hashes}
    assert stored == {key[:-4] for key in pool.cached_blocks._blocks}
