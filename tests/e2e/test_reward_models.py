"""Reward models: a score of every token, or of every step of an answer, as transformers' hidden states give them.

transformers has no class for them (the checkpoints bring code of their own), so their head is applied by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from quire import LLM
from quire.errors import ValidationError
from quire.testing.tiny_models import make_tiny_checkpoint

from .test_pooling import assert_close, engine, hidden_states, oracle, pooled, prompts_of

LENS = (1, 3, 40, 200)
STEP = 5
"""The token after each step: one of the special tokens, as <extra_0> is."""


def make_reward_checkpoint(path: Path, kind: str, num_labels: int) -> Path:
    """A Qwen2 with the head of `kind`; its sixth special token is the one that ends a step."""
    make_tiny_checkpoint(path, "qwen2", tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    hidden = weights["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(3)
    for name, shape in (("0", (hidden, hidden)), ("2", (num_labels, hidden))):
        weights[f"score.{name}.weight"] = torch.randn(shape, generator=generator) / hidden**0.5
        weights[f"score.{name}.bias"] = torch.randn(shape[0], generator=generator)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [f"Qwen2{kind}"]
    (path / "config.json").write_text(json.dumps(config))
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|system|>", "<extra_0>"))
    return path


def scores(path: Path, prompts: list[list[int]]) -> list[Tensor]:
    """[num_tokens, num_labels] of each prompt."""
    weights = load_file(path / "model.safetensors")
    found = []
    for hidden in hidden_states(path, prompts):
        inner = linear(hidden, weights["score.0.weight"], weights["score.0.bias"]).relu()
        found.append(linear(inner, weights["score.2.weight"], weights["score.2.bias"]))
    return found


def in_steps(prompts: list[list[int]]) -> list[list[int]]:
    """Every seventh token, and the last, is the end of a step."""
    return [[STEP if i % 7 == 6 or i == len(p) - 1 else token for i, token in enumerate(p)] for p in prompts]


def test_a_reward_for_every_token(tmp_path: Path) -> None:
    path, prompts = make_reward_checkpoint(tmp_path / "rm", "ForRewardModel", 1), prompts_of(LENS)
    with engine(path, max_num_batched_tokens=64, max_num_seqs=3) as llm:
        assert llm.get_supported_tasks() == ("token_classify",)
        assert_close(pooled(llm, prompts, "token_classify"), scores(path, prompts))


def test_probabilities_of_every_step(tmp_path: Path) -> None:
    """Also where a step ends in an earlier chunk; a prompt without steps has no results, and a request may say what
    ends a step for it."""
    path = make_reward_checkpoint(tmp_path / "prm", "ForProcessRewardModel", 2)
    prompts = in_steps(prompts_of(LENS))
    expected = [s.softmax(-1) for s in scores(path, prompts)]
    ends = [[i for i, token in enumerate(p) if token == STEP] for p in prompts]
    with engine(path, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        assert_close(pooled(llm, prompts, "token_classify"), [e[at] for e, at in zip(expected, ends, strict=True)])
        (none,) = pooled(llm, [[7, 8, 9]], "token_classify")
        assert none.shape == (0, 2)
        (one,) = pooled(llm, prompts[-1:], "token_classify", step_tag_id=prompts[-1][0])
        at = [i for i, token in enumerate(prompts[-1]) if token == prompts[-1][0]]
        assert_close([one], [expected[-1][at]])
        with pytest.raises(ValidationError, match=r"returned_token_ids is chosen .* at the start"):
            pooled(llm, [[7]], "token_classify", returned_token_ids=[1, 2])


def test_a_generator_that_says_good_or_bad(tmp_path: Path) -> None:
    """Its rewards are the probabilities of two tokens of its vocabulary, of those that end a step."""
    path, good, bad = make_tiny_checkpoint(tmp_path / "llama", "llama"), 30, 200
    prompts = in_steps(prompts_of(LENS))
    expected = [
        output.logits[0][[token == STEP for token in prompt]][:, [good, bad]].softmax(-1)
        for output, prompt in zip(oracle(path, "AutoModelForCausalLM", prompts), prompts, strict=True)
    ]
    config: dict[str, Any] = {"pooling_type": "STEP", "step_tag_id": STEP, "returned_token_ids": [good, bad]}
    with engine(path, runner="pooling", pooler_config=config, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        assert llm.get_supported_tasks() == ("token_classify",)
        assert_close(pooled(llm, prompts, "token_classify"), expected)


def test_a_sequence_classifier_is_a_reward_model_of_whole_answers(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "skywork", "qwen3", head="classify", num_labels=1)
    prompts = prompts_of(LENS)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    with LLM(str(path), device="cpu", dtype="float32", pooler_config={"use_activation": False}) as llm:
        assert_close(pooled(llm, prompts, "classify"), expected)
