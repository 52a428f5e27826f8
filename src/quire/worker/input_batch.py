"""The worker's memory of its requests: persistent arrays, a row per request.

Rows 0 … num_reqs - 1 are always in use: removing a request moves the last row into its place. The large arrays are
virtual memory until they are written, so a batch costs what its requests need, at most
max_num_reqs * max_model_len * 4 bytes for the token ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.wire.execution import BlockIds, NewRequestData
from quire.worker.block_table import BlockTable
from quire.worker.sample.metadata import Rows, SamplingTable


class InputBatch:
    """Token ids, lengths, block tables and sampling parameters of the requests the worker knows."""

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
        self.version = 0
        """Changes whenever a row gets another request."""

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)

    def add_request(self, request: NewRequestData) -> None:
        """Enter a request that is not in the batch; there is room for it."""
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
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table.set_row(row, block_ids)
        if request.sampling_params is not None:
            self.sampling.set_row(
                row, request.req_id, request.sampling_params, request.prompt_token_ids, request.output_token_ids
            )
        self.version += 1

    def remove_request(self, req_id: str) -> None:
        """Forget a request; unknown ids are ignored (it may have been aborted before it ever ran)."""
        row = self.rows.pop(req_id, None)
        if row is None:
            return
        self.sampling.clear_row(row)
        last = len(self.req_ids) - 1
        if row != last:
            self._move_row(last, row)
        self.req_ids.pop()
        self.version += 1

    def clear(self) -> None:
        """Forget all requests, whatever state an interrupt has left their rows in."""
        self.req_ids.clear()
        self.rows.clear()
        self.sampling.histories.clear()
        self.version += 1

    def _move_row(self, source: int, target: int) -> None:
        req_id, n = self.req_ids[source], self.num_tokens[source]
        self.req_ids[target] = req_id
        self.rows[req_id] = target
        self.token_ids[target, :n] = self.token_ids[source, :n]
        for array in (self.num_prompt_tokens, self.num_tokens, self.num_computed_tokens):
            array[target] = array[source]
        for table in self.block_tables:
            table.move_row(source, target)
        self.sampling.move_row(source, target)

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        """Add newly allocated blocks, per group."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.append_row(row, ids)

    def append_tokens(self, rows: Rows, token_ids: npt.NDArray[np.int64]) -> None:
        """Add one sampled token to each of the requests in `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        histories = self.sampling.histories
        if histories:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in histories:
                    histories[row].append(token_id)

    def extend_tokens(self, row: int, token_ids: list[int]) -> None:
        """Add outputs of one request that were not sampled here."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)
        history = self.sampling.histories.get(row)
        if history is not None:
            for token_id in token_ids:
                history.append(token_id)

    def output_lens(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Tokens each of the requests in `rows` has generated so far."""
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]
