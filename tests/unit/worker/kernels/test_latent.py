"""The kernels of latent attention beside their reference: near it, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import LatentSizes, NormSpec, RotaryAngles

from ..conftest import MakeKernels

SIZES = LatentSizes(query_rank=None, rank=40, plain=10, rotary=6, value=12)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "n", "k", "tail"), [(3, 70, 45, 6), (5, 24, 128, 0), (1, 130, 33, 3)])
def test_a_linear_layer_for_each_head(
    make_kernels: MakeKernels, heads: int, n: int, k: int, tail: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(heads)
    weight = torch.randn(heads, k, n, generator=generator).to(dtype).transpose(1, 2)
    x = torch.randn(300, heads, tail + k, generator=generator).to(dtype)
    behind = x[:, :, :tail] if tail else None
    expected = TORCH_KERNELS.batched_linear(weight)(x[:, :, tail:], behind)
    kernel = make_kernels(3).batched_linear(weight)
    found = kernel(x[:, :, tail:], behind)
    assert found.shape == (300, heads, n + tail)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * k**0.5)
    for row in (0, 1, 299):
        alone = kernel(x[row : row + 1, :, tail:], None if behind is None else behind[row : row + 1])
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotates", [True, False])
def test_the_latent_is_normed_and_the_rest_rotated(
    make_kernels: MakeKernels, rotates: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(7, size, generator=generator).to(dtype) for size in (3 * 16, 46))
    norm = torch.randn(SIZES.rank, generator=generator).to(dtype)
    turns = torch.randn(50, 3, generator=generator)
    angles = RotaryAngles(turns.cos().to(dtype), turns.sin().to(dtype), torch.arange(40, 47)) if rotates else None
    expected = TORCH_KERNELS.latent(SIZES, norm, NormSpec(eps=1e-3))(query, key, angles)
    found = make_kernels(1).latent(SIZES, norm, NormSpec(eps=1e-3))(query.clone(), key.clone(), angles)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(found[0], query) != rotates
