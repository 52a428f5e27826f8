"""EXAONE 4."""

from __future__ import annotations

import dataclasses

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class Exaone4ForCausalLM(DecoderForCausalLM):
    """Norms follow attention and MLP; queries and keys are normalised head by head. In a model with windows the layers
    without one do not rotate."""

    def __init__(self, hf: HFConfig) -> None:
        kinds, has_windows = layer_kinds(hf), hf.get("sliding_window") is not None
        layers = make_layers(hf, rope=lambda i: None if has_windows and kinds[i] != SLIDING_ATTENTION else "rope")
        spec = dataclasses.replace(common_spec(hf, layers), block="post", qk_norm="head")
        super().__init__(hf, dataclasses.replace(spec, qkv_bias=False, output_bias=False, mlp_bias=False))
