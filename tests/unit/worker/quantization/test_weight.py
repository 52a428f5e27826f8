"""The value object, and rounding plain weights to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.quantization import group_size_for, scheme_of
from quire.worker.quantization.weight import QuantizedWeight, quantize, quantize_int4, quantize_int8
from tests.seeds import examples


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_integers_stand_for_scaled_differences_from_their_zeros() -> None:
    weight = QuantizedWeight(
        bits=4,
        values=torch.tensor([[-8, 7, 3, 0, 1]], dtype=torch.int8),
        scales=torch.tensor([[0.5, -2.0, 10.0]]),
        zeros=torch.tensor([[1, -3, 8]], dtype=torch.int16),
        group_size=2,
    )
    assert weight.dequantize().tolist() == [[-4.5, 3.0, -12.0, -6.0, -70.0]]
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert weight.shape == (1, 5)
    assert weight.num_bytes == 2 + 3 * 8


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 99))
@settings(max_examples=examples(60))
def test_int8_is_off_by_half_a_step_at_most(rows: int, columns: int, seed: int) -> None:
    weight = randn(rows, columns, seed=seed)
    quantized = quantize_int8(weight)
    assert quantized.values.abs().amax() <= 127
    assert ((quantized.dequantize() - weight).abs() <= quantized.scales * 0.5001).all()
    assert (quantized.values.abs().amax(dim=1) == 127).all(), "the largest of each row uses the whole range"


@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([8, 16, 32, 128]), st.integers(0, 99))
@settings(max_examples=examples(60))
def test_int4_is_off_by_a_step_at_most(rows: int, columns: int, group_size: int, seed: int) -> None:
    """The error is half a step, except at the far end of the shorter side, where there is no 8."""
    weight = randn(rows, columns, seed=seed)
    quantized = quantize_int4(weight, group_size)
    steps = quantized.scales.abs().repeat_interleave(group_size, dim=1)[:, :columns]
    error = (quantized.dequantize() - weight).abs()
    assert (error <= steps * 1.0001).all()
    assert ((error <= steps * 0.5001) | (quantized.values == 7)).all()
    assert quantized.values.amin() >= -8
    assert (quantized.values == -8).any(dim=1).all()


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_zeros_stay_zeros(method: str) -> None:
    weight = torch.zeros(3, 64)
    weight[1, 5] = 2.0
    quantized = quantize(weight, scheme_of(method))
    assert torch.equal(quantized.dequantize(), weight)
    tiny = torch.full((1, 32), 1e-42)
    assert quantize(tiny, scheme_of(method)).dequantize().isfinite().all()


def test_the_group_size_divides_the_row() -> None:
    assert [group_size_for(n) for n in (4096, 192, 96, 688, 7)] == [128, 64, 32, 32, 32]


def test_stacked_parts_keep_their_values() -> None:
    upper, lower = quantize_int4(randn(3, 64), 32), quantize_int4(randn(5, 64, seed=1), 32)
    both = QuantizedWeight.stack([upper, lower])
    assert torch.equal(both.dequantize(), torch.cat([upper.dequantize(), lower.dequantize()]))
    assert both.kind == upper.kind != quantize_int8(randn(3, 64)).kind
