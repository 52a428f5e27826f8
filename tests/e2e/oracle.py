"""Outputs of transformers: the truth the engine is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


Guess = Callable[[list[list[int]]], list[list[int]]]


def generate_without_ties(checkpoint: Path, guess: Guess) -> list[Generation]:
    """The continuations of the first of a few sets of prompts in which no choice is a tie."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for seed in range(1, 6):
        prompts = make_prompts(seed)
        try:
            return generate(model, prompts, guess(prompts))
        except TieError:
            continue
    raise AssertionError("every set of prompts has a tie")


def in_batches(indices: list[int], prompts: list[list[int]]) -> Iterator[list[int]]:
    """Yields those whose prompts have about the same length together."""
    batch: list[int] = []
    for i in sorted(indices, key=lambda i: len(prompts[i])):
        if batch and len(prompts[i]) > 2 * len(prompts[batch[0]]) + OUTPUT_LEN:
            yield batch
            batch = []
        batch.append(i)
    yield batch


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], guesses: list[list[int]]) -> list[Generation]:
    """Returns transformers' greedy continuations, in float32, whatever the guesses are: they only save time.

    A forward pass over a prompt and its guess gives transformers' choice at each position. The guess is kept up to
    where it differs from the choices, whose first other token follows; then the next pass goes on from there. Sequences
    of a batch are filled up at their ends, which no position before sees. Raises TieError.
    """
    tokens = [list(guess[:OUTPUT_LEN]) for guess in guesses]
    done: dict[int, Generation] = {}
    while len(done) < len(prompts):
        for batch in in_batches([i for i in range(len(prompts)) if i not in done], prompts):
            sequences = [prompts[i] + tokens[i] for i in batch]
            longest = max(map(len, sequences))
            logits = model(torch.tensor([ids + [6] * (longest - len(ids)) for ids in sequences])).logits
            for i, of_sequence in zip(batch, logits, strict=True):
                start = len(prompts[i])
                of_tokens = of_sequence[start - 1 :][: min(len(tokens[i]) + 1, OUTPUT_LEN)]
                choices = of_tokens.argmax(-1).tolist()
                pairs = enumerate(zip(choices, tokens[i], strict=False))
                num_same = next((j for j, (choice, token) in pairs if choice != token), len(tokens[i]))
                tokens[i] = choices[: num_same + 1]
                if len(tokens[i]) == OUTPUT_LEN:
                    best = of_tokens.topk(2).values
                    if (best[:, 0] - best[:, 1]).min() <= MIN_GAP:
                        raise TieError
                    of_prompt = of_sequence[: start - 1].log_softmax(-1)
                    done[i] = Generation(prompts[i], tokens[i], of_tokens.log_softmax(-1), of_prompt)
    return [done[i] for i in range(len(prompts))]
