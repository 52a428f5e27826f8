"""The tokens of a step: one worker samples them, the others read them."""

from __future__ import annotations

import torch

from quire.worker.parallel.collectives import Collectives, Written


class TokenExchange:
    """Passes the sampled tokens of a step from the first worker of a group to the others. Logits are read and changed
    by the first only."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        shape = (2 * collectives.max_rows,)
        self._buffer = collectives.shared("tokens", shape, torch.int64).view(2, -1)
        self._counts, self._ids = self._buffer.numpy()

    @property
    def is_leader(self) -> bool:
        """True for the worker that samples."""
        return self._collectives.group.index == 0

    def send(self, token_ids: list[list[int]]) -> None:
        """Sends the tokens of each request. Called by the leader."""
        flat = [token_id for own in token_ids for token_id in own]
        self._counts[: len(token_ids)] = [len(own) for own in token_ids]
        self._ids[: len(flat)] = flat
        counts, ids = self._buffer
        self._collectives.ready([Written(counts[: len(token_ids)]), Written(ids[: len(flat)])])

    def receive(self, num_reqs: int) -> list[list[int]]:
        """Returns the tokens of each request. Called by the others."""
        self._collectives.ready()
        ends = self._counts[:num_reqs].cumsum().tolist()
        return [self._ids[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]
