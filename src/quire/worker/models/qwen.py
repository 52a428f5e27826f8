"""Qwen2 and 2.5, Qwen3, Qwen3-MoE."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on queries, keys and values, and nowhere else."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), qkv_bias=True))


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), qk_norm="head"))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_experts", hf.get("num_local_experts", 128)),
            expert_size=hf.size("moe_intermediate_size"),
            router=RouterSpec(
                num_experts_per_token=hf.size("num_experts_per_tok"),
                normalize=bool(hf.get("norm_topk_prob", False)),
                weights_in_float32=False,
            ),
        )
        step, plain = hf.size("decoder_sparse_step"), hf.get("mlp_only_layers", [])
        layers = make_layers(hf, moe=lambda i: moe if i not in plain and (i + 1) % step == 0 else None)
        super().__init__(hf, dataclasses.replace(common_spec(hf, layers), qk_norm="head"))
