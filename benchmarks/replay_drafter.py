"""A drafter that repeats what a request answered before, with errors: `benchmarks.speculation` runs each request twice.

Unlike `quire.testing.oracle_drafter` it learns by itself, so it works in an engine core of its own process. A draft is
wrong with probability 1 - REPLAY_ACCURACY, an environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from quire.testing.oracle_drafter import OracleDrafter
from quire.worker.spec_decode.drafter import DrafterContext, DraftRow, Proposal


class ReplayDrafter(OracleDrafter):
    """Learns the longest answer to each prompt that it sees."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.answers: dict[bytes, list[list[int]]] = {}  # type: ignore[misc]
        self.accuracy = float(os.environ.get("REPLAY_ACCURACY", "1"))  # type: ignore[misc]
        self._texts: dict[str, tuple[bytes, list[int]]] = {}

    def _propose(self, row: DraftRow) -> Proposal:
        if row.req_id not in self._texts:
            prompt = row.token_ids[: row.num_prompt_tokens].tobytes()
            self._texts[row.req_id] = prompt, row.token_ids[row.num_prompt_tokens :].tolist()
        return super()._propose(row)

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Adds tokens to the answer of a request; those before its first `propose` are added there."""
        if req_id in self._texts:
            self._texts[req_id][1].extend(token_ids)

    def forget(self, req_id: str) -> None:
        prompt, written = self._texts.pop(req_id, (b"", []))
        if len(written) > len(self.answers.get(prompt, [[]])[0]):
            self.answers[prompt] = [written]
