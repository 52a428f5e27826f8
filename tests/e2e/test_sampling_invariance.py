"""Seeded sampling gives the same tokens whatever else the engine does: alone, batched, chunked, cached, preempted."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, ReasoningTokens, SamplingParams, StructuredOutputsParams

from .conftest import Checkpoint
from .oracle import make_prompts
from .test_oracle import FEW_BLOCKS, engine, num_preemptions

PROMPTS = make_prompts(seed=2)[::2]
PARAMS = [
    SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **extra)
    for i, extra in enumerate(
        [
            {},
            {"temperature": 0.7, "top_p": 0.9, "structured_outputs": StructuredOutputsParams(regex="([a-d]{2}[0-9])+")},
            {
                "temperature": 1.3,
                "top_k": 20,
                "min_p": 0.02,
                "thinking_token_budget": 6,
                "reasoning_tokens": ReasoningTokens(12),
            },
            {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.1},
            {"logit_bias": {10: 3.0, 11: -100.0}, "bad_words": ["the"], "min_tokens": 5, "stop_token_ids": [12]},
            {"temperature": 0},
            {"allowed_token_ids": list(range(20, 60))},
            {"top_p": 0.5, "seed": -(2**63)},
        ]
        * 2
    )
    if "seed" not in extra
] + [SamplingParams(seed=-(2**63), top_p=0.5, max_tokens=24, ignore_eos=True)] * 2


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> Any:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> list[list[int]]:
    """Each request on its own, one after another."""
    with engine(checkpoint("gemma2"), max_num_seqs=1, enable_prefix_caching=False) as llm:
        return [list(generate(llm, [p], s)[0].outputs[0].token_ids) for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "max_num_batched_tokens": 33, "enable_prefix_caching": False},
        {"max_num_seqs": 16, "max_num_batched_tokens": 64, **FEW_BLOCKS},
    ],
    ids=["batched", "chunked", "preempted"],
)
def test_company_and_schedule_change_nothing(
    flags: dict[str, Any], alone: list[list[int]], checkpoint: Checkpoint
) -> None:
    with engine(checkpoint("gemma2"), **flags) as llm:
        outputs = generate(llm, PROMPTS, PARAMS)
        again = generate(llm, PROMPTS[::-1], PARAMS[::-1])[::-1]
    assert [list(o.outputs[0].token_ids) for o in outputs] == alone
    assert [list(o.outputs[0].token_ids) for o in again] == alone
    assert (num_preemptions(outputs) > 0) == ("num_gpu_blocks_override" in flags)


def test_children_equal_requests_with_consecutive_seeds(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), max_num_seqs=8) as llm:
        (together,) = generate(llm, [PROMPTS[4]], SamplingParams(n=4, seed=100, max_tokens=12, ignore_eos=True))
        children = [list(c.token_ids) for c in together.outputs]
        for i, child in enumerate(children):
            (single,) = generate(llm, [PROMPTS[4]], SamplingParams(seed=100 + i, max_tokens=12, ignore_eos=True))
            assert list(single.outputs[0].token_ids) == child
    assert len({tuple(c) for c in children}) == 4


def test_requests_without_a_seed_differ_and_an_engine_repeats_them(checkpoint: Checkpoint) -> None:
    """The engine gives seeds from its own: two engines agree, two requests of one do not."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for _ in range(2):
        with engine(checkpoint("llama"), max_num_seqs=8, seed=3) as llm:
            runs.append([list(o.outputs[0].token_ids) for o in generate(llm, [PROMPTS[4]] * 3, params)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3
