"""Command R and Command R7B (Cohere)."""

from __future__ import annotations

import dataclasses

from quire.config.attention_layout import attention_windows
from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec


class CohereForCausalLM(DecoderForCausalLM):
    """Attention and MLP of one norm, side by side; heads may have LayerNorms with weights of their own."""

    def __init__(self, hf: HFConfig) -> None:
        has_norms = hf.get("use_qk_norm", False)
        super().__init__(hf, dataclasses.replace(_cohere_spec(hf), qk_norm="heads" if has_norms else "none"))


class Cohere2ForCausalLM(DecoderForCausalLM):
    """Layers with a window rotate, those without do not."""

    def __init__(self, hf: HFConfig) -> None:
        layers = tuple(
            LayerSpec(sliding_window=window, rope=None if window is None else "rope")
            for window in attention_windows(hf)
        )
        super().__init__(hf, dataclasses.replace(_cohere_spec(hf), layers=layers))


def _cohere_spec(hf: HFConfig) -> DecoderSpec:
    """Returns the spec that both generations share."""
    return dataclasses.replace(
        common_spec(hf),
        block="parallel",
        norm="layer",
        norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
        rope_pairs=True,
        rope_in_float32=True,
        rope_rounds_tables=True,
        logits_divisor=1.0 / float(hf.get("logit_scale", 1.0)),
    )
