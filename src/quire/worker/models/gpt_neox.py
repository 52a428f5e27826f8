"""GPT-NeoX and Pythia, and other decoders with LayerNorm and rotary embedding: Command R (Cohere), Falcon, Jais 2,
Nemotron and Minitron, OLMo, Persimmon, Phi-1 to Phi-2, StableLM, StarCoder2."""

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


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """Attention and MLP, each of its own LayerNorm, side by side; a quarter of each head rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(
            hf,
            block="parallel-two" if hf.get("use_parallel_residual", True) else "pre",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            fused_qkv="groups",
            mlp_bias=True,
            gated_mlp=False,
        )
        super().__init__(hf, spec)


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
    return common_spec(
        hf,
        block="parallel",
        norm="layer",
        norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
        rope_pairs=True,
        rope_in_float32=True,
        rope_rounds_tables=True,
        logits_divisor=1.0 / float(hf.get("logit_scale", 1.0)),
    )


class FalconForCausalLM(DecoderForCausalLM):
    """Attention and MLP side by side, of one LayerNorm or of one each; queries, keys and values are fused."""

    def __init__(self, hf: HFConfig) -> None:
        if hf.get("alibi", False):
            raise UnsupportedModelError(f"{hf.path} asks for ALiBi rounded to bfloat16, which is not implemented")
        is_new, is_parallel = bool(hf.get("new_decoder_architecture", False)), bool(hf.get("parallel_attn", True))
        if is_new and not is_parallel:
            raise UnsupportedModelError(f"{hf.path} has a new decoder without parallel_attn, which does not exist")
        num_norms = hf.get("num_ln_in_parallel_attn", 2) if is_new else 1
        bias = bool(hf.get("bias", False))
        spec = common_spec(
            hf,
            layers=make_layers(hf, intermediate_size=None if hf.get("intermediate_size") else 4 * hf.hidden_size),
            block=("parallel-two" if num_norms == 2 else "parallel") if is_parallel else "pre",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            norm_bias=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            fused_qkv="parts" if hf.get("multi_query", True) and not is_new else "groups",
            gated_mlp=False,
            activation=hf.get("activation", "gelu"),
        )
        super().__init__(hf, spec)


class Jais2ForCausalLM(DecoderForCausalLM):
    """Llama with LayerNorm, biases, and an MLP without gates."""

    def __init__(self, hf: HFConfig) -> None:
        eps = float(hf.get("layer_norm_eps", 1e-5))
        spec = common_spec(hf, norm="layer", norm_eps=eps, norm_bias=True, gated_mlp=False)
        super().__init__(hf, spec)


class NemotronForCausalLM(DecoderForCausalLM):
    """LayerNorms that store w - 1, an MLP without gates, and heads of which half rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(
            hf,
            norm="layer",
            norm_eps=float(hf.get("norm_eps", 1e-5)),
            norm_bias=True,
            norm_offset=1.0,
            gated_mlp=False,
        )
        super().__init__(hf, spec)


class OlmoForCausalLM(DecoderForCausalLM):
    """LayerNorms without weights; queries, keys and values are cut to a range where the config gives one."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(
            hf,
            norm="layer",
            norm_eps=1e-5,
            norm_weight=False,
            clip_qkv=hf.get("clip_qkv"),
            rope_in_float32=True,
        )
        super().__init__(hf, spec)


class PersimmonForCausalLM(DecoderForCausalLM):
    """LayerNorm, also of queries and keys, an MLP without gates, and biases everywhere; half of each head rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(
            hf,
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            qk_norm="head" if hf.get("qk_layernorm", True) else "none",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            fused_qkv="groups",
            gated_mlp=False,
        )
        super().__init__(hf, spec)


class PhiForCausalLM(DecoderForCausalLM):
    """Attention and MLP of one LayerNorm, side by side; biases everywhere, and heads of which half rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(
            hf,
            block="parallel",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            qk_norm="head" if hf.get("qk_layernorm", False) else "none",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
            gated_mlp=False,
        )
        super().__init__(hf, spec)


class StableLmForCausalLM(DecoderForCausalLM):
    """LayerNorm, heads of which a quarter rotates, attention and MLP one after the other or side by side."""

    def __init__(self, hf: HFConfig) -> None:
        spec = common_spec(
            hf,
            block="parallel" if hf.get("use_parallel_residual", False) else "pre",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            qk_norm="listed heads" if hf.get("qk_layernorm", False) else "none",
            qkv_bias=bool(hf.get("use_qkv_bias", False)),
            output_bias=False,
            mlp_bias=False,
        )
        super().__init__(hf, spec)


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """LayerNorm, an MLP without gates, and biases everywhere; all layers have the window, if there is one."""

    def __init__(self, hf: HFConfig) -> None:
        bias = bool(hf.get("use_bias", True))
        spec = common_spec(
            hf,
            norm="layer",
            norm_eps=float(hf.get("norm_epsilon", 1e-5)),
            norm_bias=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            gated_mlp=False,
        )
        super().__init__(hf, spec)
