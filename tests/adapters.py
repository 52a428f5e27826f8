"""LoRA adapters written by hand, in PEFT's layout: for tests that need no peft, and files that peft would not write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "qalora_group_size": 16,
    "megatron_core": "megatron.core",
    "inference_mode": True,
}
SHAPES: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (48, 48),
    "self_attn.v_proj": (48, 24),
    "mlp.down_proj": (80, 48),
}
"""Inputs and outputs of matrices of the tiny llama: `tiny_models.py`."""
PREFIX = "base_model.model."


def factors(module: str, size: tuple[int, int], rank: int, seed: int, scale: float = 0.3) -> dict[str, np.ndarray]:
    """Returns the two tensors of a module."""
    rng = np.random.default_rng([seed, *module.encode()])
    return {
        f"{PREFIX}{module}.lora_A.weight": (rng.standard_normal((rank, size[0])) * scale).astype(np.float32),
        f"{PREFIX}{module}.lora_B.weight": (rng.standard_normal((size[1], rank)) * scale).astype(np.float32),
    }


def tensors(rank: int = 4, seed: int = 0, num_layers: int = 3, scale: float = 0.3) -> dict[str, np.ndarray]:
    """Returns the tensors of an adapter of the tiny llama."""
    made: dict[str, np.ndarray] = {}
    for layer in range(num_layers):
        for name, size in SHAPES.items():
            made |= factors(f"model.layers.{layer}.{name}", size, rank, seed, scale)
    return made


def write_demo_adapter(directory: Path, seed: int, rank: int = 4) -> Path:
    """Writes a random adapter of the demo model, large enough to change its text."""
    content: dict[str, np.ndarray] = {}
    for layer in range(6):
        content |= factors(f"model.layers.{layer}.self_attn.v_proj", (256, 128), rank, seed, 0.4)
        content |= factors(f"model.layers.{layer}.mlp.down_proj", (688, 256), rank, seed, 0.2)
    return write_adapter(directory, content, r=rank, target_modules=["v_proj", "down_proj"])


def write_adapter(directory: Path, content: Mapping[str, np.ndarray] | None = None, /, **changes: Any) -> Path:
    """Writes an adapter of these tensors, of an ordinary config with `changes` (None: without the field)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        dict(tensors(config.get("r", 4)) if content is None else content), directory / "adapter_model.safetensors"
    )
    return directory
