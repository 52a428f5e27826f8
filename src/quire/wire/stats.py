"""Numbers that travel with engine outputs, and the snapshot of an engine core that a client may ask for.

The engine core only counts; the frontend interprets. A snapshot is made on demand, between two steps, and bounded in
size whatever the core holds. It contains no token and no text.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec


class BaseCacheStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Queries and hits of one cache since the last report. `requests` counts look-ups, the other two count tokens.

    The `preempted_*` twins count look-ups made when a preempted request is admitted again, apart, so that the first
    three obey: one prefix query per request (promise P12 (i)).
    """

    reset: bool = False
    """The cache was emptied since the last report; sliding windows over it start anew."""
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class PrefixCacheStats(BaseCacheStats, array_like=True, omit_defaults=True, gc=False):
    """Prefix cache look-ups, in tokens."""

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Counts one look-up of `num_tokens` tokens of which `num_hits` were found."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class KVCacheEvictionEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The life of one sampled KV block, in seconds."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...] = ()


class SpecDecodeMetrics(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Drafts of one request that one step verified."""

    num_draft_tokens: int
    num_accepted_tokens: int = 0
    """Kept: equal to the tokens drawn, and not cut off by a stop."""
    from_prediction: bool = False
    """True if the drafts came from the request's prediction."""


class SpecDecodingStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Draft tokens proposed and accepted in one step.

    num_draft_tokens == num_accepted_tokens + num_rejected_tokens + num_cut_tokens. What was proposed is verified later
    or is in `num_unused_tokens`.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    num_rejected_tokens: int = 0
    num_cut_tokens: int = 0
    """Drafts that matched behind a token that ended the request."""
    num_proposed_tokens: int = 0
    num_unused_tokens: dict[str, int] = {}
    """Proposed and never verified, by reason."""
    draft_seconds: float = 0.0
    """Time that the drafter took."""
    is_enabled: bool = True
    """False after the drafter has failed."""

    def record(self, num_draft_tokens: int, num_accepted_tokens: int, num_cut_tokens: int = 0) -> None:
        """Counts one draft of which the first `num_accepted_tokens` were accepted and the next `num_cut_tokens` cut."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_cut_tokens += num_cut_tokens
        self.num_rejected_tokens += num_draft_tokens - num_accepted_tokens - num_cut_tokens
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (num_draft_tokens - len(per_position)))
        for position in range(num_accepted_tokens):
            per_position[position] += 1


class PrefillStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Where the prompt tokens of a request came from; sent once, with its first output.

    num_prompt_tokens == num_computed_tokens + num_local_cached_tokens + num_external_cached_tokens.
    """

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    external_by_source: dict[str, int] = {}
    """The same by label of the source: host, p2p, disk, external_unspecified."""
    load_span: tuple[float, float] | None = None
    """Start and end of their load, on the core's monotonic clock."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed, whatever their source."""
        return self.num_local_cached_tokens + self.num_external_cached_tokens

    def after(self, num_tokens: int) -> PrefillStats:
        """Returns the same, of one request, for the prompt without its first `num_tokens`. The cached part is the start
        of it, locally first."""
        num_prompt = self.num_prompt_tokens - num_tokens
        num_cached = max(0, self.num_cached_tokens - num_tokens)
        num_local = max(0, self.num_local_cached_tokens - num_tokens)
        num_external = num_cached - num_local
        by_source = dict.fromkeys(self.external_by_source, num_external) if num_external else {}
        return PrefillStats(num_prompt, num_prompt - num_cached, num_local, num_external, by_source)


def divide_by_source(num_tokens: int, by_source: Mapping[str, int]) -> dict[str, int]:
    """Returns the sources of `num_tokens`, which are the first of those that loads have brought."""
    divided: dict[str, int] = {}
    for source, number in by_source.items():
        if num_tokens > 0:
            divided[source] = min(number, num_tokens)
            num_tokens -= divided[source]
    return divided


class AdapterStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Adapters of one engine core: counts since the last report, and the present state."""

    num_loads: dict[str, int] = {}
    """Ended loads by outcome: "loaded", "failed"."""
    load_seconds: list[float] = []
    """Durations of the loads that succeeded."""
    wait_seconds: list[float] = []
    """Per request that had to wait for its adapter: time until it was admitted."""
    num_evictions: int = 0
    resident_bytes: int = 0
    """Memory of loaded adapters, and of those being loaded."""
    num_adapters: dict[str, int] = {}
    """Revisions of adapters by state: "cold", "loading", "ready", "failed"."""


class KVTransferStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Transfers of KV blocks: counts since the last report, and the present state."""

    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    """Look-ups outside the engine, at admissions: of the tokens beyond those found in the prefix cache."""
    num_loads_begun: int = 0
    num_loads: dict[str, int] = {}
    """Loads that no request waits for any more, by outcome: "ok", "partial", "failed", "cancelled"."""
    load_seconds: list[float] = []
    """Per load with at least one block: time that its request has waited for it."""
    num_loads_in_flight: int = 0
    num_saved_blocks: int = 0
    num_dropped_blocks: dict[str, int] = {}
    """Blocks that were not saved, by reason: "pins", "evicted", "present", or that of the worker."""
    num_held_blocks: dict[str, int] = {}
    """References of blocks outside of tables, by state."""
    num_stored_blocks: int = 0
    """Blocks that the connector can find."""
    num_stored_bytes: int = 0
    """Bytes of the store, those of other models included."""
    num_leases: dict[str, int] = {}
    """Leases of blocks to other engines that have ended, by end: "released", "expired", "broken", "error"."""
    num_rejected_records: dict[str, int] = {}
    """Records that were read and could not be used, by reason (`wire/kv_transfer.py: REJECTIONS`)."""
    num_saves_begun: int = 0
    """Blocks that were to be saved: those that were saved or dropped since, or wait."""
    num_waiting_saves: dict[str, int] = {}
    """Blocks to be saved, by state: "pinned", "postponed"."""
    save_lags: list[float] = []
    """Per save that has stored blocks: seconds since its oldest block was computed."""
    num_read_records: int = 0
    """Records that were read by loads which have ended: those that were accepted, and those that were rejected."""
    num_accepted_records: int = 0
    """Records that were read and are what they should be."""
    num_tier_loads: dict[str, dict[str, int]] = {}
    """`num_loads`, by where the blocks were."""
    num_audited_blocks: dict[str, int] = {}
    """Blocks that were computed instead of loaded, and compared: "same", "differs", "skipped"."""
    num_remote_saves_begun: int = 0
    """Records that were to be put to a block server: those that have ended since, or wait."""
    num_remote_saves: dict[str, int] = {}
    """Records that have ended, by outcome: `wire/kv_transfer.py: REMOTE_SAVE_OUTCOMES`."""
    num_waiting_remote_saves: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Statistics of the scheduler, taken once per step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    """Requests that wait for capacity."""
    num_skipped_waiting_reqs: int = 0
    """Requests that wait for something else: a grammar, the end of a pause, a remote KV transfer."""
    step_counter: int = 0
    """Steps of the present wave so far; 0 for engines that do not step together."""
    current_wave: int = 0
    """Number of waves that are over (`engine/waves.py`)."""
    kv_cache_usage: float = 0.0
    """Share of the blocks in use, 0..1, the null block left out."""
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = []
    spec_decoding_stats: SpecDecodingStats | None = None
    num_scheduled_tokens: int = 0
    """Tokens computed by the step this snapshot closes."""
    num_recomputed_tokens: int = 0
    """Tokens scheduled since the last statistics that had been computed before, and were lost in a preemption."""
    num_used_blocks: int = 0
    """In tables of requests. With the next two and `num_held_blocks`: all blocks but the null block."""
    num_cached_blocks: int = 0
    """Held by none, with content that may be hit."""
    num_free_blocks: int = 0
    """Held by none, without content."""
    num_generation_tokens: int = 0
    """Tokens generated by this step, for all frontends."""
    num_prefilled_tokens: int = 0
    """Prompt tokens computed, in this step and before, for the requests whose first output this step yields."""
    num_decoded_reqs: int = 0
    """Outputs with tokens that are not their request's first."""
    adapters: AdapterStats | None = None
    """None where no adapter is known."""
    num_dropped_kv_events: int = 0
    """Batches of KV cache events that could not be published."""
    kv_transfer: KVTransferStats | None = None
    """None where nothing is stored outside the engine."""
    num_dummy_batches: int = 0
    """Steps without requests since the last report, which other engines waited for."""
    barrier_wait_seconds: float = 0.0
    """Time since the last report that workers have waited for one another, all together."""
    num_held_blocks: int = 0
    """Blocks that transfers hold, and no table of a request."""

    @property
    def num_blocks(self) -> int:
        """Number of all blocks but the null block."""
        return self.num_used_blocks + self.num_cached_blocks + self.num_free_blocks + self.num_held_blocks


RequestPlace = Literal["running", "waiting", "preempted", "blocked"]
"""waiting: for capacity. preempted: the same, after its blocks were taken. blocked: for a grammar, the end of a pause,
a load or a step in flight."""
MAX_REFERENCES = 255
"""Largest number of references shown of a block."""


class BlockMap(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The blocks of the KV cache. The counts are exact; a large cache is listed by every `stride`-th block.

    Listed are the blocks 0, stride, 2 * stride, … below `num_touched`, a byte each. Block 0 is the null block.
    """

    num_blocks: int
    """Number of blocks in the pool, including the null block."""
    num_free: int
    """Number of blocks that can be given out, including those that hold a cached prefix."""
    num_cached: int
    """Number of blocks, in use or free, with a prefix that a request can find."""
    num_touched: int
    """Blocks from this one on have never been given out."""
    stride: int = 1
    references: bytes = b""
    """Number of block tables that hold each listed block, up to `MAX_REFERENCES`."""
    is_cached: bytes = b""
    """1 if it holds a prefix that a request can find."""


class RequestSnapshot(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One unfinished request, as the scheduler sees it."""

    request_id: str
    """The internal id."""
    external_req_id: str
    """The user's."""
    place: RequestPlace
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output."""
    num_computed_tokens: int
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache when it was admitted; -1 before that."""
    max_tokens: int | None = None
    num_preemptions: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    """Wall clock."""
    num_blocks: int = 0
    """Number of blocks in all its tables, without null blocks."""
    block_ids: bytes = b""
    """Ids of these blocks, unsigned 32-bit little-endian; of many, the first."""
    num_external_tokens: int = 0
    """Cached tokens that were loaded from outside the engine when it was admitted."""
    external_source: str = ""
    """Where these came from: host, p2p, disk, external_unspecified."""


class EngineSnapshot(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The core between two steps. `timestamp` and `time` are one moment on its monotonic and on the wall clock."""

    timestamp: float
    time: float
    pause_state: int
    """0 unpaused, 1 only new requests wait, 2 nothing is scheduled."""
    num_running: int
    num_waiting: int
    """Number of waiting requests, whatever they wait for."""
    max_num_seqs: int
    max_num_scheduled_tokens: int
    blocks: BlockMap
    requests: list[RequestSnapshot] = []
    """Running ones in order of admission, then waiting ones from the head of the queue; of many, the first."""
    num_left_out: int = 0
    """Requests that are not in the list."""
    held_blocks: dict[str, int] = {}
    """References of blocks outside of tables, by state: those of transfers."""


def join_snapshots(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Returns one snapshot of several engines, at least one: the blocks of each follow those of the one before it.

    Of the block maps every stride-th block is listed, with the largest stride of all. Times are those of the first.
    """
    first = snapshots[0]
    if len(snapshots) == 1:
        return first
    stride = max(snapshot.blocks.stride for snapshot in snapshots)
    references, is_cached, requests = bytearray(), bytearray(), list[RequestSnapshot]()
    num_before = 0
    for snapshot in snapshots:
        blocks = snapshot.blocks
        num_listed = -(-num_before // stride)
        for listed, found in ((references, blocks.references), (is_cached, blocks.is_cached)):
            listed += bytes(num_listed - len(listed)) + found[:: max(1, stride // blocks.stride)]
        for request in snapshot.requests:
            ids = array("I", request.block_ids)
            requests.append(
                msgspec.structs.replace(request, block_ids=array("I", [i + num_before for i in ids]).tobytes())
            )
        num_before += blocks.num_blocks
    maps = [snapshot.blocks for snapshot in snapshots]
    return EngineSnapshot(
        first.timestamp,
        first.time,
        max(snapshot.pause_state for snapshot in snapshots),
        sum(snapshot.num_running for snapshot in snapshots),
        sum(snapshot.num_waiting for snapshot in snapshots),
        sum(snapshot.max_num_seqs for snapshot in snapshots),
        sum(snapshot.max_num_scheduled_tokens for snapshot in snapshots),
        BlockMap(
            num_before,
            sum(blocks.num_free for blocks in maps),
            sum(blocks.num_cached for blocks in maps),
            num_before - maps[-1].num_blocks + maps[-1].num_touched,
            stride,
            bytes(references),
            bytes(is_cached),
        ),
        sorted(requests, key=lambda request: request.place != "running"),
        sum(snapshot.num_left_out for snapshot in snapshots),
        dict(sum((Counter(snapshot.held_blocks) for snapshot in snapshots), Counter[str]())),
    )
