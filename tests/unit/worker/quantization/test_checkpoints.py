"""Quantized checkpoints compute what the plain weights they stand for compute, and are refused in words where not."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire.config.engine import LoadConfig
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.layers.linear import Linear
from quire.worker.layers.moe import Experts
from quire.worker.layers.weights import weight_bytes
from quire.worker.loader import ModelWeights, Placement, load_model

from ..models.oracle import CPU, load, model_config_of, quire_logits
from ..models.test_oracle import assert_same_logits
from .writers import (
    AWQ_CONFIG,
    COMPRESSED_FP8_CONFIG,
    FP8_CONFIG,
    GPTQ_CONFIG,
    awq,
    compressed_config,
    compressed_int8,
    compressed_packed,
    float8,
    gptq,
    quantize_checkpoint,
    random_float8,
    random_weight,
)

Make = Callable[..., Path]
TOKENS = [7, 100, 30, 200, 9]
SIZES = {"hidden_size": 64, "intermediate_size": 96}

zeros4 = functools.partial(random_weight, bits=4, group_size=32, zeros=True)
plain4 = functools.partial(random_weight, bits=4, group_size=32, zeros=False)
plain8 = functools.partial(random_weight, bits=8, group_size=32, zeros=False)


def per_output8(weight: torch.Tensor, inputs: bool) -> Any:
    return random_weight(weight, 8, weight.shape[1], zeros=False, inputs=inputs)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gptq": (zeros4, gptq, GPTQ_CONFIG),
    "gptq v2": (zeros4, functools.partial(gptq, version=2), {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"}),
    "gptq, 8 bits, symmetric": (plain8, gptq, {**GPTQ_CONFIG, "bits": 8, "sym": True}),
    "awq": (zeros4, awq, AWQ_CONFIG),
    "compressed, 4 bits": (plain4, compressed_packed, compressed_config("pack-quantized", 4, "group", False)),
    "compressed, zero points": (zeros4, compressed_packed, compressed_config("pack-quantized", 4, "group", False)),
    "compressed, 8 bits packed": (plain8, compressed_packed, compressed_config("pack-quantized", 8, "group", False)),
    "compressed, int8 weights": (
        functools.partial(per_output8, inputs=False),
        compressed_int8,
        compressed_config("int-quantized", 8, "channel", False),
    ),
    "fp8": (functools.partial(random_float8, rows=16, columns=32), functools.partial(float8, rows=16), FP8_CONFIG),
    "fp8, a scale for each matrix": (
        functools.partial(random_float8, rows=1000, columns=0),
        functools.partial(float8, rows=1000),
        {"quant_method": "fp8"},
    ),
    "compressed, fp8": (
        functools.partial(random_float8, rows=0, columns=0),
        functools.partial(float8, scale_name="weight_scale"),
        COMPRESSED_FP8_CONFIG,
    ),
}


def linears(model: nn.Module) -> list[Linear]:
    return [m for path, m in model.named_modules() if isinstance(m, Linear) and ".layers." in path]


def num_quantized(model: nn.Module) -> int:
    return sum(m.quantized_bytes is not None for m in linears(model))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_what_its_integers_stand_for(tiny_checkpoint: Make, tmp_path: Path, case: str) -> None:
    stored, plain = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES[case])
    model = load(stored)
    assert num_quantized(model) == len(linears(model)) == 12
    torch.testing.assert_close(quire_logits(model, TOKENS), quire_logits(load(plain), TOKENS), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", ["gptq", "compressed, int8 weights"])
def test_quantized_rows_move_with_the_order_of_rows(tiny_checkpoint: Make, tmp_path: Path, case: str) -> None:
    """GLM's queries and keys rotate in pairs: their integers, scales, zeros and biases are put in another order."""
    stored, plain = quantize_checkpoint(tiny_checkpoint("glm", **SIZES), tmp_path, *CASES[case])
    model = load(stored)
    assert num_quantized(model) == len(linears(model))
    torch.testing.assert_close(quire_logits(model, TOKENS), quire_logits(load(plain), TOKENS), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_mixtures_and_latent_attention_in_fp8_compute_as_transformers(
    tiny_checkpoint: Make, tmp_path: Path, family: str
) -> None:
    """The head expansion of latent attention becomes plain weights."""
    stored, plain = quantize_checkpoint(tiny_checkpoint(family), tmp_path, *CASES["fp8"])
    assert num_quantized(load(stored)) > 0
    assert_same_logits(stored, 5, 40, oracle_path=plain)


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed, 4 bits", "fp8", "fp8, a scale for each matrix"])
def test_on_native_kernels(library: NativeLibrary, tiny_checkpoint: Make, tmp_path: Path, case: str) -> None:
    stored, plain = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES[case])
    placement = Placement(CPU, torch.float32, NativeKernels(Context(library, 1, library.instruction_sets()[0])))
    model = load_model(model_config_of(stored), LoadConfig(), placement)
    assert num_quantized(model) == 12
    torch.testing.assert_close(quire_logits(model, TOKENS), quire_logits(load(plain), TOKENS), rtol=1e-4, atol=1e-3)


def test_int8_with_int8_activations(tiny_checkpoint: Make, tmp_path: Path) -> None:
    config = compressed_config("int-quantized", 8, "channel", True)
    make = functools.partial(per_output8, inputs=True)
    stored, plain = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, make, compressed_int8, config)
    logits, exact = quire_logits(load(stored), TOKENS), quire_logits(load(plain), TOKENS)
    assert not torch.allclose(logits, exact, rtol=1e-4, atol=1e-3), "activations are rounded"
    assert torch.cosine_similarity(logits, exact).min() > 0.99


def test_scales_that_are_not_finite_are_refused(tiny_checkpoint: Make, tmp_path: Path) -> None:
    stored, _ = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES["awq"])
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.scales"][0, 3] = torch.nan
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.k_proj\.weight holds NaN or infinity"):
        load(stored)


def test_groups_that_are_no_neighbours(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """GPTQ in "act order": computed as plain weights."""
    source = tiny_checkpoint("llama", **SIZES)

    def write(weight: Any) -> Any:
        groups = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1)) // weight.group_size
        scattered.append((weight, groups))
        return gptq(weight, groups=groups)

    scattered: list[Any] = []
    stored, plain = quantize_checkpoint(source, tmp_path, zeros4, write, {**GPTQ_CONFIG, "desc_act": True})
    tensors = load_file(plain / "model.safetensors")
    names = [name for name, tensor in tensors.items() if ".layers." in name and tensor.dim() == 2]
    for name, (weight, groups) in zip(names, scattered, strict=True):
        tensors[name] = (weight.values - weight.zeros[:, groups]) * weight.scales[:, groups]
    save_file(tensors, plain / "model.safetensors")
    model = load(stored)
    assert num_quantized(model) == 0
    torch.testing.assert_close(quire_logits(model, TOKENS), quire_logits(load(plain), TOKENS), rtol=1e-4, atol=1e-3)


def test_only_some_matrices_are_quantized(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """The plain weights of a checkpoint stay plain, also where they are in one matrix with others."""
    source = tiny_checkpoint("llama", **SIZES)
    stored, plain = quantize_checkpoint(source, tmp_path, *CASES["awq"])
    tensors, originals = load_file(stored / "model.safetensors"), load_file(plain / "model.safetensors")
    base = "model.layers.1.self_attn.k_proj"
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{base}.{suffix}"]
    save_file(tensors | {f"{base}.weight": originals[f"{base}.weight"]}, stored / "model.safetensors")
    model = load(stored)
    assert num_quantized(model) == 11
    torch.testing.assert_close(quire_logits(model, TOKENS), quire_logits(load(plain), TOKENS), rtol=1e-4, atol=1e-3)


MOE_SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}


def quantized_experts(model: nn.Module) -> list[bool]:
    return [module.quantized_bytes is not None for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("case", ["compressed, 4 bits", "compressed, int8 weights", "gptq", "awq", "fp8"])
def test_experts_in_integers(
    library: NativeLibrary, tiny_checkpoint: Make, tmp_path: Path, family: str, case: str
) -> None:
    """Both kinds of kernels compute the model of the plain weights that the integers stand for."""
    source = tiny_checkpoint(family, **(SIZES if family == "mixtral" else MOE_SIZES))
    stored, plain = quantize_checkpoint(source, tmp_path, *CASES[case])
    exact = quire_logits(load(plain), TOKENS)
    native = Placement(CPU, torch.float32, NativeKernels(Context(library, 2, library.instruction_sets()[0])))
    for model in (load(stored), load_model(model_config_of(stored), LoadConfig(), native)):
        assert quantized_experts(model)
        assert all(quantized_experts(model))
        torch.testing.assert_close(quire_logits(model, TOKENS), exact, rtol=1e-4, atol=1e-3)


def test_experts_of_several_kinds_are_computed_as_plain_weights(tiny_checkpoint: Make, tmp_path: Path) -> None:
    stored, plain = quantize_checkpoint(tiny_checkpoint("mixtral", **SIZES), tmp_path, *CASES["gptq"])
    tensors, originals = load_file(stored / "model.safetensors"), load_file(plain / "model.safetensors")
    base = next(name for name in originals if ".layers.1." in name and ".experts.2." in name).removesuffix(".weight")
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{base}.{suffix}"]
    save_file(tensors | {f"{base}.weight": originals[f"{base}.weight"]}, stored / "model.safetensors")
    model = load(stored)
    assert quantized_experts(model).count(False) == 1
    torch.testing.assert_close(quire_logits(model, TOKENS), quire_logits(load(plain), TOKENS), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_experts_quantized_at_load(library: NativeLibrary, tiny_checkpoint: Make, method: str) -> None:
    path = tiny_checkpoint("mixtral", **SIZES)
    config = dataclasses.replace(model_config_of(path), quantization=method)
    placement = Placement(CPU, torch.float32, NativeKernels(Context(library, 1, library.instruction_sets()[0])))
    native, reference = load_model(config, LoadConfig(), placement), load(path, quantization=method)
    for model in (native, reference):
        assert all(quantized_experts(model))
        assert weight_bytes(model) < 0.8 * weight_bytes(load(path))
    logits, exact = quire_logits(native, TOKENS), quire_logits(load(path), TOKENS)
    torch.testing.assert_close(logits, quire_logits(reference, TOKENS), rtol=2e-2, atol=2e-2)
    similarity = torch.cosine_similarity(logits, exact)  # of each token; at some the router may choose otherwise
    assert (0.99 if method == "int8" else 0.5) < similarity.median() < 1.0 - 1e-7


def test_new_weights_may_be_stored_in_another_way(tiny_checkpoint: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", **SIZES)
    stored, plain = quantize_checkpoint(source, tmp_path, *CASES["gptq"])
    config, placement = model_config_of(stored), Placement(CPU, torch.float32)
    model = load_model(config, LoadConfig(), placement)
    weights = ModelWeights(model, config, LoadConfig(), placement)
    before = quire_logits(model, TOKENS)
    weights.drop()
    weights.restore()
    assert torch.equal(quire_logits(model, TOKENS), before)
    weights.replace(source)
    assert num_quantized(model) == 0
    assert torch.equal(quire_logits(model, TOKENS), quire_logits(load(source), TOKENS))
    weights.replace(stored)
    assert torch.equal(quire_logits(model, TOKENS), before)
    assert torch.allclose(before, quire_logits(load(plain), TOKENS), atol=1e-3)


@pytest.fixture(scope="module")
def stored_gptq(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path_factory.mktemp("gptq"), *CASES["gptq"])[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "method 'hqq'; those that can be read are compressed-tensors, gptq, awq, fp8, mxfp4"),
        ({**FP8_CONFIG, "weight_block_size": [128]}, r"weight_block_size \[128\], which must be two numbers"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "fp8 in the format 'e5m2'; e4m3 can be read"),
        ({**COMPRESSED_FP8_CONFIG, "format": "nvfp4"}, "8-bit floats of compressed-tensors in the format 'nvfp4'"),
        ({**GPTQ_CONFIG, "bits": 3}, "weights of 3 bits; those of 4 and 8 can be read"),
        ({**GPTQ_CONFIG, "checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        ({**GPTQ_CONFIG, "dynamic": {"-:x": {}}}, "other bits for some layers"),
        ({**AWQ_CONFIG, "version": "gemv"}, "AWQ of version 'gemv'"),
        ({"quant_method": "compressed-tensors", "config_groups": ["x"]}, "quantization_config that is not understood"),
        (["gptq"], "quantization_config that is no object"),
        (compressed_config("marlin-24", 4, "group", False), "format 'marlin-24'"),
        (compressed_config("pack-quantized", 4, "group", True), "int8 activations with weights of"),
    ],
)
def test_formats_that_cannot_be_read(stored_gptq: Path, tmp_path: Path, config: Any, message: str) -> None:
    edited = json.loads((stored_gptq / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    (tmp_path / "model.safetensors").hardlink_to(stored_gptq / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_static_scales_of_activations_are_refused(tiny_checkpoint: Make, tmp_path: Path) -> None:
    config = compressed_config("int-quantized", 8, "channel", True)
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    stored, _ = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, plain8, compressed_packed, config)
    with pytest.raises(UnsupportedModelError, match=r"maximum of each token \(dynamic\)"):
        load(stored)


def assert_damage_is_named(stored: Path, edit: Any, message: str) -> None:
    """Loading a checkpoint after `edit` of one matrix fails with an error that names file, matrix and damage."""
    tensors = load_file(stored / "model.safetensors")
    edit(tensors, "model.layers.0.self_attn.k_proj")
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(stored)
    assert "model.safetensors" in str(caught.value)
    assert "k_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, b: t.pop(f"{b}.scales"), "belongs to a quantized matrix that has no scales"),
        (
            lambda t, b: t.update({f"{b}.scales": t[f"{b}.scales"][:, 1:].contiguous()}),
            "scales do not fit a matrix of 32 x 64",
        ),
        (lambda t, b: t.update({f"{b}.qweight": t[f"{b}.qweight"][1:].contiguous()}), r"has shape \[32, 56\]"),
        (lambda t, b: t.update({f"{b}.qweight": t[f"{b}.qweight"].long()}), "packed values are torch.int64"),
        (lambda t, b: t.update({f"{b}.g_idx": t[f"{b}.g_idx"] + 5}), "g_idx names"),
    ],
)
def test_a_damaged_matrix_is_named(tiny_checkpoint: Make, tmp_path: Path, edit: Any, message: str) -> None:
    stored, _ = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES["gptq"])
    assert_damage_is_named(stored, edit, message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, b: t.pop(f"{b}.weight_scale_inv"), "is F8_E4M3 and has no scale"),
        (lambda t, b: t.pop(f"{b}.weight"), "belongs to a quantized matrix that has no weight"),
        (
            lambda t, b: t.update({f"{b}.weight_scale_inv": torch.ones(2, 3)}),
            "2 x 3 scales do not fit a matrix of 32 x",
        ),
        (lambda t, b: t.update({f"{b}.weight_scale_inv": torch.full((2, 2), torch.inf)}), "holds NaN or infinity"),
        (lambda t, b: t.update({f"{b}.weight": t[f"{b}.weight"].float()}), "is F32 and has a weight_scale_inv"),
        (lambda t, b: t[f"{b}.weight"].view(torch.uint8).view(-1)[5:6].fill_(0xFF), "holds NaN"),
    ],
)
def test_a_damaged_matrix_of_floats_is_named(tiny_checkpoint: Make, tmp_path: Path, edit: Any, message: str) -> None:
    stored, _ = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES["fp8"])
    assert_damage_is_named(stored, edit, message)


def test_the_flag_and_the_checkpoint(tiny_checkpoint: Make, tmp_path: Path) -> None:
    stored, plain = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES["gptq"])
    assert num_quantized(load(stored, quantization="gptq")) == 12
    with pytest.raises(ConfigError, match="quantized already, by gptq; leave the flag out"):
        load(stored, quantization="int4")
    with pytest.raises(
        ConfigError, match="its weights are plain; leave the flag out, or quantize them at load with int8 or"
    ):
        load(plain, quantization="awq")


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "phi3", "opt", "mixtral"])
def test_quantized_at_load(tiny_checkpoint: Make, family: str, method: str) -> None:
    path = tiny_checkpoint(family)
    model = load(path, quantization=method)
    assert num_quantized(model) == len(linears(model)), "routers, which are none of them, stay plain"
    assert all(m.quantized_bytes is None for p, m in model.named_modules() if isinstance(m, Linear) and "lm_head" in p)
    logits, exact = quire_logits(model, TOKENS), quire_logits(load(path), TOKENS)
    similarity = torch.cosine_similarity(logits, exact).min()
    assert (0.99 if method == "int8" else 0.5) < similarity < 1.0 - 1e-7


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_sleep_and_new_weights_at_load(library: NativeLibrary, tiny_checkpoint: Make, method: str) -> None:
    config = dataclasses.replace(model_config_of(tiny_checkpoint("llama")), quantization=method)
    placement = Placement(CPU, torch.bfloat16, NativeKernels(Context(library, 1, library.instruction_sets()[0])))
    model = load_model(config, LoadConfig(), placement)
    weights = ModelWeights(model, config, LoadConfig(), placement)
    before = quire_logits(model, TOKENS)
    weights.offload()
    weights.restore()
    assert torch.equal(quire_logits(model, TOKENS), before)
    weights.drop()
    with pytest.raises(RuntimeError, match="given back"):
        quire_logits(model, TOKENS)
    weights.restore()
    assert torch.equal(quire_logits(model, TOKENS), before)
    weights.replace(tiny_checkpoint("llama", seed=1))
    after = quire_logits(model, TOKENS)
    assert not torch.equal(after, before)
    other = dataclasses.replace(model_config_of(tiny_checkpoint("llama", seed=1)), quantization=method)
    assert torch.equal(after, quire_logits(load_model(other, LoadConfig(), placement), TOKENS))
