"""The tiny checkpoints are complete, reproducible, and lively enough that a wrong engine would show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from quire.testing.tiny_models import EOS, FAMILIES, VOCAB_SIZE, make_tiny_checkpoint
from tests.checkpoints import MakeCheckpoint


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: MakeCheckpoint) -> Path:
    return tiny_checkpoint(request.param)


def test_a_tiny_checkpoint_has_every_file(checkpoint: Path) -> None:
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= {p.name for p in checkpoint.iterdir()}
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == EOS


LIVELY = ("llama", "gemma2", "deepseek_v3", "bloom")
"""Families in the default suite; tests/e2e/oracle.py notices ties of others."""


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(family, marks=() if family in LIVELY else pytest.mark.slow) for family in FAMILIES],
    indirect=True,
)
def test_greedy_output_varies(checkpoint: Path) -> None:
    """Neither one token over and over, nor ties that rounding could break."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    distinct = 0
    for length in (3, 20, 60):
        prompt = torch.randint(6, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(length))
        result = model.generate(prompt, max_new_tokens=24, output_scores=True, return_dict_in_generate=True)
        distinct += len(set(result.sequences[0, length:].tolist()))
        for scores in result.scores:
            best, second = scores[0].topk(2).values
            assert best - second > 2e-5 * scores.std()
    assert distinct >= 15


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    one, two, other = (make_tiny_checkpoint(tmp_path / str(i), "llama", seed=i // 2) for i in range(3))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_overrides_and_dtype(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", dtype="float16", num_hidden_layers=1)
    config = json.loads((path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (1, "float16")


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = make_tiny_checkpoint(tmp_path, "llama")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "Naïve 🎻 choir\n"
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    theirs = AutoTokenizer.from_pretrained(path)
    assert (
        theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "<|begin|><|user|>Hi<|end|><|assistant|>"
    )
