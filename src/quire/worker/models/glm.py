"""GLM-4 and GLM-4-0414."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, common_spec


class GlmForCausalLM(DecoderForCausalLM):
    """Half of each head rotates, as neighbouring pairs; gates and inner projection are fused in the checkpoint."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _glm_spec(hf))


class Glm4ForCausalLM(DecoderForCausalLM):
    """GLM-4 with norms before and after attention and MLP."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(_glm_spec(hf), block="sandwich"))


def _glm_spec(hf: HFConfig) -> DecoderSpec:
    """Returns the spec of both."""
    spec = common_spec(hf)
    return dataclasses.replace(spec, rope_pairs=True, output_bias=False, mlp_bias=False, fused_gate_up=True)
