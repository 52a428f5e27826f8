"""Aria's text decoder."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class AriaTextForCausalLM(DecoderForCausalLM):
    """Llama with experts in every layer, and shared ones."""

    def __init__(self, hf: HFConfig) -> None:
        size = hf.size("intermediate_size")
        moe = MoESpec(
            num_experts=hf.size("moe_num_experts"),
            expert_size=size,
            router=RouterSpec(num_experts_per_token=hf.size("moe_topk"), normalize=True, weights_in_float32=False),
            layout="transposed",
            shared=SharedExpertSpec(
                size=size * hf.size("moe_num_shared_experts"), bias=bool(hf.get("mlp_bias", False))
            ),
        )
        super().__init__(hf, common_spec(hf, make_layers(hf, moe=lambda layer: moe)))
