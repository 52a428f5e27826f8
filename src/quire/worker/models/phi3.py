"""Phi-3, Phi-4 and Phi-4-mini, and Phi-3.5-MoE."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama whose checkpoints have one matrix for queries, keys and values, and one for gate_proj and up_proj."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), fused_qkv="parts", fused_gate_up=True))


class PhimoeForCausalLM(DecoderForCausalLM):
    """LayerNorms, and two experts chosen one after the other."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(
                num_experts_per_token=hf.size("num_experts_per_tok"),
                normalize=False,
                score="sparsemixer",
                threshold=2 * float(hf.get("router_jitter_noise", 0.01)),
                weights_in_float32=False,
            ),
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        spec = dataclasses.replace(
            common_spec(hf, make_layers(hf, moe=lambda layer: moe)),
            norm="layer",
            norm_bias=True,
            head_bias=bool(hf.get("lm_head_bias", False)),
        )
        super().__init__(hf, spec)
