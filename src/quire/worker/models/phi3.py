"""Phi-3 and Phi-4."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM, DecoderSpec, uniform_layers


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama with matrices that are fused in the checkpoint, and rotary embeddings of the longrope kind."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(
            hf,
            DecoderSpec(
                layers=uniform_layers(hf),
                ropes={"rope": hf.rope()},
                fused_checkpoint=True,
                activation=hf.get("hidden_act", "silu"),
            ),
        )
