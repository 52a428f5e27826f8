"""Which cache blocks hold the tokens of each request, for one KV cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class BlockTable:
    """A row of block ids per request of the batch. Entries past a row's blocks are stale and never read."""

    def __init__(self, block_size: int, max_num_reqs: int, max_model_len: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._ids = np.zeros((max_num_reqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_reqs, dtype=np.int64)

    def set_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace the blocks of a row."""
        self._num_blocks[row] = 0
        self.append_row(row, block_ids)

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row."""
        start = self._num_blocks[row]
        self._ids[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row to another place."""
        n = self._num_blocks[source]
        self._ids[target, :n] = self._ids[source, :n]
        self._num_blocks[target] = n

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the tokens at `positions` of the requests in `rows` (parallel arrays) are stored: [n] int64."""
        blocks = self._ids[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def rows(self, rows: npt.NDArray[np.int64], device: torch.device) -> Tensor:
        """The table of some requests, [len(rows), blocks] int32, as wide as the longest. May be a view: use at once."""
        width = int(self._num_blocks[rows].max())
        # rows is ascending and distinct: if its last is len - 1, it is all rows up to there
        ids = self._ids[: len(rows), :width] if rows[-1] == len(rows) - 1 else self._ids[rows, :width]
        return torch.from_numpy(ids).to(device)
