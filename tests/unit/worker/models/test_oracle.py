"""Every family's logits equal transformers' on the same checkpoint, in every variant its config can ask for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.testing.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model
from tests.rows import each_family

from .oracle import load, quire_logits, transformers_model

Make = Callable[..., Path]
TOLERANCE = 1e-4
TIE = 1e-5
"""Two experts whose logits differ by less may be chosen either way, as a CPU's rounding falls."""


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(length + 1000 * seed).choices(range(6, VOCAB_SIZE), k=length)


def logits_without_ties(oracle: Any, length: int) -> tuple[list[int], torch.Tensor]:
    """Random tokens, and transformers' logits for them, with no tie between the last expert chosen and the next."""
    k = getattr(oracle.config.get_text_config(), "num_experts_per_tok", None)
    gaps: list[float] = []

    def note_gap(gate: Any, inputs: Any, _: Any) -> None:
        best = (inputs[0].flatten(0, -2) @ gate.weight.T).sort(descending=True).values
        gaps.append((best[:, k - 1] - best[:, k]).min().item())

    gates = [m for name, m in oracle.named_modules() if name.endswith("mlp.gate") and hasattr(m, "weight")]
    hooks = [gate.register_forward_hook(note_gap) for gate in gates if k and k < len(gate.weight)]
    for seed in range(10):
        token_ids = random_tokens(length, seed)
        with torch.inference_mode():
            expected = oracle(torch.tensor([token_ids])).logits[0]
        if min(gaps, default=1.0) > TIE:
            break
        gaps.clear()
    for hook in hooks:
        hook.remove()
    return token_ids, expected


kept_model = lru_cache(maxsize=2 * len(FAMILIES))(load)
kept_oracle = lru_cache(maxsize=2 * len(FAMILIES))(transformers_model)
"""Several tests take the families' models one after the other."""


def assert_same_logits(path: Path, *lengths: int, oracle_path: Path | None = None, **fields: Any) -> None:
    """Quire's model of `path` and transformers' of `oracle_path` agree on random prompts of these lengths."""
    compare_logits(kept_model(path, **fields), kept_oracle(oracle_path or path), lengths)


def compare_logits(model: nn.Module, oracle: Any, lengths: Sequence[int]) -> None:
    for length in lengths:
        token_ids, expected = logits_without_ties(oracle, length)
        torch.testing.assert_close(quire_logits(model, token_ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_transformers(family: str, tiny_checkpoint: Make) -> None:
    """The first rows of a long prompt are those of a short one, where no rotary embedding depends on the length."""
    assert_same_logits(tiny_checkpoint(family), 1, 290)


@pytest.fixture(scope="module")
def _matmul_rows_are_independent() -> None:
    """Quire multiplies with q, k and v side by side, transformers one by one: the same bits only if the CPU's matmul
    does not care."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(n, 48, generator=generator).bfloat16() for n in (100, 48, 24))
    if not torch.equal(x @ torch.cat((a, b)).T, torch.cat((x @ a.T, x @ b.T), dim=1)):
        pytest.skip("bfloat16 products depend on the shape of the matrix on this CPU")


LATENT = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"})
OTHER_SUMS = LATENT | frozenset(
    {
        "afmoe",
        "bloom",
        "codegen",
        "llama4_text",
        "cohere",
        "cohere2",
        "falcon",
        "gemma4_text",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "laguna",
        "mpt",
        "nanochat",
        "phi",
        "xglm",
    }
)
"""Families that round at other places in transformers. gpt-oss rounds the scores of attention and of its router, afmoe
and gemma4_text of their routers, granite_swa and granitemoe_swa the answer of attention before its share without the
sink. Attention and MLP are added before the layer's input is (codegen, falcon, gpt_neox, gptj, phi); an activation or
ALiBi is rounded after each operation (bloom, gpt2, gpt_neo, mpt); the sum of experts is scaled after it is rounded
(granitemoe, granitemoeshared, laguna); logits are capped in the model's type (nanochat); queries are scaled before
products (xglm); queries and keys, rotated in float32, have their elements in pairs (cohere); keys and values are made
of latents before attention, which Quire does not (deepseek, glm4_moe_lite); the answers of experts are rounded one by
one (llama4_text)."""


@pytest.mark.parametrize("family", each_family([family for family in FAMILIES if family not in OTHER_SUMS]))
@pytest.mark.usefixtures("_matmul_rows_are_independent")
def test_bfloat16_rounds_where_transformers_does(family: str, tiny_checkpoint: Make) -> None:
    """The two differ by far less than either differs from float32 (only Gemma's soft cap differs: ours is float32)."""
    path, token_ids = tiny_checkpoint(family), random_tokens(100)
    exact = quire_logits(kept_model(path), token_ids)
    ours = quire_logits(load(path, dtype=torch.bfloat16), token_ids)
    with torch.inference_mode():
        theirs = transformers_model(path, torch.bfloat16)(torch.tensor([token_ids])).logits[0].float()
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.05 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("family", each_family(sorted(OTHER_SUMS - {"codegen", "gpt_neo"})))  # their scores are float32
def test_bfloat16_is_as_close_to_float32_as_transformers(family: str, tiny_checkpoint: Make) -> None:
    """Over several texts where there are experts: one that is chosen otherwise changes a text's errors by a lot."""
    path = tiny_checkpoint(family)
    exact_model, model = kept_model(path), load(path, dtype=torch.bfloat16)
    oracle = transformers_model(path, torch.bfloat16)
    errors = torch.zeros(2)
    for length in (200, 190, 180, 170) if family in LATENT | {"afmoe", "granitemoe_swa", "laguna"} else (200,):
        token_ids = random_tokens(length)
        exact = quire_logits(exact_model, token_ids)
        with torch.inference_mode():
            theirs = oracle(torch.tensor([token_ids])).logits[0].float()
        ours = quire_logits(model, token_ids)
        errors += torch.stack([(logits - exact).abs().mean() for logits in (ours, theirs)])
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_the_family_default(family: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    """transformers omits what equals its class default; Quire reads such a file as transformers reads the full one."""
    from transformers import AutoConfig

    path = tiny_checkpoint(family)
    config = json.loads((path / "config.json").read_text())
    defaults = AutoConfig.for_model(family).to_dict()
    kept = {k: v for k, v in config.items() if k in ("model_type", "architectures") or defaults.get(k, object()) != v}
    assert len(kept) < len(config)
    (tmp_path / "config.json").write_text(json.dumps(kept))
    (tmp_path / "model.safetensors").hardlink_to(path / "model.safetensors")
    assert_same_logits(tmp_path, 40, oracle_path=path)


def rope(rope_type: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **params}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)
LONG = [1.0 + 0.5 * i for i in range(6)]
SHORT = [1.0 + 0.1 * i for i in range(6)]
LONGROPE = rope("longrope", short_factor=SHORT, long_factor=LONG)

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("rope llama3", "llama", LLAMA3),
    ("rope linear", "llama", rope("linear", factor=4.0)),
    ("rope dynamic", "llama", rope("dynamic", factor=4.0)),
    ("rope yarn", "qwen2", YARN),
    ("rope yarn mscale", "llama", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.3, beta_fast=16, beta_slow=2)),
    ("rope yarn attention factor", "qwen3", rope("yarn", factor=8.0, attention_factor=1.3, truncate=False)),
    ("rope longrope", "phi3", {**LONGROPE, "original_max_position_embeddings": 1024}),
    ("rope partial", "phi3", rope("default", partial_rotary_factor=0.5)),
    (
        "rope longrope partial",
        "phi3",
        {
            **rope("longrope", short_factor=SHORT[:4], long_factor=LONG[:4], partial_rotary_factor=0.67),
            "original_max_position_embeddings": 1024,
        },
    ),
    ("rope theta", "mistral", rope("default", rope_theta=500.0)),
    ("tied", "llama", {"tie_word_embeddings": True}),
    ("untied", "gemma2", {"tie_word_embeddings": False}),
    ("untied", "opt", {"tie_word_embeddings": False}),
    ("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("biases", "qwen3", {"attention_bias": True}),
    ("biases", "smollm3", {"attention_bias": True, "mlp_bias": True}),
    ("biases", "olmo2", {"attention_bias": True}),
    ("biases", "granite", {"attention_bias": True, "mlp_bias": True}),
    ("biases", "gemma2", {"attention_bias": True}),
    ("wide heads", "llama", {"head_dim": 20}),
    ("one kv head", "llama", {"num_key_value_heads": 1}),
    ("as many kv heads", "olmo2", {"num_key_value_heads": 4}),
    ("no window", "mistral", {"sliding_window": None}),
    ("window", "phi3", {"sliding_window": 24}),
    ("window", "mixtral", {"sliding_window": 24}),
    ("window", "qwen3_moe", {"use_sliding_window": True, "sliding_window": 24}),
    ("window", "smollm3", {"use_sliding_window": True, "sliding_window": 24}),
    ("window off", "qwen2", {"use_sliding_window": False}),
    ("layer types", "qwen3", {"use_sliding_window": True, "sliding_window": 8,
                              "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("nope layers", "smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
    ("no soft caps", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("final soft cap", "gemma3_text", {"final_logit_softcapping": 2.0}),
    ("pattern", "gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
    ("two ropes", "gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0}}}),
    ("no bias, odd shapes", "glm", {"attention_bias": False, "num_attention_heads": 5, "num_key_value_heads": 5,
                                    "head_dim": 80, "vocab_size": 391}),
    ("a quarter rotates", "glm4", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24,
                                   **rope("default", partial_rotary_factor=0.25)}),
    ("no output bias", "seed_oss", {"attention_out_bias": False, "attention_bias": False}),
    ("biases", "helium", {"attention_bias": True, "mlp_bias": True}),
    ("no biases", "ernie4_5", {"use_bias": False, "num_attention_heads": 3, "num_key_value_heads": 3}),
    ("no scaling", "hunyuan_v1_dense", {**rope("default"), "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("pattern", "exaone4", {"layer_types": None, "sliding_window_pattern": 3, "sliding_window": 21}),
    ("no window", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("scaling where full", "olmo3", {"rope_parameters": {
        "full_attention": {**YARN["rope_parameters"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    ("pattern", "olmo3", {"layer_types": None, "sliding_window": 19}),
    ("pattern", "cwm", {"layer_types": None, "sliding_window": 19, "mlp_bias": True}),
    ("small and dense", "gemma4_text", {"enable_moe_block": False, "attention_k_eq_v": False, "num_kv_shared_layers": 3,
                                        "hidden_size_per_layer_input": 24, "use_double_wide_mlp": False}),
    ("large and dense", "gemma4_text", {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "head_dim": 16,
                                        "num_kv_shared_layers": 0, "num_hidden_layers": 7, "layer_types": None}),
    ("experts, biases", "gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "top_k_experts": 3,
                                        "attention_bias": True}),
    ("pattern", "vaultgemma", {"layer_types": None, "attn_logit_softcapping": None}),
    ("older name of gelu", "gemma", {"hidden_act": "gelu"}),
    ("no norms after", "hyperclovax", {"use_post_norm": False}),
    ("no multiplier", "hyperclovax", {"attention_multiplier": None, "attention_bias": True, "mlp_bias": True}),
    ("all windows", "ministral", {"sliding_window": 19, "layer_types": None,
                                  "num_attention_heads": 5, "num_key_value_heads": 5}),
    ("window", "ministral3", {"sliding_window": 27}),
    ("phi-4-mini", "phi3", {
        **rope("longrope", short_factor=SHORT * 2, long_factor=LONG[:6] * 2, partial_rotary_factor=0.75),
        "original_max_position_embeddings": 1024, "num_attention_heads": 3, "num_key_value_heads": 1,
        "hidden_size": 96, "tie_word_embeddings": True}),
    ("norm after", "opt", {"do_layer_norm_before": False}),
    ("no projection", "opt", {"word_embed_proj_dim": 48}),
    ("bare norms, no biases", "opt", {"layer_norm_elementwise_affine": False, "enable_bias": False}),
    ("gelu", "opt", {"activation_function": "gelu"}),
    ("no clip", "olmo", {"clip_qkv": None}),
    ("no qk norm, biases", "cohere", {"use_qk_norm": False, "attention_bias": True}),
    ("pattern", "cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    ("biases", "nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("biases", "arcee", {"attention_bias": True, "mlp_bias": True}),
    ("biases", "apertus", {"attention_bias": True}),
    ("no biases, no window", "starcoder2", {"use_bias": False, "sliding_window": None}),
    ("no qk norm", "phi", {"qk_layernorm": False}),
    ("parallel, no qk norm", "stablelm", {"use_parallel_residual": True, "qk_layernorm": False}),
    ("one after the other, no biases", "gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("unscaled, wide MLP", "gpt2", {"scale_attn_weights": False, "n_inner": None}),
    ("own keys and values", "gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}),
    ("whole heads rotate", "gptj", {"rotary_dim": 12, "tie_word_embeddings": False}),
    ("unscaled embedding", "biogpt", {"scale_embedding": False}),
    ("one kv head", "falcon", {"new_decoder_architecture": False}),
    ("own keys and values", "falcon", {"new_decoder_architecture": False, "multi_query": False, "bias": True,
                                       "num_kv_heads": 4}),
    ("one after the other", "falcon", {"new_decoder_architecture": False, "parallel_attn": False}),
    ("one norm", "falcon", {"num_ln_in_parallel_attn": 1}),
    ("four heads", "bloom", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    ("no clip", "mpt", {"attn_config": {"softmax_scale": 0.2}}),
    ("no qk norm", "persimmon", {"qk_layernorm": False}),
    ("no biases", "jais2", {"attention_bias": False, "mlp_bias": False}),
    ("no norms, growth or chunks, listed layers", "llama4_text", {
        "use_qk_norm": False, "attn_temperature_tuning": False, "attention_chunk_size": 4096,
        "moe_layers": [0, 3], "no_rope_layers": [0, 1, 0, 1], "attention_bias": True}),
    ("yarn", "deepseek_v3", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.9,
                                 original_max_position_embeddings=256)),
    ("halves, whole queries, biases", "deepseek_v3", {"rope_interleave": False, "q_lora_rank": None,
                                                      "attention_bias": True, "norm_topk_prob": False}),
    ("yarn, greedy", "deepseek_v2", {"topk_method": "greedy", "q_lora_rank": 20, **rope(
        "yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.7, original_max_position_embeddings=256)}),
    ("window", "qwen2_moe", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3}),
    ("biases", "ernie4_5_moe", {"use_bias": True, "moe_layer_interval": 2, "tie_word_embeddings": False}),
    ("no groups, two shared experts", "exaone_moe", {"n_group": 1, "topk_group": 1, "num_shared_experts": 2,
                                                   "first_k_dense_replace": 2, "norm_topk_prob": False}),
    ("no factors", "minicpm3", {"scale_depth": None, "dim_model_base": None, "q_lora_rank": None, "v_head_dim": None}),
    ("sigmoid, sum, rms norms", "cohere2_moe", {
        "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-3,
        "prefix_dense_sliding_window_pattern": 2, "attention_bias": True, "prefix_dense_intermediate_size": None}),
    ("pattern", "afmoe", {"layer_types": None, "global_attn_every_n_layers": 3, "num_dense_layers": 2,
                          "mup_enabled": False}),
    ("gate for each element, equal heads", "laguna", {
        "gating": "per-element", "num_attention_heads_per_layer": None, "moe_router_logit_softcapping": 0.0,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
    ("longrope, window", "phimoe", {
        **rope("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=1024,
               short_mscale=1.2, long_mscale=1.3), "sliding_window": 24}),
    ("no cap, biases", "nanochat", {"final_logit_softcapping": None, "attention_bias": True}),
    ("no scale", "xglm", {"scale_embedding": False, "activation_function": "relu"}),
    ("no shared expert, pattern", "granitemoe_swa", {"shared_intermediate_size": 0, "layer_rope_theta": None,
                                                     "layer_types": None, "attention_bias": True}),
    ("halves", "youtu", {"rope_interleave": False, "attention_bias": True}),
    ("sparse step", "qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides"), [v[1:] for v in VARIANTS], ids=[f"{v[1]}: {v[0]}" for v in VARIANTS])
def test_a_variant_has_the_logits_of_transformers(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """The oracle is the model that wrote the checkpoint."""
    oracle = make_tiny_model(family, **overrides).eval()
    oracle.save_pretrained(tmp_path)
    oracle.set_attn_implementation("eager")
    compare_logits(load(tmp_path), oracle, (5, 200) if "rope_parameters" in overrides else (200,))


def test_longrope_takes_the_long_factors_when_the_context_is_long(tiny_checkpoint: Make) -> None:
    path = tiny_checkpoint("phi3", **LONGROPE, original_max_position_embeddings=128)
    assert_same_logits(path, 129, 300)  # transformers chooses by the sequence, Quire by the engine's context
    assert_same_logits(path, 5, 128, max_model_len=128)


def test_dynamic_scaling_is_that_of_the_whole_context(tiny_checkpoint: Make) -> None:
    path = tiny_checkpoint("llama", **rope("dynamic", factor=4.0), max_position_embeddings=64)
    assert_same_logits(path, 5, 64)
    assert_same_logits(path, 200, max_model_len=200)  # transformers scales for the sequence it sees: 200 tokens


OLD_SPELLINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", rope("default", rope_theta=500.0), {"rope_theta": 500.0}),
    (
        "llama",
        LLAMA3,
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_type": "llama3",
            },
        },
    ),
    ("llama", rope("linear", factor=4.0), {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    (
        "qwen2",
        YARN,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ),
    (
        "phi3",
        {**LONGROPE, "original_max_position_embeddings": 1024},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
            "original_max_position_embeddings": 1024,
        },
    ),
    ("phi3", rope("default", partial_rotary_factor=0.5), {"partial_rotary_factor": 0.5}),
    ("smollm3", {}, {"rope_scaling": None}),
    (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN["rope_parameters"], "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            }
        },
        {"rope_scaling": YARN["rope_parameters"] | {"rope_theta": 500000.0}, "rope_theta": 500000.0},
    ),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
            }
        },
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
]


@pytest.mark.parametrize(
    ("family", "new", "old"), OLD_SPELLINGS, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(OLD_SPELLINGS)]
)
def test_old_spelling_of_rotary_parameters(
    family: str, new: dict[str, Any], old: dict[str, Any], tiny_checkpoint: Make, tmp_path: Path
) -> None:
    """A config.json as transformers 4 wrote it means the same."""
    path = tiny_checkpoint(family, **new)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | old))
    (tmp_path / "model.safetensors").hardlink_to(path / "model.safetensors")
    assert_same_logits(tmp_path, 200, oracle_path=path)


@pytest.mark.parametrize(
    "family", ["qwen2", "smollm3", "gemma2", "gemma3_text", "cwm", "exaone4", "olmo3", "vaultgemma"]
)
def test_layer_types_follow_from_older_keys(family: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    """Configs of transformers 4 do not list the layers' kinds."""
    overrides: dict[str, Any] = {"num_hidden_layers": 6, "sliding_window": 16, "use_sliding_window": True}
    path = tiny_checkpoint(family, layer_types=None, **overrides)
    config = json.loads((path / "config.json").read_text())
    kinds = config.pop("layer_types")
    config.pop("no_rope_layers", None)
    assert "sliding_attention" in kinds
    assert "full_attention" in kinds
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(path / "model.safetensors")
    assert_same_logits(tmp_path, 100, oracle_path=path)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scales attention by layer"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "adds a layer's input after its norm"),
        ("falcon", {"alibi": True}, "ALiBi rounded to bfloat16"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "without parallel_attn"),
        ("mpt", {"attn_config": {"alibi": False}}, "has alibi = False; only True is implemented"),
        ("afmoe", {"attention_bias": True}, "biases of queries, but not of gates"),
        ("mpt", {"no_bias": False}, "has no_bias = False; only True is implemented"),
    ],
)
def test_what_is_not_implemented_is_refused(
    family: str, overrides: dict[str, Any], message: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family)
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | overrides))
    (tmp_path / "model.safetensors").hardlink_to(path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)
