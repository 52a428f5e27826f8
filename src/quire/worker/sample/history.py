"""Which tokens a request holds, kept up to date token by token for the few requests whose sampling looks back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """The outputs of one request, and how often each distinct token of prompt and output occurs in the output.

    Sparse: memory and work grow with the distinct tokens of the request, not with the vocabulary.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self.output_token_ids: list[int] = []
        self._slot_of = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._token_ids = np.array([*distinct, *[0] * 16], dtype=np.int32)
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Note one more output token."""
        self.output_token_ids.append(token_id)
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[slot] = token_id
        self._counts[slot] += 1

    def token_counts(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Distinct tokens of prompt and output, and how often each occurs in the output. Views: use at once."""
        n = len(self._slot_of)
        return self._token_ids[:n], self._counts[:n]

    def num_after(self, token_id: int | None) -> int | None:
        """How many outputs have followed the first one that was `token_id`, None for the prompt; None if it has not
        come."""
        if token_id is None:
            return len(self.output_token_ids)
        return len(self.output_token_ids) - self.output_token_ids.index(token_id) - 1 if self.has(token_id) else None

    def has(self, token_id: int) -> bool:
        """Is it among the outputs?"""
        slot = self._slot_of.get(token_id)
        return slot is not None and bool(self._counts[slot])

    def banned_by(self, words: Iterable[list[int]]) -> list[int]:
        """The tokens that would complete one of `words` (non-empty token sequences) at the end of the output."""
        return list({word[-1] for word in words if self._ends_with(word[:-1])})

    def _ends_with(self, tail: list[int]) -> bool:
        return not tail or self.output_token_ids[-len(tail) :] == tail
