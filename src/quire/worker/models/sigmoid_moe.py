"""Families on ordinary attention whose experts are chosen as DeepSeek V3's: GLM-4.5 and 4.6, dots.llm1, Solar Open,
EXAONE with experts, Hunyuan 3, MiniMax-M2, Trinity, Laguna."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.experts import has_experts, sigmoid_experts
from quire.worker.models.spec import DecoderSpec, OutputGate, common_spec, make_layers


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """Half of each head rotates; queries and keys may be normalised head by head."""

    def __init__(self, hf: HFConfig) -> None:
        qk_norm = "head" if hf.get("use_qk_norm", False) else "none"
        super().__init__(hf, _spec(hf, sigmoid_experts(hf), qk_norm=qk_norm, output_bias=False))


class SolarOpenForCausalLM(DecoderForCausalLM):
    """Llama's attention."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _spec(hf, sigmoid_experts(hf)))


class Dots1ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head; layers may have windows."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _spec(hf, sigmoid_experts(hf), qk_norm="head"))


class ExaoneMoeForCausalLM(DecoderForCausalLM):
    """EXAONE 4's attention between norms. In a model with windows the layers without one do not rotate."""

    def __init__(self, hf: HFConfig) -> None:
        kinds, has_windows = layer_kinds(hf), hf.get("sliding_window") is not None
        moe = sigmoid_experts(hf, count="num_experts", shared="num_shared_experts")
        ropes = [None if has_windows and kind != SLIDING_ATTENTION else "rope" for kind in kinds]
        super().__init__(hf, _spec(hf, moe, ropes.__getitem__, qk_norm="head", qkv_bias=False, output_bias=False))


class HYV3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head."""

    def __init__(self, hf: HFConfig) -> None:
        keys = {"count": "num_experts", "shared": "num_shared_experts", "factor": "router_scaling_factor"}
        super().__init__(hf, _spec(hf, sigmoid_experts(hf, **keys), qk_norm="head"))


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised over all heads together; the first `rotary_dim` elements of each rotate."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(num_experts_per_token=hf.size("num_experts_per_tok"), normalize=True, score="sigmoid"),
            gate_name="w1",
            up_name="w3",
            down_name="w2",
            choice_bias=True,
        )
        rope = hf.rope()
        if hf.get("rotary_dim") is not None:
            rope = dataclasses.replace(rope, partial_rotary_factor=hf.size("rotary_dim") / hf.head_dim)
        super().__init__(hf, _spec(hf, moe, qk_norm="full", ropes={"rope": rope}))


class AfmoeForCausalLM(DecoderForCausalLM):
    """Arcee's Trinity: norms before and after, gates on the answer of attention; layers without a window do not
    rotate."""

    def __init__(self, hf: HFConfig) -> None:
        kinds = layer_kinds(hf)
        moe = sigmoid_experts(hf, count="num_experts", shared="num_shared_experts", factor="route_scale")
        spec = _spec(
            hf,
            moe,
            lambda i: "rope" if kinds[i] == SLIDING_ATTENTION else None,
            qk_norm="head",
            block="sandwich",
            output_gate=OutputGate(),
            embedding_multiplier=hf.hidden_size**0.5 if hf.get("mup_enabled", False) else 1.0,
        )
        super().__init__(hf, spec)


class LagunaForCausalLM(DecoderForCausalLM):
    """Heads by layer, a gate for each head's answer, and a rotary embedding for each kind of layer."""

    def __init__(self, hf: HFConfig) -> None:
        kinds = layer_kinds(hf)
        moe = MoESpec(
            num_experts=hf.size("num_experts"),
            expert_size=hf.size("moe_intermediate_size"),
            router=RouterSpec(
                num_experts_per_token=hf.size("num_experts_per_tok"),
                normalize=True,
                score="sigmoid",
                factor=float(hf.get("moe_routed_scaling_factor", 1.0)),
            ),
            choice_bias=True,
            logits_soft_cap=float(hf.get("moe_router_logit_softcapping", 0.0)) or None,
            scales_inputs=bool(hf.get("moe_apply_router_weight_on_input", False)),
            shared=SharedExpertSpec(size=hf.size("shared_expert_intermediate_size")),
        )
        gate = OutputGate("softplus", per_head=hf.get("gating", True) in (True, "per-head"))
        ropes = {kind: hf.rope(kind) for kind in dict.fromkeys(kinds)}
        super().__init__(hf, _spec(hf, moe, kinds.__getitem__, qk_norm="head", output_gate=gate, ropes=ropes))


def _spec(
    hf: HFConfig, moe: MoESpec, rope: Callable[[int], str | None] = lambda layer: "rope", **changes: Any
) -> DecoderSpec:
    """Returns Llama's spec with experts in the layers that have them. `rope`: see `make_layers`."""
    layers = make_layers(hf, rope=rope, moe=lambda layer: moe if has_experts(hf, layer) else None)
    return common_spec(hf, layers, **changes)
