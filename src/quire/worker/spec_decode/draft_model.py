"""A drafter that is a smaller model with the target's vocabulary: it reads the text and goes on with it.

It is lazy: a text is read when drafts of its request are asked for, not when its prompt is computed. A first token
never waits for it, and a request without drafts costs nothing.

Where several workers share the target, the one that samples has the whole model and drafts; the others get its drafts
with the next step. So drafts are those of one worker.

Drafts are drawn as the target draws: with the request's temperature, filters and seed, at the index that the token will
have in the output. Where both models give a token about the same range of the cumulative distribution, the same random
number finds it in both: more drafts are accepted than of most likely ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.attention.backend import Forward, States, set_forward_context
from quire.worker.attention.layer import Attention
from quire.worker.loader import load_weights
from quire.worker.model_runner import Model
from quire.worker.sample.kernel import DrawRules, Ids
from quire.worker.sample.metadata import Rows
from quire.worker.spec_decode.draft_kv import DraftKV, Span
from quire.worker.spec_decode.drafter import NO_PROPOSAL, DrafterContext, DraftRow, Proposal
from quire.worker.spec_decode.lengths import FADE

SHORT_SPAN = 4
"""Tokens of a request up to which logits of all are computed: a call less, for a few rows of the head more."""


class Alternatives(NamedTuple):
    """Two drafts of one position."""

    drawn: int
    likeliest: int
    bucket: int
    """Sixteenths of the likeliest one's probability."""


class _Drafts(NamedTuple):
    """One draft of each row of a batch."""

    token_ids: Ids
    confidences: Ids
    alternatives: list[Alternatives] | None
    """None if no row draws."""


class Contest:
    """Lead of drawn drafts over likeliest ones in right tokens, by the probability of the likeliest."""

    def __init__(self) -> None:
        self._leads = np.zeros(16)

    def prefers_drawn(self, buckets: Ids) -> npt.NDArray[np.bool_]:
        """Returns whether to propose the drawn token, by bucket of the likeliest one."""
        return self._leads[buckets] >= 0

    def observe(self, token_id: int, drafts: Alternatives) -> None:
        """Adds a position whose token is known now."""
        if drafts.drawn != drafts.likeliest:
            lead = (token_id == drafts.drawn) - (token_id == drafts.likeliest)
            self._leads[drafts.bucket] = FADE * self._leads[drafts.bucket] + lead


class DraftModel:
    """The model, and the drafts of one call of `propose` at a time."""

    ends = None

    def __init__(self, context: DrafterContext) -> None:
        """Loads the weights. Raises ModelLoadError."""
        config, drafting, runner = context.drafting.model, context.drafting, context.runner
        assert config is not None, "the configuration names the drafter's checkpoint"
        self.loaded = load_weights(config, context.config.load_config, context.placement)
        self._runner = runner
        self._model = cast(Model, self.loaded.model)
        self.layers = [m for m in self.loaded.model.modules() if isinstance(m, Attention) and m.is_cached]
        is_plannable = getattr(self._model, "is_plannable", True)
        plan = runner.backend.for_one_worker().plan_steps if is_plannable else _as_it_is
        self._read, self._predict = plan(self._model), plan(self._compute)
        self._kernel = context.placement.kernels.sampling()
        self._vocab_size = config.hf_config.vocab_size
        self._num_draftable = min(self._vocab_size, context.config.model_config.hf_config.vocab_size)
        self._max_len = min(config.model_len, drafting.max_model_len or config.model_len)
        self._kv: DraftKV | None = None
        self._key: tuple[int, bytes] | None = None
        """The version of the batch and the rows that `_rules` were made for."""
        self._rules: DrawRules | None = None
        self._contest = Contest()
        self._alternatives: dict[str, list[Alternatives]] = {}
        """Both drafts of each position of the last proposals."""

    def release_kv_cache(self) -> None:
        self._kv = self._key = self._rules = None

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        if self._kv is None or self._kv.memory is not self._runner.kv_cache:
            self._kv = DraftKV(self.layers, self._runner)
        spans, limits = self._choose_spans(self._kv, rows)
        drafts = self._draft(self._kv, spans, limits) if spans else {}
        return [drafts.get(row.req_id, NO_PROPOSAL) for row in rows]

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Notes which alternatives were right. Which drafts were is in the text."""
        for token_id, drafts in zip(token_ids[: num_accepted + 1], self._alternatives.pop(req_id, ()), strict=False):
            self._contest.observe(token_id, drafts)

    def forget(self, req_id: str) -> None:
        self._alternatives.pop(req_id, None)
        if self._kv is not None:
            self._kv.forget(req_id)

    def reset(self) -> None:
        """Does nothing: its keys follow from the text and its own weights."""

    def _compute(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self._model.compute_logits(_untapped(self._model(input_ids, positions)))

    def _choose_spans(self, kv: DraftKV, rows: Sequence[DraftRow]) -> tuple[list[Span], list[int]]:
        """Returns what is to be read for `rows`, within the budget of a step, and the most drafts of each span: 0 if it
        does not reach the end of the text."""
        spans: list[Span] = []
        limits: list[int] = []
        budget = self._runner.max_num_tokens
        for row in sorted(rows, key=lambda row: row.row):
            size = len(row.token_ids)
            limit = min(row.max_drafts, min(self._max_len, kv.capacity(row)) + 1 - size)
            if limit > 0 and budget > 0:
                start = kv.num_tokens(row)
                stop = min(size, start + budget)
                spans.append(Span(row, start, stop))
                limits.append(limit if stop == size else 0)
                budget -= stop - start
        return spans, limits

    @torch.inference_mode()
    def _draft(self, kv: DraftKV, spans: Sequence[Span], limits: Sequence[int]) -> dict[str, Proposal]:
        """Reads the spans and drafts at most limits[i] tokens after each. Returns the proposals by request id."""
        rows, left, stops = (np.array(x) for x in ([span.row.row for span in spans], limits, [s.stop for s in spans]))
        outputs = stops - [span.row.num_prompt_tokens for span in spans]
        proposals = [Proposal([], []) for _ in spans]
        logits = self._read_spans(kv, spans, rows)  # [len(spans), vocab]
        active = np.arange(len(spans))
        ids: Ids = active
        depth, going = 0, left > 0
        while going.any():
            active, ids = active[going], ids[going]
            if depth:
                positions, context = kv.place_one(rows[active], stops[active] + depth - 1)
                with set_forward_context(context):
                    logits = _untapped(self._predict(torch.from_numpy(ids).to(self._runner.device), positions))
            elif len(active) < len(logits):
                logits = logits[active]
            drafts = self._draw(logits[:, : self._num_draftable], rows[active], outputs[active] + depth)
            ids = drafts.token_ids
            for i, token_id, bucket in zip(active.tolist(), ids.tolist(), drafts.confidences.tolist(), strict=True):
                proposals[i].token_ids.append(token_id)
                proposals[i].confidences.append(bucket)
            if drafts.alternatives is not None:
                for i, alternatives in zip(active.tolist(), drafts.alternatives, strict=True):
                    self._alternatives.setdefault(spans[i].row.req_id, []).append(alternatives)
            depth += 1
            going = left[active] > depth
        for span, proposal in zip(spans, proposals, strict=True):
            kv.note(span, proposal.token_ids[:-1])
        return {span.row.req_id: proposal for span, proposal in zip(spans, proposals, strict=True)}

    def _read_spans(self, kv: DraftKV, spans: Sequence[Span], rows: Rows) -> Tensor:
        """Computes the tokens of the spans. Returns the logits after the last of each, [len(spans), vocab]."""
        starts = np.array([span.start for span in spans])
        query_lens = np.array([span.stop for span in spans]) - starts
        lasts = np.cumsum(query_lens) - 1
        ids = np.concatenate([span.row.token_ids[span.start : span.stop] for span in spans]).astype(np.int64)
        input_ids = torch.from_numpy(np.minimum(ids, self._vocab_size - 1)).to(self._runner.device)
        positions, context = kv.place(rows, starts, query_lens)
        with set_forward_context(context):
            if len(ids) > SHORT_SPAN * len(spans):
                return self._model.compute_logits(_untapped(self._read(input_ids, positions))[lasts])
            logits = _untapped(self._predict(input_ids, positions))
            return logits if len(ids) == len(spans) else logits[lasts]

    def _draw(self, logits: Tensor, rows: Rows, indices: Ids) -> _Drafts:
        """Draws as the requests in `rows` do, one token per row of the logits, or takes the likeliest."""
        batch = self._runner.batch
        key = (batch.version, rows.tobytes())
        if key != self._key:
            self._key, self._rules = key, batch.sampling.select_rules(rows)
        drawn = self._kernel.choose(logits, self._rules, indices)
        found = self._kernel.logprobs(logits, np.arange(len(drawn)), drawn, 1)  # the drawn token, then the likeliest
        buckets = np.minimum(np.exp(found.logprobs) * 16, 15).astype(np.int64)
        if self._rules is None:  # all are greedy
            return _Drafts(drawn, buckets[:, 0], None)
        likeliest, bucket = found.token_ids[:, 1], buckets[:, 1]
        alternatives = list(map(Alternatives, drawn.tolist(), likeliest.tolist(), bucket.tolist()))
        is_drawn = self._contest.prefers_drawn(bucket)
        return _Drafts(np.where(is_drawn, drawn, likeliest), np.where(is_drawn, buckets[:, 0], bucket), alternatives)


def _as_it_is(model: Forward) -> Forward:
    return model


def _untapped(states: States) -> Tensor:
    assert isinstance(states, Tensor), "a drafter has no taps"
    return states
