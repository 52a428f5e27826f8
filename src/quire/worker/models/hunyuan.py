"""Hunyuan v1, dense."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head after their rotation."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, hunyuan_spec(hf))


def hunyuan_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None) -> DecoderSpec:
    """Returns the spec of Hunyuan v1. Its "dynamic" scaling with `alpha` is a larger base for all lengths."""
    return dataclasses.replace(common_spec(hf, layers), qk_norm="head", qk_norm_after_rope=True)
