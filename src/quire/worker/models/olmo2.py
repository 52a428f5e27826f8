"""OLMo 2."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Norms follow attention and MLP; queries and keys are normalised over all heads together."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(hf)
        spec = dataclasses.replace(spec, block="post", qk_norm="full", norm_in_float32=True, rope_in_float32=True)
        super().__init__(hf, spec)
