"""BLOOM and MPT: attention whose scores fall with the distance (ALiBi, Press et al. 2022)."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.attention.layer import alibi_slopes
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class BloomForCausalLM(DecoderForCausalLM):
    """A norm follows the embedding; queries, keys and values are fused head by head."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.get("apply_residual_connection_post_layernorm", False):
            raise UnsupportedModelError(f"{hf.path} adds a layer's input after its norm, which is not implemented")
        spec = common_spec(
            hf,
            layers=make_layers(hf, rope=lambda layer: None, intermediate_size=4 * hf.hidden_size),
            ropes={},
            alibi_slopes=alibi_slopes(hf.num_attention_heads),
            embedding_norm=True,
            norm="layer",
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            norm_bias=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            fused_qkv="groups",
            gated_mlp=False,
            activation="gelu_pytorch_tanh",
        )
        super().__init__(hf, spec)


class MptForCausalLM(DecoderForCausalLM):
    """LayerNorm without bias, and no other bias either."""

    def __init__(self, hf: HFConfig) -> None:
        attention = hf.get("attn_config", {})
        found = {**attention, **{key: hf.get(key) for key in ("logit_scale", "no_bias")}}
        for key, value in {
            "alibi": True,
            "logit_scale": None,
            "no_bias": True,
            "prefix_lm": False,
            "qk_ln": False,
        }.items():
            if found.get(key) not in (None, value):
                raise UnsupportedModelError(f"{hf.path} has {key} = {found[key]}; only {value} is implemented")
        size = int(hf.get("expansion_ratio", 4) * hf.hidden_size)
        spec = common_spec(
            hf,
            layers=make_layers(hf, rope=lambda layer: None, intermediate_size=size),
            ropes={},
            alibi_slopes=alibi_slopes(hf.num_attention_heads, attention.get("alibi_bias_max") or 8),
            norm="layer",
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            clip_qkv=attention.get("clip_qkv"),
            fused_qkv="parts",
            gated_mlp=False,
            activation="gelu",
            attention_scale=attention.get("softmax_scale"),
        )
        super().__init__(hf, spec)
