"""KV cache events: an observer takes the changes of the prefix cache, one batch for each step that had any; a publisher
encodes and sends them, on a thread of its own.

Messages are not encrypted and contain the token ids of prompts: the socket is this host's unless an address says
otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import zmq

from quire.config.engine import EngineConfig
from quire.config.kv_events import FLAG, KVEventsConfig
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.changes import (
    BlockChanges,
    Change,
    Cleared,
    StoredRun,
    TierBlocks,
    describe_cached_blocks,
)
from quire.engine.kv_cache.stored_blocks import StoredBlocks
from quire.engine.request import RequestStatus
from quire.engine.sched.interface import SchedulerInterface, SchedulerObserver
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.wire.block_hash import BlockHash, ExtraKeys
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec
from quire.wire.kv_events import (
    DEVICE_MEDIUM,
    END_OF_REPLAY,
    STORE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventHash,
    KVEventBatch,
    KVEventSource,
    encode_batch,
    encode_sequence,
    short_hash,
)
from quire.wire.sockets import make_public_socket

logger = init_logger(__name__)

END_S = 5.0
"""Seconds to wait at the end until everything is sent."""
LINGER_MS = 1000
BATCHES_PER_TURN = 64
"""Batches that are sent before a replay has its turn."""


class KVEventsObserver(SchedulerObserver):
    """Publishes what the pool records. The first event is `AllBlocksCleared`, because the core before may have died.

    A batch that the publisher has no room for is lost. As soon as there is room, one batch clears what subscribers know
    and stores all that is cached.
    """

    def __init__(self, publisher: KVEventPublisher) -> None:
        self._publisher = publisher
        self._pool: BlockPool | None = None
        self._num_groups = 0
        self._stored: Sequence[StoredBlocks] = ()
        self._has_lost = False

    def attach(self, scheduler: SchedulerInterface) -> None:
        """Lets the pool record its changes. Raises ConfigError for a scheduler without Quire's cache."""
        manager: Any = getattr(scheduler, "kv_cache_manager", None)
        if manager is None:
            raise ConfigError(
                "--kv-events-config needs a scheduler with a kv_cache_manager; --scheduler-cls names another"
            )
        self._pool, self._num_groups = manager.block_pool, len(manager.groups)
        self._stored = _find_stored(scheduler)
        self._pool.changes = BlockChanges()
        self._pool.changes.on_cleared()
        self._publish()

    def on_finish(
        self, request_ids: list[str] | None, status: RequestStatus, report: bool, ended: Sequence[str], now: float
    ) -> None:
        self._publish()

    def on_update(
        self,
        output: SchedulerOutput,
        model_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        start: float,
        end: float,
    ) -> None:
        self._publish()

    def on_abandon(self, now: float) -> None:
        self._publish()

    def on_reset(self, reset_running_requests: bool, done: bool, now: float) -> None:
        self._publish()

    def close(self) -> None:
        self._publisher.close()

    def _publish(self) -> None:
        assert self._pool is not None
        assert self._pool.changes is not None
        changes = self._pool.changes.take()
        if not self._has_lost:
            changes += self._take_stored(is_cleared=Cleared.ALL in changes)
        if not changes and not self._has_lost:
            return
        if not self._publisher.has_room:
            self._pool.changes.num_dropped += 1
            if not self._has_lost:
                logger.warning("KV cache events are lost: subscribers get all that is cached once there is room")
            self._has_lost = True
            return
        if self._has_lost:
            cached = describe_cached_blocks(self._pool.blocks, self._num_groups)
            changes = [Cleared.ALL, *cached, *self._take_stored(is_cleared=True)]
            self._has_lost = False
        self._publisher.publish(changes)

    def _take_stored(self, *, is_cleared: bool) -> list[Change]:
        """Returns the changes of stores; all that is in them if subscribers forget everything with this batch."""
        return [change for stored in self._stored for change in stored.take(everything=is_cleared)]


class KVEventPublisher:
    """Owns the sockets, the sequence numbers and the batches that can be replayed.

    `publish` and `close` are called on the core's loop. Sequence numbers go on from `first_sequence`; `note_sequence`
    is called with the number of the next message before one is sent, so that the next core of this engine goes on.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        specs: Sequence[AnyKVCacheSpec],
        rank: int = 0,
        *,
        first_sequence: int = 0,
        note_sequence: Callable[[int], None] = lambda sequence: None,
        uses_short_hashes: bool = True,
    ) -> None:
        """Opens the sockets. Raises ConfigError if one cannot be."""
        self._encoder = EventEncoder(
            specs, rank, as_arrays=config.event_format == "array", uses_short_hashes=uses_short_hashes
        )
        self._topic, self._max_waiting = config.topic.encode(), config.max_queue_size
        self._sequence, self._note_sequence = first_sequence, note_sequence
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._waiting: deque[tuple[float, list[Change]] | None] = deque()
        """None: the end."""
        endpoint, replay_endpoint = config.endpoint_of(rank), config.replay_endpoint_of(rank)
        self._context: zmq.Context[Any] = zmq.Context()
        self._publishing = self._open(zmq.PUB, endpoint, "endpoint", config.hwm, is_bound=config.is_bound)
        self._replaying: zmq.Socket[Any] | None = None
        if replay_endpoint is not None:  # a whole replay fits, and what is beyond is lost to a slow reader
            most = 2 * config.buffer_steps + 2
            self._replaying = self._open(zmq.ROUTER, replay_endpoint, "replay_endpoint", most)
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="KVEvents", daemon=True)
        self._thread.start()
        if endpoint.startswith("tcp://") and ("*" in endpoint or "::" in endpoint):
            logger.warning("KV cache events go to every host that asks, unencrypted: they contain prompts' tokens")

    @property
    def has_room(self) -> bool:
        """Returns whether a batch can be queued: not if too many wait, or nothing can be sent any more."""
        return len(self._waiting) < self._max_waiting and self._thread.is_alive()

    def publish(self, changes: list[Change]) -> None:
        """Queues a batch."""
        self._put((time.time(), changes))

    def close(self) -> None:
        """Sends what is queued, and closes the sockets."""
        with contextlib.suppress(OSError):  # the thread has failed
            self._put(None)
        self._thread.join(END_S)
        with contextlib.suppress(OSError):
            os.close(self._writer)

    def _put(self, item: tuple[float, list[Change]] | None) -> None:
        self._waiting.append(item)
        if len(self._waiting) == 1:  # otherwise the thread looks again before it sleeps
            os.write(self._writer, b".")

    def _open(self, kind: int, address: str, name: str, mark: int, *, is_bound: bool = True) -> zmq.Socket[Any]:
        try:
            return make_public_socket(
                self._context, address, kind, bind=is_bound, high_water_mark=mark, linger_ms=LINGER_MS
            )
        except zmq.ZMQError as e:
            self._context.destroy(0)
            what = "bound" if is_bound else "connected"
            raise ConfigError(f"{FLAG}: {name} {address} cannot be {what}: {e.strerror}; choose another") from None

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception:
            logger.exception("KV cache events are not published any more")
        finally:
            self._context.destroy(LINGER_MS)
            os.close(self._reader)

    def _serve(self) -> bool:
        """Waits for batches and requests, and answers. Returns False at the end."""
        poller = zmq.Poller()
        poller.register(self._reader, zmq.POLLIN)
        if self._replaying is not None:
            poller.register(self._replaying, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._waiting else None))
            if self._reader in ready:
                os.read(self._reader, 4096)
            for _ in range(min(len(self._waiting), BATCHES_PER_TURN)):
                item = self._waiting.popleft()
                if item is None:
                    return False
                self._send(*item)
            if self._replaying is not None and self._replaying in ready:
                self._replay(self._replaying)

    def _send(self, timestamp: float, changes: list[Change]) -> None:
        payload = self._encoder.encode(timestamp, changes)
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._note_sequence(self._sequence)
        self._sent.append((sequence, payload))
        self._publishing.send_multipart((self._topic, encode_sequence(sequence), payload))

    def _replay(self, socket: zmq.Socket[Any]) -> None:
        """Answers one request: [client, empty, the first number wanted]. Ignores others."""
        request = socket.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, start = request[0], int.from_bytes(request[2], "big")
        first = self._sent[0][0] if self._sent else 0
        for sequence, payload in islice(self._sent, min(max(0, start - first), len(self._sent)), None):
            socket.send_multipart((client, b"", self._topic, encode_sequence(sequence), payload))
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def find_source(config: EngineConfig) -> KVEventSource | None:
    """Returns where an engine publishes; None: nowhere, because events are not enabled or nothing is cached."""
    events, rank = config.observability_config.kv_events, config.parallel_config.engine_index
    if not events.is_enabled or not config.cache_config.enable_prefix_caching:
        return None
    return KVEventSource(events.endpoint_of(rank), events.replay_endpoint_of(rank), events.topic, events.event_format)


class EventEncoder:
    """Makes the payloads of batches."""

    def __init__(
        self,
        specs: Sequence[AnyKVCacheSpec],
        rank: int = 0,
        *,
        as_arrays: bool = False,
        uses_short_hashes: bool = True,
    ) -> None:
        self._specs, self._rank, self._as_arrays = specs, rank, as_arrays
        self._hash: Callable[[BlockHash], EventHash] = short_hash if uses_short_hashes else bytes

    def encode(self, timestamp: float, changes: Sequence[Change]) -> bytes:
        """Returns the payload of a batch."""
        batch = KVEventBatch(timestamp, [self._make_event(change) for change in changes], self._rank)
        return encode_batch(batch, as_arrays=self._as_arrays)

    def _make_event(self, change: Change) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(change, Cleared):
            return AllBlocksCleared()
        if isinstance(change, TierBlocks):
            return self._make_tier_event(change)
        if not isinstance(change, StoredRun):
            return BlockRemoved([self._hash(change.block_hash)], DEVICE_MEDIUM, change.group_id)
        spec = self._specs[change.group_id]
        has_keys = any(change.extra_keys)
        return BlockStored(
            [self._hash(each) for each in change.hashes],
            None if change.parent is None else self._hash(change.parent),
            change.token_ids,
            spec.block_size,
            change.lora_id,
            DEVICE_MEDIUM,
            _lora_name(change.extra_keys[0]),
            extra_keys=[_plain(keys) for keys in change.extra_keys] if has_keys else None,
            group_idx=change.group_id,
            kv_cache_spec_kind="full_attention" if spec.reach is None else "sliding_window",
            kv_cache_spec_sliding_window=spec.reach,
        )

    def _make_tier_event(self, change: TierBlocks) -> BlockStored | BlockRemoved:
        """Returns the event of a store, which knows digests only."""
        hashes, group_id = [self._hash(each) for each in change.hashes], change.group_id
        if not change.is_stored:
            return BlockRemoved(hashes, STORE_MEDIUM, group_id, change.locality)
        size, where = self._specs[group_id].block_size, change.locality
        return BlockStored(hashes, None, [], size, None, STORE_MEDIUM, None, group_idx=group_id, locality=where)


def _find_stored(scheduler: Any) -> Sequence[StoredBlocks]:
    """Returns what the scheduler's connector publishes."""
    connector: Any = getattr(getattr(scheduler, "exchange", None), "connector", None)
    return getattr(connector, "stored", ())


def _lora_name(keys: ExtraKeys | None) -> str | None:
    return next((str(key[1]) for key in keys or () if key[0] == "lora"), None)


def _plain(keys: ExtraKeys | None) -> list[Any] | None:
    """Returns the values of extra keys without Quire's tags: the name of an adapter, a salt, a digest."""
    return [key[1] for key in keys] if keys else None
