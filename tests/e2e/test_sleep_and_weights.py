"""`LLM` asleep, awake again, and with other weights: the real engine on tiny models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ClientError, ModelLoadError
from quire.frontend.client.inproc import InprocClient
from quire.testing.tiny_models import make_tiny_checkpoint

PROMPTS = ["The engine keeps the keys", "Nothing is lost when", "A quire"]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=1.2, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture."""
    root = tmp_path_factory.mktemp("weights")
    return [make_tiny_checkpoint(root / str(seed), "llama", seed=seed) for seed in (0, 1)]


def make(path: Path, **flags: Any) -> LLM:
    return LLM(str(path), kv_cache_memory_bytes=8 << 20, **flags)


@pytest.fixture
def llm(checkpoints: list[Path]) -> Iterator[LLM]:
    with make(checkpoints[0]) as made:
        yield made


@pytest.fixture
def inproc_llm(checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Its steps run when the test says so, and its worker can be reached."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    with make(checkpoints[0]) as made:
        assert isinstance(made.llm_engine.engine_core, InprocClient)
        yield made


@pytest.fixture(scope="module")
def answers(checkpoints: list[Path]) -> list[list[list[int]]]:
    """Returns what engines that never sleep say, by checkpoint."""
    found = []
    for path in checkpoints:
        with make(path) as llm:
            found.append(tokens(llm))
    return found


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS * 2, [GREEDY] * 3 + [SEEDED] * 3, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_answers_are_the_same_after_a_sleep(llm: LLM, answers: list[list[list[int]]], level: int) -> None:
    assert tokens(llm) == answers[0]
    llm.sleep(level)
    assert llm.is_sleeping()
    with pytest.raises(ClientError, match=r"asleep.*call wake_up\(\) first"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.wake_up() is True
    (output,) = llm.generate("The engine keeps the keys and the values of every token", GREEDY, use_tqdm=False)
    assert (output.num_cached_tokens or 0) == 0 or level == 0
    assert tokens(llm) == answers[0]


def test_requests_of_before_a_sleep(inproc_llm: LLM, answers: list[list[list[int]]]) -> None:
    llm = inproc_llm
    llm.enqueue(PROMPTS, GREEDY)
    llm.llm_engine.step()
    llm.sleep(2, mode="keep")
    with pytest.raises(ClientError, match="frozen"):
        llm.wait_for_completion(use_tqdm=False)
    assert llm.wake_up(["weights"]) is False
    assert llm.wake_up(["kv_cache"]) is True
    done = llm.wait_for_completion(use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in done] == answers[0][:3]
    llm.enqueue(PROMPTS, GREEDY)
    llm.llm_engine.step()
    llm.sleep(1)
    ended = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in ended] == ["abort"] * 3
    assert [list(output.outputs[0].token_ids) for output in ended] == [answer[:1] for answer in answers[0][:3]]
    llm.wake_up()


def test_new_weights_answer_and_survive_a_sleep(
    llm: LLM, checkpoints: list[Path], answers: list[list[list[int]]]
) -> None:
    assert tokens(llm) == answers[0]
    assert llm.update_weights(checkpoints[1], "step 1") == "step 1" == llm.get_weight_version()
    assert tokens(llm) == answers[1] != answers[0]
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == answers[1], "a sleep brings the last weights back"
    assert llm.update_weights(str(checkpoints[0])) == "step 1+1"
    assert tokens(llm) == answers[0]


def test_a_drafter_sleeps_too_and_is_worse_after_an_update(
    checkpoints: list[Path], answers: list[list[list[int]]]
) -> None:
    """The drafter is the model itself, until the model gets other weights."""

    def num_accepted() -> int:
        (counter,) = (m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
        return int(getattr(counter, "value", 0))

    def gain(expected: list[list[int]]) -> int:
        before = num_accepted()
        assert tokens(llm) == expected
        return num_accepted() - before

    drafts = {"model": str(checkpoints[0]), "num_speculative_tokens": 3, "adaptive": False}
    with make(checkpoints[0], speculative_config=drafts, disable_log_stats=False) as llm:
        most = gain(answers[0])
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert gain(answers[0]) > 0.8 * most > 20
        llm.update_weights(checkpoints[1])
        assert gain(answers[1]) < 0.5 * most


def test_kept_requests_go_on_with_the_new_weights(inproc_llm: LLM, checkpoints: list[Path]) -> None:
    engine = inproc_llm.llm_engine
    engine.add_request("a", PROMPTS[0], GREEDY)
    seen = []
    for _ in range(5):
        (output,) = engine.step()
        seen = list(output.outputs[0].token_ids)
    engine.pause_generation("keep")
    engine.update_weights(checkpoints[1])
    assert engine.is_paused()
    engine.resume_generation()
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    result = list(output.outputs[0].token_ids)
    assert result[:5] == seen
    with make(checkpoints[1]) as other:
        prompt = engine.get_tokenizer().encode(PROMPTS[0]) + seen
        rest = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
        (continued,) = other.generate({"prompt_token_ids": prompt}, rest, use_tqdm=False)
    assert result[5:] == list(continued.outputs[0].token_ids), "as if the new model had been given the text so far"


def test_weights_that_do_not_fit(llm: LLM, checkpoints: list[Path], answers: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoints[1], tmp_path / "odd"))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][1:].clone()}, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"mlp\.up_proj\.weight has shape"):
        llm.update_weights(path)
    assert llm.get_weight_version() == "0"
    assert tokens(llm) == answers[0]


def test_calls_into_the_workers(inproc_llm: LLM) -> None:
    llm = inproc_llm
    (count,) = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))
    assert cast("int", count) > 1000
    assert llm.collective_rpc("get_supported_tasks") == [("generate",)]
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.collective_rpc("reload_weights")  # what scripts for other engines do here
    assert llm.wake_up(["kv_cache"]) is True
    llm.release_kv_cache_memory()
    assert llm.wake_up() is True


@pytest.mark.gpu
def test_a_sleep_frees_the_memory_of_a_gpu(checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 1 moves the weights to main memory and back, level 2 reads them again; the device's memory is free."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    with make(checkpoints[0], device="cuda", dtype="float32") as llm:
        before = tokens(llm)
        for level in (1, 2, 1):
            (awake,) = llm.collective_rpc(allocated_bytes)
            llm.sleep(level)
            (asleep,) = llm.collective_rpc(allocated_bytes)
            (weights,) = llm.apply_model(lambda model: sum(p.numel() * p.element_size() for p in model.parameters()))
            assert awake - asleep > (8 << 20) + 0.9 * weights
            llm.wake_up()
            assert tokens(llm) == before
        llm.sleep(1)
        llm.update_weights(checkpoints[1])
        llm.wake_up(["kv_cache"])
        assert tokens(llm) != before


def allocated_bytes(worker: Any) -> int:
    """Returns the memory that is allocated on the worker's accelerator."""
    return torch.cuda.memory_allocated(worker.device)
