"""The scheduler half of a store and peers in one engine: each part is asked, and gets the ends of what it began."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.kv_cache.store_and_peers import StoreAndPeersScheduler
from quire.engine.request import Request, RequestStatus
from quire.errors import ConfigError
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.record import make_header
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec
from quire.wire.kv_peers import pack_bits
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

from .test_peer_scheduler import ADDRESS, FULL, IDENTITY, OFFER, SIZE
from .test_store_scheduler import FINGERPRINT, PAYLOAD_BYTES

SERVER = "ipc:///blocks"
PEERS = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "E"}
IDENTITIES: dict[str, dict[str, Any]] = {
    "store": {"fingerprint": FINGERPRINT, "generation": 0, "payload_bytes": [PAYLOAD_BYTES]},
    "peers": IDENTITY,
}


def config_of(directory: Path, **extra: Any) -> Any:
    extra = {"path": str(directory.parent / "peers"), "peers": ["10.0.0.0/8"], **extra}
    peers = {**PEERS, "kv_connector_extra_config": extra}
    return EngineArgs(
        "demo", kv_store=str(directory), kv_store_size=1 << 30, kv_transfer_config=peers
    ).create_engine_config()


class Both:
    """The scheduler half, whose two parts have identities, and a store that has the first blocks of a request."""

    def __init__(self, directory: Path, **extra: Any) -> None:
        config = config_of(directory, **extra)
        self.half = StoreAndPeersScheduler(config, KVCacheConfig(10, [], [KVCacheGroupSpec(["0"], FULL)]))
        self.directory = StoreDirectory.open(directory, 1 << 30)
        for part, info in IDENTITIES.items():
            self.tell(part, info)

    def tell(self, part: str, info: dict[str, Any]) -> None:
        self.half.update_connector_output(KVConnectorOutput(info={"part": part, "info": info}))

    def add(self, offer: dict[str, Any] | None = None, num_tokens: int = 30) -> Request:
        extra = None if offer is None else {"kv_transfer_params": offer}
        params = SamplingParams(max_tokens=2, seed=3, extra_args=extra)
        request = Request(EngineCoreRequest("r", list(range(num_tokens)), params, None, 0.0), make_block_hasher(SIZE))
        self.half.on_new_request(request)
        return request

    def write(self, request: Request, num_blocks: int) -> None:
        writer = self.directory.create_extent(FINGERPRINT)
        for digest in request.block_hashes[:num_blocks]:
            header = make_header(FINGERPRINT, digest, None, 0, [1], PAYLOAD_BYTES)
            writer.append(header, [memoryview(bytes(PAYLOAD_BYTES))])
        index = self.half._store._index
        assert index is not None
        index.scan()

    def order(self, request: Request, source: str) -> LoadOrder:
        """An order for what `source` has, as the engine makes it of a match."""
        matches = self.half.find_matches(request, 0) or ()
        (match,) = (match for match in matches if match.source.startswith(source))
        keys = [BlockKey(digest, None, (1,)) for digest in request.block_hashes[: match.num_tokens // SIZE]]
        order = LoadOrder(1, match.source, 0, keys, [list(range(len(keys)))], match.params)
        self.half.update_state_after_alloc(request, order, ([],))
        return order


@pytest.fixture
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(tmp_path / "store", **getattr(request, "param", {}))
    yield made
    made.half.shutdown()
    made.directory.close()


def test_each_source_says_what_it_has(both: Both) -> None:
    request = both.add()
    assert both.half.may_transfer(request)
    assert both.half.find_matches(request, 0) == []
    both.write(request, 3)
    (stored,) = both.half.find_matches(request, 0) or ()
    assert (stored.num_tokens, stored.source) == (12, "disk")
    offered = both.add(OFFER)
    assert [(m.num_tokens, m.source) for m in both.half.find_matches(offered, 0) or ()] == [
        (12, "disk"),
        (28, f"p2p:{ADDRESS}"),
    ]


@pytest.mark.parametrize("both", [{"tiers": [SERVER]}], indirect=True)
def test_a_peer_that_is_asked_first_postpones_the_answer_of_both(both: Both) -> None:
    request = both.add()
    both.write(request, 3)
    assert both.half.find_matches(request, 0) is None
    both.tell("peers", {"have": {"r": {SERVER: pack_bits([False] * 7)}}})
    assert [match.source for match in both.half.find_matches(request, 0) or ()] == ["disk"]


def test_a_load_is_of_the_part_that_was_chosen_and_so_is_its_end(both: Both) -> None:
    request = both.add(OFFER)
    both.write(request, 3)
    stored = both.order(request, "disk")
    assert {"part": "store", **(stored.params or {})} == stored.params
    both.half.on_load_finished(stored, LoadResult(1, 0, "failed", reason="gone"))
    assert [m.source for m in both.half.find_matches(request, 0) or ()] == [f"p2p:{ADDRESS}"], "the store is empty"
    taken = both.order(request, "p2p")
    assert {"part": "peers", "lease": "lease", **(taken.params or {})} == taken.params
    both.half.on_load_finished(taken, LoadResult(1, 7, "ok", 1, 0.1))


def test_blocks_are_saved_to_the_store_and_leased_to_peers(both: Both) -> None:
    request = both.add()
    key = BlockKey(request.block_hashes[0], None, (1,))
    assert both.half.wants_saves(request)
    assert both.half.choose_blocks(0, [key.digest]) == (range(1), 1)
    assert both.half.seconds_to_save() == 0
    both.half.on_save_finished(SaveOrder(1, SavedBlocks()), SaveResult(1, 0, "ok"))
    both.write(request, 3)
    assert not both.half.choose_blocks(0, [key.digest]).wanted
    assert both.half.count_stored() == (3, both.directory.count_bytes())
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert both.half.name_lease(request) is None, "nobody asked for its blocks"
    prefilled = both.add({"do_remote_decode": True})
    prefilled.status = RequestStatus.FINISHED_LENGTH_CAPPED
    lease = both.half.name_lease(prefilled)
    assert lease is not None
    assert (both.half.make_transfer_params(prefilled, lease, 28) or {})["remote_num_tokens"] == 28
    end = both.half.reset_cache()
    assert isinstance(end, Future)
    both.half.shutdown()
    assert end.result(timeout=0) is False
    both.half.set_weights("elsewhere")
    assert both.half.reset_cache() is False


@pytest.mark.parametrize("both", [{"tiers": [SERVER]}], indirect=True)
def test_a_reset_is_of_the_store_and_of_servers(both: Both) -> None:
    end = both.half.reset_cache()
    assert isinstance(end, Future)
    assert both.half.take_message() == {"store": {"drop": 1}, "peers": {"drop": 1}}
    both.tell("peers", {"dropped": [1, {SERVER: "dropped"}]})
    assert not end.done()
    both.tell("store", {"dropped": [1, {"/store": "dropped"}]})
    assert end.result(timeout=0) is True
    for failing, other in ("store", "peers"), ("peers", "store"):
        end = both.half.reset_cache()
        assert isinstance(end, Future)
        number = both.half.take_message()["peers"]["drop"]
        both.tell(failing, {"dropped": [number, {"there": "its disk fails"}]})
        both.tell(other, {"dropped": [number, {"there": "dropped"}]})
        assert end.result(timeout=0) is False
    both.half.set_weights("elsewhere")
    assert both.half.reset_cache() is False
    assert both.half.take_message() == {"peers": {"drop": 4}}


@pytest.mark.parametrize("both", [{"tiers": [SERVER], "audit_share": 1.0}], indirect=True)
def test_an_audit_is_of_the_part_that_would_have_loaded(both: Both) -> None:
    request = both.add()
    both.write(request, 3)
    both.tell("peers", {"have": {"r": {SERVER: pack_bits([True] * 7)}}})
    matches = both.half.find_matches(request, 0) or ()
    assert [match.source for match in matches] == ["disk", f"remote:{SERVER}"]
    assert both.half.audits is not None
    assert all(both.half.audits.begins(request, match, 0, 3) for match in matches)
    blocks = SavedBlocks.of([SavedBlock(0, 1, BlockKey(request.block_hashes[0], None, (1,)))])
    plans = [both.half.plan_audit(blocks, match) for match in matches]
    assert [plan["part"] for plan in plans] == ["store", "peers"]
    assert len(plans[0]["parts"][0]["extents"]) == 1
    assert plans[1]["peers"] == [(SERVER, "")]
    for plan in plans:
        both.half.on_difference(blocks[0], plan)
    assert both.half.find_matches(request, 0) == [], "its first block is not used, and the server rests"


def test_messages_say_which_part_they_are_for(both: Both) -> None:
    assert both.half.build_connector_meta(SchedulerOutput()) is None
    assert both.half.take_message() is None
    request = both.add(OFFER)
    assert both.half.build_connector_meta(SchedulerOutput()) == {"peers": {"keep": [("lease", [(ADDRESS, "i")])]}}
    both.half.request_started(request, ([],))
    assert both.half.build_connector_meta(SchedulerOutput()) == {"peers": {"release": ["lease"]}}
    both.half.request_finished(request)
    assert both.half.build_connector_meta(SchedulerOutput()) is None
    both.half.update_connector_output(KVConnectorOutput(info=None))


def test_the_configuration_of_each_part_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    StoreAndPeersScheduler.check_config(config_of(tmp_path / "store"))
    with pytest.raises(ConfigError):
        StoreAndPeersScheduler.check_config(config_of(tmp_path / "file"))
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="this engine has none"):
        StoreAndPeersScheduler.check_config(config_of(tmp_path / "other" / "store", tiers=[SERVER]))
