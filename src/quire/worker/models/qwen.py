"""Qwen2 and 2.5, Qwen3, Qwen3-MoE."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import (
    DecoderForCausalLM,
    LayerSpec,
    common_spec,
    layer_types_of,
    sliding_window_of,
)


def windowed_layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Where there is a sliding window, it spares the first `max_window_layers` layers."""
    window = sliding_window_of(hf)
    first = int(hf.get("max_window_layers", 0))
    types = layer_types_of(hf, lambda layer: window is not None and layer >= first)
    return tuple(LayerSpec(sliding_window=window if kind == SLIDING_ATTENTION else None) for kind in types)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on queries, keys and values, and nowhere else."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf, windowed_layers(hf)), qkv_bias=True))


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf, windowed_layers(hf)), qk_norm="head"))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_experts", hf.get("num_local_experts", 128)),
            num_experts_per_token=hf.size("num_experts_per_tok"),
            expert_size=hf.size("moe_intermediate_size"),
            normalize=bool(hf.get("norm_topk_prob", False)),
            weights_in_float32=False,
        )
        step, plain, window = hf.size("decoder_sparse_step"), hf.get("mlp_only_layers", []), sliding_window_of(hf)
        layers = tuple(
            LayerSpec(sliding_window=window, moe=moe if i not in plain and (i + 1) % step == 0 else None)
            for i in range(hf.num_hidden_layers)
        )
        super().__init__(hf, dataclasses.replace(common_spec(hf, layers), qk_norm="head"))
