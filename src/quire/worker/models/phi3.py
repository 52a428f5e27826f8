"""Phi-3 and Phi-4."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM, LayerSpec, common_spec, sliding_window_of


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama with a window, and matrices that are already fused in the checkpoint."""

    def __init__(self, hf: HFConfig) -> None:
        layer = LayerSpec(sliding_window=sliding_window_of(hf))
        spec = common_spec(hf, (layer,) * hf.num_hidden_layers)
        super().__init__(hf, dataclasses.replace(spec, fused_checkpoint=True))
