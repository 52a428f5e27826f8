"""Qwen2 and 2.5, Qwen3, Qwen3-MoE."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import (
    DecoderForCausalLM,
    DecoderSpec,
    LayerSpec,
    layer_types_of,
    sliding_window_of,
    uniform_layers,
)


def windowed_layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """The sliding window is off unless `use_sliding_window`, and then spares the first `max_window_layers` layers."""
    window = sliding_window_of(hf) if hf.get("use_sliding_window", False) else None
    first = int(hf.get("max_window_layers", 0))
    types = layer_types_of(hf, lambda layer: window is not None and layer >= first)
    return tuple(LayerSpec(sliding_window=window if kind == SLIDING_ATTENTION else None) for kind in types)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on queries, keys and values, and nowhere else."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(
            hf,
            DecoderSpec(
                layers=windowed_layers(hf),
                ropes={"rope": hf.rope()},
                qkv_bias=True,
                activation=hf.get("hidden_act", "silu"),
            ),
        )


def _qwen3_spec(hf: HFConfig, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    """Queries and keys are normalised head by head."""
    attention_bias = bool(hf.get("attention_bias", False))
    return DecoderSpec(
        layers=layers,
        ropes={"rope": hf.rope()},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="head",
        activation=hf.get("hidden_act", "silu"),
    )


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen2's layers with qk-norm in the place of the biases."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _qwen3_spec(hf, windowed_layers(hf)))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_experts", hf.get("num_local_experts", 128)),
            num_experts_per_token=hf.size("num_experts_per_tok"),
            expert_size=hf.size("moe_intermediate_size"),
            normalize=bool(hf.get("norm_topk_prob", False)),
        )
        step, plain = hf.size("decoder_sparse_step"), hf.get("mlp_only_layers", [])
        window = sliding_window_of(hf) if hf.get("use_sliding_window", False) else None
        layers = tuple(
            dataclasses.replace(layer, moe=moe if i not in plain and (i + 1) % step == 0 else None)
            for i, layer in enumerate(uniform_layers(hf, sliding_window=window))
        )
        super().__init__(hf, _qwen3_spec(hf, layers))
