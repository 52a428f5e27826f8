"""On the native kernels, through the whole engine: the logits behind every token have the same bits in any company,
from a warm or a cold prefix cache, in chunks, and after preemption. Random schedules: tests/unit/worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.wire.execution import ModelRunnerOutput
from quire.worker.kernels.library import native_library
from quire.worker.step_sampler import PendingStep, StepSampler

from .conftest import Checkpoint
from .oracle import make_prompts
from .test_oracle import FEW_BLOCKS, engine, num_preemptions

PROMPTS = make_prompts(seed=3)[1::2]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Logits = dict[str, list[torch.Tensor]]

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The logits each request's tokens were sampled from, by request id, as they come."""
    logits_of: Logits = {}
    original = StepSampler.sample

    def record(self: StepSampler, step: PendingStep, *others: Any) -> ModelRunnerOutput:
        if step.logits is not None:
            for i, row in zip(step.inputs.sampling.tolist(), step.logits, strict=True):
                logits_of.setdefault(step.req_ids[i], []).append(row.clone())
        return original(self, step, *others)

    monkeypatch.setattr(StepSampler, "sample", record)
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    monkeypatch.setenv("QUIRE_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    return logits_of


def run(llm: LLM, seen: Logits, prompts: list[list[int]]) -> tuple[list[torch.Tensor], list[Any]]:
    """[max_tokens, vocab] for each prompt, and the outputs."""
    seen.clear()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [torch.stack(seen[output.request_id]) for output in outputs], outputs


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if family == "llama" or i % 2 == j else pytest.mark.slow)
        for i, family in enumerate(["llama", "gemma2", "qwen3_moe", "deepseek_v3", "llama4_text"])
        for j, dtype in enumerate(["bfloat16", "float32"])
    ],
)
def test_company_cache_chunks_and_preemption_change_no_bit(
    family: str, dtype: str, checkpoint: Checkpoint, seen: Logits
) -> None:
    path = checkpoint(family)
    with engine(path, dtype=dtype, max_num_seqs=1, enable_prefix_caching=False) as llm:
        alone, _ = run(llm, seen, PROMPTS)
    with engine(path, dtype=dtype, max_num_seqs=16) as llm:
        batched, _ = run(llm, seen, PROMPTS)
        cached, outputs = run(llm, seen, PROMPTS)
    assert sum(o.num_cached_tokens or 0 for o in outputs) > 500
    with engine(path, dtype=dtype, max_num_seqs=16, max_num_batched_tokens=64, **FEW_BLOCKS) as llm:
        preempted, outputs = run(llm, seen, PROMPTS[::-1])
    assert num_preemptions(outputs) > 0
    for other in (batched, cached, preempted[::-1]):
        assert [torch.equal(a, b) for a, b in zip(alone, other, strict=True)] == [True] * len(PROMPTS)
