"""Seed-OSS."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class SeedOssForCausalLM(DecoderForCausalLM):
    """Llama with a switch of its own for the bias of the attention's output."""

    def __init__(self, hf: HFConfig) -> None:
        output_bias = bool(hf.get("attention_out_bias", False))
        super().__init__(hf, dataclasses.replace(common_spec(hf), output_bias=output_bias))
