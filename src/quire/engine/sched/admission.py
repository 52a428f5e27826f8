"""The limits of the scheduler, and the plan of one admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.config.engine import SchedulerConfig
from quire.engine.kv_cache.block import KVCacheBlocks
from quire.engine.request import Request
from quire.errors import ConfigError, PromptTooLongError


class Admission(NamedTuple):
    """Plan for a waiting request that starts in a step."""

    cached_blocks: KVCacheBlocks
    """Found in the prefix cache."""
    num_hits: int
    """Tokens in `cached_blocks`."""
    num_cached: int
    """Tokens that are not computed again: those that the request holds, and the hits."""
    num_new: int
    """Tokens computed in the step."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one engine, from its `SchedulerConfig`."""

    max_num_scheduled_tokens: int
    """Token budget of a step."""
    max_num_seqs: int
    max_model_len: int
    """Context length, fitted to the cache."""
    long_prefill_token_threshold: int
    """Most tokens of one request in a step; 0: unlimited."""
    enable_chunked_prefill: bool
    reserve_full_isl: bool
    watermark_blocks: int
    """Blocks that an admission must leave free."""

    @classmethod
    def from_config(cls, config: SchedulerConfig, max_model_len: int, num_blocks: int) -> SchedulerLimits:
        """Raises ConfigError where a budget is still None, or too small for a prompt that may not be split."""
        budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        if budget is None or config.max_num_seqs is None:
            raise ConfigError(
                f"the scheduler has no budget (max_num_batched_tokens={config.max_num_batched_tokens}, "
                f"max_num_seqs={config.max_num_seqs}); EngineArgs.create_engine_config fills in the defaults"
            )
        if not config.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"a step of {budget} tokens cannot take a prompt of up to {max_model_len}, and chunked prefill is off; "
                "raise --max-num-batched-tokens (and --max-num-scheduled-tokens, where set), lower --max-model-len or "
                "drop --no-enable-chunked-prefill"
            )
        return cls(
            max_num_scheduled_tokens=budget,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark_blocks=int(config.watermark * num_blocks),
        )

    def validate_length(self, request: Request) -> None:
        """Raises PromptTooLongError if the context has no room for the request and one more token."""
        if not self.has_room(request):
            raise PromptTooLongError(
                f"request {request.request_id} has {request.num_tokens} tokens; the engine's context of "
                f"{self.max_model_len} takes at most {self._room(request)}; shorten the prompt or raise "
                "--max-model-len",
                param="prompt",
                value=request.num_tokens,
            )

    def has_room(self, request: Request) -> bool:
        """Returns whether the context has room for the request's tokens and, of a generating one, one more."""
        return request.num_tokens <= self._room(request)

    def _room(self, request: Request) -> int:
        return self.max_model_len - (request.sampling_params is not None)

    def cap_chunk(self, num_tokens: int, token_budget: int) -> int:
        """Returns how many of the `num_tokens` that a request lacks it may compute in a step with `token_budget`
        left."""
        if self.enable_chunked_prefill and 0 < self.long_prefill_token_threshold < num_tokens:
            num_tokens = self.long_prefill_token_threshold
        return min(num_tokens, token_budget)
