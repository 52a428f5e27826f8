"""AFM (Arcee)."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class ArceeForCausalLM(DecoderForCausalLM):
    """Llama with an MLP without gates, whose activation is relu squared."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), gated_mlp=False))
