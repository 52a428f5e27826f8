"""Drafters for tests and benchmarks of speculation: one that knows the answers, and one that knows nothing.

Their settings are class attributes, so the engine core must live in the same process (QUIRE_ENABLE_MULTIPROCESSING=0)::

    OracleDrafter.learn(outputs)  # of a run without speculation
    LLM(…, speculative_config={"model": "quire.testing.oracle_drafter:OracleDrafter", "num_speculative_tokens": 4})
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from quire.outputs import RequestOutput
from quire.worker.spec_decode.drafter import NO_PROPOSAL, Drafter, DrafterContext, DraftRow, Proposal


class OracleDrafter(Drafter):
    """Drafts what a request is known to answer. Each token is wrong with probability 1 - `accuracy`."""

    answers: ClassVar[dict[bytes, list[list[int]]]] = {}
    """Known outputs by prompt, as int32 bytes."""
    accuracy: ClassVar[float] = 1.0

    def __init__(self, context: DrafterContext) -> None:
        self._vocab_size = context.config.model_config.hf_config.vocab_size
        self._random = random.Random(0)

    @classmethod
    def learn(cls, outputs: Iterable[RequestOutput]) -> None:
        """Adds the outputs of a run."""
        for output in outputs:
            known = cls.answers.setdefault(np.array(output.prompt_token_ids, np.int32).tobytes(), [])
            known += [list(completion.token_ids) for completion in output.outputs]

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> Proposal:
        written = row.token_ids[row.num_prompt_tokens :].tolist()
        for answer in self.answers.get(row.token_ids[: row.num_prompt_tokens].tobytes(), ()):
            if answer[: len(written)] == written:
                rest = answer[len(written) : len(written) + row.max_drafts]
                ids = [i if self._random.random() < self.accuracy else (i + 1) % self._vocab_size for i in rest]
                return Proposal(ids, [round(self.accuracy * 15)] * len(ids))
        return NO_PROPOSAL

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        pass

    def forget(self, req_id: str) -> None:
        pass


class RandomDrafter(OracleDrafter):
    """Drafts random ids, some of them outside the vocabulary, and more than it may."""

    def _propose(self, row: DraftRow) -> Proposal:
        ids = [self._random.randrange(-1, self._vocab_size + 1) for _ in range(row.max_drafts + 1)]
        return Proposal(ids, [0] * len(ids))


class FailingDrafter(OracleDrafter):
    """Raises an error at its third proposal."""

    num_proposals = 0

    def _propose(self, row: DraftRow) -> Proposal:
        self.num_proposals += 1
        if self.num_proposals == 3:
            raise RuntimeError("this drafter fails")
        return super()._propose(row)
