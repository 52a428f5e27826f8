"""Gemma 1 and 2, VaultGemma, and the text models of Gemma 3 and 4."""

from __future__ import annotations

import dataclasses

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import FULL_ATTENTION, HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec, make_layers


class GemmaForCausalLM(DecoderForCausalLM):
    """Llama with scaled embeddings, norms that store their distance to 1, and the tanh form of GELU, which older
    configs call gelu."""

    def __init__(self, hf: HFConfig) -> None:
        _refuse_bidirectional(hf)
        activation = hf.get("hidden_act", "gelu_pytorch_tanh")
        spec = common_spec(
            hf,
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


class Gemma4ForCausalLM(DecoderForCausalLM):
    """Gemma 3 with normed values, wide heads in the layers without a window, and last layers that read the keys and
    values of earlier ones; by size of the model experts beside the MLP, or an input of each layer's own."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": among parts of an image
            raise UnsupportedModelError(f"{hf.path} asks for bidirectional attention, which is not implemented")
        kinds = layer_kinds(hf)
        each = zip(kinds, make_layers(hf, rope=kinds.__getitem__), strict=True)
        layers = tuple(_gemma4_layer(hf, kind, layer) for kind, layer in each)
        rope_dims = {kinds[i]: layer.head_dim or hf.head_dim for i, layer in enumerate(layers)}
        if any((layer.head_dim or hf.head_dim) != rope_dims[kinds[i]] for i, layer in enumerate(layers)):
            raise UnsupportedModelError(f"{hf.path} has heads of several sizes in layers of one type")
        spec = common_spec(
            hf,
            layers,
            block="gemma4",
            ropes={kind: hf.rope(kind) for kind in rope_dims},
            rope_dims=rope_dims,
            norm_in_float32=True,
            qk_norm="head",
            unit_value_norm=True,
            attention_scale=1.0,
            activation=hf.get("hidden_activation"),
            layer_input_size=hf.size("hidden_size_per_layer_input") if hf.get("hidden_size_per_layer_input") else None,
            logits_soft_cap=hf.get("final_logit_softcapping"),
            embedding_multiplier=hf.hidden_size**0.5,
            rounds_multiplier=True,
        )
        super().__init__(hf, spec)


def _gemma4_layer(hf: HFConfig, kind: str, layer: LayerSpec) -> LayerSpec:
    """Returns the layer with Gemma 4's own fields: values that are keys, a wider MLP, experts beside it."""
    is_wide = layer.kv_from is not None and hf.get("use_double_wide_mlp", False)
    return dataclasses.replace(
        layer,
        values_are_keys=kind == FULL_ATTENTION and layer.kv_from is None and bool(hf.get("attention_k_eq_v", False)),
        intermediate_size=2 * hf.size("intermediate_size") if is_wide else None,
        moe_beside=_gemma4_experts(hf) if hf.get("enable_moe_block", False) else None,
    )


def _gemma4_experts(hf: HFConfig) -> MoESpec:
    return MoESpec(
        num_experts=hf.size("num_experts"),
        expert_size=hf.size("moe_intermediate_size"),
        router=RouterSpec(num_experts_per_token=hf.size("top_k_experts"), normalize=True),
        layout="stacked",
        router_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        logits_divisor=hf.hidden_size**0.5,
        expert_scale=True,
    )


def _gemma_spec(hf: HFConfig) -> DecoderSpec:
    """Returns the spec that all but the first share. The kind of a layer also selects its rotary embedding."""
    _refuse_bidirectional(hf)
    kinds = layer_kinds(hf)
    return common_spec(
        hf,
        make_layers(hf, rope=lambda layer: kinds[layer]),
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
