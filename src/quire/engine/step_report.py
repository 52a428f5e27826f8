"""What the log says about a step. Numbers and ids only: prompts and outputs never appear in a log."""

from __future__ import annotations

import logging

from quire.wire.execution import SchedulerOutput


def describe_step(output: SchedulerOutput) -> str:
    """A step in one line: who computes how much, and who left."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    new_ids = set(starts)
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    parts = [
        f"{request_id}{' (new)' if request_id in new_ids else ''}: {starts.get(request_id)}+{num_tokens}"
        for request_id, num_tokens in output.num_scheduled_tokens.items()
    ]
    return (
        f"{output.total_num_scheduled_tokens} tokens of {len(parts)} requests (computed+scheduled) [{', '.join(parts)}]"
        f", finished {sorted(output.finished_req_ids)}, preempted {sorted(output.preempted_req_ids)}"
    )


def describe_iteration(index: int, output: SchedulerOutput, elapsed_s: float) -> str:
    """The iteration log line (checklist S3-EC-034). A request that computes one token (and drafts) is generating."""
    num_generating = num_generated = 0
    for request_id in output.scheduled_cached_reqs.req_ids:
        num_tokens = output.num_scheduled_tokens[request_id]
        if num_tokens == 1 + len(output.scheduled_spec_decode_tokens.get(request_id, ())):
            num_generating += 1
            num_generated += num_tokens
    return (
        f"Iteration({index}): {len(output.num_scheduled_tokens) - num_generating} context requests, "
        f"{output.total_num_scheduled_tokens - num_generated} context tokens, {num_generating} generation requests, "
        f"{num_generated} generation tokens, elapsed {elapsed_s * 1e3:.2f} ms"
    )


def log_error_detail(logger: logging.Logger, output: SchedulerOutput, request_counts: tuple[int, int]) -> None:
    """Log the input of a step that failed. Raises nothing: the error that is being reported must not be hidden."""
    try:
        logger.error("the step that failed: %s; %d running, %d waiting", describe_step(output), *request_counts)
    except Exception:
        logger.exception("the step that failed could not be described")
