"""Runs the model, one step at a time: batch in, tokens out, or what is pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire import envs
from quire.config.pooling import PoolingConfig
from quire.sampling_params import SamplingParams
from quire.wire.execution import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SchedulerOutput,
)
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.worker.attention.backend import AttentionBackend, AttentionBatch, ForwardContext, set_forward_context
from quire.worker.attention.layer import Attention, EncoderAttention
from quire.worker.input_batch import InputBatch, StepInputs, make_step_inputs
from quire.worker.kernels.base import Kernels
from quire.worker.kv_cache import KVCacheMemory, TransientKVCache, allocate_kv_cache, make_null_config
from quire.worker.pooler import Pooler
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.sample.metadata import Rows, SamplingMetadata, SamplingTable
from quire.worker.sample.sampler import apply_grammar_bitmask, sample
from quire.worker.step_planner import plan_steps


class Model(Protocol):
    """What a model class of `worker/models` offers (an nn.Module). One that pools has no logits."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] each; returns hidden states [num_tokens, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to float32 [n, vocab_size]."""
        ...


@dataclass(frozen=True)
class PendingStep:
    """A step between its forward pass and its sampling."""

    inputs: StepInputs
    req_ids: list[str]
    logits: Tensor | None
    """[len(inputs.sampling), vocab_size] float32; None if no request samples."""
    prompt_logprobs: dict[str, LogprobsTensors]


class ModelRunner:
    """Owns the batch, the KV cache memory and the step in flight; knows nothing of scheduling.

    A step is `execute_model` (bring the batch up to date, forward pass) and `sample_tokens` (sample, append). With a
    `pooling` it is `execute_model` alone.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: AttentionBackend[Any],
        device: torch.device,
        *,
        vocab_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        kernels: Kernels,
        dtype: torch.dtype,
        pooling: PoolingConfig | None = None,
    ) -> None:
        self.model = cast(Model, model)
        self.backend = backend
        self.device = device
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        layers = [m for m in model.modules() if isinstance(m, Attention)]
        self.attention_layers = {layer.layer_name: layer for layer in layers if layer.is_cached}
        """Those whose keys and values are kept."""
        encoders = [layer for layer in layers if isinstance(layer, EncoderAttention)]
        self._transient = None
        if encoders:
            sizes = {"max_num_tokens": max_num_tokens, "max_num_reqs": max_num_reqs}
            self._transient = TransientKVCache(encoders, backend, device, dtype, **sizes)
        self._run_model = self.model if encoders else plan_steps(self.model, backend)
        self.pooler = None if pooling is None else Pooler(pooling, model, kernels, dtype, device)
        self.sampling = kernels.sampling()
        self.prompt_logprobs = PromptLogprobs(vocab_size, self.sampling)
        self.counts_nans = envs.COMPUTE_NANS_IN_LOGITS.flag()
        self._is_in_step = False
        self._pending: PendingStep | None = None
        self._sampling_key: tuple[int, bytes] | None = None
        self._sampling_metadata: SamplingMetadata | None = None

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int) -> None:
        """Take memory for the cache and the batch. Must come before the first step."""
        self.kv_cache = allocate_kv_cache(config, self.backend, self.device)
        self._make_batch(config.block_sizes, max_model_len)

    def _make_batch(self, block_sizes: list[int], max_model_len: int) -> None:
        self.batch = InputBatch(self.max_num_reqs, max_model_len, block_sizes)
        self._is_in_step, self._pending, self._sampling_key = False, None, None

    def release_kv_cache(self) -> None:
        """Give the cache's memory back and forget all requests, until `initialize_kv_cache` is called again.

        What is left is the null block: enough for a step that computes nothing, or for nobody.
        """
        specs = {name: self.kv_cache.specs[group] for name, group in self.kv_cache.layer_groups.items()}
        self.kv_cache = allocate_kv_cache(make_null_config(specs), self.backend, self.device)
        self._make_batch(self.kv_cache.block_sizes, max_model_len=1)

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """The forward pass. None: call `sample_tokens`. An output: it is all there is to say about the step.

        If the step before was broken off (by an error or Ctrl-C), nothing of it is trusted: all requests are forgotten,
        as the engine has given them up, too, and sends those that still live as new ones.
        """
        if self._is_in_step:
            self.batch.clear()
            if self.pooler is not None:
                self.pooler.clear()
        self._is_in_step = True
        self._update_batch(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            self._is_in_step = False
            return EMPTY_MODEL_RUNNER_OUTPUT
        inputs = make_step_inputs(self.batch, scheduler_output.num_scheduled_tokens, self.device)
        req_ids = [self.batch.req_ids[row] for row in inputs.rows.tolist()]
        segments = None if self.pooler is None else self.pooler.segments(req_ids, inputs)
        hidden = self._forward(
            inputs.input_ids, inputs.positions, inputs.query_lens, inputs.attention, self.kv_cache, segments
        )
        if self.pooler is not None:
            output = self.pooler.pool(req_ids, inputs, hidden)
            self._is_in_step = False
            return output
        self._pending = PendingStep(
            inputs,
            req_ids,
            self._compute_logits(inputs, hidden),
            self._collect_prompt_logprobs(inputs, req_ids, hidden),
        )
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the tokens of the step `execute_model` ran, and append them to the batch."""
        assert self._pending is not None, "there is no step to sample"
        step, self._pending = self._pending, None
        output = ModelRunnerOutput(step.req_ids, [[] for _ in step.req_ids], prompt_logprobs=step.prompt_logprobs)
        if step.logits is not None:
            self._sample(step, step.logits, grammar_output, output)
        self._is_in_step = False
        return output

    def _sample(
        self, step: PendingStep, logits: Tensor, grammar_output: GrammarOutput | None, output: ModelRunnerOutput
    ) -> None:
        """Fill in `output` for the requests that sample."""
        sampling = step.inputs.sampling.tolist()
        req_ids = [step.req_ids[i] for i in sampling]
        rows = step.inputs.rows[step.inputs.sampling]
        if self.counts_nans:
            output.num_nans_in_logits = dict(zip(req_ids, logits.isnan().sum(dim=-1).tolist(), strict=True))
        if grammar_output is not None:
            _apply_grammar(logits, grammar_output, req_ids)
        sampled = sample(logits, self._metadata(rows), self.batch.output_lens(rows), self.sampling)
        self.batch.append_tokens(rows, sampled.token_ids)
        for i, token_id in zip(sampling, sampled.token_ids.tolist(), strict=True):
            output.sampled_token_ids[i] = [token_id]
        output.logprobs = {req_ids[row]: lists for row, lists in sampled.logprobs.items()}

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the diff: who left, who is new, who got blocks."""
        batch, pooler = self.batch, self.pooler
        for req_id in scheduler_output.finished_req_ids:
            batch.remove_request(req_id)
            self.prompt_logprobs.remove_request(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            batch.remove_request(req_id)
        if pooler is not None:
            for req_id in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
                pooler.remove_request(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            batch.add_request(request)
            if pooler is not None:
                pooler.add_request(request)
            else:
                self.prompt_logprobs.add_request(request)
        cached = scheduler_output.scheduled_cached_reqs
        rows = [batch.rows[req_id] for req_id in cached.req_ids]
        if rows:
            batch.num_computed_tokens[rows] = cached.num_computed_tokens
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids is not None:
                batch.append_blocks(row, block_ids)
        for req_id, token_ids in cached.new_token_ids.items():
            batch.extend_tokens(batch.rows[req_id], token_ids)

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_lens: npt.NDArray[np.int64],
        attention: Sequence[AttentionBatch],
        kv_cache: KVCacheMemory,
        segments: Tensor | None = None,
    ) -> Tensor:
        if self._transient is not None:
            attention, kv_cache = [self._transient.place(query_lens)], self._transient.memory
        metadata = [
            self.backend.make_metadata(batch, spec) for batch, spec in zip(attention, kv_cache.specs, strict=True)
        ]
        with set_forward_context(
            ForwardContext(self.backend, metadata, kv_cache.layer_groups, kv_cache.caches, segments)
        ):
            return self._run_model(input_ids, positions)

    def _compute_logits(self, inputs: StepInputs, hidden: Tensor) -> Tensor | None:
        indices = inputs.logits_indices
        if not len(indices):
            return None
        if len(indices) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(indices).to(self.device)]
        return self.model.compute_logits(hidden)

    def _collect_prompt_logprobs(
        self, inputs: StepInputs, req_ids: list[str], hidden: Tensor
    ) -> dict[str, LogprobsTensors]:
        """Score the step's prompt chunks; those of the prompts it completes."""
        complete: dict[str, LogprobsTensors] = {}
        if not self.prompt_logprobs.any_wanted:
            return complete
        for i, req_id in enumerate(req_ids):
            if self.prompt_logprobs.wanted_by(req_id):
                start, n = int(inputs.starts[i]), int(inputs.query_lens[i])
                result = self.prompt_logprobs.collect(
                    req_id, int(inputs.seq_lens[i]) - n, hidden[start : start + n], self.model.compute_logits
                )
                if result is not None:
                    complete[req_id] = result
        return complete

    def _metadata(self, rows: Rows) -> SamplingMetadata:
        """The sampling metadata of these rows; the last one as long as the same requests sample."""
        key = (self.batch.version, rows.tobytes())
        if self._sampling_metadata is None or key != self._sampling_key:
            self._sampling_key = key
            self._sampling_metadata = self.batch.sampling.select(rows, self.device)
        return self._sampling_metadata

    # -- runs without requests ----------------------------------------------------------------------------------------

    def get_kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> dict[str, AnyKVCacheSpec]:
        """What each attention layer keeps, by layer name."""
        return {name: layer.kv_cache_spec(block_size, dtype) for name, layer in self.attention_layers.items()}

    def profile_run(self, specs: Mapping[str, AnyKVCacheSpec]) -> None:
        """The largest step there can be, over a cache of one block, so that its peak memory can be measured."""
        self._dummy_step(self.max_num_tokens, allocate_kv_cache(make_null_config(specs), self.backend, self.device))

    def execute_dummy_batch(self) -> None:
        """One token of nobody."""
        self._dummy_step(1, self.kv_cache)

    @torch.inference_mode()
    def _dummy_step(self, num_tokens: int, kv_cache: KVCacheMemory) -> None:
        """Forward, logits and sampling of `num_tokens` tokens spread over as many requests as can be, in block 0."""
        num_reqs = min(num_tokens, self.max_num_reqs)
        query_lens = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int64)
        query_lens[: num_tokens % num_reqs] += 1
        positions = np.concatenate([np.arange(n) for n in query_lens.tolist()])
        attention = [
            AttentionBatch(
                query_lens,
                query_lens,
                torch.zeros((num_reqs, int(query_lens.max()) // size + 1), dtype=torch.int32, device=self.device),
                torch.from_numpy(positions % size).to(self.device),
            )
            for size in kv_cache.block_sizes
        ]
        input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        on_device = torch.from_numpy(positions).to(self.device)
        hidden = self._forward(input_ids, on_device, query_lens, attention, kv_cache)
        if self.pooler is not None:
            return
        logits = self.model.compute_logits(hidden[:num_reqs])
        table = SamplingTable(num_reqs)
        for row in range(num_reqs):
            table.set_row(row, "", SamplingParams(top_p=0.9, seed=0), [], [])
        metadata = table.select(np.arange(num_reqs), self.device)
        sample(logits, metadata, np.zeros(num_reqs, dtype=np.int64), self.sampling)


def _apply_grammar(logits: Tensor, grammar_output: GrammarOutput, req_ids: list[str]) -> None:
    """Mask the rows of `logits` (those of `req_ids`) that have a grammar."""
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    masked = [
        (i, row_of[req_id]) for i, req_id in enumerate(grammar_output.structured_output_request_ids) if req_id in row_of
    ]
    if masked:
        bitmask = np.asarray(grammar_output.grammar_bitmask)[[i for i, _ in masked]]
        apply_grammar_bitmask(logits, [row for _, row in masked], bitmask)
