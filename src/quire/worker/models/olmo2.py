"""OLMo 2 and 3."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, common_spec, make_layers


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Norms follow attention and MLP; queries and keys are normalised over all heads together."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _olmo_spec(common_spec(hf)))


class Olmo3ForCausalLM(DecoderForCausalLM):
    """OLMo 2 in which three of four layers have a window; a scaling of rotation is that of the others only."""

    def __init__(self, hf: HFConfig) -> None:
        kinds = layer_kinds(hf)
        spec = common_spec(hf, make_layers(hf, rope=lambda layer: kinds[layer]))
        super().__init__(hf, _olmo_spec(spec, ropes={kind: hf.rope(kind) for kind in dict.fromkeys(kinds)}))


def _olmo_spec(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """Returns the spec with what both generations share."""
    changes |= {"norm_in_float32": True, "rope_in_float32": True}
    return dataclasses.replace(spec, block="post", qk_norm="full", **changes)
