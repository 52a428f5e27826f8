"""Requests with adapters get what peft computes with them: greedy tokens in float32 are equal, logits within rounding.

Adapters are saved by peft itself. Requests of all of a family's adapters, and of none, run together, in random chunks,
and some are preempted. The default suite takes a few families, each with other adapters; `-m slow` all with all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.testing.tiny_models import FAMILIES
from tests.lora_worker import LoRAWorker, Work

from .conftest import Checkpoint
from .lora_oracle import OUTPUT_LEN, Adapter, Answer, answers, base_model, save_adapter

TOLERANCE = 1e-4
TOLERANCES = {"granitemoe": 3e-4}
"""Its multipliers enlarge rounding: logits differ by up to 2.1e-4, and those in float64 from both."""
NOT_SERVED = ["kv_b_proj", "shared_expert_gate", "router", "gate", "embedding_hidden_mapping_in"]
"""Modules whose adapters are refused: routers, and the absorbed matrix of latent attention. (For peft, "all-linear"
means experts, too, which are refused as well: the tests name all matrices.)"""
RANKS = (1, 8, 12, 64)
OPTIONS: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 5},
    "rslora": {"lora_alpha": 3, "use_rslora": True},
    "bias": {"lora_alpha": 6, "lora_bias": True},
    # keys must not overlap: peft sorts them when it saves
    "patterns": {"rank_pattern": {"FIRST": 3, r".*\.1\..*LAST": 5}, "alpha_pattern": {r"^.*\.\d\..*": 7, "lm_head": 2}},
}
KINDS = ("attention", "all-linear", "tables")


@dataclass(frozen=True)
class Choice:
    """One adapter of a test."""

    kind: str
    rank: int
    options: str


EVERY = [
    Choice(kind, rank, options)
    for kind in KINDS
    for rank in RANKS
    for options in OPTIONS
    if (kind, options) != ("tables", "bias")  # peft has none of tables
]
FEW: dict[str, list[Choice]] = {
    "llama": [Choice("attention", 8, "alpha"), Choice("all-linear", 12, "patterns"), Choice("tables", 1, "rslora")],
    "qwen2": [Choice("tables", 64, "patterns"), Choice("all-linear", 1, "alpha")],
    "phi3": [Choice("attention", 64, "rslora"), Choice("all-linear", 8, "bias")],
    "gemma2": [Choice("all-linear", 64, "alpha"), Choice("tables", 8, "alpha")],
    "qwen3_moe": [Choice("attention", 1, "patterns"), Choice("all-linear", 12, "alpha")],
    "gpt_neox": [Choice("attention", 12, "bias"), Choice("all-linear", 1, "patterns")],
}
"""Families that together have every form of a site: alone, packed, fused, gated, reordered, tied."""
ROWS = [pytest.param(family, choices, id=family) for family, choices in FEW.items()]
ROWS += [pytest.param(family, EVERY, id=f"{family}-all", marks=pytest.mark.slow) for family in FAMILIES]


def adapter_of(model: Any, choice: Choice) -> Adapter:
    """The adapter of a choice, by the names that the model's class has for its modules."""
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    heads = {name for name, m in model.named_modules() if m is model.get_output_embeddings()}
    every = sorted({n.rpartition(".")[2] for n in linears - heads} - {*NOT_SERVED})
    attention = sorted({n.rpartition(".")[2] for n in linears if "att" in n} - {*NOT_SERVED})
    if any(".experts." in name for name, _ in model.named_parameters()):
        # peft takes gate_proj, up_proj and down_proj for names of experts
        every = attention = [name for name in attention if name != "gate_proj"]
    options = dict(OPTIONS[choice.options])
    if choice.options == "patterns":
        ranks = options["rank_pattern"]
        first, last = attention[0], attention[-1] if len(attention) > 1 else "no_such_module"
        options["rank_pattern"] = {n.replace("FIRST", first).replace("LAST", last): r for n, r in ranks.items()}
    if choice.kind == "attention":
        return Adapter(attention, choice.rank, options)
    if choice.kind == "all-linear":
        return Adapter(every, choice.rank, options)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if any(m is table for table in tables)}
    return Adapter(sorted(names), choice.rank, options)


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread: the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize(("family", "choices"), ROWS)
def test_requests_with_adapters_get_what_peft_computes(
    family: str, choices: list[Choice], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint(family)
    model = base_model(path)
    directories = {
        str(i): save_adapter(path, adapter_of(model, choice), tmp_path / str(i), seed=i)
        for i, choice in enumerate(choices)
    }
    expected = answers(path, [None, *directories.values()])
    firsts = [torch.stack([answer.logits[0] for answer in row]) for row in expected]
    for i, first in enumerate(firsts):  # every adapter changes something, and something else
        assert all((first - other).abs().max() > 20 * TOLERANCE for other in firsts[:i])
    merges = choices[0].kind != "tables" and len(choices) < len(EVERY)  # a merged table changes a tied head, too
    merged = answers(path, [directories["0"]], merges=True)[0] if merges else []
    engine = LoRAWorker(path)
    requests = engine.load(directories)
    try:
        found = engine.run(
            [
                Work(a.prompt, adapter)
                for adapter, row in zip([None, *requests.values()], expected, strict=True)
                for a in row
            ],
            OUTPUT_LEN,
            seed=len(choices),
        )
    finally:
        engine.worker.shutdown()
    wanted: list[Answer] = [a for row in expected for a in row]
    for i, (result, answer) in enumerate(zip(found, wanted, strict=True)):
        assert result.tokens == answer.tokens, f"request {i} of {len(answer.prompt)} tokens"
        tolerance = TOLERANCES.get(family, TOLERANCE)
        torch.testing.assert_close(result.logits, answer.logits.float(), rtol=0, atol=tolerance)
    for result, answer in zip(found[len(expected[0]) :], merged, strict=False):
        if answer.prompt == wanted[0].prompt:
            torch.testing.assert_close(result.logits[0], answer.logits[0].float(), rtol=0, atol=TOLERANCE)
