"""Outputs of transformers: the truth the engine is compared with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from quire.testing.tiny_models import VOCAB_SIZE

PROMPT_LENS = (
    1,
    1,
    1,
    2,
    2,
    3,
    5,
    5,
    8,
    8,
    15,
    16,
    16,
    17,
    17,
    31,
    31,
    32,
    33,
    33,
    48,
    48,
    64,
    64,
    100,
    100,
    129,
    200,
    257,
)
PROMPT_LENS += (400, 511, 600)
"""32 prompts: around the block size, around the sliding window (32), and long."""
OUTPUT_LEN = 16
MIN_GAP = 2e-5
"""Every greedy choice of the oracle leads by this much, which rounding cannot bridge: so no mismatch is excused."""


class TieError(Exception):
    """Two tokens lead by so little that rounding decides: take other prompts."""


@dataclass(frozen=True)
class Generation:
    """One prompt and its greedy continuation."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    """[OUTPUT_LEN, vocab] log-softmax of the logits each token was chosen from."""
    prompt_logprobs: torch.Tensor
    """[len(prompt) - 1, vocab]"""


def make_prompts(seed: int) -> list[list[int]]:
    """Random prompts of PROMPT_LENS; the longest share a beginning, so that the prefix cache has something to find."""
    rng = random.Random(seed)
    shared = rng.choices(range(6, VOCAB_SIZE), k=600)
    return [
        shared[: n // 2] + rng.choices(range(6, VOCAB_SIZE), k=n - n // 2)
        if n >= 100
        else rng.choices(range(6, VOCAB_SIZE), k=n)
        for n in PROMPT_LENS
    ]


def generate_without_ties(checkpoint: Path) -> list[Generation]:
    """The continuations of the first of a few sets of prompts in which no choice is a tie."""
    for seed in range(1, 6):
        try:
            return generate(checkpoint, make_prompts(seed))
        except TieError:
            continue
    raise AssertionError("every set of prompts has a tie")


@torch.inference_mode()
def generate(checkpoint: Path, prompts: list[list[int]]) -> list[Generation]:
    """Greedy continuations by transformers' own generate, in float32. Prompts of equal length go through together.

    Raises TieError.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    done: dict[int, Generation] = {}
    for length in sorted({len(p) for p in prompts}):
        indices = [i for i, p in enumerate(prompts) if len(p) == length]
        batch = torch.tensor([prompts[i] for i in indices])
        result = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=OUTPUT_LEN,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(result.logits, dim=1)  # [batch, OUTPUT_LEN, vocab]
        best = logits.topk(2).values
        if (best[..., 0] - best[..., 1]).min() <= MIN_GAP:
            raise TieError
        prompt_logits = model(batch).logits[:, :-1]
        for i, tokens, of_tokens, of_prompt in zip(
            indices, result.sequences[:, length:].tolist(), logits, prompt_logits, strict=True
        ):
            done[i] = Generation(prompts[i], tokens, of_tokens.log_softmax(-1), of_prompt.log_softmax(-1))
    return [done[i] for i in range(len(prompts))]
