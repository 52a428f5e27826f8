"""Jais 2."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class Jais2ForCausalLM(DecoderForCausalLM):
    """Llama with LayerNorm, biases, and an MLP without gates."""

    def __init__(self, hf: HFConfig) -> None:
        eps = float(hf.get("layer_norm_eps", 1e-5))
        spec = dataclasses.replace(common_spec(hf), norm="layer", norm_eps=eps, norm_bias=True, gated_mlp=False)
        super().__init__(hf, spec)
