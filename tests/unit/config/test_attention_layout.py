"""Which layers have a window: every rule by example. That transformers agrees is the oracle tests' business."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.attention_layout import (
    MIXED,
    UNIFORM,
    CachedLayer,
    attention_windows,
    cached_layers,
    kv_sources,
    layer_configs,
    layer_kinds,
    rotates,
)
from quire.config.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from quire.config.tensor_names import names_of, renamed
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.worker.models.registry import MODELS

W = 16
TYPES = [FULL_ATTENTION, SLIDING_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION, FULL_ATTENTION, FULL_ATTENTION]


def config(architecture: str, **raw: Any) -> HFConfig:
    """Six layers, a window of 16."""
    return HFConfig(
        {"architectures": [architecture], "num_hidden_layers": 6, "sliding_window": W, **raw}, Path("config.json")
    )


@pytest.mark.parametrize(
    ("architecture", "raw", "expected"),
    [
        ("LlamaForCausalLM", {}, [None] * 6),
        ("SomeOtherForCausalLM", {"layer_types": TYPES}, [None] * 6),
        ("MistralForCausalLM", {"layer_types": TYPES}, [W] * 6),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 6),
        ("Phi3ForCausalLM", {}, [W] * 6),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": False}, [None] * 6),
        ("Gemma2ForCausalLM", {}, [W, None] * 3),
        ("Gemma2ForCausalLM", {"layer_types": TYPES}, [None, W, W, None, None, None]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, [W, W, None] * 2),
        ("Gemma4ForCausalLM", {"num_hidden_layers": 8}, [W] * 5 + [None, W, None]),
        ("Gemma4ForCausalLM", {"layer_types": [SLIDING_ATTENTION] * 6}, [W] * 5 + [None]),
        ("CwmForCausalLM", {}, [None, W, W, W, None, W]),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": 4}, [W, W, W, None, W, W]),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLG"}, [W, W, None] * 2),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LG", "num_hidden_layers": 5}, [W, None, W, None, None]),
        ("Exaone4ForCausalLM", {"sliding_window": None}, [None] * 6),
        ("MinistralForCausalLM", {}, [W] * 6),
        ("Ministral3ForCausalLM", {}, [W] * 6),
        ("Olmo3ForCausalLM", {}, [W, W, W, None, W, W]),
        ("VaultGemmaForCausalLM", {}, [W, None] * 3),
        ("Qwen2ForCausalLM", {"max_window_layers": 4}, [None] * 4 + [W] * 2),
        ("Qwen3ForCausalLM", {"max_window_layers": 6}, [None] * 6),
        ("Qwen3ForCausalLM", {"use_sliding_window": False, "layer_types": TYPES}, [None] * 6),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}, [None, W] * 3),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1, 1, 1, 1, 0]}, [W, None, None, None, None, W]),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1] * 6, "layer_types": TYPES}, [None, W, W, None, None, None]),
    ],
)
def test_windows_follow_from_the_architecture(
    architecture: str, raw: dict[str, Any], expected: list[int | None]
) -> None:
    assert attention_windows(config(architecture, **raw)) == expected


def test_a_list_for_more_layers_is_cut() -> None:
    assert layer_kinds(config("Gemma2ForCausalLM", layer_types=TYPES, num_hidden_layers=2)) == TYPES[:2]


def test_the_kind_of_a_layer_stays_when_windows_are_off() -> None:
    """Gemma 3's layers rotate by kind."""
    hf = config("Gemma3ForCausalLM", sliding_window_pattern=3, sliding_window=None)
    assert layer_kinds(hf) == [SLIDING_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION] * 2
    assert attention_windows(hf) == [None] * 6


def test_heads_and_keys_of_other_layers() -> None:
    """Gemma 4: the full layers have heads of their own, the last layers read the keys of earlier ones of their kind."""
    raw = {
        "hidden_size": 96,
        "num_attention_heads": 12,
        "head_dim": 8,
        "num_key_value_heads": 6,
        "num_kv_shared_layers": 2,
    }
    raw |= {"layer_types": [SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION] * 2}
    old = config("Gemma4ForCausalLM", **raw, global_head_dim=16, num_global_key_value_heads=3)
    sliding, full = CachedLayer(6, 8, W), CachedLayer(6, 16)
    assert kv_sources(old) == [None, None, None, None, 1, 1]
    assert cached_layers(old) == {0: sliding, 1: full, 2: sliding, 3: sliding}
    assert cached_layers(replace(old, raw={**old.raw, "attention_k_eq_v": True}))[1] == CachedLayer(3, 16)
    new = config("Gemma4ForCausalLM", **raw, per_layer_config={"1": {"head_dim": 16, "num_key_value_heads": 2}})
    assert cached_layers(new)[1] == CachedLayer(2, 16)
    with pytest.raises(ModelLoadError, match=r"num_kv_shared_layers = 5, with no .*full_attention"):
        kv_sources(config("Gemma4ForCausalLM", num_kv_shared_layers=5))
    with pytest.raises(UnsupportedModelError, match=r"per_layer_config .*; only \['head_dim', 'num_attention_heads', "):
        layer_configs(config("Gemma4ForCausalLM", per_layer_config={"1": {"sliding_window": 3}}))


def test_which_layers_rotate() -> None:
    assert [rotates(config("SmolLM3ForCausalLM", no_rope_layer_interval=3), i) for i in range(4)] == [1, 1, 0, 1]


def test_what_cannot_be_laid_out() -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json has layer_types \['full_attention'\], .* list of 6"):
        layer_kinds(config("Qwen3ForCausalLM", layer_types=[FULL_ATTENTION]))
    with pytest.raises(UnsupportedModelError, match="layer of type 'linear_attention', which is not implemented"):
        layer_kinds(config("Qwen3ForCausalLM", layer_types=["linear_attention"] * 6))
    with pytest.raises(ModelLoadError, match=r"no_rope_layers \[1\], which must be a list of 6"):
        attention_windows(config("SmolLM3ForCausalLM", no_rope_layers=[1]))
    with pytest.raises(ModelLoadError, match="'sliding_window' = 0, which must be a positive integer"):
        attention_windows(config("MistralForCausalLM", sliding_window=0))


def test_every_row_is_a_model() -> None:
    assert set(MODELS) >= UNIFORM | MIXED.keys()
    assert not UNIFORM & MIXED.keys()


def test_checkpoints_may_hold_keys_of_layers_that_read_anothers() -> None:
    """Gemma 4's do; they are not read."""
    hf = config("Gemma4ForCausalLM", layer_types=[FULL_ATTENTION] * 6, num_kv_shared_layers=2)
    name = "model.layers.{}.self_attn.k_proj.weight"
    assert [renamed(name.format(layer), names_of(hf)) for layer in (3, 4)] == [name.format(3), None]
