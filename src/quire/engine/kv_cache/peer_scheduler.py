"""The scheduler half of peers: which blocks another engine holds for a request, and which ended ones are held here.

A proxy passes on what the other engine has answered (`kv_transfer_params.py`): it names a lease, and how many tokens it
holds. Blocks are asked for by their hashes, so a wrong answer is a miss. Block servers (tiers) are asked when a request
is added which of its blocks they have. The first of them may take blocks, too (`remote_saves.py`): then they are saved
there.

Each of several workers serves its part of a block at an address of its own, and takes it from the one of its rank.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.connector import BlockChoice, BlockTables, ExternalMatch, RemoteSaves, find_longest_match
from quire.engine.kv_cache.hashing import stored_hashes
from quire.engine.kv_cache.record_scheduler import RecordScheduler
from quire.engine.request import Request, RequestStatus
from quire.errors import ConfigError, ValidationError
from quire.kv_store.directory import StoreDirectory, has_key
from quire.kv_store.peer.client import PeerList
from quire.kv_store.rests import Rests
from quire.kv_transfer_params import FIELD, TransferParams, parse_transfer_params
from quire.logger import init_logger
from quire.wire.block_hash import BlockHash
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_events import REMOTE
from quire.wire.kv_peers import MAX_KEYS
from quire.wire.kv_transfer import (
    REJECTIONS,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)

logger = init_logger(__name__)

SOURCE, TIER = "p2p", "remote"
"""Names of sources: other engines, and block servers."""
UNFIT = {
    "unreachable": "nothing listens there",
    "silent": "it has not answered in time",
    "refused": "it has another version, model, key or number of workers, or other weights or code",
}
"""Reasons for a rest, in which nothing is taken from there, and their sentences."""
UNTRUE = (*UNFIT, *REJECTIONS, "gone")
"""The same, of a block server: it has just said that it has the block, and checks what it sends."""
Site = tuple[str, str]
"""Address of the server of one worker, and its incarnation."""
_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class _Asked:
    """A question which blocks the tiers have."""

    hashes: list[BlockHash]
    answers: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """Answers by rank and address: a bit for each group and block."""

    def join(self) -> dict[str, int]:
        """Returns what the servers have for all workers."""
        first, *others = [
            {address: int.from_bytes(bits, "little") for address, bits in answer.items()}
            for answer in self.answers.values()
        ]
        for other in others:
            first = {address: bits & other[address] for address, bits in first.items() if address in other}
        return first


class PeerScheduler(RecordScheduler):
    """Takes what peers have, and promises what they ask for."""

    asks_again = False

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config, TIER, REMOTE)
        self._peers = PeerList(self.extra["peers"])
        self.has_several_sources = len(self.extra["tiers"]) > 1
        self._rests = Rests()
        """Addresses from which nothing is taken."""
        self._offers: dict[str, tuple[TransferParams, list[Site]]] = {}
        """Requests that were not admitted yet: what is held for them elsewhere, and where, by rank."""
        self._asked: dict[str, _Asked] = {}
        """Requests that were not admitted yet, about which the tiers were asked."""
        self._server_states: dict[int, str] = {}
        """State (`ServerState`) of the block server that is written to, by rank."""
        if self.extra["tiers"] and self.extra["saves"]:
            self.remote_saves = RemoteSaves()

    @classmethod
    def check_config(cls, config: EngineConfig) -> None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        if extra["tiers"] and not has_key(extra["path"]):
            raise ConfigError(
                f"the block server {extra['tiers'][0]} proves itself by a key, and this engine has none: name a copy "
                "of the file `key` in its directory with QUIRE_KV_STORE_KEY_FILE"
            )
        if extra.get("publish_store") and not (extra["tiers"] and config.observability_config.kv_events.is_enabled):
            raise ConfigError(
                "publish_store adds what a block server of tiers holds to KV cache events; name a server, and enable "
                "events with --kv-events-config"
            )
        if config.kv_transfer_config.audit_share and not extra["tiers"]:
            raise ConfigError("audit_share: loads from block servers are audited, and there are none; leave it out")
        StoreDirectory.open_for_key(extra["path"]).close()

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def _takes(self) -> bool:
        """Returns whether blocks can be taken from elsewhere now."""
        return self.role != "kv_producer" and self.is_known

    def on_new_request(self, request: Request) -> None:
        if not self._takes or request.lora_request is not None:
            return
        params = _params_of(request)
        if params is not None and params.do_remote_prefill and params.remote_request_id:
            sites = self._find_sites(params)
            if sites is not None:
                self._offers[request.request_id] = params, sites
                self.message.setdefault("keep", []).append((params.remote_request_id, sites))
        else:
            self._ask_tiers(request)

    def _ask_tiers(self, request: Request) -> bool:
        """Asks which blocks of a request the tiers have. Returns False if there is nothing to ask."""
        if not self.extra["tiers"] or request.skip_reading_prefix_cache:
            return False
        stop = min((request.num_tokens - 1) // self.block_size, MAX_KEYS // len(self.specs))
        hashes = stored_hashes(request, self.block_size)[:stop]
        if hashes:
            keys = [(group_id, digest) for group_id in range(len(self.specs)) for digest in hashes]
            self._asked[request.request_id] = _Asked(hashes)
            self.message.setdefault("ask", {})[request.request_id] = keys
        return bool(hashes)

    def _find_sites(self, params: TransferParams) -> list[Site] | None:
        """Returns where the workers of another engine serve, by rank; None if nothing may be taken from there."""
        places = [(params.remote_host, params.port, params.remote_incarnation or ""), *params.remote_ranks]
        if len(places) != self.num_workers:
            wish = "blocks are not taken from %r: it has %d workers, and this engine has %d"
            logger.warning(wish, params.remote_host, len(places), self.num_workers)
            return None
        sites: list[Site] = []
        for host, port, incarnation in places:
            address = self._peers.find_address(host, port)
            if address is None:
                logger.warning("blocks are not taken from %r: it is not among the peers", host)
                return None
            sites.append((address, incarnation))
        return sites

    def request_started(self, request: Request, tables: BlockTables) -> None:
        self._forget(request)

    def request_finished(self, request: Request) -> None:
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Needs nothing more of what is held for a request."""
        self._asked.pop(request.request_id, None)
        offer = self._offers.pop(request.request_id, None)
        if offer is not None:
            self.message.setdefault("release", []).append(offer[0].remote_request_id)

    # -- loads -------------------------------------------------------------------------------------------------

    def find_matches(self, request: Request, num_computed_tokens: int) -> list[ExternalMatch] | None:
        offer = self._offers.get(request.request_id)
        if offer is not None:
            return self._match_offer(request, num_computed_tokens, *offer)
        asked = self._asked.get(request.request_id)
        if asked is None:
            is_first = not (request.num_preemptions or request.num_computed_tokens)
            if request.lora_request is None or not is_first or not self._takes:
                return []
            return None if self._ask_tiers(request) else []  # what its adapter is made of is known only now
        if len(asked.answers) < self.num_workers:
            return None
        found = [self._match_tier(request, num_computed_tokens, asked.hashes, *tier) for tier in asked.join().items()]
        return [match for match in found if match is not None]

    def _match_offer(
        self, request: Request, start: int, params: TransferParams, sites: list[Site]
    ) -> list[ExternalMatch]:
        """Returns the match of what another engine holds: of groups with a window only the blocks at its end."""
        size = self.block_size
        num_held = max(0, params.remote_num_tokens or 0) // size * size
        most = min((request.num_tokens - 1) // size, len(request.block_hashes)) * size
        end = min(num_held, most)
        reaches = [spec.reach for spec in self.specs]
        if any(reach is not None for reach in reaches) and end != num_held:
            return []
        address = sites[0][0]
        if end <= start or self._rests.is_resting(address, time.monotonic()) or not self._are_provable(start, end):
            return []
        load = {"peers": sites, "lease": params.remote_request_id}
        return [ExternalMatch(end - start, f"{SOURCE}:{address}", load)]

    def _match_tier(
        self, request: Request, start: int, asked: list[BlockHash], address: str, bits: int
    ) -> ExternalMatch | None:
        places = {
            (group_id, digest): bool(bits >> group_id * len(asked) + index & 1)
            for group_id in range(len(self.specs))
            for index, digest in enumerate(asked)
        }
        num_tokens = find_longest_match(
            self.specs, request, start, lambda group_id, digest: places.get((group_id, digest), False)
        )
        is_resting = self._rests.is_resting(address, time.monotonic())
        if not num_tokens or is_resting or not self._are_provable(start, start + num_tokens):
            return None
        return ExternalMatch(num_tokens, f"{TIER}:{address}", {"peers": [(address, "")] * self.num_workers})

    def _are_provable(self, start: int, end: int) -> bool:
        """Returns whether a block is loaded of each position, whose tokens are compared."""
        return any(spec.reach is None or int(spec.first_token_read(end)) <= start for spec in self.specs)

    def on_load_finished(self, order: LoadOrder, result: LoadResult) -> None:
        params = order.params or {}
        address = params["peers"][0][0]
        if result.outcome == "ok":
            self._rests.note_good(address)
        elif result.reason in (UNFIT if "lease" in params else UNTRUE):
            self._rest(address, UNFIT.get(result.reason, f"it has not sent what it said it has ({result.reason})"))

    def _rest(self, address: str, why: str) -> None:
        seconds = self._rests.note_fault(address, time.monotonic())
        logger.warning("nothing is taken from %s for %.0f s: %s", address, seconds, why)

    def plan_audit(self, blocks: SavedBlocks, match: ExternalMatch) -> dict[str, Any]:
        return {"peers": (match.params or {})["peers"]}

    def on_difference(self, block: SavedBlock, audit: dict[str, Any]) -> None:
        self._rest(audit["peers"][0][0], "it has other blocks than are computed")

    # -- saves -------------------------------------------------------------------------------------------------

    def wants_saves(self, request: Request) -> bool:
        states = self._server_states
        is_writable = len(states) == self.num_workers and "closed" not in states.values()
        return is_writable and not self.is_kept_off(request)

    def seconds_to_save(self) -> float:
        if not self.is_known or list(self._server_states.values()) != ["open"] * self.num_workers:
            return math.inf  # the worker half reports it
        return self.limits.seconds_left()

    def choose_blocks(self, group_id: int, digests: Sequence[BlockHash]) -> BlockChoice:
        num_bytes = sum(one["payload_bytes"][group_id] for one in self.identities.values())
        # the worker half asks the server what it has
        return BlockChoice(*self.limits.take(group_id, digests, num_bytes, None))

    def on_save_finished(self, order: SaveOrder, result: SaveResult) -> None:
        self.limits.forget_unsaved(order.blocks, result.num_saved)
        if result.reason in ("full", "rate", "error"):
            self.limits.rest()

    # -- leases ------------------------------------------------------------------------------------------------

    def name_lease(self, request: Request) -> str | None:
        gives = self.role != "kv_consumer"
        params = _params_of(request) if gives and request.status in _ENDS else None
        is_served = self.is_known and all("listen" in one for one in self.identities.values())
        if params is None or not params.do_remote_decode or not is_served:
            return None
        return f"{request.request_id}-{secrets.token_hex(8)}"

    def make_transfer_params(self, request: Request, lease: str, num_tokens: int) -> dict[str, Any] | None:
        first, *others = (self.identities[rank] for rank in range(self.num_workers))
        host, port = _host_and_port(first["listen"])
        sampling, parallel = request.sampling_params, self.config.parallel_config
        ranks = [(*_host_and_port(one["listen"]), one["incarnation"]) for one in others]
        return {
            **({"remote_ranks": ranks} if ranks else {}),
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[] for _ in self.specs],  # blocks are asked for by their hashes
            "remote_engine_id": self.extra["engine_id"],
            "remote_request_id": lease,
            "remote_host": host,
            "remote_port": port,
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": parallel.pipeline_parallel_size,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_incarnation": first["incarnation"],
            "seed": None if sampling is None else sampling.seed,
        }

    # -- the rest ----------------------------------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        super().update_connector_output(output)
        info = output.info or {}
        if "store_state" in info:
            self._server_states[output.rank] = info["store_state"]
        if "puts" in info and self.remote_saves is not None:
            self.remote_saves.add(output.rank, info["puts"])
        for request_id, found in info.get("have", {}).items():
            if request_id in self._asked:
                self._asked[request_id].answers[output.rank] = found

    def reset_cache(self) -> bool | Future[bool]:
        """Orders the block servers to drop the records of this engine. Those that only send blocks refuse."""
        self._asked.clear()  # what they had then
        self.limits.forget_all()
        if not self.extra["tiers"]:
            return True
        return self.order_drop()

    def set_weights(self, path: str) -> None:
        super().set_weights(path)
        self._asked.clear()


def _params_of(request: Request) -> TransferParams | None:
    """Returns what the request's client sent about blocks elsewhere; None: nothing, or nothing that can be read."""
    params = request.sampling_params
    value = None if params is None or params.extra_args is None else params.extra_args.get(FIELD)
    if not value:
        return None
    try:
        return parse_transfer_params(value)
    except ValidationError:  # a client of another version: the frontend checks it
        return None


def _host_and_port(address: str) -> tuple[str, int | None]:
    """Returns the parts of an address that the server listens at, as `remote_host` and `remote_port`."""
    if not address.startswith("tcp://"):
        return address, None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
