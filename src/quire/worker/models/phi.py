"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class PhiForCausalLM(DecoderForCausalLM):
    """Attention and MLP of one LayerNorm, side by side; biases everywhere, and heads of which half rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            block="parallel",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            qk_norm="head" if hf.get("qk_layernorm", False) else "none",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
            gated_mlp=False,
        )
        super().__init__(hf, spec)
