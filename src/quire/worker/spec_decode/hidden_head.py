"""A drafter that is a head (EAGLE, EAGLE-3): it reads the target's hidden states of every step, prompts included.

Its entry at position i is made of the target's state of token i and the embedding of token i + 1; from the last entry
of a text follows the first draft. For the next ones the head's own states take the place of the target's. Entries are
made when the target computes a token and never again: states are not kept. A request whose entries have a gap, because
its prompt was found in the prefix cache and that part was not drafted for, gets no drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.speculative import HEADS, Drafting
from quire.config.speculators import aux_layers
from quire.worker.attention.backend import set_forward_context
from quire.worker.attention.layer import Attention
from quire.worker.loader import LoadedModel, ModelWeights, WeightCache, load_head, load_weights
from quire.worker.loader.shards import Ends, Sharding
from quire.worker.sample.kernel import Ids
from quire.worker.spec_decode.draft_kv import DraftKV, Span
from quire.worker.spec_decode.drafter import NO_PROPOSAL, DrafterContext, DraftRow, Proposal, TargetStep


def set_taps(target: Any, taps: tuple[int, ...], sharding: Sharding | None) -> None:
    """Makes a target, or a worker's part of it, return the inputs of layers `taps`."""
    target.model.taps = taps
    if sharding is not None and sharding.collectives is not None:
        target.model.keep_tap = sharding.collectives.copy


def tap_for_another(config: EngineConfig, drafting: Drafting, target: Any, sharding: Sharding | None) -> None:
    """Makes a stage before the last pass on what a head reads that drafts in another worker."""
    if drafting.method in HEADS and sharding is not None and sharding.stage is not None and not sharding.stage.is_last:
        assert drafting.model is not None, "it names the head"
        set_taps(target, aux_layers(drafting.model.hf_config, config.model_config.hf_config), sharding)


class HiddenHead:
    """The head, and the drafts of one call of `propose` at a time."""

    def __init__(self, context: DrafterContext) -> None:
        """Loads the weights, and taps the target. Raises ModelLoadError or UnsupportedModelError."""
        model, config = context.drafting.model, context.config
        assert model is not None, "the configuration names it"
        target: Any = context.runner.model
        cache = WeightCache(model, config.load_config)
        placement, sharding, whole = context.placement, context.sharding, target
        self.ends: LoadedModel | None = None
        if sharding is not None:
            part = dataclasses.replace(placement, sharding=Ends())
            self.ends = load_weights(config.model_config, config.load_config, part)
            whole = self.ends.model
        self._head = load_head(model, config.load_config, placement, whole, config.model_config, cache)
        weights = ModelWeights(self._head, model, config.load_config, placement, cache)
        self.loaded = LoadedModel(self._head, weights, cache)
        set_taps(target, self._head.taps, sharding)
        self._context, self._device = context, placement.device
        self.layers = [module for module in self._head.modules() if isinstance(module, Attention)]
        self._read = context.runner.backend.for_one_worker().plan_steps(self._head)
        self._kernel = placement.kernels.sampling()
        self._kv: DraftKV | None = None

    def release_kv_cache(self) -> None:
        self._kv = None

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        step, runner = self._context.step, self._context.runner
        assert step is not None, "it follows a step"
        if self._kv is None or self._kv.memory is not runner.kv_cache:
            self._kv = DraftKV(self.layers, runner)
        kv = self._kv
        wishes = {row.req_id: row.max_drafts for row in rows}
        spans, tokens = self._choose_spans(kv, step)
        if not spans:
            return [NO_PROPOSAL for _ in rows]
        states = torch.cat(step.tapped, dim=-1) if step.tapped else step.hidden
        states = states if len(tokens) == len(states) else states[torch.from_numpy(tokens).to(self._device)]
        ids = np.concatenate([span.row.token_ids[span.start + 1 : span.stop + 1] for span in spans])
        lens = np.array([span.stop - span.start for span in spans])
        slots, starts = np.array([s.row.row for s in spans]), np.array([s.start for s in spans])
        normed, after = self._compute(kv, ids, slots, starts, lens, self._head.combine(states))
        lasts = np.cumsum(lens) - 1
        limits = [min(wishes.get(s.row.req_id, 0), kv.capacity(s.row) - s.stop + 1) for s in spans]
        which = [i for i, limit in enumerate(limits) if limit > 0]
        drafts = self._draft(kv, [spans[i] for i in which], [limits[i] for i in which], normed, after, lasts[which])
        for span in spans:  # -1: an entry made of the head's own states is no entry of the text
            kv.note(span, [-1] * (len(drafts.get(span.row.req_id, NO_PROPOSAL).token_ids) - 1))
        return [drafts.get(row.req_id, NO_PROPOSAL) for row in rows]

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Does nothing: the next step says which drafts were right."""

    def forget(self, req_id: str) -> None:
        if self._kv is not None:
            self._kv.forget(req_id)

    def reset(self) -> None:
        """Drops its entries: they are made of states of the target's weights."""
        self._kv = None

    def _choose_spans(self, kv: DraftKV, step: TargetStep) -> tuple[list[Span], Ids]:
        """Returns the entries that follow from the step, without those of wrong drafts, and the step's tokens that they
        are made of."""
        inputs, batch = step.inputs, self._context.runner.batch
        spans: list[Span] = []
        tokens: list[Ids] = []
        for i, (req_id, sampled) in enumerate(zip(step.req_ids, step.sampled_token_ids, strict=True)):
            if (slot := batch.rows.get(req_id)) is None:
                continue
            num_wrong = 0 if inputs.num_drafts is None else int(inputs.num_drafts[i]) - max(len(sampled) - 1, 0)
            count = int(inputs.query_lens[i]) - num_wrong
            start = int(inputs.seq_lens[i] - inputs.query_lens[i])
            text = batch.token_ids[slot, : batch.num_tokens[slot]]
            row = DraftRow(req_id, slot, text, int(batch.num_prompt_tokens[slot]), start, 0)
            if start + count < len(text) and kv.num_tokens(row) >= start:
                spans.append(Span(row, start, start + count))
                tokens.append(np.arange(count) + inputs.starts[i])
        return spans, np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)

    def _compute(
        self, kv: DraftKV, ids: Ids, slots: Ids, starts: Ids, lens: Ids, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        positions, context = kv.place(slots, starts, lens)
        input_ids = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        with set_forward_context(context):
            normed, after = self._read(input_ids, positions, hidden)
        return normed, after

    def _draft(
        self, kv: DraftKV, spans: Sequence[Span], limits: Sequence[int], normed: Tensor, after: Tensor, lasts: Ids
    ) -> dict[str, Proposal]:
        """Drafts limits[i] tokens behind each span. normed, after: states that the head returned, of which the i-th
        span's last are those of row lasts[i]. Returns the proposals by request id."""
        proposals = {span.row.req_id: Proposal([], []) for span in spans}
        left, slots = np.array(limits), np.array([span.row.row for span in spans])
        stops = np.array([span.stop for span in spans])
        indices = stops + 1 - [span.row.num_prompt_tokens for span in spans]
        active, depth = np.arange(len(spans)), 0
        while len(active):
            kept = torch.from_numpy(lasts).to(self._device)
            ids, buckets = self._draw(self._head.compute_logits(normed[kept]), slots[active], indices[active] + depth)
            for i, token_id, bucket in zip(active.tolist(), ids.tolist(), buckets.tolist(), strict=True):
                proposal = proposals[spans[i].row.req_id]
                proposal.token_ids.append(token_id)
                proposal.confidences.append(bucket)
            depth += 1
            going = left[active] > depth
            active, kept, ids = active[going], kept[torch.from_numpy(going).to(self._device)], ids[going]
            if len(active):
                ones = np.ones_like(active)
                hidden = after[kept]
                normed, after = self._compute(kv, ids, slots[active], stops[active] + depth - 1, ones, hidden)
                lasts = np.arange(len(active))
        return proposals

    def _draw(self, logits: Tensor, slots: Ids, indices: Ids) -> tuple[Ids, Ids]:
        """Draws as the requests do, one token per row of the logits. Returns the target's ids, and confidences."""
        rules = self._context.runner.batch.sampling.select_rules(slots)
        ids = self._kernel.choose(logits, rules, indices)
        logprobs = self._kernel.logprobs(logits, np.arange(len(ids)), ids, 0).logprobs[:, 0]
        buckets = np.minimum(np.exp(logprobs) * 16, 15).astype(np.int64)
        return (ids if self._head.token_ids is None else self._head.token_ids.numpy(force=True)[ids]), buckets
