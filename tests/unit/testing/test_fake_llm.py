"""The fake under everything above it, by its dotted name: what a user's own test would do."""

from __future__ import annotations

from quire import LLM, SamplingParams
from quire.testing.fake_model import FakeModel, expected_output

MAX_MODEL_LEN = 128


def test_llm_on_the_fake_gives_the_oracles_tokens() -> None:
    llm = LLM(
        "demo",
        distributed_executor_backend="quire.testing.fake_executor:FakeExecutor",
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=20,
        max_num_batched_tokens=32,
        max_num_seqs=16,
    )
    params = [SamplingParams(max_tokens=5 + i, ignore_eos=True, logprobs=i % 3 or None) for i in range(20)]
    prompts = [{"prompt_token_ids": [7, 8, 9] * (1 + i)} for i in range(20)]
    for output, its_params in zip(llm.generate(prompts, params, use_tqdm=False), params, strict=True):
        (completion,) = output.outputs
        expected = expected_output(FakeModel(), output.prompt_token_ids, its_params, MAX_MODEL_LEN)
        assert list(completion.token_ids) == expected.token_ids
        assert completion.finish_reason == "length"
        assert (completion.logprobs is not None) == (its_params.logprobs is not None)
