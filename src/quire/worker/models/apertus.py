"""Apertus (Swiss AI)."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class ApertusForCausalLM(DecoderForCausalLM):
    """Llama with norms of queries and keys, and an MLP without gates whose activation has learned numbers."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), qk_norm="head", gated_mlp=False))
