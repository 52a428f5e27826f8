"""OLMo 2."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import (
    DecoderForCausalLM,
    DecoderSpec,
    LayerSpec,
    Rotations,
    SelfAttention,
    common_spec,
    make_mlp,
    make_norm,
)


class Olmo2Layer(nn.Module):
    """Norms after attention and MLP, none before."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(hf, spec, layer, f"{name}.self_attn")
        self.mlp = make_mlp(hf, spec, layer)
        self.post_attention_layernorm = make_norm(hf, spec, hf.hidden_size)
        self.post_feedforward_layernorm = make_norm(hf, spec, hf.hidden_size)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        x = self.post_attention_layernorm(self.self_attn(x, rotations), x)
        y: Tensor = self.post_feedforward_layernorm(self.mlp(x), x)
        return y


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised over all heads together."""

    layer_class = Olmo2Layer

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(hf)
        super().__init__(hf, dataclasses.replace(spec, qk_norm="full", norm_in_float32=True, rope_in_float32=True))
