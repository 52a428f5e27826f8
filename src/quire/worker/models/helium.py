"""Helium."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class HeliumForCausalLM(DecoderForCausalLM):
    """Llama with rotation of neighbouring pairs; no bias on the attention's output, whatever the others have."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(common_spec(hf), rope_pairs=True, output_bias=False, norm_in_float32=True)
        super().__init__(hf, spec)
