"""Qwen2 and 2.5, Qwen3, their mixtures of experts, and Mellum 2."""

from __future__ import annotations

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import HFConfig
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.experts import has_experts, softmax_experts
from quire.worker.models.spec import LayerSpec, common_spec, make_layers


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on queries, keys and values, and nowhere else."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, qkv_bias=True))


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are normalised head by head."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, qk_norm="head"))


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen2 with experts, and one for all tokens whose answer is weighted, too."""

    def __init__(self, hf: HFConfig) -> None:
        shared = SharedExpertSpec(size=hf.size("shared_expert_intermediate_size"), is_weighted=True)
        layers = _sparse_layers(hf, softmax_experts(hf, shared=shared))
        super().__init__(hf, common_spec(hf, layers, qkv_bias=bool(hf.get("qkv_bias", True))))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3 with experts."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, _sparse_layers(hf, softmax_experts(hf)), qk_norm="head"))


class MellumForCausalLM(DecoderForCausalLM):
    """Qwen3 with experts and windows; layers with and without a window rotate by bases of their own."""

    def __init__(self, hf: HFConfig) -> None:
        kinds, moe = layer_kinds(hf), softmax_experts(hf)
        layers = make_layers(hf, rope=lambda i: kinds[i], moe=lambda i: moe if has_experts(hf, i) else None)
        ropes = {kind: hf.rope(kind) for kind in dict.fromkeys(kinds)}
        super().__init__(hf, common_spec(hf, layers, qk_norm="head", ropes=ropes))


def _sparse_layers(hf: HFConfig, moe: MoESpec) -> tuple[LayerSpec, ...]:
    """Returns layers of which each `decoder_sparse_step`-th has experts that is not one of `mlp_only_layers`."""
    step, plain = hf.size("decoder_sparse_step"), hf.get("mlp_only_layers", [])
    return make_layers(hf, moe=lambda i: moe if i not in plain and (i + 1) % step == 0 else None)
