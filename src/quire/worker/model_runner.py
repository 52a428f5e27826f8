"""Runs the model one step at a time: a batch goes in, tokens or pooled results come out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.config.pooling import PoolingConfig
from quire.wire.execution import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.worker.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    Forward,
    ForwardContext,
    States,
    set_forward_context,
)
from quire.worker.attention.layer import Attention
from quire.worker.input_batch import NO_ADAPTER, InputBatch, StepInputs, make_step_inputs
from quire.worker.kernels.base import Kernels
from quire.worker.kv_cache import KVCacheMemory, TransientKVCache, allocate_kv_cache, make_null_config
from quire.worker.pooler import Pooler
from quire.worker.step_sampler import PendingStep, StepSampler


class Model(Protocol):
    """The interface of the classes in `worker/models` (nn.Modules). A model that pools has no logits."""

    def __call__(self, input_ids: Tensor, positions: Tensor, *received: Tensor) -> States:
        """[num_tokens] each; returns hidden states [num_tokens, hidden_size], and after them those of its taps.
        `received` are the results of the stage before, if the model is a stage of a pipeline."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to float32 [n, vocab_size]."""
        ...


class Adapters(Protocol):
    """The interface of the table of adapters: worker/lora/table.py."""

    def slot_of(self, request: NewRequestData) -> int:
        """Returns the slot of a request's adapter."""
        ...

    def applied(self, inputs: StepInputs) -> AbstractContextManager[None]:
        """Applies the adapters of a step's requests inside the block."""
        ...

    def apply_to_logits(self, slot: int, num_rows: int, num_base: int) -> None:
        """Applies one adapter to the rows of the next call of the logits head but the first `num_base`."""
        ...


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
        """Layers whose keys and values are stored in the KV cache."""
        encoders = [layer for layer in layers if layer.is_encoder]
        self._transient = None
        if encoders:
            sizes = {"max_num_tokens": max_num_tokens, "max_num_reqs": max_num_reqs}
            self._transient = TransientKVCache(encoders, backend, device, dtype, **sizes)
        is_plannable = getattr(model, "is_plannable", True)  # False: it computes with torch, too
        self._run_model = self.model if encoders or not is_plannable else backend.plan_steps(self.model)
        self.pooler = None if pooling is None else Pooler(pooling, model, kernels, dtype, device)
        self.sampler = StepSampler(kernels.sampling(), vocab_size, device)
        self.on_step: Callable[[PendingStep, ModelRunnerOutput], None] | None = None
        """Called at the end of every step."""
        self.adapters: Adapters | None = None
        """None: no request has an adapter."""
        self._is_in_step = False
        self._pending: PendingStep | None = None

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the cache and the batch. Must be called before the first step."""
        self.kv_cache = allocate_kv_cache(config, self.backend, self.device)
        self._make_batch(config.block_sizes, max_model_len)

    def _make_batch(self, block_sizes: list[int], max_model_len: int) -> None:
        self.batch = InputBatch(self.max_num_reqs, max_model_len, block_sizes)
        self._is_in_step, self._pending = False, None
        self.sampler.forget_batch()

    def release_kv_cache(self) -> None:
        """Frees the cache and drops all requests until `initialize_kv_cache` is called again.

        The null block is left: it is enough for a step without tokens and for a dummy step.
        """
        specs = {name: self.kv_cache.specs[group] for name, group in self.kv_cache.layer_groups.items()}
        self.kv_cache = allocate_kv_cache(make_null_config(specs), self.backend, self.device)
        self._make_batch(self.kv_cache.block_sizes, max_model_len=1)

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs the forward pass. Returns None if `sample_tokens` must follow, else the output of the step.

        If the step before was interrupted (by an error or Ctrl-C), all requests are dropped: the engine has dropped
        them, too, and sends those that are still live as new ones.
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
        drafts = scheduler_output.scheduled_spec_decode_tokens
        inputs = make_step_inputs(self.batch, scheduler_output.num_scheduled_tokens, self.device, drafts)
        req_ids = [self.batch.req_ids[row] for row in inputs.rows.tolist()]
        with self._adapting(inputs):
            return self._run_step(inputs, req_ids, drafts)

    def _adapting(self, inputs: StepInputs) -> AbstractContextManager[None]:
        if self.adapters is None or inputs.adapter_slots is None:
            return nullcontext()
        return self.adapters.applied(inputs)

    def _run_step(
        self, inputs: StepInputs, req_ids: list[str], drafts: Mapping[str, list[int]]
    ) -> ModelRunnerOutput | None:
        segments = None if self.pooler is None else self.pooler.segments(req_ids, inputs)
        hidden, *tapped = self._forward(
            inputs.input_ids,
            inputs.positions,
            inputs.query_lens,
            inputs.attention,
            self.kv_cache,
            segments,
            inputs.embeds,
        )
        if self.pooler is not None:
            output = self._pool(self.pooler, req_ids, inputs, hidden)
            self._is_in_step = False
            return output
        logits = self._compute_logits(inputs, hidden)
        if logits is not None and self.sampler.exchange is not None and self.sampler.prompts.wanted:
            logits = logits.clone()  # the logits of prompts take their place in the buffer of all workers
        self._pending = PendingStep(
            inputs,
            req_ids,
            hidden,
            logits,
            self.sampler.score_prompts(inputs, req_ids, hidden, functools.partial(self._logits_of_one, inputs)),
            drafts,
            tuple(tapped),
        )
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples the tokens of the step that `execute_model` ran, and appends them to the batch."""
        assert self._pending is not None, "there is no step to sample"
        step, self._pending = self._pending, None
        output = self.sampler.sample(step, self.batch, grammar_output)
        if self.on_step is not None:
            self.on_step(step, output)
        self._is_in_step = False
        return output

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the diff: requests that left, new requests, new blocks and tokens."""
        batch, pooler = self.batch, self.pooler
        for req_id in scheduler_output.finished_req_ids:
            batch.remove_request(req_id)
            self.sampler.prompts.remove_request(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            batch.remove_request(req_id)
        if pooler is not None:
            for req_id in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
                pooler.remove_request(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            batch.add_request(request, NO_ADAPTER if self.adapters is None else self.adapters.slot_of(request))
            if pooler is not None:
                pooler.add_request(request)
            else:
                self.sampler.prompts.add_request(request)
        cached = scheduler_output.scheduled_cached_reqs
        rows = [batch.rows[req_id] for req_id in cached.req_ids]
        if rows:
            batch.num_computed_tokens[rows] = cached.num_computed_tokens
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids is not None:
                batch.append_blocks(row, block_ids)
        for req_id, token_ids in cached.new_token_ids.items():
            batch.complete_tokens(batch.rows[req_id], token_ids)

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_lens: npt.NDArray[np.int64],
        attention: Sequence[AttentionBatch],
        kv_cache: KVCacheMemory,
        segments: Tensor | None = None,
        embeds: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the last hidden states, and those of the model's taps."""
        if self._transient is not None:
            attention, kv_cache = [self._transient.place(query_lens)], self._transient.memory
        metadata = [
            self.backend.make_metadata(batch, spec) for batch, spec in zip(attention, kv_cache.specs, strict=True)
        ]
        with set_forward_context(
            ForwardContext(self.backend, metadata, kv_cache.layer_groups, kv_cache.caches, segments, embeds)
        ):
            run = self._run_model if embeds is None else self.model  # plans look every token up
            states = self._call(run, input_ids, positions)
        return states if isinstance(states, tuple) else (states,)

    def _call(self, run: Forward, input_ids: Tensor, positions: Tensor) -> States:
        return run(input_ids, positions)

    def _pool(self, pooler: Pooler, req_ids: list[str], inputs: StepInputs, hidden: Tensor) -> ModelRunnerOutput:
        return pooler.pool(req_ids, inputs, hidden)

    def _compute_logits(self, inputs: StepInputs, hidden: Tensor) -> Tensor | None:
        indices = inputs.logits_indices
        if not len(indices):
            return None
        if len(indices) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(indices).to(self.device)]
        return self.model.compute_logits(hidden)

    def _logits_of_one(self, inputs: StepInputs, index: int, first: int, hidden: Tensor) -> Tensor:
        """Returns the logits of rows of the step's request at `index`, of which `first` is the number of the first."""
        if self.adapters is not None and inputs.adapter_slots is not None:
            num_base = 0 if inputs.base_lens is None else min(max(0, inputs.base_lens[index] - first), len(hidden))
            self.adapters.apply_to_logits(int(inputs.adapter_slots[index]), len(hidden), int(num_base))
        return self.model.compute_logits(hidden)

    # -- runs without requests ----------------------------------------------------------------------------------------

    def get_kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> dict[str, AnyKVCacheSpec]:
        """Returns the cache spec of each attention layer by its name."""
        return {name: layer.kv_cache_spec(block_size, dtype) for name, layer in self.attention_layers.items()}

    def profile_run(self, specs: Mapping[str, AnyKVCacheSpec]) -> None:
        """Runs the largest possible step over a cache of one block, so that its peak memory can be measured."""
        self._dummy_step(self.max_num_tokens, allocate_kv_cache(make_null_config(specs), self.backend, self.device))

    def execute_dummy_batch(self, num_tokens: int = 1) -> None:
        """Runs a dummy step of a few tokens."""
        self._dummy_step(num_tokens, self.kv_cache)

    @torch.inference_mode()
    def _dummy_step(self, num_tokens: int, kv_cache: KVCacheMemory) -> None:
        """Runs `num_tokens` tokens of as many requests as possible, in block 0: forward pass, logits and sampling."""
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
        hidden, *_ = self._forward(input_ids, on_device, query_lens, attention, kv_cache)
        if self.pooler is None:
            self._sample_dummy(hidden[:num_reqs])

    def _sample_dummy(self, hidden: Tensor) -> None:
        self.sampler.sample_dummy(self.model.compute_logits(hidden))
