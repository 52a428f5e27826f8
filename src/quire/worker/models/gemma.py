"""Gemma 1 and 2, VaultGemma, and the text model of Gemma 3."""

from __future__ import annotations

import dataclasses

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, common_spec, make_layers


class GemmaForCausalLM(DecoderForCausalLM):
    """Llama with scaled embeddings, norms that store their distance to 1, and the tanh form of GELU, which older
    configs call gelu."""

    def __init__(self, hf: HFConfig) -> None:
        _refuse_bidirectional(hf)
        activation = hf.get("hidden_act", "gelu_pytorch_tanh")
        spec = dataclasses.replace(
            common_spec(hf),
            norm_offset=1.0,
            norm_in_float32=True,
            activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
            embedding_multiplier=hf.hidden_size**0.5,
            rounds_multiplier=True,
        )
        super().__init__(hf, spec)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Every second layer has a window; attention scores are softly capped."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(_gemma_spec(hf), attention_soft_cap=hf.get("attn_logit_softcapping")))


class VaultGemmaForCausalLM(DecoderForCausalLM):
    """Gemma 2 without the norms after attention and MLP."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(_gemma_spec(hf), attention_soft_cap=hf.get("attn_logit_softcapping"), block="pre")
        super().__init__(hf, spec)


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Five layers with a window to one without, each kind with its own rotary base; qk-norm instead of soft caps."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(_gemma_spec(hf), qk_norm="head"))


def _gemma_spec(hf: HFConfig) -> DecoderSpec:
    """Returns the spec that all but the first share. The kind of a layer also selects its rotary embedding."""
    _refuse_bidirectional(hf)
    kinds = layer_kinds(hf)
    return dataclasses.replace(
        common_spec(hf, make_layers(hf, rope=lambda layer: kinds[layer])),
        block="sandwich",
        ropes={kind: hf.rope(kind) for kind in dict.fromkeys(kinds)},
        norm_offset=1.0,
        norm_in_float32=True,
        activation=hf.get("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=float(hf.require("query_pre_attn_scalar")) ** -0.5,
        logits_soft_cap=hf.get("final_logit_softcapping"),
        embedding_multiplier=hf.hidden_size**0.5,
        rounds_multiplier=True,
    )


def _refuse_bidirectional(hf: HFConfig) -> None:
    if hf.get("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{hf.path} asks for bidirectional attention, which is not implemented")
