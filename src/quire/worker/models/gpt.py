"""GPT-2 and models like it: GPT-BigCode (StarCoder), GPT-Neo, GPT-J, CodeGen, BioGPT, XGLM."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, common_spec, make_layers


class GPT2ForCausalLM(DecoderForCausalLM):
    """Learned positions, LayerNorm and biases; matrices are stored as [in_features, out_features]."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.get("scale_attn_by_inverse_layer_idx", False):
            raise UnsupportedModelError(f"{hf.path} scales attention by layer, which is not implemented")
        super().__init__(hf, dataclasses.replace(_gpt_spec(hf), fused_qkv="parts", transposed=True))


class GPTBigCodeForCausalLM(DecoderForCausalLM):
    """GPT-2 with one head of keys and values for all queries, unless the config says otherwise."""

    def __init__(self, hf: HFConfig) -> None:
        is_shared = hf.get("multi_query", True)
        super().__init__(hf, dataclasses.replace(_gpt_spec(hf), fused_qkv="parts" if is_shared else "groups"))


class GPTNeoForCausalLM(DecoderForCausalLM):
    """Attention scores are not scaled; every second layer has a window."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(_gpt_spec(hf), qkv_bias=False, attention_scale=1.0))


class GPTJForCausalLM(DecoderForCausalLM):
    """Attention and MLP of one norm, side by side; the first elements of each head rotate, as neighbouring pairs."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _gptj_spec(hf))


class CodeGenForCausalLM(DecoderForCausalLM):
    """GPT-J with queries, keys and values fused by quarters of the heads."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.num_attention_heads % 4:
            raise UnsupportedModelError(f"{hf.path} has {hf.num_attention_heads} heads, which must be a multiple of 4")
        super().__init__(hf, dataclasses.replace(_gptj_spec(hf), fused_qkv="quarters"))


class BioGptForCausalLM(DecoderForCausalLM):
    """Embeddings are scaled, and positions begin at the third row of their table, as in OPT."""

    def __init__(self, hf: HFConfig) -> None:
        scale = hf.hidden_size**0.5 if hf.get("scale_embedding", True) else 1.0
        spec = _gpt_spec(hf)
        spec = dataclasses.replace(
            spec, activation=hf.get("hidden_act", "gelu"), position_offset=2, embedding_multiplier=scale, norm_eps=1e-5
        )
        super().__init__(hf, spec)


class XGLMForCausalLM(DecoderForCausalLM):
    """Embeddings are scaled, and positions are sines and cosines."""

    def __init__(self, hf: HFConfig) -> None:
        scale = hf.hidden_size**0.5 if hf.get("scale_embedding", True) else 1.0
        spec = dataclasses.replace(
            _gpt_spec(hf),
            activation=hf.get("activation_function", "gelu"),
            position_offset=2,
            sinusoidal_positions=True,
            embedding_multiplier=scale,
        )
        super().__init__(hf, spec)


def _inner_size(hf: HFConfig) -> int | None:
    """Returns the inner size of MLPs where the config gives none."""
    return 4 * hf.hidden_size if hf.get("intermediate_size") is None else None


def _gpt_spec(hf: HFConfig) -> DecoderSpec:
    """Returns the spec that all share. Raises UnsupportedModelError for a decoder that reads an encoder's output."""
    if hf.get("add_cross_attention", False):
        raise UnsupportedModelError(f"{hf.path} asks for cross attention, which is not implemented")
    return common_spec(
        hf,
        layers=make_layers(hf, rope=lambda layer: None, intermediate_size=_inner_size(hf)),
        ropes={},
        position_offset=0,
        norm="layer",
        norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=hf.get("activation_function", "gelu_new"),
        attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
    )


def _gptj_spec(hf: HFConfig) -> DecoderSpec:
    rope = dataclasses.replace(hf.rope(), partial_rotary_factor=hf.size("rotary_dim") / hf.head_dim)
    return dataclasses.replace(
        _gpt_spec(hf),
        layers=make_layers(hf, intermediate_size=_inner_size(hf)),
        block="parallel",
        position_offset=None,
        ropes={"rope": rope},
        rope_pairs=True,
        qkv_bias=False,
        output_bias=False,
        head_bias=True,
    )
