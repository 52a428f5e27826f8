"""An executor without a model: deterministic tokens, and a strict reading of the worker's protocol.

For tests of schedulers, engines and frontends. It runs wherever an `Executor` does::

    LLM("demo", distributed_executor_backend="quire.testing.fake_executor:FakeExecutor")

Its tokens are those of `FakeModel`, read through the block tables the engine sends, so a test compares them with
`expected_output`. Whatever a real worker could only answer with silently wrong numbers raises `ProtocolError`.
Log-probabilities are given for output tokens only; sampling parameters are ignored (see `FakeModel`).
To change the model, its speed or the depth of the pipeline, subclass it and set the class attributes.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.errors import ModelLoadError
from quire.lora_request import LoRARequest
from quire.resolve import resolve
from quire.testing.fake_hardware import BlockTable, Clock, FakeAdapters, InFlight, KVMemory, ProtocolError, as_future
from quire.testing.fake_model import FakeModel, FakeSequence, kv_identity
from quire.wire.execution import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    BlockIds,
    DraftTokenIds,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.worker.kv_transfer.worker import KVConnectorWorker


class _LiveRequest:
    """State of a request in the worker."""

    def __init__(self, data: NewRequestData, tables: list[BlockTable], adapter: str) -> None:
        self.adapter = (data.lora_request.lora_int_id, data.lora_revision) if data.lora_request is not None else None
        self.tokens = data.prompt_token_ids + data.output_token_ids
        self.num_prompt = len(data.prompt_token_ids)
        self.num_computed = data.num_computed_tokens
        self.params = data.sampling_params
        self.identity = kv_identity(data.sampling_params, data.lora_request, adapter)
        self.base = kv_identity(data.sampling_params, None), data.lora_start
        self.tables = tables


class FakeExecutor(Executor):
    """An executor without a model. `num_computed_tokens` counts every token it has computed, for
    comparison with the metrics."""

    vocab_size: ClassVar[int] = 256
    layer_specs: ClassVar[dict[str, AnyKVCacheSpec] | None] = None
    """One spec per attention layer; None for a single layer of full attention with the configured block size."""
    available_bytes: ClassVar[int] = 1 << 20
    pipeline_depth: ClassVar[int] = 1
    """Number of steps that may be under way at once. More than one makes the engine use its batch queue."""
    step_time_s: ClassVar[float] = 0.0
    token_time_s: ClassVar[float] = 0.0
    clock: ClassVar[Clock] = time
    adapter_bytes: ClassVar[int] = 1000
    adapter_load_s: ClassVar[float] = 0.0
    adapter_failure_rate: ClassVar[float] = 0.0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.adapters = FakeAdapters(
            num_bytes=self.adapter_bytes, load_s=self.adapter_load_s, failure_rate=self.adapter_failure_rate
        )
        self._max_model_len = config.model_config.model_len
        self._requests: dict[str, _LiveRequest] = {}
        self._unsampled: tuple[SchedulerOutput, dict[str, list[int]]] | None = None
        """The step whose logits are held, with the digests of each request that samples: one and one per draft."""
        self._sampled: list[str] = []
        """Requests that have sampled in steps whose results were given out, since drafts were last taken."""
        self._in_flight: deque[InFlight] = deque()
        self._released: set[str] = set()
        """Parts of "weights" and "kv_cache" that sleep has released."""
        connector = config.kv_transfer_config.connector
        self.transfers: KVConnectorWorker | None = None if connector is None else resolve(connector.worker)(config)
        """Worker half of the connector; None: there is none."""
        self.num_computed_tokens = 0

    # -- start-up -----------------------------------------------------------------------------------------------

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Never calls the callback: the fake has no process that could die."""

    @property
    def max_concurrent_batches(self) -> int:
        return self.pipeline_depth

    @property
    def num_live_requests(self) -> int:
        """Number of requests it remembers: 0 once the engine has reported all of them as finished."""
        return len(self._requests)

    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        if self.layer_specs is not None:
            return [self.layer_specs]
        return [{"layer.0": FullAttentionSpec(self.config.cache_config.block_size, 1, 1)}]

    def get_draft_kv_cache_spec(self) -> dict[str, AnyKVCacheSpec]:
        """Returns no layers: the drafter writes into the slots of the model's."""
        return {}

    def determine_available_memory(self) -> list[int]:
        return [self.available_bytes]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        (config,) = kv_cache_configs
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._kv_cache_config = config
        self._groups = [(s.block_size, s.sliding_window if isinstance(s, SlidingWindowSpec) else None) for s in specs]
        self._allocate_memory()
        self.model = FakeModel(tuple(window for _, window in self._groups), self.vocab_size)

    def _allocate_memory(self) -> None:
        config = self._kv_cache_config
        self._memory = KVMemory(config.num_blocks, max(config.block_sizes))
        if self.transfers is not None:
            self.transfers.register_kv_caches(self._memory)

    # -- a step -------------------------------------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        if non_block:
            return as_future(lambda: self._execute(scheduler_output))
        output: ModelRunnerOutput | None = self._execute(scheduler_output).result()
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        if non_block:
            return as_future(lambda: self._sample(grammar_output))
        output: ModelRunnerOutput = self._sample(grammar_output).result()
        return output

    def _execute(self, step: SchedulerOutput) -> InFlight:
        if self._unsampled is not None:
            raise ProtocolError("execute_model was called twice without sample_tokens in between")
        self._forget(step)
        if step.kv_connector_metadata is not None:
            self.send_transfers(step.kv_connector_metadata)
        self._check_totals(step)
        if not step.num_scheduled_tokens:
            self._end_step()
            return self._start(EMPTY_MODEL_RUNNER_OUTPUT)
        if self._released:
            raise ProtocolError(f"tokens are scheduled while {sorted(self._released)} is not there")
        self._unsampled = step, self._forward(step)
        self._end_step()
        return InFlight(None)

    def _sample(self, grammar_output: GrammarOutput | None) -> InFlight:
        if self._unsampled is None:
            raise ProtocolError("sample_tokens was called without a step whose logits are held")
        (step, digests), self._unsampled = self._unsampled, None
        drafts = step.scheduled_spec_decode_tokens
        masks: dict[str, npt.NDArray[np.int32]] = {}
        if grammar_output is not None:
            row = 0
            for req_id in grammar_output.structured_output_request_ids:
                num_rows = 1 + len(drafts.get(req_id, ()))
                masks[req_id] = grammar_output.grammar_bitmask[row : row + num_rows]
                row += num_rows
        output = ModelRunnerOutput(req_ids=list(step.num_scheduled_tokens))
        for req_id in output.req_ids:
            rows = digests.get(req_id, [])
            request = self._requests[req_id]
            token_ids = self._verify(rows, drafts.get(req_id, []), masks.get(req_id)) if rows else []
            output.sampled_token_ids.append(token_ids)
            request.tokens += token_ids
            request.num_computed -= len(rows) - len(token_ids)  # slots of rejected drafts will be overwritten
            if rows and request.params is not None and request.params.num_logprobs is not None:
                output.logprobs[req_id] = self._logprobs(rows[: len(token_ids)], request.params.num_logprobs)
        return self._start(output, step.total_num_scheduled_tokens)

    def _verify(self, digests: list[int], drafts: list[int], masks: npt.NDArray[np.int32] | None) -> list[int]:
        """Returns the tokens of a request, up to the first that is not the draft at its position."""
        token_ids: list[int] = []
        for row, digest in enumerate(digests):
            token_ids.append(_allowed(self.model.next_token(digest), None if masks is None else masks[row]))
            if drafts[row : row + 1] != token_ids[-1:]:
                break
        return token_ids

    def _forget(self, step: SchedulerOutput) -> None:
        self._memory.has_lost_step = False
        for req_id in step.preempted_req_ids | step.finished_req_ids:
            # One that is not known may have been aborted while it waited, or be named again after a failed step.
            request = self._requests.pop(req_id, None)
            for table in request.tables if request is not None else ():
                table.drop()

    def _remember(self, data: NewRequestData) -> None:
        if data.req_id in self._requests:
            raise ProtocolError(f"request {data.req_id} is new but known already")
        if len(data.block_ids) != len(self._groups):
            raise ProtocolError(f"request {data.req_id} has {len(data.block_ids)} tables, not {len(self._groups)}")
        tables = [
            BlockTable(self._memory, block_size, window, block_ids)
            for (block_size, window), block_ids in zip(self._groups, data.block_ids, strict=True)
        ]
        for table in tables:
            table.slide(data.num_computed_tokens)
        self._requests[data.req_id] = _LiveRequest(data, tables, self.adapters.digest_of(data))

    def _continue(self, req_id: str, new_block_ids: BlockIds | None, num_computed: int) -> None:
        request = self._requests.get(req_id)
        if request is None:
            raise ProtocolError(f"request {req_id} is scheduled as a running one but is not known")
        if num_computed != request.num_computed:
            raise ProtocolError(f"request {req_id} has {request.num_computed} computed tokens, not {num_computed}")
        for group, table in enumerate(request.tables):
            if new_block_ids is not None:
                table.append(new_block_ids[group])
            table.slide(num_computed)

    def _check_totals(self, step: SchedulerOutput) -> None:
        scheduled = step.num_scheduled_tokens
        named = [data.req_id for data in step.scheduled_new_reqs] + step.scheduled_cached_reqs.req_ids
        if len(named) != len(scheduled) or set(named) != scheduled.keys():
            raise ProtocolError(f"tokens are scheduled for {sorted(scheduled)}, data is given for {sorted(named)}")
        if sum(scheduled.values()) != step.total_num_scheduled_tokens:
            raise ProtocolError(f"{scheduled} does not add up to {step.total_num_scheduled_tokens} tokens")
        limits = self.config.scheduler_config
        budget = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
        if budget is not None and step.total_num_scheduled_tokens > budget:
            raise ProtocolError(f"{step.total_num_scheduled_tokens} tokens are scheduled; the budget is {budget}")
        num_requests = len(self._requests) + len(step.scheduled_new_reqs)
        if limits.max_num_seqs is not None and num_requests > limits.max_num_seqs:
            raise ProtocolError(f"{num_requests} requests are running; the limit is {limits.max_num_seqs}")

    def _forward(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """Computes the step and returns the digests of each request that samples.

        Running requests go first. New ones follow in their order of admission and take their blocks only then, because
        a new request may share blocks that an earlier one fills in this very step: a real model fills them layer by
        layer for the whole batch.
        """
        running = step.scheduled_cached_reqs
        rows = zip(running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True)
        for req_id, new_block_ids, num_computed in rows:
            self._continue(req_id, new_block_ids, num_computed)
        for req_id, token_ids in running.new_token_ids.items():
            request = self._requests[req_id]
            request.tokens += token_ids[len(request.tokens) - max(request.num_computed, request.num_prompt) :]
        digests = {}
        for req_id in running.req_ids:
            digests[req_id] = self._forward_request(req_id, step)
        for data in step.scheduled_new_reqs:
            self._remember(data)
            digests[data.req_id] = self._forward_request(data.req_id, step)
        self.num_computed_tokens += step.total_num_scheduled_tokens
        return {req_id: found for req_id, found in digests.items() if found}

    def _forward_request(self, req_id: str, step: SchedulerOutput) -> list[int]:
        """Computes the scheduled tokens of one request. Returns the digests of its last one and of its drafts; none if
        more of the prompt is to come."""
        request = self._requests[req_id]
        if request.adapter is not None and request.adapter[1] and request.adapter not in self.adapters.loaded:
            raise ProtocolError(f"request {req_id} runs with adapter {request.adapter}, which was dropped")
        drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
        tokens = request.tokens + drafts
        start, end = request.num_computed, request.num_computed + step.num_scheduled_tokens[req_id]
        self._check_chunk(req_id, request, start, end, len(tokens))
        if drafts and end < len(tokens):
            raise ProtocolError(f"request {req_id} has drafts in a step that ends before them, at {end}")
        if any(not 0 <= token_id < self.vocab_size for token_id in drafts):
            raise ProtocolError(f"request {req_id} has drafts outside the vocabulary of {self.vocab_size}: {drafts}")
        visible = [self._memory.read(table, table.first_visible(start), start) for table in request.tables]
        sequence = FakeSequence(self.model, request.identity, visible, request.base)
        digests = [sequence.compute(tokens[position], position) for position in range(start, end)]
        for group, table in enumerate(request.tables):
            self._memory.write(table, start, sequence.slots(group))
        request.num_computed = end
        return digests[-1 - len(drafts) :] if end == len(tokens) else []

    def _check_chunk(self, req_id: str, request: _LiveRequest, start: int, end: int, num_tokens: int) -> None:
        if end <= start or start < 0:
            raise ProtocolError(f"request {req_id}: tokens [{start}, {end}) are scheduled")
        if end > num_tokens:
            raise ProtocolError(f"request {req_id}: token {end} is scheduled, it has only {num_tokens}")
        if end > self._max_model_len:
            raise ProtocolError(f"request {req_id}: token {end} is scheduled, max_model_len is {self._max_model_len}")
        for table in request.tables:
            if end > len(table.block_ids) * table.block_size:
                raise ProtocolError(f"request {req_id}: token {end} has no block in {table.block_ids}")

    def _logprobs(self, digests: list[int], num_logprobs: int) -> LogprobsLists:
        """Returns each sampled token, then the top ones; each is exp(-1) times as likely as the one before."""
        count = self.vocab_size if num_logprobs == -1 else num_logprobs
        ids = [[self.model.next_token(digest), *self.model.top_tokens(digest, count)] for digest in digests]
        logprobs = [[-0.5, *(-0.5 - rank for rank in range(len(row) - 1))] for row in ids]
        return LogprobsLists(ids, logprobs, [1] * len(ids))

    # -- the pipeline -------------------------------------------------------------------------------------------

    def _start(self, output: ModelRunnerOutput, num_tokens: int = 0) -> InFlight:
        if len(self._in_flight) == self.pipeline_depth:
            raise ProtocolError(f"a step was started while {self.pipeline_depth} are under way")
        future = InFlight(output, lambda f: self._finish(f, num_tokens))
        self._in_flight.append(future)
        self._memory.in_flight.append(self._memory.take_written())
        return future

    def _finish(self, future: InFlight, num_tokens: int) -> None:
        if self._in_flight[0] is not future:
            raise ProtocolError("a step was waited for before the steps started earlier")
        self._in_flight.popleft()
        self._memory.in_flight = self._memory.in_flight[1:]
        if future.output is not None:
            rows = zip(future.output.req_ids, future.output.sampled_token_ids, strict=True)
            self._sampled += [req_id for req_id, token_ids in rows if token_ids]
        if num_tokens and (duration := self.step_time_s + num_tokens * self.token_time_s):
            self.clock.sleep(duration)

    # -- adapters -----------------------------------------------------------------------------------------------

    def measure_adapter(self, lora_request: LoRARequest) -> Future[int]:
        return self.adapters.measure(lora_request)

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        return self.adapters.load(load)

    def drop_adapter(self, key: AdapterKey) -> None:
        self.adapters.drop(key)

    # -- transfers ----------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        if self.transfers is not None:
            self.transfers.end_step()

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], None]) -> None:
        assert self.transfers is not None, "a connector is configured"
        self.transfers.report = callback

    def send_transfers(self, orders: KVConnectorMetadata) -> None:
        assert self.transfers is not None, "a connector is configured"
        self.transfers.start(orders)

    # -- sleep and new weights ----------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Drops the KV cache and all requests; at level 2 the weights, too."""
        self.release_kv_cache_memory()
        self._released |= {"weights"} if level == 2 else set()

    def release_kv_cache_memory(self) -> None:
        """Replaces the content of all blocks by zeros."""
        if self._in_flight or self._unsampled is not None:
            raise ProtocolError("the KV cache was given back while a step was under way")
        self._requests.clear()
        self._memory.forget_tables()  # transfers may still write into it
        self._allocate_memory()  # zeros
        self._released.add("kv_cache")

    def wake_up(self, tags: list[str]) -> None:
        """Restores the parts in `tags`: blocks come back as zeros, weights as they were."""
        self._released.difference_update(tags)

    def check_weights(self, path: str) -> None:
        """Accepts every path as a checkpoint. Raises ModelLoadError for an empty one."""
        if not path:
            raise ModelLoadError("an empty path names no checkpoint")

    def load_weights(self, path: str | None = None) -> None:
        """Becomes the model of checkpoint `path`, which gives other tokens; None: keeps the present model."""
        if self._in_flight or self._unsampled is not None:
            raise ProtocolError("the weights were replaced while a step was under way")
        self.model = self.model if path is None else dataclasses.replace(self.model, weights=path)
        self._released.discard("weights")
        if self.transfers is not None and path is not None:
            self.transfers.set_weights(path)

    def undo_weights(self) -> None:
        """Has no effect: a load that fails has changed nothing."""

    # -- the rest of the interface ------------------------------------------------------------------------------

    def execute_dummy_batch(self) -> None:
        self.clock.sleep(self.step_time_s)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for requests whose tokens were just given out, as a drafter model does: their slots, too."""
        drafting = self.config.speculative_config.drafting
        sampled, self._sampled = self._sampled, []
        if drafting is None:
            return None
        live = [req_id for req_id in sampled if req_id in self._requests]
        for req_id in live:
            self._write_ahead(self._requests[req_id], drafting.num_lookahead_tokens)
        self._memory.take_written()  # that is done
        return DraftTokenIds(live, [self.propose(req_id, drafting.num_speculative_tokens) for req_id in live])

    def propose(self, req_id: str, num_drafts: int) -> list[int]:
        """Returns the tokens that the model will draw next, if no grammar interferes."""
        request = self._requests[req_id]
        sequence = FakeSequence(self.model, request.identity, [b""] * len(self._groups), request.base)
        tokens = list(request.tokens)
        for position in range(len(request.tokens) + num_drafts):
            digest = sequence.compute(tokens[position], position)
            if position + 1 == len(tokens):
                tokens.append(self.model.next_token(digest))
        return tokens[len(request.tokens) : len(request.tokens) + num_drafts]

    def _write_ahead(self, request: _LiveRequest, num_tokens: int) -> None:
        """Writes nonsense into the slots of the drafts, as far as blocks reach: real tokens will overwrite it."""
        for table in request.tables:
            end = min(request.num_computed + num_tokens, len(table.block_ids) * table.block_size)
            if end > request.num_computed:
                self._memory.write(table, request.num_computed, b"!!!!" * (end - request.num_computed))

    def reset_drafter(self) -> None:
        """Has no effect: drafts are a function of the text."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Stores the context length that the engine has fitted to the cache."""
        self._max_model_len = max_model_len

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if callable(method):
            return [method(self, *args, **(kwargs or {}))]
        return [getattr(self, method)(*args, **(kwargs or {}))]

    def check_health(self) -> None:
        pass

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        pass

    def shutdown(self) -> None:
        self._requests.clear()
        if self.transfers is not None:
            self.transfers.close()


def _allowed(token: int, mask: npt.NDArray[np.int32] | None) -> int:
    """Returns `token`, or the next higher one that a grammar allows, in a circle; `token` if it allows none."""
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little"))
    if not len(allowed):
        return token
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])
