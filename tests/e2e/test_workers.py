"""Several workers beside one, which share layers or have some each: everything that a request may ask for has the same
answer, and so has everything after the engine slept or got new weights."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ConfigError
from quire.structured_outputs import StructuredOutputsParams
from tests.adapters import write_demo_adapter

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
PROMPTS = ["Hello, what is a KV cache?", "Tell me about tensor parallelism. " * 12, "a b c a b c a b c a b"]
KINDS: dict[str, SamplingParams] = {
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=20, logprobs=3),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=20),
    "prompt": SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=4),
    "grammar": SamplingParams(
        seed=1, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(yes|no|maybe)( (yes|no)){0,5}")
    ),
    "several": SamplingParams(n=2, seed=3, temperature=1.0, max_tokens=12),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """The base model, and two adapters: one for each prompt."""
    paths = [write_demo_adapter(tmp_path_factory.mktemp("adapter"), seed, rank) for seed, rank in ((1, 4), (2, 20))]
    return [None, *(LoRARequest(f"adapter {i}", i, str(path)) for i, path in enumerate(paths, start=1))]


def answers(adapters: list[LoRARequest | None], **flags: Any) -> dict[str, Any]:
    flags = {
        "max_model_len": 512,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 99,
        "enable_lora": True,
        **flags,
    }
    llm = LLM("demo", **flags)

    def run(params: SamplingParams, lora: list[LoRARequest | None] | None = None) -> list[Any]:
        outputs = llm.generate(PROMPTS, params, lora_request=lora, use_tqdm=False)
        found = [[(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs] for output in outputs]
        return [found, [output.prompt_logprobs for output in outputs]]

    try:
        found: dict[str, Any] = {kind: run(params) for kind, params in KINDS.items()}
        found["cached"] = run(KINDS["seeded"])
        found["adapters"] = run(KINDS["seeded"], adapters)
        llm.sleep(1)
        llm.wake_up()
        found["after a sleep"] = run(KINDS["seeded"])
        llm.sleep(2)
        llm.wake_up()
        found["after reading the weights again"] = run(KINDS["penalties"])
        found["adapters of prompts"] = run(KINDS["prompt"], adapters[::-1])
        waited = llm.llm_engine.engine_core.engine_core.executor.take_barrier_wait()  # type: ignore[attr-defined]
        assert (waited > 0) == (flags.get("tensor_parallel_size", 1) > 1)
        return found
    finally:
        llm.llm_engine.shutdown()


@pytest.fixture(scope="module")
def alone(adapters: list[LoRARequest | None]) -> dict[str, Any]:
    """The answers of one worker."""
    found = answers(adapters)
    (same, *_), (first, second, third) = found["seeded"][0], found["adapters"][0]
    assert first == same
    assert [second, third] != found["seeded"][0][1:]
    return found


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),  # tests/process/test_workers.py
        pytest.param({"tensor_parallel_size": 2, "speculative_config": NGRAM}, marks=pytest.mark.slow),
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "speculative_config": NGRAM}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "num_gpu_blocks_override": 35}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_several_workers_answer_as_one(
    flags: dict[str, Any], alone: dict[str, Any], adapters: list[LoRARequest | None]
) -> None:
    assert answers(adapters, **flags) == alone


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"device": "cuda"}, "--device cuda: only CPUs compute with several workers yet"),
    ],
)
def test_what_does_not_work_with_several_is_refused_by_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", tensor_parallel_size=2, **flags)
