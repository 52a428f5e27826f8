"""Falcon."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class FalconForCausalLM(DecoderForCausalLM):
    """Attention and MLP side by side, of one LayerNorm or of one each; queries, keys and values are fused."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.get("alibi", False):
            raise UnsupportedModelError(f"{hf.path} asks for ALiBi rounded to bfloat16, which is not implemented")
        is_new, is_parallel = bool(hf.get("new_decoder_architecture", False)), bool(hf.get("parallel_attn", True))
        if is_new and not is_parallel:
            raise UnsupportedModelError(f"{hf.path} has a new decoder without parallel_attn, which does not exist")
        num_norms = hf.get("num_ln_in_parallel_attn", 2) if is_new else 1
        bias = bool(hf.get("bias", False))
        spec = dataclasses.replace(
            common_spec(hf),
            layers=make_layers(hf, intermediate_size=None if hf.get("intermediate_size") else 4 * hf.hidden_size),
            block=("parallel-two" if num_norms == 2 else "parallel") if is_parallel else "pre",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            norm_bias=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            fused_qkv="parts" if hf.get("multi_query", True) and not is_new else "groups",
            gated_mlp=False,
            activation=hf.get("activation", "gelu"),
        )
        super().__init__(hf, spec)
