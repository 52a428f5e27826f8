"""Builders and a scripted worker for the tests of the engine: the smallest things that can stand in for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from quire.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.speculative import Drafting, SpeculativeConfig
from quire.engine.executor.abstract import Executor
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request
from quire.engine.sched.drafts import DraftFitter
from quire.engine.sched.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from quire.wire.execution import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_SIZE = 4
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=4, dtype="float32")

_arrivals = count()


def make_core_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 4,
    *,
    priority: int = 0,
    arrival_time: float | None = None,
    client_index: int = 0,
    cache_salt: str | None = None,
    output_token_ids: Sequence[int] = (),
    **params: Any,
) -> EngineCoreRequest:
    """`prompt` is token ids, or their number (then all differ between requests). `params` are SamplingParams."""
    if isinstance(prompt, int):
        start = 1000 + 1000 * sum(map(ord, request_id))
        prompt = range(start, start + prompt)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **params}),
        pooling_params=None,
        arrival_time=float(next(_arrivals)) if arrival_time is None else arrival_time,
        priority=priority,
        client_index=client_index,
        cache_salt=cache_salt,
        output_token_ids=list(output_token_ids),
    )


def make_request(request_id: str = "a", prompt: int | Sequence[int] = 4, **fields: Any) -> Request:
    return Request(make_core_request(request_id, prompt, **fields), make_block_hasher(BLOCK_SIZE))


def make_kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One group of one layer. `num_blocks` counts the null block, as everywhere."""
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], SPEC)])


class Clock:
    """A clock that advances by one second with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_scheduler(
    num_blocks: int = 101,
    *,
    max_model_len: int = 200,
    enable_caching: bool = False,
    log_stats: bool = True,
    include_finished_set: bool = False,
    structured_output_manager: Any = None,
    num_spec_tokens: int = 0,
    num_lookahead_tokens: int = 0,
    max_concurrent_steps: int = 1,
    sends_tokens: bool = False,
    **config: Any,
) -> Scheduler:
    """A scheduler with blocks of 4 tokens. `config` are fields of SchedulerConfig."""
    drafts = DraftFitter(num_spec_tokens, max_model_len, num_lookahead_tokens=num_lookahead_tokens)
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 16, **config}
    return Scheduler(
        make_kv_cache_config(num_blocks),
        SchedulerConfig(**config),
        max_model_len=max_model_len,
        enable_caching=enable_caching,
        log_stats=log_stats,
        include_finished_set=include_finished_set,
        structured_output_manager=structured_output_manager,
        drafts=drafts if num_spec_tokens else None,
        max_concurrent_steps=max_concurrent_steps,
        sends_tokens=sends_tokens,
        clock=Clock(),
    )


TokenChoice = Callable[[str, list[int]], int]
"""The next token of a request, by its id and the tokens it has."""


def next_token(request_id: str, tokens: list[int]) -> int:
    """Returns the scripted model's token: the position."""
    return len(tokens)


def digest(request_id: str, tokens: list[int]) -> int:
    """A token that any difference in the tokens before it would change, but the request's name would not."""
    return hash(tuple(tokens)) % 50_000


class ScriptedWorker:
    """Behaves as the interface demands of a worker, and raises when a message is inconsistent.

    It keeps the tokens of a request from its NewRequestData until the request is finished or preempted. Each slot of
    its KV cache holds a hash of the prefix that was computed into it; before a token is sampled all slots in the
    request's block table must hold what they should.
    """

    def __init__(self, choose: TokenChoice = next_token) -> None:
        self.choose = choose
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt: dict[str, int] = {}
        self.block_ids: dict[str, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The result of a step."""
        for request_id in output.finished_req_ids | output.preempted_req_ids:
            self.tokens.pop(request_id, None)
            self.block_ids.pop(request_id, None)
        computed = self._take_in(output)
        assert computed.keys() == output.num_scheduled_tokens.keys()
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        assert output.scheduled_spec_decode_tokens.keys() <= computed.keys()
        for request_id, start in computed.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            stop = start + output.num_scheduled_tokens[request_id]
            self._compute(request_id, start, stop, drafts)
        req_ids = list(reversed(computed))  # a batch order of its own
        return ModelRunnerOutput(
            req_ids, [self._sample(i, computed[i] + output.num_scheduled_tokens[i], output) for i in req_ids]
        )

    def _take_in(self, output: SchedulerOutput) -> dict[str, int]:
        """Computed tokens by request id."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} is known already"
            self.tokens[new.req_id] = new.prompt_token_ids + new.output_token_ids
            self.num_prompt[new.req_id] = len(new.prompt_token_ids)
            self.block_ids[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_block_ids, num_computed in rows:
            assert request_id in self.tokens, f"{request_id} is not known"
            if new_block_ids is not None:
                assert any(new_block_ids), "None stands for no new blocks"
                self.block_ids[request_id] += new_block_ids[0]
            computed[request_id] = num_computed
        for request_id, token_ids in cached.new_token_ids.items():
            lacking = self.tokens[request_id]
            lacking += token_ids[len(lacking) - max(computed[request_id], self.num_prompt[request_id]) :]
        return computed

    def _slot(self, request_id: str, position: int) -> tuple[int, int]:
        return self.block_ids[request_id][position // BLOCK_SIZE], position % BLOCK_SIZE

    def _compute(self, request_id: str, start: int, stop: int, drafts: list[int]) -> None:
        tokens = self.tokens[request_id] + drafts
        assert start < stop <= len(tokens), f"{request_id} computes tokens it does not have"
        for position in range(start, stop):
            self.slots[self._slot(request_id, position)] = hash(tuple(tokens[: position + 1]))

    def _sample(self, request_id: str, num_computed: int, output: SchedulerOutput) -> list[int]:
        tokens = self.tokens[request_id]
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        if num_computed < len(tokens) + len(drafts):
            return []
        for position in range(len(tokens)):
            held = self.slots[self._slot(request_id, position)]
            assert held == hash(tuple(tokens[: position + 1])), f"{request_id} reads a wrong slot at {position}"
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(self.choose(request_id, tokens))
            tokens.append(sampled[-1])
            if sampled[-1] != draft:
                break
        return sampled


class Engine:
    """A scheduler and a scripted worker, step by step."""

    def __init__(self, scheduler: Scheduler, choose: TokenChoice = next_token) -> None:
        self.scheduler = scheduler
        self.worker = ScriptedWorker(choose)
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(self, *requests: Request) -> None:
        """Add requests in order."""
        for request in requests:
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        """Schedule only; the block bookkeeping is checked."""
        output = self.scheduler.schedule()
        self.scheduler.kv_cache_manager.check_integrity()
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput | None = None) -> dict[int, EngineCoreOutputs]:
        """Take in `result`, or what the worker makes of the step."""
        if result is None:
            result = self.worker.execute(output)
        batches = self.scheduler.update_from_output(output, result)
        self.scheduler.kv_cache_manager.check_integrity()
        for batch in batches.values():
            for one in batch.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)
        return batches

    def step(self) -> SchedulerOutput:
        """One whole step; returns what was scheduled."""
        output = self.schedule()
        self.update(output)
        return output

    def run(self, max_steps: int = 1000) -> None:
        """Runs steps until no request is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still unfinished after {max_steps} steps: {list(self.scheduler.requests.values())}")

    def tokens(self, request_id: str) -> list[int]:
        """Everything the request's client was sent."""
        return [token for one in self.outputs.get(request_id, []) for token in one.new_token_ids]

    def last(self, request_id: str) -> EngineCoreOutput:
        """The last output of a request."""
        return self.outputs[request_id][-1]


class ScriptedExecutor(Executor):
    """Runs a ScriptedWorker; with `hold` its Futures stay open until a test resolves them by hand.

    Class attributes are the script: EngineCore makes the executor itself. Use a subclass per test.
    """

    max_batches = 1
    hold = False
    samples_apart = True
    """Samples as real workers do: execute_model returns None, and sample_tokens the result."""
    num_bytes = 1 << 20
    tasks: tuple[str, ...] = ("generate",)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.worker = ScriptedWorker()
        self.calls: list[str] = []
        self.kv_cache_configs: list[KVCacheConfig] = []
        self.rpcs: list[tuple[Any, ...]] = []
        self.drafts: DraftTokenIds | None = None
        self.held: list[tuple[Future[Any], Any]] = []
        self.failures: list[BaseException] = []
        """Raised by the next calls of execute_model, one each."""
        self.rpc_failures: list[tuple[str, BaseException]] = []
        """Method and what its next call raises, in order."""
        self.on_execute: Callable[[SchedulerOutput], None] = lambda output: None
        self._result: ModelRunnerOutput = EMPTY_MODEL_RUNNER_OUTPUT

    @property
    def max_concurrent_batches(self) -> int:
        return self.max_batches

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self.calls.append("register_failure_callback")

    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        self.calls.append("get_kv_cache_specs")
        return [{"layer": SPEC}]

    def determine_available_memory(self) -> list[int]:
        self.calls.append("determine_available_memory")
        return [self.num_bytes]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.calls.append("initialize_from_config")
        self.kv_cache_configs = kv_cache_configs

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.calls.append("execute_model")
        self.on_execute(scheduler_output)
        future: Future[Any] = Future()
        if self.failures:
            future.set_exception(self.failures.pop(0))
            return future
        self._result = self.worker.execute(scheduler_output)
        apart = self.samples_apart and scheduler_output.total_num_scheduled_tokens > 0
        return self._answer(None if apart else self._result, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        self.calls.append("sample_tokens")
        return self._answer(self._result, non_block)

    def _answer(self, value: Any, non_block: bool) -> Any:
        if not non_block:
            return value
        future: Future[Any] = Future()
        if self.hold:
            self.held.append((future, value))
        else:
            future.set_result(value)
        return future

    def release(self, num_futures: int = 2) -> None:
        """Resolve the oldest open Futures (a step has two: forward pass and sampling)."""
        for _ in range(num_futures):
            future, value = self.held.pop(0)
            future.set_result(value)

    def execute_dummy_batch(self) -> None:
        self.calls.append("execute_dummy_batch")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        self.calls.append("take_draft_token_ids")
        drafts, self.drafts = self.drafts, None
        return drafts

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self.rpcs.append((method, timeout, args, kwargs))
        if self.rpc_failures and self.rpc_failures[0][0] == method:
            raise self.rpc_failures.pop(0)[1]
        return ["pong"]

    def check_health(self) -> None:
        self.calls.append("check_health")

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        self.calls.append(f"profile({is_start}, {prefix}, {delay_iterations}, {max_iterations})")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def make_config(
    *,
    max_model_len: int = 200,
    enable_prefix_caching: bool = False,
    num_blocks: int | None = 101,
    drafting: Drafting | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """A whole EngineConfig. `scheduler` are fields of SchedulerConfig, or `log_iterations`."""
    log_iterations = scheduler.pop("log_iterations", False)
    return EngineConfig(
        model_config=ModelConfig(
            max_model_len=max_model_len, hf_config=HFConfig({"max_position_embeddings": 1000}, Path())
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=enable_prefix_caching,
            num_gpu_blocks_override=num_blocks,
        ),
        scheduler_config=SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 16, **scheduler}),
        speculative_config=SpeculativeConfig(drafting=drafting),
        observability_config=ObservabilityConfig(enable_logging_iteration_details=log_iterations),
    )
