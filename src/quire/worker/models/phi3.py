"""Phi-3 and Phi-4."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama with a window, and matrices that are already fused in the checkpoint."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(common_spec(hf), fused_qkv="parts", fused_gate_up=True))
