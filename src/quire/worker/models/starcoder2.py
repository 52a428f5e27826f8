"""StarCoder2."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """LayerNorm, an MLP without gates, and biases everywhere; all layers have the window, if there is one."""

    def __init__(self, hf: HFConfig) -> None:
        bias = bool(hf.get("use_bias", True))
        spec = dataclasses.replace(
            common_spec(hf),
            norm="layer",
            norm_eps=float(hf.get("norm_epsilon", 1e-5)),
            norm_bias=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            gated_mlp=False,
        )
        super().__init__(hf, spec)
