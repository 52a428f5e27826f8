"""Every family's logits equal transformers' on the same checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.testing.tiny_models import FAMILIES, VOCAB_SIZE

from .oracle import load, quire_logits, transformers_model

PROMPT_LENS = (1, 5, 33, 200, 600)
TOLERANCE = 1e-4


def random_tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(6, VOCAB_SIZE), k=length)


def assert_same_logits(path: Path, lengths: tuple[int, ...] = PROMPT_LENS, **fields: int) -> None:
    model, oracle = load(path, **fields), transformers_model(path)
    for length in lengths:
        token_ids = random_tokens(length)
        with torch.inference_mode():
            expected = oracle(torch.tensor([token_ids])).logits[0]
        torch.testing.assert_close(quire_logits(model, token_ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    assert_same_logits(tiny_checkpoint(family))
