"""OLMo."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class OlmoForCausalLM(DecoderForCausalLM):
    """LayerNorms without weights; queries, keys and values are cut to a range where the config gives one."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            norm="layer",
            norm_eps=1e-5,
            norm_weight=False,
            clip_qkv=hf.get("clip_qkv"),
            rope_in_float32=True,
        )
        super().__init__(hf, spec)
