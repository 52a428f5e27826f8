"""Numbers that travel with engine outputs. The engine core only counts; meaning is made in the frontend."""

from __future__ import annotations

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
    """Prefix cache look-ups, in tokens (checklist S0-PR-025)."""

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one look-up of `num_tokens` tokens of which `num_hits` were found."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class KVCacheEvictionEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The life of one sampled KV block, in seconds (checklist S0-PR-033…035)."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...] = ()


class SpecDecodingStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Draft tokens proposed and accepted in one step."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one draft of which the first `num_accepted_tokens` were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (num_draft_tokens - len(per_position)))
        for position in range(num_accepted_tokens):
            per_position[position] += 1


class PrefillStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Where the prompt tokens of a request came from; sent once, with its first output (checklist S3-DEF-038).

    num_prompt_tokens == num_computed_tokens + num_local_cached_tokens + num_external_cached_tokens.
    """

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed, whatever their source."""
        return self.num_local_cached_tokens + self.num_external_cached_tokens

    def after(self, num_tokens: int) -> PrefillStats:
        """The same for the prompt without its first `num_tokens`. The cached part is the start of it, locally first."""
        num_prompt = self.num_prompt_tokens - num_tokens
        num_cached = max(0, self.num_cached_tokens - num_tokens)
        num_local = max(0, self.num_local_cached_tokens - num_tokens)
        return PrefillStats(num_prompt, num_prompt - num_cached, num_local, num_cached - num_local)


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A snapshot of the scheduler taken once per step (checklist S0-ST-011)."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    """Waiting for capacity."""
    num_skipped_waiting_reqs: int = 0
    """Waiting for something else than capacity: a grammar, a remote KV transfer, more input."""
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    """Share of the blocks in use, 0..1, the null block left out."""
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = []
    spec_decoding_stats: SpecDecodingStats | None = None
    num_scheduled_tokens: int = 0
    """Tokens computed by the step this snapshot closes."""
    num_recomputed_tokens: int = 0
    """Those scheduled since the last snapshot that had been computed before, and lost with a request's blocks."""
    num_used_blocks: int = 0
    """Held by requests. With the next two: all blocks but the null block."""
    num_cached_blocks: int = 0
    """Held by none, with content that may be hit."""
    num_free_blocks: int = 0
    """Held by none, without content."""
