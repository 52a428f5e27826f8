"""A recorded load, served once more by a real engine: the same arrivals and lengths, prefixes shared as they were."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from quire.cli.bench.workloads import IdRange
from quire.config.engine_args import EngineArgs
from quire.engine.recording.format import HASH_BYTES, IS_POOLING
from quire.errors import ConfigError
from quire.replay.study import RecordedRequest, Study
from quire.replay.what_if import Changes
from quire.resolve import resolve
from quire.sampling_params import RequestOutputKind, SamplingParams


class Rerun:
    """One run. It is recorded to `path`, and measured from that recording as the first one was."""

    def __init__(self, study: Study, changes: Changes, model: str, flags: dict[str, Any], path: Path) -> None:
        """Raises ConfigError for a load that cannot be served again."""
        if any(request.segments[0].add.flags & IS_POOLING for request in study.requests):
            raise ConfigError("--rerun: the recording has pooling requests; only generation is served again")
        header = changes.apply(study.header)
        scheduler = header.scheduler
        self._requests = study.requests
        self._block_size = min(header.kv_cache.block_sizes)
        self._args = EngineArgs(
            **{
                "model": model,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_num_seqs": scheduler.max_num_seqs,
                "scheduling_policy": scheduler.scheduling_policy,
                "enable_chunked_prefill": scheduler.enable_chunked_prefill,
                "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
                "scheduler_reserve_full_isl": scheduler.scheduler_reserve_full_isl,
                "watermark": scheduler.watermark,
                "block_size": self._block_size,
                "num_gpu_blocks_override": header.kv_cache.num_blocks,
                "enable_prefix_caching": header.enable_caching,
                "max_model_len": header.max_model_len,
                "skip_tokenizer_init": True,
                "disable_log_stats": True,
                "record": str(path),
                **flags,
            }
        )

    def run(self) -> None:
        """Serve everything, at the times it came."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        config = self._args.create_engine_config("serving")
        ids = IdRange.of_vocabulary(config.model_config.hf_config.vocab_size)
        prompts = [self._make_prompt(number, ids) for number in range(len(self._requests))]
        async with resolve("quire.frontend.async_llm:AsyncLLM").from_engine_config(config) as engine:
            start = time.monotonic() - min((r.segments[0].arrival_s for r in self._requests), default=0.0)
            pairs = zip(self._requests, prompts, strict=True)
            async with asyncio.TaskGroup() as tasks:
                for number, (request, prompt) in enumerate(pairs):
                    tasks.create_task(_serve(engine, str(number), request, prompt, start))

    def _make_prompt(self, number: int, ids: IdRange) -> list[int]:
        """Tokens that follow from the recorded hashes of the blocks; beyond the last full block they are its own."""
        request = self._requests[number]
        add = request.segments[0].add
        if add.prompt is not None:
            return add.prompt
        tokens: list[int] = []
        for start in range(0, len(request.blocks), HASH_BYTES):
            if len(tokens) >= add.num_prompt_tokens:
                break
            tokens += _draw(request.blocks[start : start + HASH_BYTES], self._block_size, ids)
        tokens += _draw(number, max(0, add.num_prompt_tokens - len(tokens)), ids)
        return tokens[: add.num_prompt_tokens]


def _draw(seed: int | bytes, count: int, ids: IdRange) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ids.low, ids.high) for _ in range(count)]


async def _serve(engine: Any, request_id: str, request: RecordedRequest, prompt: list[int], start: float) -> None:
    segment = request.segments[0]
    await asyncio.sleep(max(0.0, start + segment.arrival_s - time.monotonic()))
    num_outputs = max(1, segment.num_outputs)
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        min_tokens=num_outputs,
        max_tokens=num_outputs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    stream = engine.generate({"prompt_token_ids": prompt}, params, request_id, priority=segment.add.priority)
    async for _ in stream:
        pass
