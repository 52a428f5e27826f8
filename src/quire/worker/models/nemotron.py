"""Nemotron and Minitron."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class NemotronForCausalLM(DecoderForCausalLM):
    """LayerNorms that store w - 1, an MLP without gates, and heads of which half rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            norm="layer",
            norm_eps=float(hf.get("norm_eps", 1e-5)),
            norm_bias=True,
            norm_offset=1.0,
            gated_mlp=False,
        )
        super().__init__(hf, spec)
