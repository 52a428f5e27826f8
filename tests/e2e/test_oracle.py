"""Greedy output of the whole engine equals transformers' generate, token for token in float32.

No mismatch is tolerated: the oracle's choices all lead by more than rounding can bridge (`oracle.MIN_GAP`, asserted).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire.testing.tiny_models import FAMILIES
from tests.rows import each_family

from .conftest import Checkpoint, Oracle
from .oracle import OUTPUT_LEN, Generation
from .oracle import generate as greedy

LOGPROB_TOLERANCE = 1e-4
MODEL_LEN = 640
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
FEW_BLOCKS = {"num_gpu_blocks_override": 60, "scheduler_reserve_full_isl": False}
"""Room for one of the long prompts and a few short ones: requests wait, and some are preempted."""


EACH_FAMILY = each_family(FAMILIES)
"""Families whose tokens are compared; of the others tests/unit compares the logits, and -m slow the tokens."""


@contextmanager
def engine(path: Path, **flags: Any) -> Iterator[LLM]:
    """An engine over a tiny checkpoint, with statistics so that preemptions can be counted."""
    flags = {"device": "cpu", "dtype": "float32", "max_model_len": MODEL_LEN, "disable_log_stats": False, **flags}
    with LLM(str(path), **flags) as llm:
        yield llm


def generate(llm: LLM, expected: list[Generation], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": g.prompt} for g in expected], params, use_tqdm=False)


def assert_same_tokens(outputs: list[RequestOutput], expected: list[Generation]) -> None:
    for i, (output, generation) in enumerate(zip(outputs, expected, strict=True)):
        assert list(output.outputs[0].token_ids) == generation.tokens, f"prompt {i} of {len(generation.prompt)} tokens"


def num_preemptions(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family == "llama" else pytest.mark.slow) for family in FAMILIES]
)
def test_the_oracle_is_what_transformers_generates(family: str, checkpoint: Checkpoint, oracle: Oracle) -> None:
    """Also where nothing is guessed right."""
    expected = [g for g in oracle(family) if len(g.prompt) in (1, 33, 129)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    for generation in expected:
        ids = torch.tensor([generation.prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_LEN, eos_token_id=None)
        assert found[0, len(generation.prompt) :].tolist() == generation.tokens
    again = greedy(model, [g.prompt for g in expected], [[7] * OUTPUT_LEN] * len(expected))
    assert [g.tokens for g in again] == [g.tokens for g in expected]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_all_at_once_then_again_from_the_prefix_cache(family: str, checkpoint: Checkpoint, oracle: Oracle) -> None:
    """32 requests in one batch with log-probabilities; then once more, when every full block is in the cache."""
    expected = oracle(family)
    with engine(checkpoint(family), max_num_seqs=32) as llm:
        params = GREEDY.clone()
        params.logprobs = 5
        first = generate(llm, expected, params)
        second = generate(llm, expected)
    assert_same_tokens(first, expected)
    assert_same_tokens(second, expected)
    assert sum(o.num_cached_tokens or 0 for o in second) > 1000
    for output, generation in zip(first, expected, strict=True):
        assert_same_logprobs(output, generation)


def assert_same_logprobs(output: RequestOutput, generation: Generation) -> None:
    positions = output.outputs[0].logprobs
    assert positions is not None
    for entries, reference, token in zip(positions, generation.logprobs, generation.tokens, strict=True):
        assert next(iter(entries)) == token
        assert len(entries) == 5  # the best five, of which the sampled token is one
        for token_id, entry in entries.items():
            assert abs(entry.logprob - reference[token_id].item()) < LOGPROB_TOLERANCE
            assert entry.rank == 1 + int((reference > reference[token_id]).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_cuda_gives_the_tokens_of_transformers(family: str, checkpoint: Checkpoint, oracle: Oracle) -> None:
    """The same code on a GPU, in whole prompts and in chunks."""
    expected = oracle(family)
    for budget in (4096, 48):
        with engine(checkpoint(family), device="cuda", max_num_seqs=32, max_num_batched_tokens=budget) as llm:
            assert_same_tokens(generate(llm, expected), expected)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_in_small_chunks_with_too_few_blocks(family: str, checkpoint: Checkpoint, oracle: Oracle) -> None:
    """48 tokens per step and a cache far too small: prompts in chunks, requests preempted and computed again."""
    expected = oracle(family)
    # Mistral's layers all forget: its requests need no more than seven blocks each.
    flags = {**FEW_BLOCKS, "num_gpu_blocks_override": 20} if family == "mistral" else FEW_BLOCKS
    with engine(checkpoint(family), max_num_seqs=16, max_num_batched_tokens=48, **flags) as llm:
        outputs = generate(llm, expected)
    assert_same_tokens(outputs, expected)
    assert num_preemptions(outputs) > 0


SCHEDULES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "17_tokens_a_step": {"max_num_seqs": 3, "max_num_batched_tokens": 17},
    "whole_prompts": {"max_num_seqs": 32, "max_num_batched_tokens": 4096},
    "few_blocks": {"max_num_seqs": 32, "max_num_batched_tokens": 200, **FEW_BLOCKS},
    "blocks_of_4": {"max_num_seqs": 8, "block_size": 4, "long_prefill_token_threshold": 50},
}
ATTENTIONS = ("llama", "mistral", "gemma2")


@pytest.mark.parametrize(
    ("family", "flags", "caching"),
    [  # every pair of two of them; all three together with -m slow
        pytest.param(
            *(family, flags, caching),
            id=f"{family}-{name}-{caching}",
            marks=() if caching == bool((i + j) % 2) else pytest.mark.slow,
        )
        for i, family in enumerate(ATTENTIONS)
        for j, (name, flags) in enumerate(SCHEDULES.items())
        for caching in (True, False)
    ],
)
def test_full_windowed_and_mixed_attention_under_every_schedule(
    family: str, flags: dict[str, Any], caching: bool, checkpoint: Checkpoint, oracle: Oracle
) -> None:
    expected = oracle(family)[::2]
    with engine(checkpoint(family), enable_prefix_caching=caching, **flags) as llm:
        outputs = generate(llm, expected)
        again = generate(llm, expected[-2:])
    assert_same_tokens(outputs, expected)
    assert_same_tokens(again, expected[-2:])
    assert (sum(o.num_cached_tokens or 0 for o in again) > 0) == caching


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("flags", [{}, {"max_num_batched_tokens": 40}], ids=["whole_prompts", "chunks"])
def test_prompt_logprobs_are_complete_beside_a_warm_prefix_cache(
    family: str, flags: dict[str, Any], checkpoint: Checkpoint, oracle: Oracle
) -> None:
    """They are complete although the same prompts are in the prefix cache, and there is none for the first token."""
    expected = [g for g in oracle(family) if len(g.prompt) in (1, 2, 17, 200)]
    with engine(checkpoint(family), max_num_seqs=4, **flags) as llm:
        generate(llm, expected)
        outputs = generate(llm, expected, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    for output, generation in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for entries, reference, token in zip(
            output.prompt_logprobs[1:], generation.prompt_logprobs, generation.prompt[1:], strict=True
        ):
            assert entries is not None
            assert {token, *reference.topk(2).indices.tolist()} == set(entries)
            for token_id, entry in entries.items():
                assert abs(entry.logprob - reference[token_id].item()) < LOGPROB_TOLERANCE


def test_bfloat16_follows_the_oracle_closely(checkpoint: Checkpoint, oracle: Oracle) -> None:
    """Rounded numbers choose other tokens now and then, but the log-probabilities of the prompt stay near."""
    generation = next(g for g in oracle("llama") if len(g.prompt) == 100)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(checkpoint("llama")), dtype="bfloat16", max_model_len=MODEL_LEN, device="cpu") as llm:
        (output,) = generate(llm, [generation], params)
    assert output.prompt_logprobs is not None
    errors = torch.tensor(
        [
            entries[token].logprob - reference[token].item()
            for entries, reference, token in zip(
                output.prompt_logprobs[1:], generation.prompt_logprobs, generation.prompt[1:], strict=True
            )
            if entries is not None
        ]
    )
    assert errors.abs().mean() < 0.1
