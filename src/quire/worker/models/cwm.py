"""Code World Model."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class CwmForCausalLM(DecoderForCausalLM):
    """Llama 3 in which three of four layers have a window."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), qkv_bias=False, output_bias=False))
