"""Adapters of a mixture's experts give what peft computes: of all experts at once, of each, and with shared factors.

peft makes the former itself (`target_parameters`). Adapters of each expert are as older releases of transformers, whose
experts were modules, had them saved: peft converts them when it loads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lora_worker import LoRAWorker, Work

from .conftest import Checkpoint
from .lora_oracle import OUTPUT_LEN, SPREAD, Adapter, answers, base_model, save_adapter

TOLERANCE = 1e-4
BOTH = ("experts.gate_up_proj", "experts.down_proj")
RANK = 4


def expert_sizes(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's stacked matrices, by name."""
    return {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith(BOTH)}


def save_all_at_once(parameters: tuple[str, ...], **options: Any) -> Callable[[Path, Path, int], Path]:
    def save(checkpoint: Path, directory: Path, seed: int) -> Path:
        made = Adapter([], RANK, {"target_parameters": list(parameters), **options})
        return save_adapter(checkpoint, made, directory, seed)

    return save


def save_one_by_one(names: tuple[str, str, str], moe: str = "mlp") -> Callable[[Path, Path, int], Path]:
    """`names`: of gate, up and down."""

    def save(checkpoint: Path, directory: Path, seed: int) -> Path:
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for name, shape in expert_sizes(base_model(checkpoint)).items():
            layer = name.split(".mlp.")[0]
            hidden, size = (shape[2], shape[1] // 2) if name.endswith(BOTH[0]) else (shape[1], shape[2])
            for expert in range(shape[0]):
                for part in names[:2] if name.endswith(BOTH[0]) else names[2:]:
                    sizes = (size, hidden) if part == names[2] else (hidden, size)
                    prefix = f"base_model.model.{layer}.{moe}.experts.{expert}.{part}"
                    first = torch.randn(RANK, sizes[0], generator=generator) * SPREAD * sizes[0] ** -0.5
                    made[f"{prefix}.lora_A.weight"] = first
                    made[f"{prefix}.lora_B.weight"] = torch.randn(sizes[1], RANK, generator=generator) * SPREAD
        return write(directory, made, target_modules=list(names))

    return save


def write(directory: Path, made: Mapping[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir()
    save_file(dict(made), directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 6, **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


PATTERNS = {"rank_pattern": {"experts.gate_up_proj": 3}, "alpha_pattern": {r".*\.1\..*down_proj": 9}}
CASES: dict[str, dict[str, Callable[[Path, Path, int], Path]]] = {
    "qwen3_moe": {
        "all": save_all_at_once(BOTH),
        "patterns": save_all_at_once(BOTH, **PATTERNS, use_rslora=True),
        "down": save_all_at_once(BOTH[1:]),
        "gate_up": save_all_at_once(BOTH[:1], lora_alpha=5),
        "each": save_one_by_one(("gate_proj", "up_proj", "down_proj")),
    },
    "mixtral": {"each": save_one_by_one(("w1", "w3", "w2"), "block_sparse_moe"), "all": save_all_at_once(BOTH)},
    "gpt_oss": {"all": save_all_at_once(BOTH)},  # transposed, and gates alternate
    "llama4_text": {"all": save_all_at_once(BOTH)},  # transposed, and peft does not know
}
MORE = (
    "deepseek_v3",
    "afmoe",
    "cohere2_moe",
    "phimoe",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "minimax_m2",
    "hunyuan_v1_moe",
)
ROWS = [pytest.param(family, cases, id=family) for family, cases in CASES.items()]
ROWS += [pytest.param(family, {"all": save_all_at_once(BOTH)}, id=family, marks=pytest.mark.slow) for family in MORE]


def compare(path: Path, directories: Mapping[str, Path], expected: Mapping[str, list[Any]], seed: int) -> None:
    """Runs the requests of all adapters, and of none (""), together."""
    engine = LoRAWorker(path)
    requests = engine.load(directories)
    order = [(name, a) for name, row in expected.items() for a in row]
    try:
        found = engine.run([Work(a.prompt, requests.get(name)) for name, a in order], OUTPUT_LEN, seed=seed)
    finally:
        engine.worker.shutdown()
    for (name, a), result in zip(order, found, strict=True):
        assert result.tokens == a.tokens, name
        torch.testing.assert_close(result.logits, a.logits.float(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "cases"), ROWS)
def test_experts_with_adapters_answer_as_peft_s(
    family: str, cases: Mapping[str, Callable[[Path, Path, int], Path]], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint(family)
    directories = {name: save(path, tmp_path / name, i) for i, (name, save) in enumerate(cases.items())}
    rows = answers(path, [None, *directories.values()])
    expected = dict(zip(["", *directories], rows, strict=True))
    firsts = [torch.stack([a.logits[0] for a in row]) for row in rows]
    for i, first in enumerate(firsts):
        assert all((first - other).abs().max() > 100 * TOLERANCE for other in firsts[:i])
    compare(path, directories, expected, seed=1)


def test_shared_factors_are_those_of_every_expert(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe")
    whole = save_all_at_once(BOTH)(path, tmp_path / "whole", 5)
    tensors = load_file(whole / "adapter_model.safetensors")
    count = next(iter(expert_sizes(base_model(path)).values()))[0]
    spread, shared = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("lora_A.weight") and "base_layer" in name:
            shared[name] = tensor[:RANK].clone()
            spread[name] = shared[name].repeat(count, 1)
        elif name.endswith("lora_B.weight") and "base_layer" not in name:
            shared[name] = tensor[:, ::count].clone()
            spread[name] = shared[name].repeat_interleave(count, dim=1)
    config = json.loads((whole / "adapter_config.json").read_text())
    directories = {
        name: write(tmp_path / name, content, **config) for name, content in (("spread", spread), ("shared", shared))
    }
    row = answers(path, [directories["spread"]])[0]
    compare(path, directories, {"spread": row, "shared": row}, seed=2)
