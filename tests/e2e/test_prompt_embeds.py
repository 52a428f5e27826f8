"""A prompt's own rows of the embedding table, given as embeddings, yield its bits: alone, in company, in chunks,
cached, preempted, mixed with tokens, and with speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config.model import ASSETS_DIR
from quire.errors import ConfigError, ValidationError
from quire.outputs import RequestOutput

from .conftest import Checkpoint
from .test_oracle import num_preemptions

QUESTIONS = [
    "What is a block table, and why does every request of the engine have one of its own?",
    "What does the scheduler do at every step, and which requests does it run first of all of them?",
    "Why is a seed useful?",
    "A list: one two three one two three one two three one two three one two three one",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=30, frequency_penalty=0.5, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, n=3, max_tokens=20),
]
ROWS = load_file(ASSETS_DIR / "demo" / "model.safetensors")["model.embed_tokens.weight"]


def engine(model: str = "demo", **flags: Any) -> LLM:
    flags = {"max_model_len": 128, "num_gpu_blocks_override": 400, "disable_log_stats": False, **flags}
    return LLM(model, enable_prompt_embeds=True, **flags)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (c.token_ids, c.text, c.finish_reason, [{i: p.logprob for i, p in step.items()} for step in c.logprobs or ()])
        for output in outputs
        for c in output.outputs
    ]


COMPANIES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "whole": ({}, (0, 1, 2)),
    "chunks of 7": ({"max_num_batched_tokens": 7, "max_num_seqs": 7}, (2,)),
    "preempted": ({"num_gpu_blocks_override": 10, "enable_prefix_caching": False}, (1,)),
    "speculated": (
        {"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 3, "adaptive": False}},
        (0,),
    ),
}
"""Flags, and which of PARAMS; the others with -m slow."""


@pytest.mark.parametrize(
    ("flags", "params_of_requests"),
    [
        pytest.param(
            flags,
            [params for i, params in enumerate(PARAMS) if (i in chosen) == is_default],
            id=f"{name}{'' if is_default else ', others'}",
            marks=() if is_default else pytest.mark.slow,
        )
        for name, (flags, chosen) in COMPANIES.items()
        for is_default in (True, False)
    ],
)
def test_own_rows_of_the_table_yield_the_same_bits(
    flags: dict[str, Any], params_of_requests: list[SamplingParams]
) -> None:
    with engine(**flags) as llm:
        ids = [llm.get_tokenizer().encode(question) for question in QUESTIONS]
        embeds = [{"prompt_embeds": ROWS[i]} for i in ids]
        masks = [[n % 3 == 0 for n in range(len(i))] for i in ids]
        mixed = [
            {"prompt_embeds": ROWS[i], "prompt_token_ids": i, "prompt_is_token_ids": mask}
            for i, mask in zip(ids, masks, strict=True)
        ]
        for params in params_of_requests:
            expected = llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)
            llm.reset_prefix_cache()
            found = llm.generate(embeds, params, use_tqdm=False)
            again = llm.generate(embeds, params, use_tqdm=False)
            alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in mixed]
            assert seen(found) == seen(again) == seen(alone) == seen(expected)
            assert [output.prompt_token_ids for output in found] == [[0] * len(i) for i in ids]
            if flags.get("enable_prefix_caching", True):
                assert [o.num_cached_tokens for o in again] == [(len(i) - 1) // 16 * 16 for i in ids]
                if params.n == 1:
                    assert [o.num_cached_tokens for o in alone] == [0] * len(ids)  # tokens and rows: no common prefix
            else:
                assert num_preemptions(found)


def test_embeddings_share_blocks_with_equal_rows_only() -> None:
    soft = torch.from_numpy(ROWS[40:72].float().numpy().copy())
    others = soft.clone()
    others[3, 5] += 1
    question = ROWS[[7, 8, 9]].float()
    with engine() as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        first, second, third = (
            llm.generate({"prompt_embeds": torch.cat([rows, question])}, params, use_tqdm=False)[0]
            for rows in (soft, soft, others)
        )
    assert [o.num_cached_tokens for o in (first, second, third)] == [0, 32, 0]
    assert seen([first]) == seen([second])


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "gpt2"])
def test_families_that_scale_or_add_positions(family: str, checkpoint: Checkpoint) -> None:
    """Rows take the place of those of the table, before whatever a family does with them."""
    path = checkpoint(family)
    tensors = load_file(path / "model.safetensors")
    (rows,) = (t for name, t in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    ids = list(range(5, 25))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    with engine(str(path), dtype="float32") as llm:
        expected = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert seen(llm.generate({"prompt_embeds": rows[ids]}, params, use_tqdm=False)) == seen(expected)


def test_what_embeddings_cannot_be_combined_with() -> None:
    embeds = {"prompt_embeds": ROWS[:5]}
    with engine() as llm:
        with pytest.raises(ValidationError, match="prompt_logprobs score tokens"):
            llm.generate(embeds, SamplingParams(prompt_logprobs=1), use_tqdm=False)
        with pytest.raises(ValidationError, match="cut prompt_embeds yourself"):
            llm.generate(embeds, tokenization_kwargs={"truncate_prompt_tokens": 3}, use_tqdm=False)
        for more in ({"prompt": "text"}, {"prompt_token_ids": [1]}, {"prompt_is_token_ids": [True] * 5}):
            with pytest.raises(ValidationError, match="'prompt_embeds' stand alone, or with"):
                llm.generate({**embeds, **more}, use_tqdm=False)
        mixed = {"prompt_token_ids": [1] * 5, "prompt_is_token_ids": [True] * 4}
        with pytest.raises(ValidationError, match="their lengths must agree"):
            llm.generate({**embeds, **mixed}, use_tqdm=False)
        with pytest.raises(ValidationError, match="beam_search takes text and token ids"):
            llm.beam_search([embeds], BeamSearchParams(beam_width=2, max_tokens=2))
    with LLM(max_model_len=64, num_gpu_blocks_override=16) as llm:  # noqa: SIM117
        with pytest.raises(ValidationError, match="start it with --enable-prompt-embeds"):
            llm.generate(embeds, use_tqdm=False)


def test_a_model_that_cannot_take_them_is_refused_at_the_start(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="OPTForCausalLM takes token ids only"):
        engine(str(checkpoint("opt")), dtype="float32")
