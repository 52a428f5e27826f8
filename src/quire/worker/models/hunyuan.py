"""Hunyuan v1, with and without experts."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec, make_layers


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head after their rotation."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, hunyuan_spec(hf))


class HunYuanMoEV1ForCausalLM(DecoderForCausalLM):
    """Experts in every layer, and one for all tokens. The number of choices may differ by layer."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, hunyuan_spec(hf, make_layers(hf, moe=lambda layer: _experts(hf, layer))))


def _experts(hf: HFConfig, layer: int) -> MoESpec:
    size, numbers = hf.size("intermediate_size"), (hf.get("num_experts"), hf.get("moe_topk"))
    if not all(isinstance(number, int) or len(number) == hf.num_hidden_layers for number in numbers):
        raise ModelLoadError(f"{hf.path}: num_experts and moe_topk must be numbers, or lists of one for each layer")
    num_experts, chosen = (number if isinstance(number, int) else int(number[layer]) for number in numbers)
    return MoESpec(
        num_experts=num_experts,
        expert_size=size,
        router=RouterSpec(num_experts_per_token=chosen, normalize=True),
        router_in_float32=True,
        shared=SharedExpertSpec(size=size),
    )


def hunyuan_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None) -> DecoderSpec:
    """Returns the spec of Hunyuan v1. Its "dynamic" scaling with `alpha` is a larger base for all lengths."""
    return common_spec(hf, layers, qk_norm="head", qk_norm_after_rope=True)
