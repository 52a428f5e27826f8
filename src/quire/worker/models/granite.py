"""Granite 3."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class GraniteForCausalLM(DecoderForCausalLM):
    """Llama with a factor on embeddings, attention scores, residuals and logits."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            block="scaled",
            attention_scale=float(hf.get("attention_multiplier", 1.0)),
            embedding_multiplier=float(hf.get("embedding_multiplier", 1.0)),
            residual_multiplier=float(hf.get("residual_multiplier", 1.0)),
            logits_divisor=float(hf.get("logits_scaling", 1.0)),
        )
        super().__init__(hf, spec)
