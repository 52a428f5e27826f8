"""Fits drafts to their requests, and counts what became of each proposed token.

`num_proposed_tokens` = verified (`num_draft_tokens`) + `num_unused_tokens` + in flight, at every moment. In flight are
the drafts that requests hold (`Request.spec_token_ids`) and those of steps without a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from quire.config.engine import EngineConfig
from quire.engine.request import Request, RequestStatus
from quire.wire.execution import DraftTokenIds, NewRequestData
from quire.wire.stats import SpecDecodeMetrics, SpecDecodingStats

Unused = Literal[
    "ended",
    "aborted",
    "jumped",
    "context",
    "grammar",
    "cap",
    "budget",
    "blocks",
    "preempted",
    "invalid",
    "abandoned",
]
"""Why a draft token is not verified.

ended, aborted: its request has ended, by an abort or otherwise. invalid: the token is not in the vocabulary, or the
request has no last token that drafts could follow. jumped: the grammar forced other tokens, or the same. context: the
request ends before it. grammar: not allowed. cap: more than K, than the row of the table by batch size, or than the
request wants. budget, blocks: the step has none left. preempted: its request was. abandoned: the step was given up.
"""
REQUEST_CAP = "num_speculative_tokens"
"""Key of `SamplingParams.extra_args`: most drafts of the request in a step."""


class DraftFitter:
    """Owns all rules about a proposal, and the statistics. Drafts that a request can use become its
    `spec_token_ids`."""

    def __init__(
        self,
        num_spec_tokens: int,
        max_model_len: int,
        *,
        num_lookahead_tokens: int = 0,
        vocab_size: int | None = None,
        caps: Sequence[tuple[int, int, int]] = (),
        is_enabled: bool = True,
    ) -> None:
        """`caps` are (from, to, most drafts) by number of running requests. A vocab_size of None: all ids are good.
        is_enabled False: there will be no drafts, and the statistics say so."""
        self.num_spec_tokens = num_spec_tokens
        self.num_lookahead_tokens = num_lookahead_tokens
        """Tokens beyond those of a step for which blocks are allocated, where they are free."""
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._caps = sorted(caps)
        self._predicted: set[Request] = set()
        """Requests whose drafts come from their prediction."""
        self._is_enabled = is_enabled
        self._stats = self._new_stats()
        self._has_news = not is_enabled

    @classmethod
    def from_config(cls, config: EngineConfig, max_model_len: int) -> DraftFitter | None:
        """Returns the fitter of an engine that speculates, or must not any more; None for another one."""
        drafting, dropped = config.speculative_config.drafting, config.speculative_config.dropped
        if drafting is None:
            return None if dropped is None else cls(dropped.num_speculative_tokens, max_model_len, is_enabled=False)
        return cls(
            drafting.num_speculative_tokens,
            max_model_len,
            num_lookahead_tokens=drafting.num_lookahead_tokens,
            vocab_size=config.model_config.hf_config.get("vocab_size"),
            caps=drafting.num_speculative_tokens_per_batch_size,
        )

    # -- proposals ---------------------------------------------------------------------------------------------

    def fit(self, drafts: DraftTokenIds, requests: Mapping[str, Request], num_running: int) -> None:
        """Gives each request what it can use of its drafts. A later proposal replaces an earlier one."""
        self._has_news = True
        self._stats.draft_seconds += drafts.seconds
        if self._is_enabled != drafts.is_enabled:
            self._is_enabled = self._stats.is_enabled = drafts.is_enabled
            self.num_lookahead_tokens = 0
        cap = self._find_cap(num_running)
        for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self._stats.num_proposed_tokens += len(token_ids)
            request = requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                self.drop(len(token_ids), "ended")
                continue
            self.take_back(request, "invalid")
            request.spec_token_ids = self._fit_to(request, token_ids, cap)
            if request_id in drafts.predicted_req_ids:
                self._predicted.add(request)

    def _find_cap(self, num_running: int) -> int:
        found = [most for start, _, most in self._caps if start <= num_running]
        return min(found[-1], self.num_spec_tokens) if found else self.num_spec_tokens

    def _fit_to(self, request: Request, token_ids: list[int], cap: int) -> list[int]:
        forced, params = request.unsent_token_ids, request.sampling_params
        if params is None or request.num_tokens - request.num_computed_tokens != 1 + len(forced):
            return self._cut(token_ids, 0, "invalid")
        if self._vocab_size is not None:
            size = self._vocab_size
            first_bad = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < size), len(token_ids))
            token_ids = self._cut(token_ids, first_bad, "invalid")
        if forced:  # the drafter did not know of them
            num_jumped = len(forced) if token_ids[: len(forced)] == forced else len(token_ids)
            self.drop(min(num_jumped, len(token_ids)), "jumped")
            token_ids = token_ids[num_jumped:]
        room = self._max_model_len - request.num_tokens - 1  # one token comes without a draft
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - request.num_output_tokens - 1)
        token_ids = self._cut(token_ids, room, "context")
        if token_ids and request.structured_output is not None:
            token_ids = self._cut(token_ids, request.structured_output.count_valid(token_ids), "grammar")
        if params.extra_args is not None:
            cap = min(cap, params.extra_args.get(REQUEST_CAP, cap))
        return self._cut(token_ids, cap, "cap")

    def _cut(self, token_ids: list[int], num_kept: int, reason: Unused) -> list[int]:
        if num_kept >= len(token_ids):
            return token_ids
        num_kept = max(num_kept, 0)
        self.drop(len(token_ids) - num_kept, reason)
        return token_ids[:num_kept]

    def introduce(self, data: NewRequestData, request: Request) -> None:
        """Sends the worker what a drafter may read of a new request."""
        data.prediction_token_ids, data.cache_salt = request.origin.prediction_token_ids, request.cache_salt

    # -- the books ---------------------------------------------------------------------------------------------

    def drop(self, num_tokens: int, reason: Unused) -> None:
        """Counts draft tokens that will not be verified."""
        if num_tokens:
            self._has_news = True
            unused = self._stats.num_unused_tokens
            unused[reason] = unused.get(reason, 0) + num_tokens

    def take_back(self, request: Request, reason: Unused) -> None:
        """Drops the drafts that a request holds."""
        self.drop(len(request.spec_token_ids), reason)
        request.spec_token_ids = []
        self._predicted.discard(request)

    def drop_of_ended(self, request: Request, num_tokens: int) -> None:
        """Counts drafts of a request that has ended."""
        self.drop(num_tokens, "aborted" if request.status is RequestStatus.FINISHED_ABORTED else "ended")
        self._predicted.discard(request)

    def record(self, request: Request, num_drafts: int, num_matched: int, num_kept: int) -> SpecDecodeMetrics:
        """Counts drafts that a step has verified: `num_matched` equal the tokens drawn, of which a stop has left
        `num_kept`, the one after the drafts included."""
        self._has_news = True
        num_accepted = min(num_matched, num_kept)
        self._stats.record(num_drafts, num_accepted, num_matched - num_accepted)
        from_prediction = request in self._predicted
        self._predicted.discard(request)
        return SpecDecodeMetrics(num_drafts, num_accepted, from_prediction)

    def take_stats(self) -> SpecDecodingStats | None:
        """Returns what was counted since the last call; None if nothing was."""
        if not self._has_news:
            return None
        stats, self._stats, self._has_news = self._stats, self._new_stats(), not self._is_enabled
        return stats

    def _new_stats(self) -> SpecDecodingStats:
        stats = SpecDecodingStats(self.num_spec_tokens, is_enabled=self._is_enabled)
        stats.num_accepted_tokens_per_pos = [0] * self.num_spec_tokens
        return stats
