"""Gemma 2 and the text model of Gemma 3."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from quire.config.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.models.decoder import (
    DecoderForCausalLM,
    DecoderSpec,
    LayerSpec,
    Rotations,
    SelfAttention,
    common_spec,
    layer_types_of,
    make_mlp,
    make_norm,
    sliding_window_of,
)


class GemmaLayer(nn.Module):
    """A norm before and after attention, a norm before and after the MLP."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(hf, spec, layer, f"{name}.self_attn")
        self.mlp = make_mlp(hf, spec, layer)
        self.input_layernorm = make_norm(hf, spec, hf.hidden_size)
        self.post_attention_layernorm = make_norm(hf, spec, hf.hidden_size)
        self.pre_feedforward_layernorm = make_norm(hf, spec, hf.hidden_size)
        self.post_feedforward_layernorm = make_norm(hf, spec, hf.hidden_size)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        attended = self.self_attn(self.input_layernorm(x), rotations)
        x = x + self.post_attention_layernorm(attended)
        y: Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return y


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Every second layer has a window; attention scores are softly capped."""

    layer_class = GemmaLayer

    def __init__(self, hf: HFConfig) -> None:
        spec = _gemma_spec(hf, layer_types_of(hf, lambda layer: layer % 2 == 0))
        super().__init__(hf, dataclasses.replace(spec, attention_soft_cap=hf.get("attn_logit_softcapping")))


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Five layers with a window to one without, each kind with its own rotary base; qk-norm instead of soft caps."""

    layer_class = GemmaLayer

    def __init__(self, hf: HFConfig) -> None:
        pattern = hf.size("sliding_window_pattern")
        spec = _gemma_spec(hf, layer_types_of(hf, lambda layer: (layer + 1) % pattern != 0))
        super().__init__(hf, dataclasses.replace(spec, qk_norm="head"))


def _gemma_spec(hf: HFConfig, types: list[str]) -> DecoderSpec:
    """What both generations share. `types`: the kind of each layer, which also says how it rotates."""
    if hf.get("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{hf.path} asks for bidirectional attention, which is not implemented")
    windows = {SLIDING_ATTENTION: sliding_window_of(hf), FULL_ATTENTION: None}
    return dataclasses.replace(
        common_spec(hf, tuple(LayerSpec(sliding_window=windows[kind], rope=kind) for kind in types)),
        ropes={kind: hf.rope(kind) for kind in windows if kind in types},
        norm_offset=1.0,
        norm_in_float32=True,
        activation=hf.get("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=float(hf.require("query_pre_attn_scalar")) ** -0.5,
        logits_soft_cap=hf.get("final_logit_softcapping"),
        embedding_multiplier=hf.hidden_size**0.5,
    )
