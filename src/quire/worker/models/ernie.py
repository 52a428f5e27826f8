"""ERNIE 4.5, dense."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec


class Ernie45ForCausalLM(DecoderForCausalLM):
    """Llama with rotation of neighbouring pairs in float32, and one switch for all biases."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, ernie_spec(hf))


def ernie_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None) -> DecoderSpec:
    """Returns the spec of ERNIE 4.5."""
    bias, spec = bool(hf.get("use_bias", False)), common_spec(hf, layers)
    spec = dataclasses.replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
    return dataclasses.replace(spec, rope_pairs=True, rope_in_float32=True)
