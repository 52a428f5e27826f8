"""Mistral and Ministral: Llama with a sliding window; Mixtral: Mistral with experts."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.attention.backend import ScaleGrowth
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class MistralForCausalLM(DecoderForCausalLM):
    """All layers have the window, if there is one."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf))


class MinistralForCausalLM(MistralForCausalLM):
    """Mistral in which layers without a window may be listed."""


class Ministral3ForCausalLM(DecoderForCausalLM):
    """Mistral whose attention scores grow slowly with the position beyond the trained length."""

    def __init__(self, hf: HFConfig) -> None:
        params = hf.rope().params
        factor = float(params.get("llama_4_scaling_beta") or 0.0)
        growth = ScaleGrowth(factor, int(params["original_max_position_embeddings"])) if factor else None
        layers = [dataclasses.replace(layer, scale_growth=growth) for layer in make_layers(hf)]
        super().__init__(hf, dataclasses.replace(common_spec(hf, tuple(layers)), qkv_bias=False, output_bias=False))


class MixtralForCausalLM(DecoderForCausalLM):
    """Experts in every layer."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(num_experts_per_token=hf.size("num_experts_per_tok"), normalize=True),
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        super().__init__(hf, common_spec(hf, make_layers(hf, moe=lambda layer: moe)))
