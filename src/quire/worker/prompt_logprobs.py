"""Log-probabilities of prompts, collected chunk by chunk and handed over whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from quire.wire.execution import LogprobsTensors, NewRequestData
from quire.worker.sample.kernel import SamplingKernel

LOGITS_PER_TILE = 1 << 24
"""Prompt tokens are taken in tiles whose logits stay below this: 64 MiB."""


class PromptLogprobs:
    """The prompts still being scored. A preempted request keeps what it has, and goes on when it comes back.

    Row i of a result is the prediction of prompt token i + 1. Rows the request never computed, because it asked to read
    the prefix cache, have log-probability NaN and rank 0.
    """

    def __init__(self, vocab_size: int, kernel: SamplingKernel) -> None:
        self._kernel = kernel
        self._vocab_size = vocab_size
        self._partial: dict[str, tuple[LogprobsTensors, int, list[int]]] = {}
        """By request id: rows so far, how many top tokens (-1: all), the prompt."""

    def add_request(self, request: NewRequestData) -> None:
        """Start to collect if the request wants it. One that has outputs got its prompt's log-probabilities before."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or params.prompt_logprobs is None or request.output_token_ids:
            return
        if request.req_id in self._partial:
            return
        num_top = min(params.prompt_logprobs, self._vocab_size)
        shape = (len(prompt) - 1, 1 + (self._vocab_size if num_top == -1 else num_top))
        token_ids = np.zeros(shape, np.int32)
        token_ids[:, 0] = prompt[1:]
        rows = LogprobsTensors(token_ids, np.full(shape, np.nan, np.float32), np.zeros(shape[0], np.int32))
        self._partial[request.req_id] = (rows, num_top, prompt)

    def remove_request(self, req_id: str) -> None:
        """Forget a finished request."""
        self._partial.pop(req_id, None)

    @property
    def any_wanted(self) -> bool:
        """Whether any prompt is being scored."""
        return bool(self._partial)

    def wanted_by(self, req_id: str) -> bool:
        """Whether this request's prompt is being scored."""
        return req_id in self._partial

    def collect(
        self, req_id: str, first_position: int, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> LogprobsTensors | None:
        """Score a chunk of the prompt. The whole result if the chunk completes it, else None.

        hidden: [n, hidden_size], the model's output at positions first_position, first_position + 1, …
        """
        rows, num_top, prompt = self._partial[req_id]
        last = min(first_position + hidden.shape[0], len(prompt) - 1)
        step = max(1, LOGITS_PER_TILE // self._vocab_size)
        for start in range(first_position, last, step):
            end = min(start + step, last)
            targets = np.array(prompt[start + 1 : end + 1], dtype=np.int64)
            logits = compute_logits(hidden[start - first_position : end - first_position])
            k = self._vocab_size if num_top == -1 else num_top
            scored = self._kernel.logprobs(logits, np.arange(len(targets)), targets, k)
            rows.logprob_token_ids[start:end] = scored.token_ids
            rows.logprobs[start:end] = scored.logprobs
            rows.selected_token_ranks[start:end] = scored.ranks
        if first_position + hidden.shape[0] < len(prompt):
            return None
        del self._partial[req_id]
        return rows
