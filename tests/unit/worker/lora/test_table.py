"""Slots, installation between steps, and which rows a step's adapters see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.execution import NewRequestData
from quire.wire.lora import AdapterLoad
from quire.worker.lora.table import AdapterTable, _set, _split
from tests.adapters import PREFIX, factors, tensors, write_adapter
from tests.checkpoints import MakeCheckpoint
from tests.lora_worker import GREEDY, LoRAWorker, Work

PROMPTS = [[7, 8, 9], list(range(20, 60)), [300, 5, 17, 200, 41]]


@pytest.fixture
def engine(tiny_checkpoint: MakeCheckpoint) -> Iterator[LoRAWorker]:
    made = LoRAWorker(tiny_checkpoint("llama"))
    yield made
    made.worker.shutdown()


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    return {name: write_adapter(tmp_path / name, tensors(seed=i)) for i, name in enumerate("abc")}


def table_of(engine: LoRAWorker) -> AdapterTable:
    assert engine.worker._adapters is not None
    return engine.worker._adapters


def tokens(engine: LoRAWorker, adapter: LoRARequest | None, **options: Any) -> list[list[int]]:
    return [r.tokens for r in engine.run([Work(p, adapter) for p in PROMPTS], 5, seed=1, **options)]


class Recorder:
    """Stands for an AdapterBatch."""

    def __init__(self) -> None:
        self.given: Any = None

    def set(self, starts: list[int], slots: list[int]) -> None:
        self.given = starts, slots

    def clear(self) -> None:
        self.given = None


@pytest.mark.parametrize(
    ("slots", "lens", "given"),
    [
        ([0], [5], ([0, 5], [0])),
        ([-1, -1, 2, 2, 7], [1, 2, 3, 4, 5], ([0, 3, 10, 15], [-1, 2, 7])),
        ([0, 1], [1, 1], ([0, 1, 2], [0, 1])),
        ([], [], None),
    ],
)
def test_neighbours_with_one_adapter_are_one_segment(slots: list[int], lens: list[int], given: Any) -> None:
    batch = Recorder()
    _set(batch, np.array(slots, dtype=np.int64), np.array(lens, dtype=np.int64))
    assert batch.given == given


def test_rows_before_an_invocation_are_apart() -> None:
    slots, lens = np.array([-1, 2, 2, 7]), np.array([3, 4, 5, 6])
    assert _split(slots, lens, None) == (slots, lens)
    split = _split(slots, lens, np.array([0, 4, 2, 0]))
    assert [each.tolist() for each in split] == [[-1, -1, -1, 2, 7], [3, 4, 2, 3, 6]]


def test_slots_are_used_again_and_dropped_adapters_change_nothing(
    engine: LoRAWorker, adapters: dict[str, Path]
) -> None:
    base = tokens(engine, None)
    requests = engine.load(adapters)
    with_adapter = {name: tokens(engine, request) for name, request in requests.items()}
    assert len({str(found) for found in [base, *with_adapter.values()]}) == 4
    table = table_of(engine)
    assert {name: table.slot_of(new(request)) for name, request in requests.items()} == {"a": 0, "b": 1, "c": 2}
    engine.worker.drop_adapter((2, 0))
    assert tokens(engine, requests["a"]) == with_adapter["a"]
    load = AdapterLoad(LoRARequest("b", 2, str(adapters["c"])), 1)  # the next revision of b
    engine.worker.load_adapter(load).result(timeout=120)
    table.begin_step()
    assert table.slot_of(new(load.lora_request, revision=1)) == 1
    assert tokens(engine, None) == base
    assert tokens(engine, requests["c"]) == with_adapter["c"]


def test_slots_are_given_in_the_order_of_requests(engine: LoRAWorker, adapters: dict[str, Path]) -> None:
    """Not in that in which a worker has read its part of the adapters: all workers of an engine must agree."""
    requests = engine.load(adapters)
    table = table_of(engine)
    table.begin_step()
    assert [table.slot_of(new(requests[name])) for name in "cabc"] == [0, 1, 2, 0]


def new(request: LoRARequest, revision: int = 0) -> NewRequestData:
    return NewRequestData("r", [1], ([],), 0, GREEDY, lora_request=request, lora_revision=revision)


def test_a_step_may_not_name_what_is_not_loaded(engine: LoRAWorker, adapters: dict[str, Path]) -> None:
    request = engine.load({"a": adapters["a"]})["a"]
    table = table_of(engine)
    with pytest.raises(AssertionError, match="which is not loaded"):
        table.slot_of(new(request, revision=1))


def test_loading_again_under_the_same_key_replaces(engine: LoRAWorker, adapters: dict[str, Path]) -> None:
    request = engine.load({"a": adapters["a"]})["a"]
    before = tokens(engine, request)
    engine.worker.drop_adapter((1, 0))
    engine.worker.load_adapter(AdapterLoad(request, 0)).result(timeout=120)
    assert tokens(engine, request) == before
    engine.worker.load_adapter(AdapterLoad(LoRARequest("a", 1, str(adapters["b"])), 0)).result(timeout=120)
    assert tokens(engine, request) != before
    assert len(table_of(engine)._installed) == 1


def test_what_is_dropped_before_a_step_is_freed_at_once(engine: LoRAWorker, adapters: dict[str, Path]) -> None:
    """An engine without requests may load and evict without end."""
    requests = engine.load(adapters)
    table = table_of(engine)
    assert len(table._arrived) == 3
    for i in (1, 2):
        engine.worker.drop_adapter((i, 0))
    assert list(table._arrived) == [(3, 0)]
    table.begin_step()
    assert table.slot_of(new(requests["c"])) == 0
    assert list(table._installed) == [(3, 0)]
    engine.worker.load_adapter(AdapterLoad(requests["c"], 0)).result(timeout=120)
    engine.worker.drop_adapter((3, 0))  # both the one that is installed and the one that has arrived
    table.begin_step()
    assert not table._installed


def test_prompts_are_scored_with_the_adapter(engine: LoRAWorker, adapters: dict[str, Path]) -> None:
    """Log-probabilities of a prompt in chunks and in company equal those of the prompt alone."""
    requests = engine.load(adapters)
    found: dict[tuple[str, int], list[Any]] = {}
    scorer = engine.worker.runner.sampler.prompts
    original = scorer.collect

    for seed, names in ((1, "abc"), (2, "cba"), (3, "a"), (4, "b"), (5, "c")):
        works = [Work(p, requests[name]) for name in names for p in PROMPTS]
        results: dict[str, Any] = {}

        def keep(req_id: str, *args: Any, results: dict[str, Any] = results) -> Any:
            done = original(req_id, *args)
            if done is not None:
                results[req_id] = done.logprobs
            return done

        scorer.collect = keep  # type: ignore[method-assign]
        engine.run(works, 2, seed=seed, params=SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=1))
        for i, name in enumerate(n for n in names for _ in PROMPTS):
            found.setdefault((name, i % len(PROMPTS)), []).append(results[str(i)])
    for scores in found.values():
        assert len(scores) == 3
        for other in scores[1:]:
            np.testing.assert_allclose(scores[0], other, atol=1e-4)
    assert not np.allclose(found["a", 1][0][:, 0], found["b", 1][0][:, 0], atol=1e-2)


def test_sleep_and_new_weights(engine: LoRAWorker, adapters: dict[str, Path]) -> None:
    """Level 1 and new weights keep adapters, also where kernels are made anew; level 2 drops them."""
    request = engine.load({"a": adapters["a"]})["a"]
    base, before = tokens(engine, None), tokens(engine, request)
    assert before != base
    engine.worker.sleep(level=1)
    engine.worker.wake_up(["weights", "kv_cache"])
    assert tokens(engine, request) == before
    engine.worker.load_weights()
    assert tokens(engine, request) == before
    engine.worker.sleep(level=2)
    assert not table_of(engine)._installed
    engine.worker.wake_up(["weights", "kv_cache"])
    assert tokens(engine, None) == base
    engine.load({"a": adapters["a"]})
    assert tokens(engine, request) == before


def test_after_a_step_layers_are_the_base_s_again(engine: LoRAWorker, tmp_path: Path) -> None:
    """Drafters share the table and the head with the model."""
    content = {**tensors(), **factors("lm_head", (48, 384), 4, seed=1)}
    for end, shape in (("A", (4, 384)), ("B", (48, 4))):
        content[f"{PREFIX}model.embed_tokens.lora_embedding_{end}"] = np.ones(shape, np.float32)
    model = engine.worker.runner.model
    ids, hidden = torch.arange(6), torch.randn(6, 48)

    def look() -> list[torch.Tensor]:
        return [model.model.embed_tokens(ids), model.compute_logits(hidden)]  # type: ignore[attr-defined]

    before = look()
    request = engine.load({"a": write_adapter(tmp_path, content)})["a"]
    assert tokens(engine, request) != tokens(engine, None)
    tokens(engine, request)
    engine.worker.execute_dummy_batch()
    for x, y in zip(before, look(), strict=True):
        assert torch.equal(x, y)


def test_without_the_flag_nothing_is_made(tiny_checkpoint: MakeCheckpoint) -> None:
    engine = LoRAWorker(tiny_checkpoint("llama"), enable_lora=False)
    assert engine.worker._adapters is None
    assert engine.worker.runner.adapters is None
    engine.worker.shutdown()


def test_other_types_are_refused(tiny_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"--lora-dtype bfloat16 on a model of float32"):
        LoRAWorker(tiny_checkpoint("llama"), lora_dtype="bfloat16")
    engine = LoRAWorker(tiny_checkpoint("llama"), dtype="bfloat16", lora_dtype="bfloat16")
    assert engine.worker.dtype is torch.bfloat16
    engine.worker.shutdown()
