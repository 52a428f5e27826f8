"""OLMo 2 and 3, and OLMo's mixtures of experts."""

from __future__ import annotations

from typing import Any

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.experts import softmax_experts
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec, make_layers


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Norms follow attention and MLP; queries and keys are normalised over all heads together."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _olmo_spec(hf))


class Olmo3ForCausalLM(DecoderForCausalLM):
    """OLMo 2 in which three of four layers have a window; a scaling of rotation is that of the others only."""

    def __init__(self, hf: HFConfig) -> None:
        kinds = layer_kinds(hf)
        layers = make_layers(hf, rope=kinds.__getitem__)
        super().__init__(hf, _olmo_spec(hf, layers, ropes={kind: hf.rope(kind) for kind in dict.fromkeys(kinds)}))


class FlexOlmoForCausalLM(DecoderForCausalLM):
    """OLMo 2 with experts in every layer."""

    def __init__(self, hf: HFConfig) -> None:
        moe = softmax_experts(hf, size="intermediate_size")
        super().__init__(hf, _olmo_spec(hf, make_layers(hf, moe=lambda layer: moe)))


class OlmoeForCausalLM(DecoderForCausalLM):
    """Llama with experts in every layer; queries and keys are normalised over all heads together."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.get("clip_qkv") is not None:
            raise UnsupportedModelError(f"{hf.path} has clip_qkv {hf.get('clip_qkv')!r}, which is not implemented here")
        moe = softmax_experts(hf, size="intermediate_size")
        super().__init__(hf, common_spec(hf, make_layers(hf, moe=lambda layer: moe), qk_norm="full"))


def _olmo_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None, **changes: Any) -> DecoderSpec:
    """Returns the spec that both generations share."""
    changes |= {"norm_in_float32": True, "rope_in_float32": True}
    return common_spec(hf, layers, block="post", qk_norm="full", **changes)
