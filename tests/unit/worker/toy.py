"""A two-layer model with attention, its dense twin, and a scheduler that does at random all a scheduler may do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.execution import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlidingWindowSpec
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.layer import Attention
from quire.worker.attention.torch_backend import TorchAttentionBackend
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.model_runner import ModelRunner

VOCAB, HEADS, KV_HEADS, HEAD_SIZE, WINDOW, BLOCK_SIZE = 29, 4, 2, 8, 6, 4
HIDDEN = HEADS * HEAD_SIZE
CPU = torch.device("cpu")


def make_cache_config(
    specs: Mapping[str, AnyKVCacheSpec], num_blocks: int
) -> tuple[KVCacheConfig, tuple[int | None, ...]]:
    """Returns a cache with a group for each kind of layers, and the window of each."""
    kinds = list(dict.fromkeys(specs.values()))
    tensors = [KVCacheTensor(num_blocks * spec.page_size_bytes, [name]) for name, spec in specs.items()]
    groups = [KVCacheGroupSpec([name for name, spec in specs.items() if spec == kind], kind) for kind in kinds]
    windows = tuple(kind.sliding_window if isinstance(kind, SlidingWindowSpec) else None for kind in kinds)
    return KVCacheConfig(num_blocks, tensors, groups), windows


class ToyModel(nn.Module):
    """Embeddings of token and position, a full and a sliding attention layer, logits. Scores and logits are no larger
    than those of models people train, so that rounding in single precision stays far under what is asserted."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.positions = torch.randn(512, HIDDEN, generator=generator) * 0.5
        self.projections = torch.randn(2, HIDDEN, HIDDEN + 2 * KV_HEADS * HEAD_SIZE, generator=generator) * 0.2
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator) * HIDDEN**-0.5
        self.layers = nn.ModuleList(
            Attention(AttentionSpec(HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, window), f"layer.{i}")
            for i, window in enumerate((None, WINDOW))
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens[input_ids] + self.positions[positions]
        for layer, projection in zip(self.layers, self.projections, strict=True):
            kv = KV_HEADS * HEAD_SIZE
            x = x + layer(*(x @ projection).split((HIDDEN, kv, kv), dim=-1))
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


def dense_logits(model: ToyModel, token_ids: list[int]) -> Tensor:
    """Logits at every position, without a cache and in double precision: [len(token_ids), VOCAB]."""
    n = len(token_ids)
    x = model.tokens[token_ids].double() + model.positions[:n]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    for projection, window in zip(model.projections.double(), (n, WINDOW), strict=True):
        kv = KV_HEADS * HEAD_SIZE
        q, k, v = (x @ projection).split((HIDDEN, kv, kv), dim=-1)
        q = q.view(n, HEADS, HEAD_SIZE).transpose(0, 1)
        k, v = (t.view(n, KV_HEADS, HEAD_SIZE).repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * HEAD_SIZE**-0.5
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, HIDDEN)
    return x @ model.head.double()


def make_runner(num_blocks: int = 200, max_num_reqs: int = 8, max_model_len: int = 128) -> ModelRunner:
    """A runner of the toy model: two groups that share one tensor, the cache full of NaN."""
    runner = ModelRunner(
        ToyModel(),
        TorchAttentionBackend(),
        CPU,
        vocab_size=VOCAB,
        max_num_reqs=max_num_reqs,
        max_num_tokens=256,
        kernels=TORCH_KERNELS,
        dtype=torch.float32,
    )
    specs = runner.get_kv_cache_specs(BLOCK_SIZE, torch.float32)
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    size = num_blocks * next(iter(specs.values())).page_size_bytes
    runner.initialize_kv_cache(KVCacheConfig(num_blocks, [KVCacheTensor(size, list(specs))], groups), max_model_len)
    for cache in runner.kv_cache.caches.values():
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    return runner


def run_step(runner: ModelRunner, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """Both halves of a step."""
    output = runner.execute_model(scheduler_output)
    return runner.sample_tokens(None) if output is None else output


def new_request(
    req_id: str, prompt: list[int], scheduled: int, params: SamplingParams | None = None, first_block: int = 1
) -> SchedulerOutput:
    """A step with one new request that owns the blocks from `first_block` on, 20 for each group."""
    blocks = (list(range(first_block, first_block + 20)), list(range(first_block + 20, first_block + 40)))
    request = NewRequestData(req_id, prompt, blocks, 0, params or SamplingParams(temperature=0))
    return SchedulerOutput([request], num_scheduled_tokens={req_id: scheduled}, total_num_scheduled_tokens=scheduled)


def cached_request(req_id: str, num_computed: int, scheduled: int) -> SchedulerOutput:
    """A step with one request the worker knows, which needs no new blocks."""
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData([req_id], [None], [num_computed]),
        num_scheduled_tokens={req_id: scheduled},
        total_num_scheduled_tokens=scheduled,
    )


@dataclass
class ToyRequest:
    """A request as the random scheduler sees it."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)
    blocks: tuple[list[int], ...] = field(default_factory=lambda: ([], []))
    """Per KV cache group."""
    computed: int = 0
    lora_request: LoRARequest | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class RandomScheduler:
    """Admits, chunks, skips, preempts, resumes and ends requests at random; also gives blocks of the sliding group away
    once they are out of the window."""

    def __init__(
        self,
        seed: int,
        num_blocks: int = 200,
        max_num_reqs: int = 8,
        windows: tuple[int | None, ...] = (None, WINDOW),
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.random = random.Random(seed)
        self.windows = windows
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        self.random.shuffle(self.free)
        self.max_num_reqs = max_num_reqs
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.finished_ids: set[str] = set()
        self.num_preemptions = 0

    def schedule(self) -> SchedulerOutput:
        """One random step."""
        output = SchedulerOutput(finished_req_ids=self.finished_ids)
        self.finished_ids = set()
        for request in [r for r in self.running if r.computed and self.random.random() < 0.04]:
            self._release(request)
            self.running.remove(request)
            self.waiting.insert(0, request)
            output.preempted_req_ids.add(request.req_id)
            self.num_preemptions += 1
        for request in [r for r in self.running if self.random.random() < 0.85]:
            new_blocks = self._schedule(request, output)
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request.req_id)
            cached.new_block_ids.append(new_blocks if any(new_blocks) else None)
            cached.num_computed_tokens.append(request.computed)
        while self.waiting and len(self.running) < self.max_num_reqs and self.random.random() < 0.7:
            request = self.waiting.pop(0)
            if request.req_id in output.preempted_req_ids:
                self.waiting.insert(0, request)
                break
            self.running.append(request)
            self._schedule(request, output)
            output.scheduled_new_reqs.append(
                NewRequestData(
                    request.req_id,
                    list(request.prompt),
                    tuple(list(b) for b in request.blocks),
                    0,
                    request.params,
                    None,
                    list(request.outputs),
                    request.lora_request,
                )
            )
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        return output

    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, max_tokens: int) -> list[ToyRequest]:
        """Append what was sampled; the requests that are done."""
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        done = []
        for request in list(self.running):
            num_scheduled = scheduled.num_scheduled_tokens.get(request.req_id, 0)
            if not num_scheduled:
                continue
            request.computed += num_scheduled
            assert bool(sampled[request.req_id]) == (request.computed == len(request.tokens))
            request.outputs += sampled[request.req_id]
            if len(request.outputs) >= max_tokens:
                self._release(request)
                self.running.remove(request)
                self.finished_ids.add(request.req_id)
                done.append(request)
        return done

    def _schedule(self, request: ToyRequest, output: SchedulerOutput) -> tuple[list[int], ...]:
        remaining = len(request.tokens) - request.computed
        num_tokens = self.random.choice([remaining, self.random.randint(1, remaining)])
        output.num_scheduled_tokens[request.req_id] = num_tokens
        for window, held in zip(self.windows, request.blocks, strict=True):
            if window is not None:
                self._release_behind(held, request.computed - window + 1)
        needed = -(-(request.computed + num_tokens) // self.block_size)
        new: tuple[list[int], ...] = tuple([] for _ in self.windows)
        for ids, held in zip(new, request.blocks, strict=True):
            ids += [self.free.pop(0) for _ in range(needed - len(held))]
            held += ids
        return new

    def _release_behind(self, held: list[int], first_position: int) -> None:
        """A block whose last token is out of the window of the next query will never be read again."""
        for i in range(max(0, first_position) // self.block_size):
            if i < len(held) and held[i]:
                self.free.append(held[i])
                held[i] = 0

    def _release(self, request: ToyRequest) -> None:
        for held in request.blocks:
            self.free += [b for b in held if b]
            held.clear()
        request.computed = 0
