"""Writes quantized checkpoints in the layouts other tools use: the inverse of quantization/formats.py, written from the
formats' own descriptions, value by value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from quire.worker.quantization.weight import Coding, QuantizedWeight

AWQ_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]


def pack(values: Tensor, bits: int) -> Tensor:
    """values: [rows, n] of unsigned numbers to [rows, n * bits / 32] int32, the first in the lowest bits."""
    per_word = 32 // bits
    fields = functional.pad(values.long(), (0, -values.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = (fields << torch.arange(per_word) * bits).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unsigned(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Values [out, in] and zero points [out, groups], from 0 up."""
    half = 1 << (weight.bits - 1)
    zeros = torch.zeros_like(weight.scales).long() if weight.zeros is None else weight.zeros.long()
    return weight.values.long() + half, zeros + half


def gptq(weight: QuantizedWeight, *, version: int = 1, groups: Tensor | None = None) -> Tensors:
    """The tensors of one matrix. `groups` names each input's group, if they are not neighbours."""
    values, zeros = unsigned(weight)
    if groups is None:
        groups = torch.arange(weight.shape[1]) // weight.group_size
    stored_zeros = zeros.T - 1 if version == 1 else zeros.T
    return {
        "qweight": pack(values, weight.bits).T.contiguous(),
        "qzeros": pack(stored_zeros.contiguous(), weight.bits),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def awq(weight: QuantizedWeight) -> Tensors:
    """The tensors of one matrix, "gemm" version."""
    order = torch.arange(weight.shape[0]).view(-1, 8)[:, AWQ_FIELDS].flatten()
    values, zeros = unsigned(weight)
    return {
        "qweight": pack(values.T[:, order], 4),
        "qzeros": pack(zeros.T[:, order], 4),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
    }


def compressed_packed(weight: QuantizedWeight) -> Tensors:
    """The tensors of one matrix, compressed-tensors `pack-quantized`."""
    values, zeros = unsigned(weight)
    tensors = {
        "weight_packed": pack(values, weight.bits),
        "weight_scale": weight.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack(zeros.T, weight.bits).T.contiguous()
    return tensors


def compressed_int8(weight: QuantizedWeight) -> Tensors:
    """The tensors of one matrix, compressed-tensors `int-quantized`."""
    return {"weight": weight.values, "weight_scale": weight.scales.to(torch.bfloat16)}


def float8(weight: QuantizedWeight, *, scale_name: str = "weight_scale_inv", rows: int = 0) -> Tensors:
    """The tensors of one matrix of e4m3 floats. `rows`: outputs that share a scale; 0: each has its own."""
    scales = weight.scales[::rows] if rows else weight.scales
    return {"weight": weight.values.view(torch.float8_e4m3fn), scale_name: scales.contiguous()}


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
COMPRESSED_FP8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def random_float8(weight: Tensor, rows: int, columns: int) -> QuantizedWeight:
    """e4m3 floats of about the size of `weight`, [out, in], with a scale for each block of rows and columns.

    0 rows: for each output; 0 columns: for all inputs."""
    outputs, inputs = weight.shape
    columns = columns or inputs
    generator = torch.Generator().manual_seed(outputs * inputs)
    scales = (
        weight.abs().amax()
        / 448
        * (1 + torch.rand(-(-outputs // (rows or 1)), -(-inputs // columns), generator=generator))
    )
    scales = scales.repeat_interleave(rows or 1, dim=0)[:outputs]
    values = (weight / scales.repeat_interleave(columns, dim=1)[:, :inputs]).to(torch.float8_e4m3fn)
    return QuantizedWeight(
        bits=8, values=values.view(torch.int8), scales=scales.contiguous(), group_size=columns, coding=Coding.E4M3
    )


GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed_config(layout: str, bits: int, strategy: str, quantizes_inputs: bool) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": "int", "strategy": strategy, "dynamic": False},
        "input_activations": inputs if quantizes_inputs else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def random_weight(weight: Tensor, bits: int, group_size: int, *, zeros: bool, inputs: bool = False) -> QuantizedWeight:
    """Integers of about the size of `weight`, [out, in], with scales that every type holds exactly."""
    (rows, columns), half = weight.shape, 1 << (bits - 1)
    generator = torch.Generator().manual_seed(rows * columns + bits)
    groups = columns // group_size
    scale = 2.0 ** torch.tensor(float(weight.abs().amax()) / half).log2().ceil()
    return QuantizedWeight(
        bits=bits,
        values=torch.randint(-half, half, (rows, columns), generator=generator).to(torch.int8),
        scales=scale * torch.randint(2, 6, (rows, groups), generator=generator) / 4,
        zeros=torch.randint(-half + 1, half, (rows, groups), generator=generator).to(torch.int16) if zeros else None,
        group_size=group_size,
        quantizes_inputs=inputs,
    )


def quantize_checkpoint(
    source: Path,
    target: Path,
    make: Callable[[Tensor], QuantizedWeight],
    write: Callable[[QuantizedWeight], Tensors],
    config: dict[str, Any],
) -> tuple[Path, Path]:
    """Copies of checkpoint `source` with the matrices of its layers, but for routers, replaced by what `make` makes of
    them: one as `write` stores them, one as the plain weights they stand for."""
    stored, plain = target / "stored", target / "plain"
    for path in (stored, plain):
        shutil.copytree(source, path)
    packed: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in name and tensor.dim() == 2 and not name.endswith(".gate.weight"):
            weight = make(tensor)
            dequantized[name] = weight.dequantize()
            base = name.removesuffix(".weight")
            packed |= {f"{base}.{suffix}": value.contiguous() for suffix, value in write(weight).items()}
        else:
            packed[name] = dequantized[name] = tensor
    save_file(packed, stored / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors")
    edit = json.loads((stored / "config.json").read_text()) | {"quantization_config": config}
    (stored / "config.json").write_text(json.dumps(edit))
    return stored, plain


MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def mxfp4_checkpoint(source: Path, target: Path, seed: int = 0) -> tuple[Path, Path]:
    """Copies of gpt-oss checkpoint `source` with random experts: in MXFP4, and as the plain weights they stand for,
    dequantized by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = target / "stored", target / "plain"
    for path in (stored, plain):
        shutil.copytree(source, path)
    generator = torch.Generator().manual_seed(seed)
    packed: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = dequantized[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator).to(torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dequantized[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert dequantized[name].shape == tensor.shape
    save_file(packed, stored / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors")
    edit = json.loads((stored / "config.json").read_text()) | {"quantization_config": MXFP4_CONFIG}
    (stored / "config.json").write_text(json.dumps(edit))
    return stored, plain
