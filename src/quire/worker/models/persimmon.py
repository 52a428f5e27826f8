"""Persimmon."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class PersimmonForCausalLM(DecoderForCausalLM):
    """LayerNorm, also of queries and keys, an MLP without gates, and biases everywhere; half of each head rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            qk_norm="head" if hf.get("qk_layernorm", True) else "none",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            fused_qkv="groups",
            gated_mlp=False,
        )
        super().__init__(hf, spec)
