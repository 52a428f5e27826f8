"""A random engine configuration and the traffic that suits it. Everything follows from one integer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from quire.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.speculative import Drafting, SpeculativeConfig
from quire.engine.sched.policy import POLICIES
from quire.frontend.session import SessionInput
from quire.lora_request import LoRARequest
from quire.sampling_params import RepetitionDetectionParams, SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_hardware import FakeAdapters, InFlight
from quire.testing.fake_model import KV_IDENTITY
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import DraftTokenIds, GrammarOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, SlidingWindowSpec
from quire.wire.lora import AdapterInfo, AdapterLoad

VOCAB_SIZE = 8
"""Few tokens, so that prefixes meet and stop tokens come up."""
DRAFTERS = (
    "right",
    "wrong",
    "mixed",
    "too long",
    "out of vocabulary",
    "for unknown ids",
    "twice",
    "late by a step",
    "raising",
)
LORAS = (LoRARequest("red", 1, "/red"), LoRARequest("red", 2, "/redder"), LoRARequest("blue", 3, "/blue"))
MORE_LORAS = (*LORAS, LoRARequest("green", 4, "/green/alora=3,5"), LoRARequest("grey", 5, "/grey/alora=2"))
"""Two of them begin at an invocation."""
MAX_LOAD_STEPS = 12
"""Most steps that the load of an adapter takes."""


class WorkerFault(RuntimeError):  # noqa: N818  it is one, not an error of ours
    """An error that a worker raises when an operation asks for it."""


class SimulatedAdapters(FakeAdapters):
    """Loads take random numbers of ticks, and fail at random. Adapters have sizes of their own."""

    def __init__(self, max_steps: int, failure_rate: float) -> None:
        super().__init__(failure_rate=failure_rate)
        self.max_steps = max_steps
        """0: loads are done at once."""
        self.num_failed: Counter[int] = Counter()
        """Loads that failed, by adapter id."""
        self._under_way: list[list[Any]] = []
        """Ticks left, and what to call then."""

    @property
    def num_under_way(self) -> int:
        """Loads and measurements that have not ended."""
        return len(self._under_way)

    def size_of(self, lora_request: LoRARequest) -> int:
        return 100 + 60 * lora_request.lora_int_id

    def tick(self) -> None:
        """Some time passes."""
        for entry in self._under_way:
            entry[0] -= 1
        ended = [end for ticks, end in self._under_way if ticks <= 0]
        self._under_way = [entry for entry in self._under_way if entry[0] > 0]
        for end in ended:
            end()

    def _later(self, end: Callable[[], None]) -> None:
        if self.max_steps:
            self._under_way.append([self._rng.randint(1, self.max_steps), end])
        else:
            end()

    def measure(self, lora_request: LoRARequest) -> Future[int]:
        future: Future[int] = Future()
        self._later(lambda: future.set_result(self.size_of(lora_request)))
        return future

    def end_load(self, load: AdapterLoad, future: Future[AdapterInfo], fails: bool) -> None:
        end = super().end_load
        self.num_failed[load.lora_request.lora_int_id] += fails
        self._later(lambda: end(load, future, fails))


class SimulatedExecutor(FakeExecutor):
    """Passes every step to `on_step`, right after it was scheduled, and fails on request."""

    vocab_size = VOCAB_SIZE
    adapter_steps: ClassVar[int] = 0
    drafter: ClassVar[str] = "right"
    """One of `DRAFTERS`."""
    fault: str | None = None
    """Where the next step fails: "before" (the worker never has it), "forward" (nothing of it is computed) or "sample"
    (all of it is)."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.adapters: SimulatedAdapters = SimulatedAdapters(self.adapter_steps, self.adapter_failure_rate)
        self.on_step: Callable[[SchedulerOutput], None] = lambda step: None
        self._rng = random.Random(self.drafter)
        self._late: DraftTokenIds | None = None
        self._num_proposals = 0

    def _execute(self, step: SchedulerOutput) -> InFlight:
        self.on_step(step)
        self._fail_if_told("before")
        return super()._execute(step)

    def _forward(self, step: SchedulerOutput) -> dict[str, list[int]]:
        self._fail_if_told("forward")
        return super()._forward(step)

    def _sample(self, grammar_output: GrammarOutput | None) -> InFlight:
        self._fail_if_told("sample")
        return super()._sample(grammar_output)

    def _fail_if_told(self, place: str) -> None:
        if self.fault == place:
            self.fault = self._unsampled = None
            self._memory.has_lost_step = True
            raise WorkerFault(place)

    def propose(self, req_id: str, num_drafts: int) -> list[int]:
        drafter, rng = self.drafter, self._rng
        drafts = super().propose(req_id, num_drafts + 3 * (drafter == "too long"))
        wrong = [(token_id + 1) % VOCAB_SIZE for token_id in drafts]
        if drafter == "wrong":
            return wrong
        if drafter == "mixed":
            num_right = rng.randint(0, num_drafts)
            return (drafts[:num_right] + wrong[num_right:])[: rng.randint(0, num_drafts)]
        if drafter == "out of vocabulary":
            drafts[rng.randrange(num_drafts)] = rng.choice([-1, VOCAB_SIZE])
        return drafts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        match self.drafter:
            case "for unknown ids":
                drafts.req_ids.append("unknown")
                drafts.draft_token_ids.append([1, 2])
            case "twice":
                drafts.req_ids += drafts.req_ids
                drafts.draft_token_ids += [token_ids[1:] for token_ids in drafts.draft_token_ids]
            case "late by a step":
                self._late, late = drafts, self._late
                return late
            case "raising":
                self._num_proposals += 1
                if self._num_proposals > 20:  # as a worker does whose drafter raises
                    return DraftTokenIds([], [], is_enabled=False)
        return drafts

    def recover(self) -> None:
        """Drops the steps in flight: the engine has seen the failure and will not ask for them."""
        self._in_flight.clear()
        self._memory.in_flight.clear()


@dataclass(frozen=True)
class World:
    """One configuration. `documents` are the texts that prompts share prefixes of."""

    config: EngineConfig
    executor_class: type[SimulatedExecutor]
    documents: tuple[tuple[int, ...], ...]
    add_weight: int
    session_share: float
    """Share of requests that are sessions."""
    adapter_share: float = 0.0
    """Share of requests that have an adapter, where adapters are short of memory and places, and change; 0: a few
    have, which are loaded at once."""
    tier_seed: int | None = None
    """Seed of the store outside the engine; None: there is none."""

    @property
    def has_tier(self) -> bool:
        """True if there is a store outside the engine."""
        return self.tier_seed is not None

    def with_tier(self, rng: random.Random) -> World:
        """The same, with a store outside the engine."""
        transfer = KVTransferConfig(
            kv_connector="FakeTier",
            min_load_tokens=rng.choice([1, 1, 4]),
            load_bias=1000.0,
            max_pinned_share=rng.choice([0.05, 0.2, 1.0]),
        )
        cache = replace(self.config.cache_config, enable_prefix_caching=True)
        tier_seed, num_workers = rng.getrandbits(32), rng.choice([1, 1, 2, 3])
        transfer = replace(transfer, kv_connector_extra_config={"tier": "simulation", "workers": num_workers})
        config = replace(self.config, kv_transfer_config=transfer, cache_config=cache)
        return replace(self, config=config, tier_seed=tier_seed)

    def with_adapters(self, rng: random.Random) -> World:
        """The same, with adapters that compete, fail and are loaded again."""
        lora_config = LoRAConfig(
            enable_lora=True,
            max_loras=rng.choice([None, 1, 1, 2, 3]),
            max_cpu_loras=rng.choice([None, None, 1, 2, 3]),
            lora_memory_bytes=rng.choice([300, 500, 800, 5000]),  # the largest takes 400
        )
        executor_class = type(
            "AdaptingExecutor",
            (self.executor_class,),
            {
                "adapter_steps": rng.choice([1, 3, MAX_LOAD_STEPS]),
                "adapter_failure_rate": rng.choice([0.0, 0.0, 0.1, 0.5]),
            },
        )
        config = replace(self.config, lora_config=lora_config)
        return replace(self, config=config, executor_class=executor_class, adapter_share=rng.choice([0.3, 0.9]))

    def with_drafts(self, rng: random.Random) -> World:
        """The same, with speculation."""
        num_drafts, reaches_ahead = rng.choice([0, 1, 3, 8]), rng.random() < 0.5
        if not num_drafts:
            return self
        drafting = Drafting(
            method="ngram",
            num_speculative_tokens=num_drafts,
            model=self.config.model_config if reaches_ahead else None,
            num_speculative_tokens_per_batch_size=rng.choice([(), (), ((1, 2, num_drafts), (3, 9, 1))]),
        )
        hf_config = HFConfig({**self.config.model_config.hf_config.raw, "vocab_size": VOCAB_SIZE}, Path())
        config = replace(
            self.config,
            model_config=replace(self.config.model_config, hf_config=hf_config),
            speculative_config=SpeculativeConfig(drafting=drafting),
        )
        executor_class = type(
            "DraftingExecutor", (self.executor_class,), {"drafter": rng.choice((*DRAFTERS, "right", "right"))}
        )
        return replace(self, config=config, executor_class=executor_class)

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step; 0 without speculation."""
        drafting = self.config.speculative_config.drafting
        return 0 if drafting is None else drafting.num_speculative_tokens

    @classmethod
    def draw(cls, rng: random.Random) -> World:
        """A small engine, so that blocks run out and limits are met all the time."""
        block_size = rng.choice([1, 1, 2, 2, 3, 4, 4, 5, 8, 16])
        model_len = rng.randint(6, 60) + rng.choice([0, 2]) * block_size
        layers = _draw_layers(rng, block_size)
        num_blocks = len(layers) * model_len / block_size * rng.uniform(0.5, 1.6)
        chunked = rng.random() < 0.8
        max_num_seqs = rng.randint(1, 8)
        budget = rng.choice([max_num_seqs, max_num_seqs + rng.randint(0, 8), rng.randint(max_num_seqs, 64)])
        config = EngineConfig(
            model_config=ModelConfig(
                max_model_len=-1, hf_config=HFConfig({"max_position_embeddings": model_len}, Path())
            ),
            cache_config=CacheConfig(
                block_size=block_size,
                num_gpu_blocks_override=min(max(8, round(num_blocks)), 64),
                enable_prefix_caching=rng.random() < 0.85,
                kv_cache_metrics=rng.random() < 0.2,
                kv_cache_metrics_sample=1.0,
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=budget if chunked else max(budget, model_len),
                max_num_seqs=max_num_seqs,
                max_num_scheduled_tokens=None if rng.random() < 0.8 or not chunked else rng.randint(1, budget),
                scheduling_policy=rng.choice(sorted(POLICIES)),
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=rng.choice([0, 0, rng.randint(1, 8)]) if chunked else 0,
                scheduler_reserve_full_isl=rng.random() < 0.5,
                watermark=rng.choice([0.0, 0.0, 0.05, 0.2]),
            ),
            lora_config=LoRAConfig(enable_lora=True, lora_memory_bytes=1 << 20),
        )
        executor_class = type(
            "WorldExecutor",
            (SimulatedExecutor,),
            {"layer_specs": layers, "pipeline_depth": rng.choice([1, 1, 2, 3])},
        )
        documents = tuple(tuple(rng.randrange(VOCAB_SIZE) for _ in range(64)) for _ in range(rng.randint(1, 2)))
        add_weight, session_share = rng.choice([10, 20, 40]), rng.choice([0.0, 0.0, 0.2, 0.5])
        return cls(config, executor_class, documents, add_weight, session_share)

    def __str__(self) -> str:
        cache, limits = self.config.cache_config, self.config.scheduler_config
        return (
            f"layers {self.executor_class.layer_specs}\npipeline_depth {self.executor_class.pipeline_depth}\n"
            f"model_len {self.config.model_config.model_len}\n{cache}\n{limits}\n"
            f"drafter {self.executor_class.drafter}: {self.config.speculative_config}"
        )


def _draw_layers(rng: random.Random, block_size: int) -> dict[str, AnyKVCacheSpec]:
    """Full attention, sliding windows, or both, in numbers that make one group or several."""
    full, sliding = rng.choice([(1, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 4)])
    several_blocks = rng.randint(block_size + 2, 3 * block_size + 2)
    window = rng.choice([1, block_size, block_size + 1, several_blocks, several_blocks, rng.randint(1, 24)])
    layers: dict[str, AnyKVCacheSpec] = {f"full.{i}": FullAttentionSpec(block_size, 1, 1) for i in range(full)}
    for i in range(sliding):
        layers[f"sliding.{i}"] = SlidingWindowSpec(block_size, 1, 1, sliding_window=window)
    return layers


def draw_request(
    rng: random.Random, world: World, request_id: str, arrival: int, max_model_len: int, history: list[list[int]]
) -> EngineCoreRequest:
    """A request whose prompt is likely to share a prefix with others: with a document, or with what an earlier
    request has read and written (`history`)."""
    source = rng.choice(history) if history and rng.random() < 0.3 else rng.choice(world.documents)
    length = rng.randint(1, max_model_len - 1)
    if rng.random() < 0.5:
        length = min(length, 16)
    tail = rng.choice([0, 0, 1, 3])
    prompt = list(source[: max(0, length - tail)])
    prompt += [rng.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
    salt = rng.choice([*[None] * 6, "", "a", "b"])
    is_session = rng.random() < world.session_share
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt[: 1 + max_model_len // 3] if is_session else prompt,
        sampling_params=_draw_params(rng, salt),
        pooling_params=None,
        arrival_time=float(arrival // 2),  # ties happen
        lora_request=rng.choice(LORAS) if rng.random() < 0.1 else _draw_adapter(rng, world),
        cache_salt=salt,
        client_index=rng.randrange(2),
        priority=rng.choice([0, 0, 0, 0, -1, 1, 2]),
        resumable=is_session,
    )


def _draw_adapter(rng: random.Random, world: World) -> LoRARequest | None:
    if not world.adapter_share or rng.random() >= world.adapter_share:
        return None
    return rng.choice(MORE_LORAS)


def draw_input(rng: random.Random, world: World, session: EngineCoreRequest, arrival_time: float) -> SessionInput:
    """The next input of a session, sometimes the last one, sometimes only to say that there will be no more."""
    text = rng.choice(world.documents)
    length = rng.choice([1, 1, 2, rng.randint(1, 6), rng.randint(1, 24)])
    is_last = rng.random() >= 0.7
    token_ids = [] if is_last and rng.random() >= 0.6 else list(text[:length])
    return SessionInput(token_ids, _draw_params(rng, session.cache_salt), arrival_time, is_last)


def _draw_params(rng: random.Random, salt: str | None) -> SamplingParams:
    max_tokens = None if rng.random() < 0.05 else rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)])
    repetition = RepetitionDetectionParams(2, 1, 2) if rng.random() < 0.1 else None
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens or 4) if rng.random() < 0.2 else 0,
        stop_token_ids=[rng.randrange(VOCAB_SIZE)] if rng.random() < 0.2 else [],
        eos_token_id=0 if rng.random() < 0.5 else None,
        ignore_eos=rng.random() < 0.1,
        repetition_detection=repetition,
        skip_reading_prefix_cache=True if rng.random() < 0.05 else None,
        logprobs=1 if rng.random() < 0.05 else None,
        extra_args=None if salt is None else {KV_IDENTITY: salt},
    )


def draw_operations(rng: random.Random, world: World, count: int) -> list[tuple[str, int]]:
    """Operations as plain data, (kind, number), that mean something in whatever state they meet: any part of the list
    can be replayed, which is how a failure is made small."""
    weights = {
        "step": 60,
        "add": world.add_weight,
        "feed": world.add_weight * min(1.0, 3 * world.session_share),
        "refused": 1,
        "abort": 6,
        "abort_in_flight": 3,
        "reset_prefix_cache": 0.3,
        "pause": 0.4,
        "sleep": 0.3,
        "resume": 4,
        "wake_up": 2,
        "update_weights": 0.3,
        "fault": 0.2,
        "crash": 0.2,
        "drain": 0.1,
    }
    if world.adapter_share:
        weights["adapters"] = 6
    if world.has_tier:
        weights |= {"tier_fault": 3, "complete_load": 8, "reset_prefix_cache": 5, "crash": 1.0}
    kinds = rng.choices(list(weights), list(weights.values()), k=count)
    return [(kind, rng.getrandbits(32)) for kind in kinds]
