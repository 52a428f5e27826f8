"""The scheduler half of a connector: what is stored outside the engine, and what of it is worth having.

A connector is a row of `config/kv_transfer.py: CONNECTORS`. Its two halves meet only in the messages of
`wire/kv_transfer.py`. Methods have vLLM's names where they do the same. `KVExchange` does the rest for all connectors:
it allocates, fences, waits, gives up, registers what is verified, pins what is saved, and counts.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.hashing import stored_hashes
from quire.engine.kv_cache.load_cost import NEVER
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.kv_cache.stored_blocks import StoredBlocks
from quire.engine.request import Request
from quire.errors import QuireError
from quire.wire.block_hash import BlockHash
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.kv_peers import DROP_S
from quire.wire.kv_transfer import (
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)
from quire.wire.stats import KVTransferStats

BlockTables = tuple[list[KVCacheBlock], ...]
"""Blocks of a request per group, in order of position. They must not be changed."""


class ExternalMatch(NamedTuple):
    """Tokens that a store has of a request, beyond those in the prefix cache."""

    num_tokens: int
    """Whole blocks, at least one. All groups have what a token after them reads."""
    source: str = "external_unspecified"
    """Label of metrics: host, p2p, remote, disk, external_unspecified. It is also what is measured, and rested when it
    stalls; of several with one label, each has a name after a colon."""
    params: dict[str, Any] | None = None
    """Sent to the worker half with the load."""


NONE_STORED = 0, 0
RESET_S = DROP_S + 1.0
"""Time in which what is stored must be dropped."""


class BlockChoice(NamedTuple):
    """Which of some computed blocks are to be saved."""

    wanted: Sequence[int]
    """Indices, in order."""
    num_decided: int
    """Leading blocks that were decided on; the rest cannot be saved now."""


NOTHING_CHOSEN = BlockChoice((), 0)


class RemoteSaves:
    """Counts of records that are put to a block server, of all workers, since the last statistics."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.outcomes = Counter[str]()
        self.has_changed = False
        self._num_waiting: dict[int, int] = {}
        """Numbers by rank."""

    def add(self, rank: int, counts: dict[str, Any]) -> None:
        """Takes in a worker's report."""
        self.num_begun += counts["begun"]
        self.outcomes.update(counts["outcomes"])
        self._num_waiting[rank] = counts["waiting"]
        self.has_changed = True

    def move_to(self, stats: KVTransferStats) -> None:
        """Adds the counts to statistics, and begins anew."""
        stats.num_remote_saves_begun, self.num_begun = self.num_begun, 0
        stats.num_remote_saves, self.outcomes = dict(self.outcomes), Counter()
        stats.num_waiting_remote_saves, self.has_changed = sum(self._num_waiting.values()), False


class Audited(NamedTuple):
    """Blocks of one request that are compared."""

    positions: range
    match: ExternalMatch
    """Match of the load that is computed instead."""


class LoadAudits:
    """The requests whose blocks are computed instead of loaded, and compared with the stored ones.

    On native kernels they must be the same to the bit. A share of the loads is chosen at random; the blocks of their
    requests are ordered to be compared when they are full (`saver.py`), as others are ordered to be saved.
    """

    def __init__(self, share: float, *sources: str) -> None:
        """`share`: of the loads from `sources`, which are named without what follows a colon."""
        self._share, self._sources = share, sources
        self._audited: dict[Request, Audited] = {}

    def begins(self, request: Request, match: ExternalMatch, first: int, num_blocks: int) -> bool:
        """Returns whether a load of `num_blocks` from block `first` on is computed instead."""
        if match.source.partition(":")[0] not in self._sources or random.random() >= self._share:
            return False
        self._audited[request] = Audited(range(first, first + num_blocks), match)
        return True

    def find(self, request: Request) -> Audited | None:
        """Returns which blocks of a request are compared."""
        return self._audited.get(request)

    def end(self, request: Request) -> None:
        """Forgets a request."""
        self._audited.pop(request, None)


class KVConnectorScheduler(ABC):
    """The scheduler half. Runs on the core's loop: no file, no socket and no hashing of data here.

    All methods but one do nothing unless they are overridden.
    """

    asks_again = True
    """After an answer of None `find_matches` is called again, in the next step; False: after the next report of the
    worker half."""
    sees_all_steps = False
    """True: `build_connector_meta` is called for each step; False: for those before which something has happened to
    requests or transfers."""
    has_several_sources = False
    """True: what a load has not brought is looked up again, in the other sources of `find_matches`."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.block_size = self.specs[0].block_size if self.specs else 1

    next_step_at = NEVER
    """The time (`time.monotonic`) at which a step is made even if there is nothing to compute."""

    audits: LoadAudits | None = None
    """Loads that are computed instead, to be compared; None: there are none."""

    remote_saves: RemoteSaves | None = None
    """Counts of what a block server is given; None: there is none."""

    stored: Sequence[StoredBlocks] = ()
    """Blocks of the stores that are published as KV cache events."""

    @classmethod
    def check_config(cls, config: EngineConfig) -> None:
        """Raises ConfigError if the connector cannot be used. Called before the workers are started, whose own errors
        are harder to read."""
        return

    def may_transfer(self, request: Request) -> bool:
        """Returns whether blocks of a request may be saved and loaded. Those with an adapter may if it counts by its
        content (`stored_hashes`), which is known once it was loaded: under its name other files may be there later."""
        return request.lora_request is None

    # -- loads -------------------------------------------------------------------------------------------------

    @abstractmethod
    def find_matches(self, request: Request, num_computed_tokens: int) -> Sequence[ExternalMatch] | None:
        """Returns what each source has beyond the first `num_computed_tokens`, which are whole blocks and in the cache;
        the quickest is loaded. None: ask again in a later step.

        Of a request of n tokens at most n - 1 are matched. May be called often, and changes nothing.
        `find_longest_match` helps.
        """

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Takes the owner of all block tables, once, before the first request."""
        return

    def update_state_after_alloc(self, request: Request, order: LoadOrder, tables: BlockTables) -> None:
        """Notes that a load has been ordered. `tables`: the request's blocks up to its end. May set `order.params`."""
        return

    def on_load_finished(self, order: LoadOrder, result: LoadResult) -> None:
        """Notes the end of a load: an index forgets what cannot be read."""
        return

    def get_error(self, request: Request) -> QuireError | None:
        """Returns the error that a waiting request ends with because of its load; None: it is computed."""
        return None

    # -- saves -------------------------------------------------------------------------------------------------

    def wants_saves(self, request: Request) -> bool:
        """Returns whether blocks of this request are saved at all."""
        return True

    def seconds_to_save(self) -> float:
        """Returns after how many seconds blocks can be saved; 0: now; infinity: a report will make it so. Until then
        computed blocks are postponed, and offered later if they are still in the cache."""
        return 0.0

    def choose_blocks(self, group_id: int, digests: Sequence[BlockHash]) -> BlockChoice:
        """Returns which computed blocks are to be saved: those that are not stored yet, and were not chosen before
        (two requests may compute the same side by side), as far as there is room. A block that was chosen can be chosen
        again if its save ends without it. Called once for each full block, when the result of its step is in, and again
        if it could not be saved then."""
        return NOTHING_CHOSEN

    def on_save_finished(self, order: SaveOrder, result: SaveResult) -> None:
        """Notes the end of a save: an index learns what can be found."""
        return

    def plan_audit(self, blocks: SavedBlocks, match: ExternalMatch) -> dict[str, Any]:
        """Returns the message to the worker half about an audit: where what is stored of `blocks` is, which would have
        been loaded by `match`."""
        return {}

    def on_difference(self, block: SavedBlock, audit: dict[str, Any]) -> None:
        """Notes that a computed block is not the stored one, which must not be used. `audit`: the message."""
        return

    # -- requests ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Notes that a request has been added."""
        return

    def take_message(self) -> dict[str, Any] | None:
        """Returns what is sent to the worker half at once, after `on_new_request`, `reset_cache` and an answer of None;
        None: nothing. It is never lost, as a step that fails is."""
        return None

    def request_started(self, request: Request, tables: BlockTables) -> None:
        """Notes that a request was admitted, with or without a load. `tables` has all its blocks from now on."""
        return

    def name_lease(self, request: Request) -> str | None:
        """Returns the name under which the blocks of an ended request's prompt are held for another engine; None: they
        are not."""
        return None

    def make_transfer_params(self, request: Request, lease: str, num_tokens: int) -> dict[str, Any] | None:
        """Returns the `kv_transfer_params` of an ended request's last output. `num_tokens` are held by `lease`."""
        return None

    def request_finished(self, request: Request) -> None:
        """Notes that a request has ended."""
        return

    # -- the rest ----------------------------------------------------------------------------------------------

    @property
    def holds_blocks(self) -> bool:
        """Returns whether it holds blocks that a report will give back, besides those of loads and saves."""
        return False

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Takes in a report of the worker half, before `on_load_finished` and `on_save_finished`."""
        return

    def build_connector_meta(self, output: SchedulerOutput) -> dict[str, Any] | None:
        """Returns what is sent to the worker half with a step that is about to be sent; None: nothing, and no step is
        made for it. See `sees_all_steps`."""
        return self.take_message()

    def set_weights(self, path: str) -> None:
        """Notes that the weights were replaced by those of `path`: only what was computed with the same ones fits. No
        transfer is under way."""
        return

    def count_stored(self) -> tuple[int, int]:
        """Returns the number of blocks that can be found, and the bytes of the whole store: the same object until they
        change. Called for each step."""
        return NONE_STORED

    def reset_cache(self) -> bool | Future[bool]:
        """Drops what is stored. Returns False if that failed, or a Future of this, which a report of the worker half
        ends within RESET_S."""
        return True

    def shutdown(self) -> None:
        """Releases its resources. May be called twice."""
        return


def find_longest_match(
    specs: Sequence[AnyKVCacheSpec], request: Request, num_computed_tokens: int, has: Callable[[int, bytes], bool]
) -> int:
    """Returns the most tokens beyond `num_computed_tokens` that can be loaded: full groups have all blocks of them, and
    groups with a window or chunk what the token after them reads.

    `has(group_id, digest)`, with a digest of `stored_hashes`, returns whether a store has a block. It is asked for each
    block of full groups up to the first that is missing, and for few of the others.
    """
    size = specs[0].block_size
    start = num_computed_tokens // size
    hashes = stored_hashes(request, size)
    stop = min((request.num_tokens - 1) // size, len(hashes))
    for group_id, spec in enumerate(specs):
        if spec.reach is None:
            stop = next((i for i in range(start, stop) if not has(group_id, hashes[i])), stop)
    windows = [(group_id, spec) for group_id, spec in enumerate(specs) if spec.reach is not None]
    while stop > start:
        missing = -1
        for group_id, spec in windows:
            first = max(start, min(stop - 1, int(spec.first_token_read(stop * size)) // size))
            missing = max(
                missing, next((i for i in range(stop - 1, first - 1, -1) if not has(group_id, hashes[i])), -1)
            )
        if missing < 0:
            return (stop - start) * size
        stop = missing  # no longer match contains the missing block
    return 0
