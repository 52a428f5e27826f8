"""Adapters as PEFT makes and computes them: what requests with adapters are compared with."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from quire.testing.tiny_models import VOCAB_SIZE

OUTPUT_LEN = 6
PROMPT_LENS = (1, 17, 40)
MIN_GAP = 2e-4
SPREAD = 0.2
"""Standard deviation of the factors' elements, over the square root of their inputs."""


@dataclass(frozen=True)
class Adapter:
    """An adapter to be made: arguments of peft's LoraConfig."""

    targets: str | Sequence[str]
    rank: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A prompt, its greedy continuation, and the logits behind it, [OUTPUT_LEN, vocab]."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


class TieError(Exception):
    """Two tokens lead by so little that rounding decides."""


@cache
def base_model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def save_adapter(checkpoint: Path, adapter: Adapter, directory: Path, seed: int) -> Path:
    """Writes an adapter with random factors, by peft."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    targets = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    config = LoraConfig(r=adapter.rank, target_modules=targets, task_type="CAUSAL_LM", **adapter.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of copies of tables, and of deprecated names in transformers
        peft = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if ".lora_" in name:
                    is_output = "lora_B" in name or "embedding" in name
                    scale = SPREAD * (1.0 if is_output else parameter.shape[-1] ** -0.5)
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        peft.save_pretrained(directory)
    return directory


@torch.inference_mode()
def answer(model: Any, prompts: Sequence[list[int]]) -> list[Answer]:
    """Greedy continuations, one prompt at a time. Raises TieError."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_LEN,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(result.logits)
        best = logits.topk(2).values
        if (best[:, 0] - best[:, 1]).min() <= MIN_GAP:
            raise TieError
        found.append(Answer(prompt, result.sequences[0, len(prompt) :].tolist(), logits))
    return found


def random_prompts(seed: int) -> list[list[int]]:
    """Returns a prompt of each length."""
    rng = random.Random(seed)
    return [rng.choices(range(6, VOCAB_SIZE), k=n) for n in PROMPT_LENS]


def answers(
    checkpoint: Path,
    directories: Sequence[Path | None],
    *,
    merges: bool = False,
    make_prompts: Callable[[int], list[list[int]]] = random_prompts,
) -> list[list[Answer]]:
    """Returns peft's answers with each of the adapters (None: of the base model) to the same prompts, in which no
    choice is a tie. `merges`: with weights merged into the base. `make_prompts` gets a seed."""
    models = []
    for directory in directories:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        if directory is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = PeftModel.from_pretrained(model, directory)
                model = model.merge_and_unload() if merges else model
        models.append(model.eval())
    columns = [_answers_without_ties(models, i, make_prompts) for i in range(len(make_prompts(0)))]
    return [list(row) for row in zip(*columns, strict=True)]


def _answers_without_ties(
    models: Sequence[Any], index: int, make_prompts: Callable[[int], list[list[int]]]
) -> list[Answer]:
    """Returns each model's answer to one of the prompts."""
    for seed in range(40):
        try:
            return [answer(model, [make_prompts(seed)[index]])[0] for model in models]
        except TieError:
            continue
    raise AssertionError(f"prompt {index} has a tie with every seed")
