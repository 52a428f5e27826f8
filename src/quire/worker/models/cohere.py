"""Command R, Command R7B, and its successors with experts (Cohere)."""

from __future__ import annotations

import dataclasses

from quire.config.attention_layout import attention_windows
from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.experts import has_experts
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec, make_layers


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


class Cohere2MoeForCausalLM(DecoderForCausalLM):
    """Cohere 2 with experts, after dense layers, all of which may rotate."""

    def __init__(self, hf: HFConfig) -> None:
        score, strategy = (
            hf.get("expert_selection_fn", "softmax"),
            hf.get("shared_expert_combination_strategy", "average"),
        )
        if score not in ("softmax", "sigmoid") or strategy not in ("average", "sum"):
            raise UnsupportedModelError(f"{hf.path} asks for experts by {score!r} and {strategy!r}: not implemented")
        num_shared, size = int(hf.get("num_shared_experts", 0)), hf.size("intermediate_size")
        share = 2.0 if num_shared and strategy == "average" else 1.0
        moe = MoESpec(
            num_experts=hf.size("num_experts"),
            expert_size=size,
            router=RouterSpec(
                num_experts_per_token=hf.size("num_experts_per_tok"),
                normalize=score == "softmax" or bool(hf.get("norm_topk_prob", True)),
                score=score,
                factor=1.0 / share,
                weights_in_float32=False,
            ),
            shared=SharedExpertSpec(size=num_shared * size, divisor=share) if num_shared else None,
        )
        windows, dense_rotate = attention_windows(hf), hf.get("prefix_dense_sliding_window_pattern", 1) == 1
        rotates = [window or (dense_rotate and not has_experts(hf, i)) for i, window in enumerate(windows)]
        layers = make_layers(
            hf,
            rope=lambda i: "rope" if rotates[i] else None,
            moe=lambda i: moe if has_experts(hf, i) else None,
            intermediate_size=hf.get("prefix_dense_intermediate_size"),
        )
        spec = dataclasses.replace(_cohere_spec(hf), layers=layers)
        if hf.get("rms_norm_eps") is not None:
            spec = dataclasses.replace(spec, norm="rms", norm_eps=float(hf.get("rms_norm_eps")))
        super().__init__(hf, spec)


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
