"""Llama 2 and 3.x, everything published in their format, and families that differ from it in a switch or two: AFM
(Arcee), Apertus, Aria's text decoder, Code World Model, EXAONE 4, GLM-4 and GLM-4-0414, Helium, Mistral, Ministral and
Mixtral, nanochat, Phi-3 and Phi-4, SmolLM3."""

from __future__ import annotations

import dataclasses

from quire.config.attention_layout import layer_kinds, rotates
from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.worker.attention.backend import ScaleGrowth
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, common_spec, make_layers


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder, with biases where the config asks for them."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf))


class ApertusForCausalLM(DecoderForCausalLM):
    """Llama with norms of queries and keys, and an MLP without gates whose activation has learned numbers."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, qk_norm="head", gated_mlp=False))


class ArceeForCausalLM(DecoderForCausalLM):
    """Llama with an MLP without gates, whose activation is relu squared."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, gated_mlp=False))


class AriaTextForCausalLM(DecoderForCausalLM):
    """Llama with experts in every layer, and shared ones."""

    def __init__(self, hf: HFConfig) -> None:
        size = hf.size("intermediate_size")
        moe = MoESpec(
            num_experts=hf.size("moe_num_experts"),
            expert_size=size,
            router=RouterSpec(num_experts_per_token=hf.size("moe_topk"), normalize=True, weights_in_float32=False),
            layout="transposed",
            shared=SharedExpertSpec(
                size=size * hf.size("moe_num_shared_experts"), bias=bool(hf.get("mlp_bias", False))
            ),
        )
        super().__init__(hf, common_spec(hf, make_layers(hf, moe=lambda layer: moe)))


class CwmForCausalLM(DecoderForCausalLM):
    """Llama 3 in which three of four layers have a window."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, qkv_bias=False, output_bias=False))


class Exaone4ForCausalLM(DecoderForCausalLM):
    """Norms follow attention and MLP; queries and keys are normalised head by head. In a model with windows the layers
    without one do not rotate."""

    def __init__(self, hf: HFConfig) -> None:
        kinds, has_windows = layer_kinds(hf), hf.get("sliding_window") is not None
        layers = make_layers(hf, rope=lambda i: None if has_windows and kinds[i] != SLIDING_ATTENTION else "rope")
        no_biases = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
        super().__init__(hf, common_spec(hf, layers, block="post", qk_norm="head", **no_biases))


class GlmForCausalLM(DecoderForCausalLM):
    """Half of each head rotates, as neighbouring pairs; gates and inner projection are fused in the checkpoint."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, _glm_spec(hf))


class Glm4ForCausalLM(DecoderForCausalLM):
    """GLM-4 with norms before and after attention and MLP."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, dataclasses.replace(_glm_spec(hf), block="sandwich"))


def _glm_spec(hf: HFConfig) -> DecoderSpec:
    """Returns the spec that GLM-4 and GLM-4-0414 share."""
    return common_spec(hf, rope_pairs=True, output_bias=False, mlp_bias=False, fused_gate_up=True)


class HeliumForCausalLM(DecoderForCausalLM):
    """Llama with rotation of neighbouring pairs; no bias on the attention's output, whatever the others have."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(hf, rope_pairs=True, output_bias=False, norm_in_float32=True)
        super().__init__(hf, spec)


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: all layers have the window, if there is one."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf))


class MinistralForCausalLM(MistralForCausalLM):
    """Mistral in which layers without a window may be listed."""


class Ministral3ForCausalLM(DecoderForCausalLM):
    """Mistral whose attention scores grow slowly with the position beyond the trained length."""

    def __init__(self, hf: HFConfig) -> None:
        params = hf.rope().params
        factor = float(params.get("llama_4_scaling_beta") or 0.0)
        growth = ScaleGrowth(factor, int(params["original_max_position_embeddings"])) if factor else None
        layers = [dataclasses.replace(layer, scale_growth=growth) for layer in make_layers(hf)]
        super().__init__(hf, common_spec(hf, tuple(layers), qkv_bias=False, output_bias=False))


class MixtralForCausalLM(DecoderForCausalLM):
    """Mistral with experts in every layer."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(num_experts_per_token=hf.size("num_experts_per_tok"), normalize=True),
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        super().__init__(hf, common_spec(hf, make_layers(hf, moe=lambda layer: moe)))


class NanoChatForCausalLM(DecoderForCausalLM):
    """Norms without weights, one of them behind the embedding; heads rotate backwards, and are normed after it."""

    def __init__(self, hf: HFConfig) -> None:
        layers = (dataclasses.replace(layer, unit_qk_norm=True) for layer in make_layers(hf))
        spec = common_spec(
            hf,
            tuple(layers),
            embedding_norm=True,
            norm_weight=False,
            rope_backwards=True,
            gated_mlp=False,
            logits_soft_cap=hf.get("final_logit_softcapping"),
        )
        super().__init__(hf, spec)


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama whose checkpoints have one matrix for queries, keys and values, and one for gate_proj and up_proj."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, fused_qkv="parts", fused_gate_up=True))


class PhimoeForCausalLM(DecoderForCausalLM):
    """LayerNorms, and two experts chosen one after the other."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(
                num_experts_per_token=hf.size("num_experts_per_tok"),
                normalize=False,
                score="sparsemixer",
                threshold=2 * float(hf.get("router_jitter_noise", 0.01)),
                weights_in_float32=False,
            ),
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        spec = common_spec(
            hf,
            make_layers(hf, moe=lambda layer: moe),
            norm="layer",
            norm_bias=True,
            head_bias=bool(hf.get("lm_head_bias", False)),
        )
        super().__init__(hf, spec)


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """A decoder in which some layers do not rotate (NoPE, Yang et al. 2025); only those may have a window."""

    def __init__(self, hf: HFConfig) -> None:
        layers = make_layers(hf, rope=lambda layer: "rope" if rotates(hf, layer) else None)
        super().__init__(hf, common_spec(hf, layers))
