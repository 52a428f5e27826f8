"""The scheduler half of peers: what it takes for true, what it asks for, and what it promises."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.kv_cache.changes import Change, TierBlocks
from quire.engine.kv_cache.connector import ExternalMatch
from quire.engine.kv_cache.hashing import make_block_hasher, stored_hashes
from quire.engine.kv_cache.peer_scheduler import PeerScheduler
from quire.engine.kv_cache.store_and_peers import StoreAndPeersScheduler
from quire.engine.request import Request, RequestStatus
from quire.errors import ConfigError
from quire.kv_transfer_params import parse_transfer_params
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
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
from quire.wire.stats import KVTransferStats

SIZE = 4
FULL = FullAttentionSpec(SIZE, 1, 8)
WINDOW = SlidingWindowSpec(SIZE, 1, 8, sliding_window=6)
IDENTITY = {"fingerprint": b"f" * 32, "generation": 0, "listen": "tcp://127.0.0.1:99", "incarnation": "i"}
ADDRESS = "tcp://10.0.0.9:5600"
OFFER = {
    "do_remote_prefill": True, "remote_request_id": "lease", "remote_host": "10.0.0.9", "remote_port": 5600,
    "remote_num_tokens": 28, "remote_incarnation": "i",
}  # fmt: skip


class Half:
    """The scheduler half, with an identity."""

    def __init__(self, *specs: AnyKVCacheSpec, role: str = "kv_both", num_workers: int = 1, **extra: Any) -> None:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "engine_id": "E",
            "kv_connector_extra_config": {"path": "unused", "peers": ["10.0.0.0/8"], **extra},
        }
        args = EngineArgs("demo", kv_transfer_config=transfer, tensor_parallel_size=num_workers)
        config = args.create_engine_config()
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs or [FULL])]
        self.half = PeerScheduler(config, KVCacheConfig(10, [], groups))
        self.half.update_connector_output(KVConnectorOutput(info=IDENTITY))

    def add(self, transfer: dict[str, Any] | None = None, num_tokens: int = 30, **fields: Any) -> Request:
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(max_tokens=2, seed=3, extra_args=extra)
        origin = EngineCoreRequest("r", list(range(num_tokens)), params, None, 0.0, **fields)
        request = Request(origin, make_block_hasher(SIZE))
        self.half.on_new_request(request)
        return request

    def match(self, request: Request, start: int = 0) -> ExternalMatch | None:
        """The longest match; None: there is none."""
        matches = self.half.find_matches(request, start)
        assert matches is not None
        return max(matches, key=lambda match: match.num_tokens, default=None)


def test_what_a_peer_holds_is_matched_and_its_lease_kept_until_the_request_starts() -> None:
    half = Half()
    request = half.add(OFFER)
    assert half.half.build_connector_meta(SchedulerOutput()) == {"keep": [("lease", [(ADDRESS, "i")])]}
    load = {"peers": [(ADDRESS, "i")], "lease": "lease"}
    assert half.match(request) == ExternalMatch(28, f"p2p:{ADDRESS}", load)
    assert half.match(request, 8) == ExternalMatch(20, f"p2p:{ADDRESS}", load)
    assert half.match(request, 28) is None
    half.half.request_started(request, ([],))
    assert half.half.build_connector_meta(SchedulerOutput()) == {"release": ["lease"]}
    assert half.half.build_connector_meta(SchedulerOutput()) is None
    assert half.match(request) is None, "preempted: the lease is over"
    half.half.request_finished(request)
    assert half.half.build_connector_meta(SchedulerOutput()) is None


@pytest.mark.parametrize(("name", "tables"), [("request_started", [([],)]), ("request_finished", [])])
def test_a_lease_is_released_however_the_request_goes_on(name: str, tables: list[Any]) -> None:
    half = Half()
    request = half.add(OFFER)
    half.half.build_connector_meta(SchedulerOutput())
    getattr(half.half, name)(request, *tables)
    assert half.half.build_connector_meta(SchedulerOutput()) == {"release": ["lease"]}


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "11.0.0.9"},
        {"remote_host": None},
        {"remote_port": None},
        {"remote_port": "x"},
        {"remote_request_id": None},
        {"do_remote_prefill": False},
        {"remote_num_tokens": 3},
        {"remote_num_tokens": None},
        {"remote_num_tokens": -8},
    ],
)
def test_an_offer_that_cannot_be_used_is_none(change: dict[str, Any]) -> None:
    half = Half()
    assert half.match(half.add(OFFER | change)) is None


def test_more_than_the_prompt_is_not_taken() -> None:
    half = Half()
    match = half.match(half.add(OFFER | {"remote_num_tokens": 1 << 40}, 28))
    assert match is not None
    assert match.num_tokens == 24, "the last token is computed"


def test_who_takes_nothing() -> None:
    half = Half(role="kv_producer")
    assert half.match(half.add(OFFER)) is None
    half = Half()
    assert half.match(half.add(OFFER, lora_request=LoRARequest("l", 1, "/l"))) is None
    half.half.set_weights("other")
    assert half.match(half.add(OFFER)) is None, "the namespace is not known"
    half.half.update_connector_output(KVConnectorOutput(info=IDENTITY))
    assert half.match(half.add(OFFER)) is None, "that report is of the old weights"


def test_windows_are_taken_only_whole() -> None:
    half = Half(FULL, WINDOW)
    assert half.match(half.add(OFFER)) is not None
    assert half.match(half.add(OFFER, 27)) is None, "the window of a shorter prompt is elsewhere"
    half = Half(WINDOW)
    assert half.match(half.add(OFFER)) is None, "no record proves the first blocks"
    request = half.add(OFFER)
    assert half.match(request, 24) is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr("quire.engine.kv_cache.peer_scheduler.time.monotonic", lambda: now[0])
    return now


def test_a_peer_that_cannot_be_used_rests(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    half = Half()
    request = half.add(OFFER)
    order = LoadOrder(1, "p2p", 0, [], [], {"peers": [(ADDRESS, "i")], "lease": "lease"})
    for reason in ("gone", "mac"):
        half.half.on_load_finished(order, LoadResult(1, 0, "failed", reason=reason))
        assert half.match(request) is not None
    for seconds in (5, 10, 20):
        half.half.on_load_finished(order, LoadResult(1, 0, "failed", reason="refused"))
        assert half.match(request) is None
        clock[0] += seconds - 0.5
        assert half.match(request) is None
        clock[0] += 0.5
        assert half.match(request) is not None
    assert f"nothing is taken from {ADDRESS} for 20 s: it has another version, model, key or" in caplog.text
    half.half.on_load_finished(order, LoadResult(1, 7, "ok"))
    half.half.on_load_finished(order, LoadResult(1, 0, "failed", reason="silent"))
    clock[0] += 5
    assert half.match(request) is not None, "a good load makes the next rest a short one"


# -- block servers -------------------------------------------------------------------------------------------------


def test_block_servers_are_asked_once_and_the_longest_match_wins() -> None:
    half = Half(FULL, WINDOW, tiers=["tcp://a:1", "tcp://b:1"])
    request = half.add()
    message = half.half.build_connector_meta(SchedulerOutput())
    assert message == {"ask": {"r": [(group, digest) for group in (0, 1) for digest in request.block_hashes]}}
    assert half.half.find_matches(request, 0) is None
    assert not half.half.asks_again
    bits = {"tcp://a:1": [True] * 5 + [False] * 9, "tcp://b:1": [True] * 6 + [False] + [True] * 6 + [False]}
    has = {address: pack_bits(each) for address, each in bits.items()}
    half.half.update_connector_output(KVConnectorOutput(info={"have": {"other": {}, "r": has}}))
    assert half.match(request) == ExternalMatch(24, "remote:tcp://b:1", {"peers": [("tcp://b:1", "")]})
    assert half.match(request, 24) is None
    half.half.request_started(request, ([],))
    assert half.match(request) is None


def test_a_server_that_has_not_answered_has_nothing() -> None:
    half = Half(tiers=["tcp://a:1"])
    request = half.add()
    half.half.update_connector_output(KVConnectorOutput(info={"have": {"r": {}}}))
    assert half.match(request) is None
    assert half.match(half.add(num_tokens=4)) is None, "there is no whole block before the last token"


@pytest.mark.parametrize("reason", ["unreachable", "silent", "refused", "gone", "mac", "format", "tokens"])
def test_a_server_that_does_not_send_what_it_said_rests(clock: list[float], reason: str) -> None:
    half = Half(tiers=["tcp://a:1", "tcp://b:1"])
    request = half.add()
    bits = {"tcp://a:1": [True] * 7, "tcp://b:1": [True] * 5 + [False] * 2}
    has = {address: pack_bits(each) for address, each in bits.items()}
    half.half.update_connector_output(KVConnectorOutput(info={"have": {"r": has}}))
    matches = half.half.find_matches(request, 0)
    assert matches is not None
    assert [match.num_tokens for match in matches] == [28, 20], "the quicker one is chosen"
    assert half.half.has_several_sources
    order = LoadOrder(1, matches[0].source, 0, [], [], matches[0].params)
    half.half.on_load_finished(order, LoadResult(1, 3, "partial", reason=reason))
    match = half.match(request)
    assert match is not None
    assert match.num_tokens == 20
    clock[0] += 5
    half.half.on_load_finished(order, LoadResult(1, 0, "failed", reason="stale"))
    match = half.match(request)
    assert match is not None
    assert match.num_tokens == 28, "it was started again, which is no fault"


def test_a_server_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    remote = EngineArgs("demo", kv_store_remote="tcp://10.0.0.7:14579")
    with pytest.raises(ConfigError, match="name a copy of the file `key` in its directory with QUIRE_KV_STORE_KEY_FI"):
        PeerScheduler.check_config(remote.create_engine_config())
    both = EngineArgs("demo", kv_store=str(tmp_path / "store"), kv_store_remote="tcp://10.0.0.7:14579")
    with pytest.raises(ConfigError, match="proves itself by a key, and this engine has none"):
        StoreAndPeersScheduler.check_config(both.create_engine_config())
    (tmp_path / "keyfile").write_bytes(bytes(32))
    (tmp_path / "keyfile").chmod(0o600)
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "keyfile"))
    PeerScheduler.check_config(remote.create_engine_config())
    StoreAndPeersScheduler.check_config(both.create_engine_config())


def test_a_store_that_has_all_does_not_wait_for_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs("demo", kv_store=str(tmp_path), kv_store_remote="tcp://10.0.0.7:14579").create_engine_config()
    both = StoreAndPeersScheduler(config, KVCacheConfig(10, [], [KVCacheGroupSpec(["0"], FULL)]))
    both.update_connector_output(KVConnectorOutput(info={"part": "peers", "info": IDENTITY}))
    store_has, size = [0], SIZE
    monkeypatch.setattr(both._store, "find_matches", lambda request, start: [ExternalMatch(store_has[0], "disk")])
    request = Request(EngineCoreRequest("r", list(range(30)), SamplingParams(), None, 0.0), make_block_hasher(size))
    both.on_new_request(request)
    assert set(both.take_message() or {}) == {"peers"}
    assert both.find_matches(request, 0) is None
    store_has[0] = 28
    matches = both.find_matches(request, 0)
    assert matches == [ExternalMatch(28, "disk", {"part": "store"})]
    both.shutdown()


def test_what_block_servers_have_is_audited_and_one_with_other_blocks_rests(tmp_path: Path) -> None:
    half = Half(tiers=["tcp://a:1", "tcp://b:1"], audit_share=1.0)
    request, audits = half.add(), half.half.audits
    has = {address: pack_bits([True] * 7) for address in ("tcp://a:1", "tcp://b:1")}
    half.half.update_connector_output(KVConnectorOutput(info={"have": {"r": has}}))
    first, second = half.half.find_matches(request, 0) or ()
    assert audits is not None
    assert audits.begins(request, first, 0, 7)
    assert not audits.begins(request, first._replace(source="p2p:tcp://a:1"), 0, 7)
    assert audits.find(request) == (range(7), first)
    plan = half.half.plan_audit([], first)
    assert plan == {"peers": [("tcp://a:1", "")]}
    half.half.on_difference(SavedBlock(0, 1, KEY), plan)
    matches = half.half.find_matches(request, 0)
    assert matches == [second]
    audits.end(request)
    assert audits.find(request) is None
    extra = {"path": str(tmp_path / "key"), "audit_share": 0.5}
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match="loads from block servers are audited, and there are none"):
        PeerScheduler.check_config(EngineArgs("demo", kv_transfer_config=transfer).create_engine_config())


# -- saves to a block server ---------------------------------------------------------------------------------------

KEY = BlockKey(b"d" * 32, None, (1, 2, 3, 4))


def saving(num_workers: int = 1, role: str = "kv_both") -> Half:
    half = Half(role=role, num_workers=num_workers, tiers=["tcp://a:1"])
    for rank in range(num_workers):
        half.half.update_connector_output(KVConnectorOutput(info=IDENTITY | {"payload_bytes": [100]}, rank=rank))
    return half


def test_blocks_are_saved_while_a_server_takes_them() -> None:
    half = saving(num_workers=2)
    request, peers = half.add(), half.half

    def tell(rank: int, state: str) -> tuple[bool, float]:
        peers.update_connector_output(KVConnectorOutput(info={"store_state": state}, rank=rank))
        return peers.wants_saves(request), peers.seconds_to_save()

    assert (peers.wants_saves(request), peers.seconds_to_save()) == (False, math.inf), "it was not asked yet"
    assert tell(0, "open") == (False, math.inf), "the other worker's may take none"
    assert tell(1, "open") == (True, 0.0)
    assert tell(1, "away") == (True, math.inf), "what is computed meanwhile is saved later"
    assert tell(1, "closed") == (False, math.inf)
    assert tell(1, "open") == (True, 0.0)
    assert list(peers.choose_blocks(0, [KEY.digest]).wanted) == [0]
    assert list(peers.choose_blocks(0, [KEY.digest]).wanted) == [], "it was ordered"
    order = SaveOrder(1, SavedBlocks.of([SavedBlock(0, 1, KEY)]))
    peers.on_save_finished(order, SaveResult(1, 0, "cancelled"))
    assert list(peers.choose_blocks(0, [KEY.digest]).wanted) == [0]
    peers.on_save_finished(order, SaveResult(1, 1, "ok"))
    assert peers.seconds_to_save() == 0.0
    peers.on_save_finished(order, SaveResult(1, 0, "failed", reason="rate"))
    assert 0 < peers.seconds_to_save() < math.inf
    peers.set_weights("other")
    assert peers.seconds_to_save() == math.inf


def test_what_must_not_leave_an_engine_is_not_saved() -> None:
    half = saving()
    half.half.update_connector_output(KVConnectorOutput(info={"store_state": "open"}))
    assert half.half.wants_saves(half.add())
    salted = half.add(cache_salt="secret")
    assert half.half.wants_saves(salted)
    half.half.extra["skip_salted"] = True
    assert not half.half.wants_saves(salted)
    kept_off = half.add()
    assert kept_off.sampling_params is not None
    kept_off.sampling_params.extra_args = {"kv_store": False}
    assert not half.half.wants_saves(kept_off)
    reading = saving(role="kv_consumer")
    assert reading.half.remote_saves is None
    assert not reading.half.wants_saves(reading.add())


def test_records_are_dropped_when_all_servers_of_all_workers_have(caplog: pytest.LogCaptureFixture) -> None:
    half = saving(num_workers=2)
    peers, request = half.half, half.add()
    assert list(peers.choose_blocks(0, [KEY.digest]).wanted) == [0]

    def tell(rank: int, number: int, outcome: str) -> None:
        info = {"dropped": [number, {"tcp://a:1": outcome}]}
        peers.update_connector_output(KVConnectorOutput(info=info, rank=rank))

    def drop() -> Future[bool]:
        end = peers.reset_cache()
        assert isinstance(end, Future)
        return end

    peers.take_message()
    first = drop()
    assert peers.take_message() == {"drop": 1}
    assert half.match(request) is None, "what the servers have said is forgotten"
    assert list(peers.choose_blocks(0, [KEY.digest]).wanted) == [0], "it may be ordered again"
    second = drop()
    tell(0, 1, "dropped")
    tell(1, 2, "refused")
    assert not first.done()
    tell(1, 1, "dropped")
    tell(0, 2, "refused")
    assert (first.result(timeout=0), second.result(timeout=0)) == (True, False)
    assert [record.getMessage() for record in caplog.records if "not dropped" in record.getMessage()] == [
        "records of this model are not dropped at tcp://a:1: refused"
    ]
    tell(0, 2, "refused")  # it has ended
    third = drop()
    peers.shutdown()
    peers.shutdown()
    assert third.result(timeout=0) is False
    assert Half().half.reset_cache() is True, "there are no servers"


def test_blocks_with_an_adapter_are_asked_for_once_its_content_is_known() -> None:
    """A lease of another engine is not taken: its hashes have the adapter's name."""
    half = Half(tiers=["tcp://a:1"])
    request = half.add(OFFER, lora_request=LoRARequest("l", 1, "/l"))
    peers = half.half
    assert peers.take_message() is None
    assert not peers.may_transfer(request)
    request.report.adapter_digest = "d" * 64
    assert peers.may_transfer(request)
    hashes = stored_hashes(request, SIZE)[:7]
    assert hashes[0] != request.block_hashes[0]
    assert half.half.find_matches(request, 0) is None
    assert half.half.find_matches(request, 0) is None
    assert peers.take_message() == {"ask": {"r": [(0, digest) for digest in hashes]}}
    answer = {"have": {"r": {"tcp://a:1": pack_bits([True] * 3 + [False] * 4)}}}
    peers.update_connector_output(KVConnectorOutput(info=answer))
    assert half.match(request) == ExternalMatch(12, "remote:tcp://a:1", {"peers": [("tcp://a:1", "")]})
    request.report.adapter_digest, request.report.stored_hashes = "e" * 64, []
    assert half.match(request) is None, "the adapter was loaded again, from other files"
    peers.request_started(request, ([],))
    request.report.num_preemptions = 1
    assert half.match(request) is None
    assert peers.take_message() is None, "it is asked about once"
    whole = half.add(lora_request=LoRARequest("l", 1, "/l"))
    whole.report.adapter_digest = "d" * 64
    assert whole.sampling_params is not None
    whole.sampling_params.skip_reading_prefix_cache = True
    assert half.match(whole) is None, "it is computed"
    assert Half(role="kv_producer", tiers=["tcp://a:1"]).match(request) is None


def test_what_a_server_holds_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(tiers=["tcp://a:1"], publish_store=True)
    peers, block = half.half, [0, b"d" * 32]

    def tell(generation: int, *report: Any) -> list[Change]:
        info = {"watched": report, "generation": generation}
        peers.update_connector_output(KVConnectorOutput(info=info))
        (stored,) = peers.stored
        return stored.take(everything=False)

    there = TierBlocks(0, [b"d" * 32], is_stored=True, locality="REMOTE")
    assert tell(0, [block], [], False) == [there]
    assert tell(1, [], [block], False) == [], "of other weights"
    peers.set_weights("other")
    assert tell(0, [block], [], False) == [replace(there, is_stored=False)]
    assert Half(tiers=["tcp://a:1"]).half.stored == ()
    (tmp_path / "key").write_bytes(bytes(32))
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "key"))
    config = peers.config
    with pytest.raises(ConfigError, match="enable events with --kv-events-config"):
        PeerScheduler.check_config(config)
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = {"path": str(tmp_path / "own"), "tiers": ["tcp://a:1"], "publish_store": True}
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    args = EngineArgs(
        "demo", kv_transfer_config={**transfer, "kv_connector_extra_config": extra}, kv_events_config=events
    )
    PeerScheduler.check_config(args.create_engine_config())


def test_puts_of_all_workers_are_counted() -> None:
    half = saving(num_workers=2)
    saves, stats = half.half.remote_saves, KVTransferStats()
    assert saves is not None
    for rank, counts in enumerate(({"stored": 3}, {"stored": 1, "rate": 1})):
        report = {"begun": 5, "outcomes": counts, "waiting": 2 + rank}
        half.half.update_connector_output(KVConnectorOutput(info={"puts": report}, rank=rank))
    assert saves.has_changed
    saves.move_to(stats)
    assert (stats.num_remote_saves_begun, stats.num_remote_saves) == (10, {"stored": 4, "rate": 1})
    assert (stats.num_waiting_remote_saves, saves.has_changed) == (5, False)
    saves.move_to(stats)
    assert (stats.num_remote_saves_begun, stats.num_remote_saves, stats.num_waiting_remote_saves) == (0, {}, 5)


# -- several workers -----------------------------------------------------------------------------------------------

OTHER = IDENTITY | {"fingerprint": b"g" * 32, "listen": "tcp://127.0.0.1:98", "incarnation": "j"}
RANKS = {"remote_ranks": [["10.0.0.9", 5601, "j"]]}


def test_each_worker_takes_from_the_one_of_its_rank() -> None:
    half = Half(num_workers=2)
    assert half.match(half.add(OFFER | RANKS)) is None, "one worker has not reported what its blocks are"
    half.half.update_connector_output(KVConnectorOutput(info=OTHER, rank=1))
    request, sites = half.add(OFFER | RANKS), [(ADDRESS, "i"), ("tcp://10.0.0.9:5601", "j")]
    assert half.half.build_connector_meta(SchedulerOutput()) == {"keep": [("lease", sites)]}
    assert half.match(request) == ExternalMatch(28, f"p2p:{ADDRESS}", {"peers": sites, "lease": "lease"})


@pytest.mark.parametrize(
    "ranks", [{}, {"remote_ranks": [*RANKS["remote_ranks"]] * 2}, {"remote_ranks": [["11.0.0.9", 5601, "j"]]}]
)
def test_other_numbers_of_workers_and_hosts_that_are_no_peers_are_none(ranks: dict[str, Any]) -> None:
    half = Half(num_workers=2)
    half.half.update_connector_output(KVConnectorOutput(info=OTHER, rank=1))
    assert half.match(half.add(OFFER | ranks)) is None
    assert half.half.build_connector_meta(SchedulerOutput()) is None, "nothing is connected to"


def test_a_server_must_have_the_parts_of_all_workers() -> None:
    half = Half(num_workers=2, tiers=["tcp://a:1", "tcp://b:1"])
    half.half.update_connector_output(KVConnectorOutput(info=OTHER, rank=1))
    request = half.add()
    bits = [[True] * 6 + [False], [True] * 3 + [False] + [True] * 3]
    for rank, each in enumerate(bits):
        assert half.half.find_matches(request, 0) is None
        have = {"r": {"tcp://a:1": pack_bits(each)} | ({} if rank else {"tcp://b:1": pack_bits([True] * 7)})}
        half.half.update_connector_output(KVConnectorOutput(info={"have": have}, rank=rank))
    assert half.match(request) == ExternalMatch(12, "remote:tcp://a:1", {"peers": [("tcp://a:1", "")] * 2})


def test_an_answer_says_where_each_worker_serves() -> None:
    half = Half(num_workers=2)
    request = end(half.add({"do_remote_decode": True}))
    assert half.half.name_lease(request) is None
    half.half.update_connector_output(KVConnectorOutput(info=OTHER, rank=1))
    assert half.half.name_lease(request) is not None
    answer = half.half.make_transfer_params(request, "lease", 28)
    assert answer is not None
    assert (answer["remote_port"], answer["remote_incarnation"], answer["tp_size"]) == (99, "i", 2)
    assert answer["remote_ranks"] == [("127.0.0.1", 98, "j")]
    assert parse_transfer_params(answer).remote_ranks == [("127.0.0.1", 98, "j")]


# -- leases --------------------------------------------------------------------------------------------------------


def end(request: Request, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Request:
    request.status = status
    return request


def test_the_answer_has_what_proxies_of_vllm_pass_on() -> None:
    half = Half(FULL, WINDOW)
    request = end(half.add({"do_remote_decode": True}))
    lease = half.half.name_lease(request)
    assert lease is not None
    assert lease.startswith("r-")
    assert lease != half.half.name_lease(request)
    assert half.half.make_transfer_params(request, lease, 28) == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[], []], "remote_engine_id": "E",
        "remote_request_id": lease, "remote_host": "127.0.0.1", "remote_port": 99, "tp_size": 1, "dcp_size": 1,
        "pp_size": 1, "remote_num_tokens": 28, "remote_blocks_expiry_time": None, "transfer_mode": "pull",
        "remote_incarnation": "i", "seed": 3,
    }  # fmt: skip


def test_what_is_not_promised() -> None:
    half = Half()
    assert half.half.name_lease(end(half.add())) is None
    assert half.half.name_lease(end(half.add(OFFER))) is None
    asked = {"do_remote_decode": True}
    assert half.half.name_lease(end(half.add(asked), RequestStatus.FINISHED_ABORTED)) is None
    assert Half(role="kv_consumer").half.name_lease(end(half.add(asked))) is None
    half.half.set_weights("other")
    assert half.half.name_lease(end(half.add(asked))) is None, "what the blocks are made of is not known yet"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"listen": "tcp://*:1"}, "names no host: other engines are sent this address"),
        ({"listen": "tcp://0.0.0.0:1"}, "names no host"),
        ({"peer": []}, "unknown key 'peer'; did you mean peers"),
        ({"peers": ["a b"]}, "'a b' is no host and no network"),
        ({"kv_lease_duration": 0}, "kv_lease_duration must be in"),
    ],
)
def test_what_cannot_be_configured(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Half(**extra)
