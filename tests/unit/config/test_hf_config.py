"""config.json, in every spelling, and what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.family_defaults import FAMILY_DEFAULTS
from quire.config.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig, RopeConfig
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError


def config(**raw: Any) -> HFConfig:
    return HFConfig(raw, Path("config.json"))


def test_reads_a_file_with_overrides_on_top(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_size": 8, "vocab_size": 5}))
    hf = HFConfig.from_dir(tmp_path, {"hidden_size": 16})
    assert (hf.architecture, hf.hidden_size, hf.vocab_size) == ("X", 16, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "not valid JSON"),
        ("[1]", "holds a list"),
        ("\xff", "not UTF-8 text"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_file_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=message) as caught:
        HFConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_and_absence() -> None:
    """Absence means the family's default, null means none."""
    assert config(model_type="mistral").get("sliding_window") == FAMILY_DEFAULTS["mistral"]["sliding_window"]
    assert config(model_type="mistral", sliding_window=None).get("sliding_window") is None
    assert config(model_type="mistral", sliding_window=None).get("sliding_window", 7) == 7
    assert config(model_type="never heard of").get("sliding_window") is None
    assert config(model_type="gemma2").tie_word_embeddings
    assert not config(model_type="llama").tie_word_embeddings


def test_sizes_that_are_left_out_are_derived() -> None:
    hf = config(hidden_size=64, num_attention_heads=4)
    assert (hf.head_dim, hf.num_key_value_heads) == (16, 4)
    assert config(hidden_size=64, num_attention_heads=4, head_dim=32).head_dim == 32
    assert config(num_attention_heads=4, num_key_value_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize("value", [0, -1, 1.5, "12", True, [4]])
def test_a_size_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json has 'hidden_size' = .*positive integer"):
        _ = config(hidden_size=value).hidden_size


def test_heads_must_share_kv_heads_evenly() -> None:
    with pytest.raises(ModelLoadError, match="8 attention heads, no multiple of its 3 kv heads"):
        _ = config(num_attention_heads=8, num_key_value_heads=3).num_key_value_heads


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json has no 'vocab_size', which XForCausalLM needs"):
        _ = config(architectures=["XForCausalLM"]).vocab_size


def test_dtype_and_special_tokens() -> None:
    assert config(torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert config(dtype="float32", torch_dtype="float16").dtype == "float32"
    assert config().dtype is None
    assert config(eos_token_id=[2, 3]).eos_token_ids == [2, 3]
    assert config(eos_token_id=2).eos_token_ids == [2]
    assert config().eos_token_ids == []
    assert (config(bos_token_id=0).bos_token_id, config().bos_token_id) == (0, None)


ROPES: list[tuple[dict[str, Any], RopeConfig]] = [
    ({}, RopeConfig()),
    ({"rope_theta": 5e5}, RopeConfig(rope_theta=5e5)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(rope_theta=5e5)),
    ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}, RopeConfig(rope_theta=5e5)),
    ({"partial_rotary_factor": 0.5}, RopeConfig(partial_rotary_factor=0.5)),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, RopeConfig(partial_rotary_factor=0.25)),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", params={"factor": 2})),
    (
        {"rope_parameters": {"factor": 4}, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
        RopeConfig("linear", params={"factor": 2}),
    ),
    (
        {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        RopeConfig("yarn", params={"factor": 4.0, "original_max_position_embeddings": 4096}),
    ),
    (
        {
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
        },
        RopeConfig("yarn", params={"factor": 4.0, "original_max_position_embeddings": 1024}),
    ),
    (
        {"model_type": "phi3", "original_max_position_embeddings": 1024, "rope_scaling": {"type": "su"}},
        RopeConfig("longrope", params={"factor": 4.0, "original_max_position_embeddings": 1024}),
    ),
    ({"model_type": "smollm3"}, RopeConfig(rope_theta=2e6)),
]


@pytest.mark.parametrize(("raw", "expected"), ROPES)
def test_rope_in_every_spelling(raw: dict[str, Any], expected: RopeConfig) -> None:
    assert config(**raw).rope() == expected


NESTED = {
    FULL_ATTENTION: {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
    SLIDING_ATTENTION: {"rope_theta": 2e3},
}


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": NESTED},
        {"rope_theta": 1e6, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8}},
    ],
)
def test_rope_per_layer_type(raw: dict[str, Any]) -> None:
    hf = config(model_type="gemma3_text", **raw)
    assert hf.rope(FULL_ATTENTION) == RopeConfig("linear", 1e6, params={"factor": 8})
    assert hf.rope(SLIDING_ATTENTION) == RopeConfig(rope_theta=2e3)


def test_gemma3_defaults_per_layer_type() -> None:
    hf = config(model_type="gemma3_text")
    assert (hf.rope(FULL_ATTENTION).rope_theta, hf.rope(SLIDING_ATTENTION).rope_theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    "bad",
    [
        {"rope_scaling": [1]},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_theta": -1},
        {"partial_rotary_factor": "all"},
    ],
)
def test_malformed_rope_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json has rotary parameter"):
        config(**bad).rope()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": YARN}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": YARN}, 4096),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
    ],
)
def test_the_context_length_follows_from_the_config(raw: dict[str, Any], expected: int) -> None:
    assert config(**raw).context_len == expected
    assert ModelConfig(hf_config=config(**raw)).model_len == expected
    assert HFConfig(raw, Path(), max_model_len=77).context_len == 77
