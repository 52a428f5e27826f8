"""nanochat."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class NanoChatForCausalLM(DecoderForCausalLM):
    """Norms without weights, one of them behind the embedding; heads rotate backwards, and are normed after it."""

    def __init__(self, hf: HFConfig) -> None:
        layers = (dataclasses.replace(layer, unit_qk_norm=True) for layer in make_layers(hf))
        spec = dataclasses.replace(
            common_spec(hf, tuple(layers)),
            embedding_norm=True,
            norm_weight=False,
            rope_backwards=True,
            gated_mlp=False,
            logits_soft_cap=hf.get("final_logit_softcapping"),
        )
        super().__init__(hf, spec)
