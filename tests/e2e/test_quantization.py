"""`LLM` with quantized weights: same bits alone and in a batch, asleep and awake; memory that is really smaller."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.worker.layers.weights import weight_bytes

PROMPTS = ["Prefix caching is", "A quire is", "The scheduler", "The KV cache"]
PARAMS = SamplingParams(max_tokens=16, temperature=0, logprobs=1, ignore_eos=True)


def answers(llm: LLM, prompts: list[str]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, to the bit."""
    found = []
    for output in llm.generate(prompts, PARAMS, use_tqdm=False):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        found.append([(t, at[t].logprob) for t, at in zip(completion.token_ids, completion.logprobs, strict=True)])
    return found


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_alone_batched_and_after_a_sleep(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    with LLM("demo", quantization=method, kv_cache_memory_bytes=16 << 20) as llm:
        batched = answers(llm, PROMPTS * 3)
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        (quantized,) = llm.apply_model(weight_bytes)
        (kernels,) = llm.collective_rpc(lambda worker: worker.kernels.name)
        if kernels == "native":  # torch's own products depend on the batch
            assert batched == alone * 3
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm, PROMPTS * 3) == batched
    with LLM("demo", kv_cache_memory_bytes=16 << 20) as llm:
        (plain,) = llm.apply_model(weight_bytes)
    assert quantized < (0.65 if method == "int8" else 0.45) * plain
