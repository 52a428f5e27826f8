"""Statistics of outputs and of finished requests."""

from __future__ import annotations

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.request_state import RequestState
from quire.frontend.session import SessionState
from quire.wire.engine_core import EngineCoreOutput, FinishReason


class OutputCounter:
    """Counts the outputs of one batch. Requests that waited equally long since their last output, mostly all of a step,
    are counted as one run."""

    __slots__ = ("_num_tokens", "_num_waits", "_since", "_stats", "_timestamp")

    def __init__(self, stats: IterationStats, timestamp: float) -> None:
        """`timestamp` is the time of the step, on the core's clock."""
        self._stats = stats
        self._timestamp = timestamp
        self._num_tokens = 0
        self._num_waits = 0
        self._since = 0.0
        """Time of the previous output of the requests of the present run."""

    def add(self, state: RequestState, output: EngineCoreOutput) -> None:
        """Counts one output, before anything else is done with it."""
        if state.is_prefilling or output.events or output.num_nans_in_logits:
            self._add_special(state, output)
        elif output.new_token_ids:  # nearly every output
            self._num_tokens += len(output.new_token_ids)
            if state.last_token_ts != self._since:
                self._end_run()
                self._since = state.last_token_ts
            self._num_waits += 1
            state.last_token_ts = self._timestamp

    def _end_run(self) -> None:
        if self._num_waits:
            self._stats.add_waits(self._timestamp - self._since, self._num_waits)
            self._num_waits = 0

    def _add_special(self, state: RequestState, output: EngineCoreOutput) -> None:
        stats = state.stats
        if stats is not None:
            owner = state.owner if state.is_prefilling else None
            self._stats.update_from_output(
                output, self._timestamp, state.is_prefilling, stats, state.num_context_tokens, owner
            )
            state.last_token_ts = stats.last_token_ts

    def close(self) -> None:
        """Adds the counts to the statistics."""
        self._stats.num_generation_tokens += self._num_tokens
        self._end_run()


def close_segment(
    state: RequestState, session: SessionState, finish_reason: FinishReason, iteration_stats: IterationStats | None
) -> None:
    """Adds a segment that has ended to the books of its session."""
    if iteration_stats is not None and state.stats is not None:
        _close_books(state, finish_reason, iteration_stats)
        iteration_stats.take_segment(session.stats)


def record_finished(state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats) -> None:
    """Adds a finished request: a session counts as one, and so do the n outputs of one prompt."""
    stats, session, parent = state.stats, state.session, state.parent
    if stats is None:
        return
    if session is None:
        _close_books(state, finish_reason, iteration_stats)
        longest = stats.num_generation_tokens
    else:
        if session.end is None:
            close_segment(state, session, finish_reason, iteration_stats)
        iteration_stats.update_from_finished_session(session.stats, finish_reason)
        longest = session.stats.num_generation_tokens
    if parent is not None:
        longest = parent.observe_num_generation_tokens(longest)
        if parent.child_requests:
            return
    iteration_stats.max_num_generation_tokens.append(longest)
    iteration_stats.n_params.append(1 if parent is None else parent.n)


def _close_books(state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats) -> None:
    params, stats = state.request.sampling_params, state.stats
    assert stats is not None
    iteration_stats.update_from_finished_request(
        state.external_req_id,
        finish_reason,
        stats,
        num_prompt_tokens=state.num_prompt_tokens - state.num_context_tokens,
        max_tokens_param=None if params is None else params.max_tokens,
        num_cached_tokens=max(0, (state.num_cached_tokens or 0) - state.num_context_tokens),
        owner=state.owner,
    )
