"""Adapters of classifying models bring a classifier of their own: scores are peft's, and those of others stay."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from quire import LLM, LoRARequest
from quire.errors import AdapterError
from quire.testing.tiny_models import make_tiny_checkpoint

from .test_pooling import DECODER_LENS, TOLERANCE, prompts_of

FAMILIES = {"qwen3": ["q_proj", "down_proj"], "bert": ["query", "value"]}


def save(path: Path, directory: Path, targets: list[str], num_labels: int, prompts: list[list[int]]) -> torch.Tensor:
    """Writes an adapter with a classifier, by peft. Returns its scores, [prompts, labels]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=num_labels, ignore_mismatched_sizes=True, dtype=torch.float32
        )
        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="SEQ_CLS"))
        generator = torch.Generator().manual_seed(num_labels)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        peft.save_pretrained(str(directory))
    peft.eval()
    with torch.inference_mode():
        return torch.cat([peft(input_ids=torch.tensor([prompt])).logits for prompt in prompts])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_adapter_s_classifier(family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", family, head="classify", num_labels=3)
    prompts, targets = prompts_of(DECODER_LENS)[:4], FAMILIES[family]
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in prompts])]
    expected += [save(path, tmp_path / str(n), targets, n, prompts) for n in (3, 5)]
    assert (expected[0] - expected[1]).abs().min() > 10 * TOLERANCE
    adapters = [None, LoRARequest("three", 1, str(tmp_path / "3")), LoRARequest("five", 2, str(tmp_path / "5"))]
    flags: Any = {"device": "cpu", "dtype": "float32", "enable_lora": True, "pooler_config": {"use_activation": False}}
    with LLM(str(path), max_lora_cls_labels=8, max_num_seqs=5, **flags) as llm:
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts for _ in adapters]
        outputs = llm.classify(given, use_tqdm=False, lora_request=adapters * len(prompts))
        for i, scores in enumerate(expected):
            found = [torch.tensor(output.outputs.probs) for output in outputs[i :: len(adapters)]]
            torch.testing.assert_close(torch.stack(found), scores, rtol=0, atol=TOLERANCE)
    with (
        LLM(str(path), **flags) as llm,
        pytest.raises(AdapterError, match="has 5 labels, the model's 3; --max-lora-cls-labels"),
    ):
        llm.classify(given[:1], use_tqdm=False, lora_request=adapters[2])
