"""Experts of checkpoints: every layout of tensors, types of what is small, layers behind the decoder's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.config.quantization import scheme_of
from quire.errors import UnsupportedModelError
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.moe import Experts, Router
from quire.worker.quantization.weight import quantize

from .oracle import load
from .test_oracle import assert_same_logits

Make = Callable[..., Path]


@pytest.mark.parametrize("family", ["glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_biases_of_the_choice_stay_float32(tiny_checkpoint: Make, family: str) -> None:
    path = tiny_checkpoint(family)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        stored = [file.get_tensor(name) for name in sorted(file.keys()) if name.endswith("e_score_correction_bias")]
    routers = [module for module in load(path, dtype=torch.bfloat16).modules() if isinstance(module, Router)]
    assert routers
    assert all(bias.abs().max() > 0.01 for bias in stored)
    for bias, router in zip(stored, routers, strict=True):
        assert router.e_score_correction_bias is not None
        assert torch.equal(router.e_score_correction_bias, bias)


def test_the_layers_of_predictors_are_left_out(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = tiny_checkpoint("glm4_moe", num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    count = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    tensors[f"model.layers.{count}.eh_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    assert_same_logits(tmp_path, 20, oracle_path=path)


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("family", ["granitemoeshared", "aria_text", "qwen2_moe", "glm4_moe"])
def test_every_layout_can_be_quantized_at_load(tiny_checkpoint: Make, family: str, method: str) -> None:
    """Stacked, transposed, one by one; shared experts, plain and weighted."""
    path, scheme = tiny_checkpoint(family), scheme_of(method)
    found, plain = (
        [module for module in model.modules() if isinstance(module, Experts)]
        for model in (load(path, quantization=method), load(path))
    )
    assert found
    for ours, exact in zip(found, plain, strict=True):
        x = torch.randn(7, exact.gate_up_proj.shape[2], generator=torch.Generator().manual_seed(1))
        count = exact.gate_up_proj.shape[0]
        ids, weights = (torch.arange(14) % count).view(7, 2), torch.rand(7, 2)
        gate_up, down = ([quantize(w, scheme) for w in block.data] for block in (exact.gate_up_proj, exact.down_proj))
        expected = TORCH_KERNELS.quantized_experts(gate_up, down, exact.kernel_spec)(x, ids, weights)
        assert ours.quantized_bytes
        assert torch.equal(ours(x, ids, weights), expected)


def test_a_clamp_behind_a_norm_is_refused(tiny_checkpoint: Make) -> None:
    """OLMoE cuts queries and keys after their norm; the other families with this key before."""
    with pytest.raises(UnsupportedModelError, match="clip_qkv"):
        load(tiny_checkpoint("olmoe", clip_qkv=8.0))
