"""Models of transformers behind the whole engine: the tokens of transformers, streams, cache, preemption, aborts."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.cli.info import make_report
from quire.config import model_impl
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError

from .conftest import Checkpoint, Oracle
from .oracle import OUTPUT_LEN

GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
FAMILY = "gemma2"
"""Windows, caps, tied and scaled embeddings."""
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 640,
    "disable_log_stats": False,
    "model_impl": "transformers",
}


@contextmanager
def engine(path: Path, **flags: Any) -> Iterator[LLM]:
    with LLM(str(path), **{**FLAGS, **flags}) as llm:
        yield llm


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_transformers_also_from_the_cache(checkpoint: Checkpoint, oracle: Oracle) -> None:
    expected = oracle(FAMILY)
    prompts: Any = [{"prompt_token_ids": g.prompt} for g in expected]
    with engine(checkpoint(FAMILY), max_num_batched_tokens=96, max_num_seqs=32) as llm:
        first = llm.generate(prompts, GREEDY, use_tqdm=False)
        second = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.sleep(level=2)
        llm.wake_up()
        third = llm.generate(prompts[:4], GREEDY, use_tqdm=False)
    assert tokens(first) == tokens(second) == [g.tokens for g in expected]
    assert tokens(third) == [g.tokens for g in expected[:4]]
    assert sum(o.num_cached_tokens or 0 for o in second) > 1000


def test_preempted_requests_get_the_same_tokens(checkpoint: Checkpoint, oracle: Oracle) -> None:
    expected = oracle(FAMILY)
    prompts: Any = [{"prompt_token_ids": g.prompt} for g in expected]
    with engine(checkpoint(FAMILY), num_gpu_blocks_override=110, scheduler_reserve_full_isl=False) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics is not None) > 0
    assert tokens(outputs) == [g.tokens for g in expected]


def test_streams_and_aborts(checkpoint: Checkpoint, oracle: Oracle) -> None:
    expected = oracle(FAMILY)[:4]

    async def stream(llm: AsyncLLM, i: int, stop_after: int | None) -> list[int]:
        found: list[int] = []
        prompt: Any = {"prompt_token_ids": expected[i].prompt}
        async for output in llm.generate(prompt, GREEDY, f"{i}"):
            found = list(output.outputs[0].token_ids)
            if stop_after is not None and len(found) >= stop_after:
                await llm.abort(f"{i}")
                break
        return found

    async def main() -> list[list[int]]:
        llm = AsyncLLM.from_engine_args(EngineArgs(str(checkpoint(FAMILY)), **FLAGS))
        try:
            return await asyncio.gather(*(stream(llm, i, 3 if i == 1 else None) for i in range(4)))
        finally:
            llm.shutdown()

    streams = asyncio.run(main())
    for i, generation in enumerate(expected):
        assert streams[i] == generation.tokens[: len(streams[i])]
        assert (len(streams[i]) < OUTPUT_LEN) == (i == 1)


def test_weights_are_quantized_at_load(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("qwen3_moe"), quantization="int8", dtype="bfloat16") as llm:
        (output,) = llm.generate([{"prompt_token_ids": [7, 8, 9]}], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == OUTPUT_LEN


def test_random_weights_are_the_same_for_a_seed(checkpoint: Checkpoint) -> None:
    answers = []
    for seed in (1, 1, 2):
        with engine(checkpoint("llama"), load_format="dummy", seed=seed) as llm:
            answers.append(tokens(llm.generate([{"prompt_token_ids": [7, 8, 9]}], GREEDY, use_tqdm=False)))
    assert answers[0] == answers[1] != answers[2]


def test_an_embedding_is_that_of_quires_own_class(checkpoint: Checkpoint) -> None:
    found = []
    for impl in ("quire", "transformers"):
        with engine(checkpoint("qwen3"), model_impl=impl, runner="pooling") as llm:
            (output,) = llm.embed([{"prompt_token_ids": list(range(10, 60))}], use_tqdm=False)
            found.append(output.outputs.embedding)
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def edited(source: Path, target: Path, **keys: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps({**config, **keys}), encoding="utf-8")
    return target


def test_what_cannot_run_is_refused_in_words(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")
    mamba = edited(source, tmp_path / "mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM has layers that keep recurrent states"):
        LLM(str(mamba), **{**FLAGS, "model_impl": "auto"})
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="scales its rotary embedding by 'dynamic'"):
        LLM(str(edited(source, tmp_path / "dynamic", rope_parameters=dynamic)), **FLAGS)
    with pytest.raises(ModelLoadError, match=r"has no tensor model.layers.3.*\(and 8 more\)"):
        LLM(str(edited(source, tmp_path / "deeper", num_hidden_layers=4)), **FLAGS)
    report = make_report(EngineArgs(str(mamba)).create_engine_config())
    assert "recurrent states" in report["problems"][0]
    assert report["model"]["supported"] is False


def test_code_of_a_checkpoint_is_never_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`auto_map` names code beside the weights: it has no effect, and a class that only it names is refused."""
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    mapped = {"AutoModelForCausalLM": "modeling.LlamaForCausalLM", "AutoConfig": "modeling.LlamaConfig"}
    path = edited(checkpoint("llama"), tmp_path / "mapped", auto_map=mapped)
    (path / "modeling.py").write_text(trap, encoding="utf-8")
    with engine(path) as llm:
        llm.generate([{"prompt_token_ids": [7, 8, 9]}], GREEDY, use_tqdm=False)
    other = edited(path, tmp_path / "other", architectures=["OwnForCausalLM"])
    with pytest.raises(ConfigError, match="known neither to Quire nor to transformers"):
        LLM(str(other), **FLAGS)
    assert not (tmp_path / "ran").exists()


def test_a_class_without_a_row_is_tried_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    version, rows = model_impl.certified_models()
    others = {name: row for name, row in rows.items() if name != "LlamaForCausalLM"}
    monkeypatch.setattr(model_impl, "certified_models", lambda: (version, others))
    for _ in range(2):
        with engine(checkpoint("llama")) as llm:
            llm.generate([{"prompt_token_ids": [7, 8, 9]}], GREEDY, use_tqdm=False)
        (verdict,) = (cache_root / "trials").glob("fallback-LlamaForCausalLM-*.json")
        assert json.loads(verdict.read_text(encoding="utf-8"))["agrees"] is True
    verdict.write_text(json.dumps({"agrees": False, "why": "a stone fell on it"}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="its trial failed: a stone fell on it"):
        LLM(str(checkpoint("llama")), **FLAGS)
    verdict.unlink()
