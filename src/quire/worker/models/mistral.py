"""Mistral: Llama with a sliding window; Mixtral: Mistral with experts."""

from __future__ import annotations

from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import (
    DecoderForCausalLM,
    DecoderSpec,
    LayerSpec,
    Rotations,
    SelfAttention,
    common_spec,
    make_layers,
    make_mlp,
    make_norm,
)


class MistralForCausalLM(DecoderForCausalLM):
    """All layers have the window, if there is one."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf))


class MixtralLayer(nn.Module):
    """A decoder layer whose experts are called block_sparse_moe in checkpoints."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(hf, spec, layer, f"{name}.self_attn")
        self.block_sparse_moe = make_mlp(hf, spec, layer)
        self.input_layernorm = make_norm(hf, spec, hf.hidden_size)
        self.post_attention_layernorm = make_norm(hf, spec, hf.hidden_size)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        x = self.self_attn(self.input_layernorm(x), rotations, x)
        y: Tensor = self.block_sparse_moe(self.post_attention_layernorm(x), x)
        return y


class MixtralForCausalLM(DecoderForCausalLM):
    """Experts in every layer."""

    layer_class = MixtralLayer

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            num_experts_per_token=hf.size("num_experts_per_tok"),
            expert_size=hf.size("intermediate_size"),
            normalize=True,
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        super().__init__(hf, common_spec(hf, make_layers(hf, moe=lambda layer: moe)))
