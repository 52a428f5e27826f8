"""How steps are filled."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag, parse_human_int


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Budgets and order of the scheduler. After `EngineArgs.create_engine_config` no budget is None."""

    max_num_batched_tokens: int | None = flag(
        None, "Token budget of one step; default 4096 offline, 2048 serving.", parse=parse_human_int, minimum=1
    )
    max_num_seqs: int | None = flag(
        None, "Requests running at once; default 256 offline, 128 serving.", parse=int, minimum=1
    )
    max_num_queued_reqs: int | None = flag(
        None,
        "Requests that may wait for their first token; more are refused at once (503). Default: no limit; 16384 in "
        "quire serve.",
        parse=int,
        minimum=1,
    )
    max_num_queued_tokens: int | None = flag(
        None,
        "Prompt tokens that may wait for a first token; more are refused at once (503). Default: no limit; 32M in "
        "quire serve.",
        parse=parse_human_int,
        minimum=1,
    )
    max_num_reserved_tokens: int | None = flag(
        None,
        "Tokens that live requests may have in all, prompts and the longest outputs they ask for; more are refused at "
        "once (503). Default: no limit.",
        parse=parse_human_int,
        minimum=1,
    )
    max_num_scheduled_tokens: int | None = flag(
        None, "Tokens scheduled in one step where it should differ from the budget.", parse=parse_human_int, minimum=1
    )
    scheduling_policy: str = flag(
        "fcfs",
        "Order of waiting requests: first come first served, or by priority (smaller first).",
        choices=("fcfs", "priority"),
    )
    enable_chunked_prefill: bool = flag(True, "Split prompts that do not fit the step's budget.")
    long_prefill_token_threshold: int = flag(
        0, "Most prompt tokens of one request per step; 0 for no limit.", parse=parse_human_int, minimum=0
    )
    scheduler_reserve_full_isl: bool = flag(
        True, "Admit a request only when blocks for its whole prompt are free, so that prefills do not thrash."
    )
    watermark: float = flag(
        0.0, "Share of blocks kept free when admitting requests.", parse=float, minimum=0, maximum=0.9
    )
    stream_interval: int = flag(1, "Emit a streamed update every so many tokens.", parse=int, minimum=1)
    scheduler_cls: str = flag("quire.engine.sched.scheduler:Scheduler", "Scheduler class, as package.module:Class.")
