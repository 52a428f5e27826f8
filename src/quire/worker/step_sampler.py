"""Sampling after a forward pass, log-probabilities of prompts, and counts of NaNs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire import envs
from quire.sampling_params import SamplingParams
from quire.wire.execution import GrammarOutput, LogprobsTensors, ModelRunnerOutput, NewRequestData
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.parallel.tokens import TokenExchange
from quire.worker.sample.kernel import SamplingKernel
from quire.worker.sample.metadata import Rows, SamplingMetadata, SamplingTable
from quire.worker.sample.sampler import apply_grammar_bitmask, sample
from quire.worker.sample.verify import NO_DRAFT, Runs, verify


@dataclass(frozen=True)
class PendingStep:
    """A step between its forward pass and its sampling."""

    inputs: StepInputs
    req_ids: list[str]
    hidden: Tensor
    """[num_tokens, hidden_size], the model's output. The next step may overwrite it."""
    logits: Tensor | None
    """[len(inputs.logits_indices), vocab_size] float32; None if no request samples."""
    prompt_logprobs: dict[str, LogprobsTensors]
    """Results of the prompts that the step completes."""
    drafts: Mapping[str, list[int]] = field(default_factory=dict)
    """Drafts in the step, by request id."""
    tapped: tuple[Tensor, ...] = ()
    """Inputs of the model's tapped layers, like `hidden`."""


class StepSampler:
    """Samples the rows of a step, and scores the prompts of requests that asked for it."""

    def __init__(self, kernel: SamplingKernel, vocab_size: int, device: torch.device) -> None:
        self.prompts = PromptLogprobs(vocab_size, kernel)
        self._kernel = kernel
        self._device = device
        self._counts_nans = envs.COMPUTE_NANS_IN_LOGITS.flag()
        self._key: tuple[int, bytes] | None = None
        """The version of the batch and the rows that `_metadata` was made for."""
        self._metadata: SamplingMetadata | None = None
        self.exchange: TokenExchange | None = None
        """Passes tokens among the workers that compute the step together; None: there is one worker."""

    def forget_batch(self) -> None:
        """Drops what was made for a batch. Must be called when another batch takes its place."""
        self._key = self._metadata = None

    def score_prompts(
        self,
        inputs: StepInputs,
        req_ids: list[str],
        hidden: Tensor,
        compute_logits: Callable[[int, int, Tensor], Tensor],
    ) -> dict[str, LogprobsTensors]:
        """Scores the step's chunks of prompts. Returns the results of the prompts that are complete. `compute_logits`
        is called with the number of a request, the number of a row of it, and rows from there on."""
        complete: dict[str, LogprobsTensors] = {}
        if not self.prompts.wanted:
            return complete
        for i, req_id in enumerate(req_ids):
            if req_id in self.prompts.wanted:
                start, n = int(inputs.starts[i]), int(inputs.query_lens[i])
                first = int(inputs.seq_lens[i]) - n
                compute = functools.partial(compute_logits, i)
                result = self.prompts.collect(req_id, first, hidden[start : start + n], compute)
                if result is not None:
                    complete[req_id] = result
        return complete

    def sample(self, step: PendingStep, batch: InputBatch, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples the tokens of `step` and appends them to `batch`."""
        output = ModelRunnerOutput(step.req_ids, [[] for _ in step.req_ids], prompt_logprobs=step.prompt_logprobs)
        logits = step.logits
        if logits is None:
            return output
        sampling = step.inputs.sampling.tolist()
        req_ids = [step.req_ids[i] for i in sampling]  # one for each row of the logits
        rows = step.inputs.rows[step.inputs.sampling]
        if self.exchange is not None and not self.exchange.is_leader:
            for i, row, token_ids in zip(sampling, rows.tolist(), self.exchange.receive(len(sampling)), strict=True):
                batch.extend_tokens(row, token_ids)
                output.sampled_token_ids[i] = token_ids
            return output
        num_nans = logits.isnan().sum(dim=-1).tolist() if self._counts_nans else None
        if grammar_output is not None:
            _apply_grammar(logits, grammar_output, req_ids, step.drafts)
        metadata, output_lens = self._select(batch, rows), batch.output_lens(rows)
        if step.inputs.num_drafts is None:
            sampled = sample(logits, metadata, output_lens, self._kernel)
            batch.append_tokens(rows, sampled.token_ids)
            for i, token_id in zip(sampling, sampled.token_ids.tolist(), strict=True):
                output.sampled_token_ids[i] = [token_id]
            firsts: list[int] = list(range(len(req_ids)))
            logprobs = sampled.logprobs
        else:
            runs = _find_runs(step.inputs, batch)
            verified = verify(logits, metadata, output_lens, runs, self._kernel)
            for i, row, token_ids in zip(sampling, rows.tolist(), verified.token_ids, strict=True):
                batch.extend_tokens(row, token_ids)
                output.sampled_token_ids[i] = token_ids
            firsts, logprobs = runs.firsts.tolist(), verified.logprobs
        if self.exchange is not None:
            self.exchange.send([output.sampled_token_ids[i] for i in sampling])
        output.logprobs = {req_ids[row]: lists for row, lists in logprobs.items()}
        if num_nans is not None:
            for i, first, req_id in zip(sampling, firsts, req_ids, strict=True):
                output.num_nans_in_logits[req_id] = num_nans[first : first + len(output.sampled_token_ids[i])]
        return output

    def _select(self, batch: InputBatch, rows: Rows) -> SamplingMetadata:
        """Returns the sampling metadata of `rows`: the last one, as long as the same requests sample."""
        key = (batch.version, rows.tobytes())
        if self._metadata is None or key != self._key:
            self._key, self._metadata = key, batch.sampling.select(rows, self._device)
        return self._metadata

    def sample_dummy(self, logits: Tensor) -> None:
        """Samples a token of each row, as requests with top-p would."""
        if self.exchange is not None and not self.exchange.is_leader:
            return
        n = len(logits)
        table = SamplingTable(n)
        for row in range(n):
            table.set_row(row, "", SamplingParams(top_p=0.9, seed=0), [], [])
        sample(logits, table.select(np.arange(n), self._device), np.zeros(n, dtype=np.int64), self._kernel)


def _find_runs(inputs: StepInputs, batch: InputBatch) -> Runs:
    """Returns the runs of a step with drafts, which are still behind the tokens of their requests in `batch`."""
    assert inputs.num_drafts is not None
    rows, lens = inputs.rows[inputs.sampling], inputs.num_drafts[inputs.sampling] + 1
    ends = np.cumsum(lens)
    firsts = ends - lens
    positions = np.arange(ends[-1]) + np.repeat(batch.num_tokens[rows] - firsts, lens)
    drafts = batch.token_ids[np.repeat(rows, lens), np.minimum(positions, batch.token_ids.shape[1] - 1)]
    drafts[ends - 1] = NO_DRAFT
    return Runs(firsts, lens, drafts)


def _apply_grammar(
    logits: Tensor, grammar_output: GrammarOutput, req_ids: list[str], drafts: Mapping[str, list[int]]
) -> None:
    """Masks the rows of `logits` (those of `req_ids`, 1 + its drafts for each) that have a grammar."""
    first_row: dict[str, int] = {}
    num_rows = 0
    for req_id in req_ids:
        first_row[req_id] = num_rows
        num_rows += 1 + len(drafts.get(req_id, ()))
    rows: list[int] = []
    mask_rows: list[int] = []
    next_mask_row = 0
    for req_id in grammar_output.structured_output_request_ids:
        n = 1 + len(drafts.get(req_id, ()))
        if req_id in first_row:
            rows += range(first_row[req_id], first_row[req_id] + n)
            mask_rows += range(next_mask_row, next_mask_row + n)
        next_mask_row += n
    if rows:
        apply_grammar_bitmask(logits, rows, np.asarray(grammar_output.grammar_bitmask)[mask_rows])


LOGITS_PER_TILE = 1 << 24
"""Prompt tokens are scored in tiles whose logits stay below this: 64 MiB."""


class PromptLogprobs:
    """Log-probabilities of prompts, collected chunk by chunk. A preempted request keeps its rows until it comes back.

    Row i of a result is the prediction of prompt token i + 1. Rows the request never computed, because it asked to read
    the prefix cache, have log-probability NaN and rank 0.
    """

    def __init__(self, vocab_size: int, kernel: SamplingKernel) -> None:
        self._kernel = kernel
        self._vocab_size = vocab_size
        self.wanted: dict[str, tuple[LogprobsTensors, int, list[int]]] = {}
        """The prompts that are being scored: rows so far, number of top tokens (-1: all) and prompt, by request id."""

    def add_request(self, request: NewRequestData) -> None:
        """Starts to collect if the request asks for it and has no outputs: one with outputs has had the result."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or params.prompt_logprobs is None or request.output_token_ids:
            return
        if request.req_id in self.wanted:
            return
        num_top = min(params.prompt_logprobs, self._vocab_size)
        shape = (len(prompt) - 1, 1 + (self._vocab_size if num_top == -1 else num_top))
        token_ids = np.zeros(shape, np.int32)
        token_ids[:, 0] = prompt[1:]
        rows = LogprobsTensors(token_ids, np.full(shape, np.nan, np.float32), np.zeros(shape[0], np.int32))
        self.wanted[request.req_id] = (rows, num_top, prompt)

    def remove_request(self, req_id: str) -> None:
        """Drops a finished request."""
        self.wanted.pop(req_id, None)

    def collect(
        self, req_id: str, first_position: int, hidden: Tensor, compute_logits: Callable[[int, Tensor], Tensor]
    ) -> LogprobsTensors | None:
        """Scores a chunk of the prompt. Returns the whole result if the chunk completes the prompt, else None.

        hidden: [n, hidden_size], the model's output at positions first_position, first_position + 1, …
        compute_logits is called with the number of a row of it, and the rows from there on whose logits are needed.
        """
        rows, num_top, prompt = self.wanted[req_id]
        last = min(first_position + hidden.shape[0], len(prompt) - 1)
        step = max(1, LOGITS_PER_TILE // self._vocab_size)
        for start in range(first_position, last, step):
            end = min(start + step, last)
            targets = np.array(prompt[start + 1 : end + 1], dtype=np.int64)
            first = start - first_position
            logits = compute_logits(first, hidden[first : end - first_position])
            k = self._vocab_size if num_top == -1 else num_top
            scored = self._kernel.logprobs(logits, np.arange(len(targets)), targets, k)
            rows.logprob_token_ids[start:end] = scored.token_ids
            rows.logprobs[start:end] = scored.logprobs
            rows.selected_token_ranks[start:end] = scored.ranks
        if first_position + hidden.shape[0] < len(prompt):
            return None
        del self.wanted[req_id]
        return rows
