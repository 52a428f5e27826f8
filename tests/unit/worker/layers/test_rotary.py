"""Frequencies equal transformers' to the last bit; rotating is a rotation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.config.hf_config import HFConfig, RopeConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.reference import rotate
from quire.worker.layers.rotary import RotaryEmbedding, inverse_frequencies

HEAD_DIM, TRAINED_LEN = 16, 512

PARAMS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "default": st.just({}),
    "linear": st.fixed_dictionaries({"factor": st.floats(1, 32)}),
    "dynamic": st.fixed_dictionaries({"factor": st.floats(1, 32)}),
    "proportional": st.fixed_dictionaries(
        {"partial_rotary_factor": st.floats(0.1, 1)}, optional={"factor": st.floats(1, 32)}
    ),
    "llama3": st.fixed_dictionaries(
        {
            "factor": st.floats(1, 32),
            "low_freq_factor": st.floats(0.5, 2),
            "high_freq_factor": st.floats(2.5, 8),
            "original_max_position_embeddings": st.integers(32, 8192),
        }
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": st.floats(1, 32), "original_max_position_embeddings": st.integers(32, 8192)},
        optional={
            "attention_factor": st.floats(0.5, 2),
            "beta_fast": st.integers(16, 64),
            "beta_slow": st.integers(1, 8),
            "mscale": st.floats(0.1, 2),
            "mscale_all_dim": st.floats(0.1, 2),
            "truncate": st.booleans(),
        },
    ),
    "longrope": st.fixed_dictionaries(
        {
            "short_factor": st.lists(st.floats(1, 4), min_size=8, max_size=8),
            "long_factor": st.lists(st.floats(4, 64), min_size=8, max_size=8),
            "original_max_position_embeddings": st.integers(32, 2048),
        },
        optional={"factor": st.floats(1, 32), "attention_factor": st.floats(0.5, 2)},
    ),
}


@given(st.data())
@pytest.mark.parametrize("rope_type", PARAMS)
def test_frequencies_are_those_of_transformers(rope_type: str, data: st.DataObject) -> None:
    from pathlib import Path

    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta = data.draw(st.floats(1000, 1e7))
    context_len = data.draw(st.integers(16, 8192))
    raw = {"rope_type": rope_type, "rope_theta": theta, **data.draw(PARAMS[rope_type])}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": TRAINED_LEN}
    config = LlamaConfig(**sizes, rope_parameters=dict(raw))
    if rope_type == "default":
        expected, expected_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=context_len)

    rope = HFConfig({**sizes, "rope_parameters": raw}, Path()).rope()
    found, factor = inverse_frequencies(rope, HEAD_DIM, TRAINED_LEN, context_len)
    assert torch.equal(found, expected)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def embedding(context_len: int = 64, partial: float = 1.0) -> RotaryEmbedding:
    rope = RotaryEmbedding(RopeConfig(partial_rotary_factor=partial), HEAD_DIM, TRAINED_LEN, context_len)
    rope.allocate(torch.device("cpu"), torch.float32)
    return rope


def test_tables_have_a_row_per_position() -> None:
    rope = embedding(context_len=10, partial=0.5)
    assert rope.cos.shape == rope.sin.shape == (10, HEAD_DIM // 4)
    cos, sin = rope(torch.tensor([9, 0, 9])).rows
    assert cos.shape == (3, 1, HEAD_DIM // 4)
    assert torch.equal(cos[0], cos[2])
    assert torch.equal(cos[1], torch.ones(1, 4))
    assert torch.equal(sin[1], torch.zeros(1, 4))


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rope, generator = embedding(), torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=generator)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        return (
            rotate(q, *rope(torch.tensor([q_position])).rows) * rotate(k, *rope(torch.tensor([k_position])).rows)
        ).sum()

    torch.testing.assert_close(rotate(q, *rope(torch.tensor([17])).rows).norm(), q.norm())
    torch.testing.assert_close(score(20, 13), score(47, 40))
    assert (score(20, 13) - score(20, 14)).abs() > 1e-3


def test_a_partial_rotation_leaves_the_rest_alone() -> None:
    x = torch.randn(2, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *embedding(partial=0.5)(torch.tensor([3, 4])).rows)
    assert torch.equal(turned[..., HEAD_DIM // 2 :], x[..., HEAD_DIM // 2 :])
    assert not torch.equal(turned[..., : HEAD_DIM // 2], x[..., : HEAD_DIM // 2])


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeConfig("mrope"), "type 'mrope' is not implemented; known are default, linear"),
        (RopeConfig("linear"), "type 'linear' needs 'factor'"),
        (
            RopeConfig(
                "longrope",
                params={
                    "factor": 1,
                    "original_max_position_embeddings": 8,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                },
            ),
            "needs 8 factors",
        ),
        (
            RopeConfig(
                "longrope",
                params={"factor": 1, "original_max_position_embeddings": 8, "short_factor": "x", "long_factor": "x"},
            ),
            "needs 8 factors",
        ),
    ],
)
def test_what_cannot_be_computed(rope: RopeConfig, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        RotaryEmbedding(rope, HEAD_DIM, TRAINED_LEN, TRAINED_LEN)


def test_is_built_on_the_meta_device_without_losing_its_frequencies() -> None:
    with torch.device("meta"):
        rope = RotaryEmbedding(RopeConfig(), HEAD_DIM, TRAINED_LEN, 8)
    assert rope.inv_freq.device.type == "cpu"
    rope.allocate(torch.device("cpu"), torch.bfloat16)
    assert rope.cos.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("linear", {"factor": 1e-320}),
        ("llama3", {"factor": 8.0, "low_freq_factor": "low", "high_freq_factor": 4.0}),
        ("yarn", {"factor": 8.0, "beta_fast": -1.0}),
        ("yarn", {"factor": 8.0, "beta_fast": math.inf}),
        ("yarn", {"factor": 8.0, "attention_factor": math.nan}),
        ("longrope", {"factor": 8.0, "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}),
        ("longrope", {"factor": 8.0, "short_factor": ["a"] * 8, "long_factor": [1.0] * 8}),
    ],
)
def test_parameters_without_finite_angles_are_refused_in_one_line(kind: str, params: dict[str, Any]) -> None:
    rope = RopeConfig(kind, params={"original_max_position_embeddings": 1 << 20, **params})
    with pytest.raises(UnsupportedModelError, match=f"rotary embedding of type '{kind}'") as error:
        inverse_frequencies(rope, 16, 64, 128)
    assert "\n" not in str(error.value)
