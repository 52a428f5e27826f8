"""On a CUDA device, greedy output equals transformers' on that device, for every family. Run by scripts/gpu_check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.testing.tiny_models import FAMILIES, make_tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (1, 7, 40, 150, 300)
NUM_TOKENS = 16


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def oracle(path: Path, prompt: list[int]) -> list[int]:
    """transformers' greedy continuation on the same device, in float32 without TF32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    ids = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
        )
    return [int(t) for t in out[0, len(prompt) :]]


@pytest.fixture(autouse=True)
def _exact_matmul() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_on_cuda(family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / family, family)
    llm = LLM(str(path), device="cuda", dtype="float32", max_num_batched_tokens=128, max_num_seqs=8)
    asked = [{"prompt_token_ids": p} for p in prompts(llm.llm_engine.model_config.hf_config.vocab_size)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    got = [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]
    assert got == [oracle(path, p["prompt_token_ids"]) for p in asked]
