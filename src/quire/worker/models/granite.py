"""Granite 3 with and without experts, and HyperCLOVA X, which has the same factors."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec, make_layers


class GraniteForCausalLM(DecoderForCausalLM):
    """Llama with a factor on embeddings, attention scores, residuals and logits."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _granite_spec(hf))


class GraniteSWAForCausalLM(DecoderForCausalLM):
    """Granite in which three of four layers have a window, with attention sinks and a rotary base per layer; 0: the
    layer does not rotate."""

    def __init__(self, hf: HFConfig, moe: MoESpec | None = None) -> None:
        rope, thetas = hf.rope(), hf.get("layer_rope_theta")
        thetas = [rope.rope_theta] * hf.num_hidden_layers if thetas is None else thetas
        rope_of = [f"theta {theta:g}".replace(".", "_") if theta else None for theta in thetas]
        layers = make_layers(hf, rope=rope_of.__getitem__, moe=lambda layer: moe)
        names = {layer.rope: float(theta) for layer, theta in zip(layers, thetas, strict=True) if layer.rope}
        ropes = {name: dataclasses.replace(rope, rope_theta=theta) for name, theta in names.items()}
        super().__init__(hf, dataclasses.replace(_granite_spec(hf), layers=layers, ropes=ropes, attention_sinks=True))


class GraniteMoeSWAForCausalLM(GraniteSWAForCausalLM):
    """Granite with windows, and experts in every layer."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _experts(hf))


class GraniteMoeForCausalLM(DecoderForCausalLM):
    """Granite with experts; GraniteMoeShared adds an expert for all tokens."""

    def __init__(self, hf: HFConfig) -> None:
        moe = _experts(hf)
        super().__init__(hf, _granite_spec(hf, make_layers(hf, moe=lambda layer: moe)))


class HyperCLOVAXForCausalLM(DecoderForCausalLM):
    """Granite whose logits are multiplied instead of divided; most checkpoints also norm what they add."""

    def __init__(self, hf: HFConfig) -> None:
        spec, norms_after = _granite_spec(hf), bool(hf.get("use_post_norm", True))
        block = "scaled-sandwich" if norms_after else "pre"
        super().__init__(hf, dataclasses.replace(spec, block=block, logits_divisor=1.0 / spec.logits_divisor))
        if not norms_after:
            self.names = ()


def _experts(hf: HFConfig) -> MoESpec:
    size = int(hf.get("shared_intermediate_size", 0))
    return MoESpec(
        num_experts=hf.size("num_local_experts"),
        expert_size=hf.size("intermediate_size"),
        router=RouterSpec(
            num_experts_per_token=hf.size("num_experts_per_tok"), normalize=True, weights_in_float32=False
        ),
        layout="stacked",
        shared=SharedExpertSpec(size=size, is_fused=True) if size else None,
    )


def _granite_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None) -> DecoderSpec:
    """Returns the spec that all Granite models share: its four factors."""
    scale = hf.get("attention_multiplier")
    return common_spec(
        hf,
        layers,
        attention_scale=None if scale is None else float(scale),
        embedding_multiplier=float(hf.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(hf.get("residual_multiplier", 1.0)),
        logits_divisor=float(hf.get("logits_scaling", 1.0)),
    )
