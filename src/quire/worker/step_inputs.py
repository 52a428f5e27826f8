"""The flat inputs of one step: the scheduled tokens of all requests, one after another, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.attention.backend import AttentionBatch
from quire.worker.input_batch import InputBatch
from quire.worker.sample.metadata import Rows


@dataclass(frozen=True)
class StepInputs:
    """What a forward pass gets, and which of its outputs are wanted. Requests are in the order of the batch."""

    rows: Rows
    """[num_reqs] rows of the batch that take part."""
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
    """Which of the requests sample a token: those that reach all the tokens they have."""

    @property
    def logits_indices(self) -> npt.NDArray[np.int64]:
        """[len(sampling)] the last token of each request that samples."""
        return (self.starts + self.query_lens - 1)[self.sampling]


def make_step_inputs(batch: InputBatch, num_scheduled_tokens: Mapping[str, int], device: torch.device) -> StepInputs:
    """Lay out the scheduled tokens. Every id is in the batch, with its num_computed_tokens up to date."""
    scheduled = np.zeros(batch.num_reqs, dtype=np.int64)
    for req_id, num_tokens in num_scheduled_tokens.items():
        scheduled[batch.rows[req_id]] = num_tokens
    rows = np.flatnonzero(scheduled)
    query_lens = scheduled[rows]
    computed = batch.num_computed_tokens[rows]
    seq_lens = computed + query_lens
    starts = np.cumsum(query_lens) - query_lens

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
        sampling=np.flatnonzero(seq_lens == batch.num_tokens[rows]),
    )
