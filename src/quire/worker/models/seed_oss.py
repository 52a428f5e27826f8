"""Seed-OSS."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class SeedOssForCausalLM(DecoderForCausalLM):
    """Llama with a switch of its own for the bias of the attention's output."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, output_bias=bool(hf.get("attention_out_bias", False))))
