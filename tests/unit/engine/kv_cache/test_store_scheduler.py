"""The scheduler half of the store: what it finds, what it wants, and what it forgets."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.kv_cache.connector import NOTHING_CHOSEN, ExternalMatch
from quire.engine.kv_cache.store_scheduler import NO_PLACE, StoreScheduler
from quire.engine.request import Request
from quire.errors import ConfigError
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import ExtentWriter
from quire.kv_store.record import make_header
from quire.kv_store.write_limits import SAVED_S, WriteBudget
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)

from .model import ModelRequest

BLOCK_SIZE = 4
PAYLOAD_BYTES = 64
FINGERPRINT = hashlib.sha256(b"weights").digest()
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 8)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, 1, 8, sliding_window=6)


class Store:
    """The scheduler half, and a writer that stands for the worker half."""

    def __init__(
        self, directory: Path, specs: list[AnyKVCacheSpec], flags: dict[str, Any] | None = None, **extra: Any
    ) -> None:
        config = EngineArgs(
            "demo",
            **(flags or {}),
            kv_transfer_config={
                "kv_connector": "StoreConnector",
                "kv_role": extra.pop("kv_role", "kv_both"),
                "kv_connector_extra_config": {"path": str(directory), "max_bytes": 1 << 30, **extra},
            },
        ).create_engine_config()
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
        self.half = StoreScheduler(config, KVCacheConfig(10, [], groups))
        self.directory = StoreDirectory.open(directory, 1 << 30)
        self.writers: dict[bytes, ExtentWriter] = {}
        self.num_groups = len(specs)

    def identify(self, generation: int = 0, fingerprint: bytes = FINGERPRINT, rank: int = 0) -> None:
        info = {
            "fingerprint": fingerprint,
            "generation": generation,
            "payload_bytes": [PAYLOAD_BYTES] * self.num_groups,
        }
        self.half.update_connector_output(KVConnectorOutput(info=info, rank=rank))

    def write(self, request: ModelRequest, blocks: list[int], group: int = 0, fingerprint: bytes = FINGERPRINT) -> None:
        if fingerprint not in self.writers:
            self.writers[fingerprint] = self.directory.create_extent(fingerprint)
        for index in blocks:
            digest = request.block_hashes[index]
            header = make_header(fingerprint, digest, None, group, [1], PAYLOAD_BYTES)
            self.writers[fingerprint].append(header, [memoryview(bytes(PAYLOAD_BYTES))])
        if self.half._index is not None:
            self.half._index.scan()

    def match(self, request: ModelRequest, num_computed_tokens: int = 0) -> list[ExternalMatch]:
        return self.half.find_matches(cast(Request, request), num_computed_tokens)

    def num_matched(self, request: ModelRequest, num_computed_tokens: int = 0) -> int:
        return sum(match.num_tokens for match in self.match(request, num_computed_tokens))

    def wants(self, request: ModelRequest, index: int) -> bool:
        return list(self.half.choose_blocks(0, [request.block_hashes[index]]).wanted) == [0]


def key_of(request: ModelRequest, index: int) -> BlockKey:
    return BlockKey(request.block_hashes[index], None, (1,))


def request_of(num_tokens: int, **fields: Any) -> ModelRequest:
    return ModelRequest("r", list(range(num_tokens)), **fields)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Any]:
    made: list[Store] = []

    def make(specs: list[AnyKVCacheSpec] | None = None, **extra: Any) -> Store:
        made.append(Store(tmp_path / "store", specs or [FULL], **extra))
        return made[-1]

    yield make
    for store in made:
        store.half.shutdown()
        store.half.shutdown()
        store.directory.close()


def test_what_the_directory_has_is_matched_up_to_the_first_gap(stores: Any) -> None:
    store, request = stores(), request_of(33)
    store.write(request, [0, 1, 2, 4])
    assert store.match(request) == [], "the namespace is not known"
    store.identify()
    assert store.match(request) == [ExternalMatch(12, "disk")]
    assert store.num_matched(request, 8) == 4
    assert store.num_matched(request, 12) == 0
    store.write(request, [3, 5, 6, 7])
    assert store.half.count_stored() == (8, store.directory.count_bytes())
    assert store.num_matched(request) == 32
    assert store.num_matched(request_of(32)) == 28, "the last token is computed"


def test_a_window_needs_only_what_it_reads_but_a_proof_of_all(stores: Any) -> None:
    both, request = stores([FULL, WINDOW]), request_of(33)
    both.identify()
    both.write(request, list(range(8)), group=0)
    assert both.num_matched(request) == 0
    both.write(request, [6, 7], group=1)
    assert both.num_matched(request) == 32
    alone = stores([WINDOW])
    alone.identify()
    other = ModelRequest("r", list(range(100, 133)))
    alone.write(other, [6, 7])
    assert alone.num_matched(other) == 0, "nothing proves the tokens before"
    alone.write(other, list(range(6)))
    assert alone.num_matched(other) == 32


def test_an_order_says_where_the_records_are(stores: Any) -> None:
    store, request = stores(), request_of(17)
    store.identify()
    store.write(request, [0, 1, 3])
    order = LoadOrder(1, "disk", 0, [key_of(request, i) for i in range(4)], [[1, 2, 3, 4]])
    store.half.update_state_after_alloc(cast(Request, request), order, ([],))
    assert order.params is not None
    (part,) = order.params["parts"]
    assert part["extents"] == [store.writers[FINGERPRINT].name]
    (places,) = part["places"]
    assert [place == NO_PLACE for place in places] == [False, False, True, False]
    assert places[0] == 0
    assert places[0] < places[1] < places[3]


@pytest.mark.parametrize(("reason", "num_left"), [("mac", 4), ("gone", 4), ("", 12)])
def test_a_record_that_cannot_be_used_is_forgotten_and_written_again(stores: Any, reason: str, num_left: int) -> None:
    store, request = stores(), request_of(13)
    store.identify()
    store.write(request, [0, 1, 2])
    order = LoadOrder(1, "disk", 0, [key_of(request, i) for i in range(3)], [[1, 2, 3]])
    store.half.on_load_finished(order, LoadResult(1, 1, "partial", reason=reason))
    assert store.num_matched(request) == num_left
    assert store.wants(request, 1) == bool(reason)


def test_a_block_is_wanted_once(stores: Any) -> None:
    store, request = stores(), request_of(17)
    assert not store.wants(request, 0)
    assert store.half.seconds_to_save() == math.inf, "the namespace is not known"
    store.identify()
    assert store.half.seconds_to_save() == 0
    assert store.half.wants_saves(cast(Request, request))
    store.write(request, [0])
    assert [store.wants(request, i) for i in (0, 1, 1, 2)] == [False, True, False, True]
    order = SaveOrder(1, SavedBlocks.of(SavedBlock(0, i, key_of(request, i)) for i in (1, 2)))
    store.half.on_save_finished(order, SaveResult(1, 1, "cancelled"))
    assert [store.wants(request, i) for i in (1, 2)] == [False, True]


def test_nothing_is_wanted_while_the_writer_rests(stores: Any) -> None:
    store, request = stores(), request_of(17)
    store.identify()
    order = SaveOrder(1, SavedBlocks.of([SavedBlock(0, 1, key_of(request, 1))]))
    store.half.on_save_finished(order, SaveResult(1, 0, "failed", reason="full"))
    assert not store.wants(request, 1)
    assert 0 < store.half.seconds_to_save() < 60


def test_what_is_kept_off(stores: Any) -> None:
    store = stores(skip_salted=True)
    store.identify()
    assert store.half.wants_saves(cast(Request, request_of(17)))
    assert not store.half.wants_saves(cast(Request, request_of(17, cache_salt="s")))
    kept_off = request_of(17, sampling_params=SamplingParams(extra_args={"kv_store": False}))
    assert not store.half.wants_saves(cast(Request, kept_off))


def test_blocks_with_an_adapter_are_known_once_its_content_is(stores: Any) -> None:
    store = stores()
    store.identify()
    request: Any = request_of(17, lora_request=LoRARequest("a", 1, "/a"))
    assert store.half.may_transfer(request_of(17))
    assert not store.half.may_transfer(request)
    request.report.adapter_digest = "aa"
    assert store.half.may_transfer(request)


def test_a_directory_that_cannot_be_used_is_refused_before_workers_start(stores: Any, tmp_path: Path) -> None:
    config = stores().half.config
    StoreScheduler.check_config(config)
    (tmp_path / "store").chmod(0o755)
    with pytest.raises(ConfigError, match="is open to others"):
        StoreScheduler.check_config(config)


TWO_WORKERS = {"tensor_parallel_size": 2}
OTHER = hashlib.sha256(b"the second worker's").digest()


def test_of_several_workers_all_must_have_a_block(stores: Any) -> None:
    store, request = stores(flags=TWO_WORKERS), request_of(17)
    store.write(request, [0, 1, 2, 3])
    store.write(request, [0, 1, 3], fingerprint=OTHER)
    store.identify()
    assert store.num_matched(request) == 0, "the second worker's namespace is not known"
    assert store.half.seconds_to_save() == math.inf
    store.identify(fingerprint=OTHER, rank=1)
    assert store.num_matched(request) == 8
    assert [store.wants(request, i) for i in (0, 2, 3)] == [False, True, False]
    assert store.half.count_stored()[0] == 3, "of the worker that has least"
    store.write(request, [2], fingerprint=OTHER)
    assert store.num_matched(request) == 16


def test_an_order_says_where_each_workers_records_are(stores: Any) -> None:
    store, request = stores(flags=TWO_WORKERS), request_of(17)
    store.write(request, [0, 1, 2])
    store.write(request, [2, 0], fingerprint=OTHER)
    for rank, fingerprint in enumerate((FINGERPRINT, OTHER)):
        store.identify(fingerprint=fingerprint, rank=rank)
    order = LoadOrder(1, "disk", 0, [key_of(request, i) for i in range(3)], [[1, 2, 3]])
    store.half.update_state_after_alloc(cast(Request, request), order, ([],))
    assert order.params is not None
    first, second = order.params["parts"]
    assert [first["extents"], second["extents"]] == [[store.writers[f].name] for f in (FINGERPRINT, OTHER)]
    ((a, b, c),), ((d, e, f),) = first["places"], second["places"]
    assert (a, b, d > f, e, f) == (0, NO_PLACE, True, NO_PLACE, 0)
    assert c > a


def test_what_one_worker_could_not_read_all_write_again(stores: Any) -> None:
    store, request = stores(flags=TWO_WORKERS), request_of(13)
    for rank, fingerprint in enumerate((FINGERPRINT, OTHER)):
        store.write(request, [0, 1, 2], fingerprint=fingerprint)
        store.identify(fingerprint=fingerprint, rank=rank)
    assert store.num_matched(request) == 12
    order = LoadOrder(1, "disk", 0, [key_of(request, i) for i in range(3)], [[1, 2, 3]])
    store.half.on_load_finished(order, LoadResult(1, 1, "partial", reason="mac"))
    assert store.num_matched(request) == 4
    assert store.wants(request, 1)


def test_new_weights_are_known_when_all_workers_have_them(stores: Any) -> None:
    store, request = stores(flags=TWO_WORKERS), request_of(13)
    for rank, fingerprint in enumerate((FINGERPRINT, OTHER)):
        store.write(request, [0, 1, 2], fingerprint=fingerprint)
        store.identify(fingerprint=fingerprint, rank=rank)
    store.half.set_weights("/new")
    store.identify(generation=1)
    store.identify(generation=0, fingerprint=OTHER, rank=1)  # of the old weights, late
    assert store.num_matched(request) == 0
    assert store.half.seconds_to_save() == math.inf
    store.identify(generation=1, fingerprint=OTHER, rank=1)
    index = store.half._index
    store.identify(generation=1, fingerprint=OTHER, rank=1)
    assert store.half._index is index, "an update was taken back"
    store.half._index.scan()
    assert store.num_matched(request) == 12


def test_roles(stores: Any) -> None:
    request = request_of(17)
    producer, consumer = stores(kv_role="kv_producer"), stores(kv_role="kv_consumer")
    producer.write(request, [0, 1])
    for store in (producer, consumer):
        store.identify()
    assert (producer.num_matched(request), consumer.num_matched(request)) == (0, 8)
    assert producer.half.wants_saves(cast(Request, request))
    assert not consumer.half.wants_saves(cast(Request, request))


def test_blocks_are_chosen_up_to_the_rate_and_without_those_that_are_there(stores: Any) -> None:
    store, request = stores([FULL, FULL], max_write_bytes_per_s=5 * 2 * PAYLOAD_BYTES), request_of(65)
    store.half.limits._budget._clock = lambda: 0.0
    store.identify()
    store.write(request, [1, 2], group=1)
    hashes = request.block_hashes
    assert store.half.choose_blocks(0, hashes[:3]) == (range(3), 3), "those of the other group do not count"
    assert store.half.choose_blocks(1, hashes[:9]) == ([0, 3, 4, 5, 6, 7, 8], 9)
    assert store.half.choose_blocks(0, hashes[:3]) == NOTHING_CHOSEN, "nothing is left, and no time passes"
    store.half.limits._budget._left = 2.5 * PAYLOAD_BYTES
    assert store.half.choose_blocks(0, hashes[2:9]) == ([1, 2, 3], 4)
    assert store.half.seconds_to_save() > 0


def test_what_was_ordered_long_ago_is_ordered_again(stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, request, now = stores(), request_of(17), [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store.identify()
    assert store.wants(request, 0)
    assert not store.wants(request, 0)
    now[0] += SAVED_S + 0.1
    assert store.wants(request, 0)


def test_a_rate_has_a_burst_of_a_second() -> None:
    now = [0.0]
    budget = WriteBudget(100, lambda: now[0])
    assert [budget.take(60) for _ in range(3)] == [True, True, False]
    now[0] = 0.1
    assert not budget.take(60)
    assert budget.seconds_left() == pytest.approx(0.1)
    now[0] = 0.3
    assert budget.take(60)
    now[0] = 100.0
    assert [budget.take(60) for _ in range(3)] == [True, True, False]


def test_new_weights_are_another_namespace(stores: Any) -> None:
    store, request = stores(), request_of(17)
    store.write(request, [0, 1])
    store.identify()
    assert store.num_matched(request) == 8
    store.half.set_weights("/new")
    assert store.num_matched(request) == 0
    store.identify(generation=0)  # of the old weights, late
    assert store.num_matched(request) == 0
    store.identify(generation=1, fingerprint=bytes(32))
    assert store.num_matched(request) == 0


def test_a_reset_drops_what_is_stored(stores: Any) -> None:
    store, request = stores(), request_of(17)
    store.write(request, [0, 1])
    store.identify()
    ends = [store.half.reset_cache() for _ in range(2)]
    assert store.num_matched(request) == 0
    assert store.half.take_message() == {"drop": 2}
    for number, outcome in (1, "dropped"), (2, "its disk fails"):
        store.half.update_connector_output(KVConnectorOutput(info={"dropped": [number, {"/store": outcome}]}))
    assert [end.result(timeout=0) for end in ends] == [True, False]
    assert store.half.build_connector_meta(SchedulerOutput()) is None
    store.half.set_weights("/new")
    assert not store.half.reset_cache(), "its namespace is not known"


def test_a_block_that_two_requests_have_computed_is_chosen_once(stores: Any) -> None:
    store = stores()
    store.identify()
    first, second, third = (bytes([i]) * 32 for i in range(3))
    assert store.half.choose_blocks(0, [first, second, first, first]) == ([0, 1], 4)
    assert store.half.choose_blocks(0, [second, third, third, first]) == ([1], 4)
