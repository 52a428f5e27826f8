"""Granite 3."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderSpec,
    LayerSpec,
    Rotations,
    common_spec,
)


class GraniteLayer(DecoderLayer):
    """A decoder layer that scales what it adds."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(hf, spec, layer, name)
        self.multiplier = float(hf.get("residual_multiplier", 1.0))

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        x = x + self.multiplier * self.self_attn(self.input_layernorm(x), rotations)
        y: Tensor = x + self.multiplier * self.mlp(self.post_attention_layernorm(x))
        return y


class GraniteForCausalLM(DecoderForCausalLM):
    """Llama with a factor on embeddings, attention scores, residuals and logits."""

    layer_class = GraniteLayer

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            attention_scale=float(hf.get("attention_multiplier", 1.0)),
            embedding_multiplier=float(hf.get("embedding_multiplier", 1.0)),
            logits_divisor=float(hf.get("logits_scaling", 1.0)),
        )
        super().__init__(hf, spec)
