"""The running requests of a worker: their tokens, blocks and sampling parameters by row, and the inputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.wire.execution import BlockIds, NewRequestData
from quire.worker.attention.backend import AttentionBatch
from quire.worker.sample.metadata import Rows, SamplingTable


class BlockTable:
    """A row of block ids per request of the batch. Entries past a row's blocks are stale and never read."""

    def __init__(self, block_size: int, max_num_reqs: int, max_model_len: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._ids = np.zeros((max_num_reqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_reqs, dtype=np.int64)

    def set_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Replaces the blocks of a row."""
        self._num_blocks[row] = 0
        self.append_row(row, block_ids)

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Adds blocks at the end of a row."""
        start = self._num_blocks[row]
        self._ids[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)

    def move_row(self, source: int, target: int) -> None:
        """Copies a row to another place."""
        n = self._num_blocks[source]
        self._ids[target, :n] = self._ids[source, :n]
        self._num_blocks[target] = n

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns [n] int64: the slots of the tokens at `positions` of the requests in `rows` (parallel arrays)."""
        blocks = self._ids[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def block_ids(self, row: int) -> npt.NDArray[np.int32]:
        """Returns the blocks of a row, [n]. A view: use at once."""
        return self._ids[row, : self._num_blocks[row]]

    def rows(self, rows: npt.NDArray[np.int64], device: torch.device) -> Tensor:
        """Returns the table of some requests, [len(rows), blocks] int32, as wide as the longest. May be a view: use at
        once."""
        width = int(self._num_blocks[rows].max())
        # rows are distinct: if they ascend to len - 1, they are all rows up to there
        is_head = rows[-1] == len(rows) - 1 and bool((rows[:-1] < rows[1:]).all())
        ids = self._ids[: len(rows), :width] if is_head else self._ids[rows, :width]
        return torch.from_numpy(ids).to(device)


class PromptEmbeds:
    """The embeddings of a prompt, and which of its positions they are for."""

    def __init__(self, rows: npt.NDArray[np.float32], is_token_ids: Sequence[bool] | None) -> None:
        """rows: [num_prompt_tokens, hidden_size]."""
        self._rows = rows
        self.is_embed = np.ones(len(rows), bool) if is_token_ids is None else ~np.array(is_token_ids, bool)
        """[num_prompt_tokens] True where the row counts, not the token."""

    def take(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Returns the positions from `start` to `stop` that are embeddings, and their rows, [n, hidden_size]."""
        positions = start + np.flatnonzero(self.is_embed[start:stop])
        return positions, self._rows[positions]


NO_ADAPTER = -1
"""Slot of requests for the base model."""


class InputBatch:
    """Token ids, lengths, block tables and sampling parameters of the running requests."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_sizes: list[int]) -> None:
        self.max_num_reqs = max_num_reqs
        self.req_ids: list[str] = []
        self.rows: dict[str, int] = {}
        self.token_ids = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        """Prompt, then outputs."""
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.block_tables = [BlockTable(size, max_num_reqs, max_model_len) for size in block_sizes]
        """Per KV cache group."""
        self.sampling = SamplingTable(max_num_reqs)
        self.adapter_slots = np.full(max_num_reqs, NO_ADAPTER, dtype=np.int64)
        """Slot of each request's adapter: see worker/lora/table.py."""
        self.adapter_starts = np.zeros(max_num_reqs, dtype=np.int64)
        """Position of the first token of each request that its adapter applies to."""
        self.draft_hints: dict[str, tuple[npt.NDArray[np.int32] | None, str | None]] = {}
        """(predicted outputs, cache salt) of the requests that have either."""
        self.embeds: dict[str, PromptEmbeds] = {}
        """The requests whose prompts are embeddings, at least in part."""
        self.version = 0
        """Changes whenever a row gets another request."""

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)

    def add_request(self, request: NewRequestData, adapter_slot: int = NO_ADAPTER) -> None:
        """Adds a request that is not in the batch; there must be room for it."""
        row = len(self.req_ids)
        assert row < self.max_num_reqs, f"more than max_num_seqs={self.max_num_reqs} requests run at once"
        assert request.req_id not in self.rows, f"request {request.req_id} is already known"
        tokens = request.prompt_token_ids + request.output_token_ids
        self.req_ids.append(request.req_id)
        self.rows[request.req_id] = row
        self.token_ids[row, : len(tokens)] = tokens
        self.num_prompt_tokens[row] = len(request.prompt_token_ids)
        self.num_tokens[row] = len(tokens)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.adapter_slots[row], self.adapter_starts[row] = adapter_slot, request.lora_start
        if request.prediction_token_ids or request.cache_salt is not None:
            prediction = np.array(request.prediction_token_ids, np.int32) if request.prediction_token_ids else None
            self.draft_hints[request.req_id] = prediction, request.cache_salt
        prompt = request.prompt_token_ids
        if request.prompt_embeds is not None:
            embeds = self.embeds[request.req_id] = PromptEmbeds(request.prompt_embeds, request.prompt_is_token_ids)
            prompt = [prompt[i] for i in np.flatnonzero(~embeds.is_embed)]  # penalties count tokens only
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table.set_row(row, block_ids)
        if request.sampling_params is not None:
            self.sampling.set_row(row, request.req_id, request.sampling_params, prompt, request.output_token_ids)
        self.version += 1

    def remove_request(self, req_id: str) -> None:
        """Removes a request. Unknown ids are ignored: the request may have been aborted before it ran."""
        row = self.rows.pop(req_id, None)
        if row is None:
            return
        self.draft_hints.pop(req_id, None)
        self.embeds.pop(req_id, None)
        self.sampling.clear_row(row)
        last = len(self.req_ids) - 1
        if row != last:
            self._move_row(last, row)
        self.req_ids.pop()
        self.version += 1

    def clear(self) -> None:
        """Removes all requests, even where an interrupt has left their rows half written."""
        self.req_ids.clear()
        self.rows.clear()
        self.draft_hints.clear()
        self.embeds.clear()
        self.sampling.histories.clear()
        self.version += 1

    def _move_row(self, source: int, target: int) -> None:
        req_id, n = self.req_ids[source], self.num_tokens[source]
        self.req_ids[target] = req_id
        self.rows[req_id] = target
        self.token_ids[target, :n] = self.token_ids[source, :n]
        for array in (self.num_prompt_tokens, self.num_tokens, self.num_computed_tokens):
            array[target] = array[source]
        for array in (self.adapter_slots, self.adapter_starts):
            array[target] = array[source]
        for table in self.block_tables:
            table.move_row(source, target)
        self.sampling.move_row(source, target)

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        """Adds newly allocated blocks, per group."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.append_row(row, ids)

    def append_tokens(self, rows: Rows, token_ids: npt.NDArray[np.int64]) -> None:
        """Adds one sampled token to each of the requests in `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        histories = self.sampling.histories
        if histories:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in histories:
                    histories[row].append(token_id)

    def extend_tokens(self, row: int, token_ids: list[int]) -> None:
        """Adds several outputs of one request. Its history may have the first of them already."""
        start = self.num_tokens[row]
        history = self.sampling.histories.get(row)
        if history is not None:
            for token_id in token_ids[len(history.output_token_ids) - (start - self.num_prompt_tokens[row]) :]:
                history.append(token_id)
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def complete_tokens(self, row: int, token_ids: list[int]) -> None:
        """Adds those outputs that the request lacks. `token_ids` are its outputs that are not computed. Outputs that
        are computed and not known were drafts: they are in their places."""
        first = max(self.num_computed_tokens[row], self.num_prompt_tokens[row])
        self.num_tokens[row] = max(self.num_tokens[row], first)
        self.extend_tokens(row, token_ids[int(self.num_tokens[row] - first) :])

    def write_drafts(self, drafts: Mapping[str, list[int]]) -> npt.NDArray[np.int64]:
        """Writes drafts, by request id, behind the tokens of their requests, where later tokens overwrite them. Returns
        [num_reqs] the number of each row."""
        num_drafts = np.zeros(self.num_reqs, dtype=np.int64)
        for req_id, token_ids in drafts.items():
            row = self.rows[req_id]
            start = self.num_tokens[row]
            self.token_ids[row, start : start + len(token_ids)] = token_ids
            num_drafts[row] = len(token_ids)
        return num_drafts

    def output_lens(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Returns the number of output tokens that each of the requests in `rows` has so far."""
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a forward pass, and which of its outputs are sampled. Requests are in the order of the batch, or of
    their adapters' slots."""

    rows: Rows
    """[num_reqs] rows of the batch in the step."""
    starts: npt.NDArray[np.int64]
    """[num_reqs] where each request's tokens start."""
    query_lens: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    """[num_reqs] tokens in the cache after this step."""
    input_ids: Tensor
    """[num_tokens] int64"""
    positions: Tensor
    """[num_tokens] int64"""
    attention: list[AttentionBatch]
    """Per KV cache group."""
    sampling: Rows
    """Indices of the requests that sample: those whose last token is in the step."""
    num_drafts: npt.NDArray[np.int64] | None
    """[num_reqs] the last tokens of each request that are drafts; None: there are no drafts in the step."""
    embeds: tuple[Tensor, Tensor] | None = None
    """Tokens that are embeddings, [n] int64, and their rows, [n, hidden_size] float32; None: there are none."""
    adapter_slots: npt.NDArray[np.int64] | None = None
    """[num_reqs] ascending slots of the requests' adapters; None: the step has no adapters."""
    base_lens: npt.NDArray[np.int64] | None = None
    """[num_reqs] first tokens of each request that its adapter does not apply to; None: there are none."""

    @property
    def logits_lens(self) -> npt.NDArray[np.int64]:
        """[len(sampling)] the number of tokens of each request whose logits are needed."""
        if self.num_drafts is None:
            return np.ones(len(self.sampling), dtype=np.int64)
        return self.num_drafts[self.sampling] + 1

    @property
    def logits_indices(self) -> npt.NDArray[np.int64]:
        """The tokens whose logits are needed: of each request that samples its last certain token, and its drafts."""
        lasts = (self.starts + self.query_lens - 1)[self.sampling]
        if self.num_drafts is None:
            return lasts
        lens = self.logits_lens
        return np.arange(lens.sum()) + np.repeat(lasts - np.cumsum(lens) + 1, lens)


NO_DRAFTS: Mapping[str, list[int]] = {}


def make_step_inputs(
    batch: InputBatch,
    num_scheduled_tokens: Mapping[str, int],
    device: torch.device,
    drafts: Mapping[str, list[int]] = NO_DRAFTS,
) -> StepInputs:
    """Returns the inputs of a step. Every id must be in the batch, with its num_computed_tokens up to date.
    `drafts` are among the scheduled tokens of their requests; they are written into the batch. Requests with the same
    adapter come one after the other."""
    scheduled = np.zeros(batch.num_reqs, dtype=np.int64)
    for req_id, num_tokens in num_scheduled_tokens.items():
        scheduled[batch.rows[req_id]] = num_tokens
    rows = np.flatnonzero(scheduled)
    slots = base_lens = None
    if (batch.adapter_slots[rows] != NO_ADAPTER).any():
        rows, slots, base_lens = _sort_by_adapter(batch, rows, scheduled)
    query_lens = scheduled[rows]
    computed = batch.num_computed_tokens[rows]
    seq_lens = computed + query_lens
    starts = np.cumsum(query_lens) - query_lens
    num_drafts = batch.write_drafts(drafts)[rows] if drafts else None
    certain_lens = seq_lens if num_drafts is None else seq_lens - num_drafts

    token_rows = np.repeat(rows, query_lens)  # [num_tokens]
    positions = np.arange(len(token_rows)) + np.repeat(computed - starts, query_lens)
    input_ids = batch.token_ids[token_rows, positions].astype(np.int64)
    attention = [
        AttentionBatch(
            query_lens,
            seq_lens,
            table.rows(rows, device),
            torch.from_numpy(table.slots(token_rows, positions)).to(device),
        )
        for table in batch.block_tables
    ]
    return StepInputs(
        rows=rows,
        starts=starts,
        query_lens=query_lens,
        seq_lens=seq_lens,
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=attention,
        sampling=np.flatnonzero(certain_lens == batch.num_tokens[rows]),
        num_drafts=num_drafts,
        embeds=_find_embeds(batch, rows, starts, computed, seq_lens, device) if batch.embeds else None,
        adapter_slots=slots,
        base_lens=base_lens,
    )


def _sort_by_adapter(
    batch: InputBatch, rows: npt.NDArray[np.int64], scheduled: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """Returns the rows in the order of their adapters' slots, with `adapter_slots` and `base_lens` of the step."""
    num_before = batch.adapter_starts[rows] - batch.num_computed_tokens[rows]  # tokens before the adapter
    slots = np.where(num_before >= scheduled[rows], NO_ADAPTER, batch.adapter_slots[rows])
    if not (slots != NO_ADAPTER).any():
        return rows, None, None
    order = np.argsort(slots, kind="stable")
    rows, slots, num_before = rows[order], slots[order], num_before[order]
    base_lens = np.where(slots == NO_ADAPTER, 0, num_before).clip(0)
    return rows, slots, base_lens if base_lens.any() else None


def _find_embeds(
    batch: InputBatch, rows: Rows, starts: Rows, computed: Rows, seq_lens: Rows, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Returns the tokens of a step that are embeddings, and their rows; None: there are none."""
    indices, values = [], []
    for row, start, first, stop in zip(*(a.tolist() for a in (rows, starts, computed, seq_lens)), strict=True):
        embeds = batch.embeds.get(batch.req_ids[row])
        if embeds is not None and embeds.is_embed[first:stop].any():
            positions, found = embeds.take(first, stop)
            indices.append(positions - first + start)
            values.append(found)
    if not indices:
        return None
    return torch.from_numpy(np.concatenate(indices)).to(device), torch.from_numpy(np.concatenate(values)).to(device)
