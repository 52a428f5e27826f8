"""SmolLM3."""

from __future__ import annotations

from quire.config.attention_layout import rotates
from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """A decoder in which some layers do not rotate (NoPE, Yang et al. 2025); only those may have a window."""

    def __init__(self, hf: HFConfig) -> None:
        layers = make_layers(hf, rope=lambda layer: "rope" if rotates(hf, layer) else None)
        super().__init__(hf, common_spec(hf, layers))
