"""Native linear layers: near the float64 result, and each row has the same bits in any company, on any threads."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.native import Matrix
from quire.worker.kernels.reference import TORCH_KERNELS, linear
from quire.worker.kernels.specs import LOGITS, PLAIN, LinearSpec

from ..conftest import MakeKernels

SHAPES = [(64, 64), (100, 48), (17, 80), (160, 352), (256, 30), (33, 7), (1, 32)]
"""(outputs, inputs): whole panels and parts of them, inputs that need padding, an odd number of them."""
MAX_ROWS = 300
"""More than go through a panel at once."""
SPECS = [
    PLAIN,
    LOGITS,
    LinearSpec(activation="relu"),
    LinearSpec(activation="silu", gated=True),
    LinearSpec(activation="gelu", gated=True),
    LinearSpec(activation="gelu_pytorch_tanh", gated=True),
    LinearSpec(float32_output=True, divisor=3.0, soft_cap=2.0),
    LinearSpec(clip=0.5),
]
DTYPES = [torch.bfloat16, torch.float32]


def randn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight(n: int, k: int, spec: LinearSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = 2 * n if spec.gated else n
    return (randn(1, rows, k, dtype=torch.float32) * k**-0.5).to(dtype), randn(2, rows, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_the_float64_reference(
    make_kernels: MakeKernels, n: int, k: int, spec: LinearSpec, dtype: torch.dtype
) -> None:
    weight, bias = make_weight(n, k, spec, dtype)
    x, residual = randn(3, 21, k, dtype=dtype), randn(4, 21, n, dtype=dtype)
    for b, r in ((None, None), (bias, None), (bias, residual)):
        y = make_kernels(1).linear(weight, b, spec)(x, r)
        wide = (None if t is None else t.double() for t in (r, weight, b))
        wide_residual, wide_weight, wide_bias = wide
        plain = LinearSpec(
            activation=spec.activation, gated=spec.gated, divisor=spec.divisor, soft_cap=spec.soft_cap, clip=spec.clip
        )
        expected = linear(x.double(), wide_residual, weight=wide_weight, bias=wide_bias, spec=plain)
        assert y.dtype == (torch.float32 if spec.float32_output else dtype)
        tolerance = 2**-8 if y.dtype == torch.bfloat16 else 3e-6
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_are_no_work(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    weight, bias = make_weight(64, 80, PLAIN, dtype)
    for num_threads in (1, 2):
        kernel = make_kernels(num_threads).linear(weight, bias, PLAIN)
        assert kernel(randn(1, 0, 80, dtype=dtype), None).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [PLAIN, SPECS[3]], ids=str)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (192, 1100)])
def test_a_row_has_the_same_bits_in_any_company(
    make_kernels: MakeKernels, n: int, k: int, spec: LinearSpec, dtype: torch.dtype
) -> None:
    weight, bias = make_weight(n, k, spec, dtype)
    x, residual = randn(5, MAX_ROWS, k, dtype=dtype), randn(6, MAX_ROWS, n, dtype=dtype)
    alone = torch.cat(
        [make_kernels(1).linear(weight, bias, spec)(x[i : i + 1], residual[i : i + 1]) for i in range(0, MAX_ROWS, 7)]
    )
    rng = random.Random(n * k)
    for num_threads in (1, 2, 3):
        kernel = make_kernels(num_threads).linear(weight, bias, spec)
        whole = kernel(x, residual)
        assert torch.equal(whole[::7], alone)
        for rows in (1, 2, 5, 6, 7, 15, 16, 17, 31, 33, 64, 255):
            start = rng.randint(0, MAX_ROWS - rows)
            some = slice(start, start + rows)
            assert torch.equal(kernel(x[some], residual[some]), whole[some]), (num_threads, rows)


def test_rows_may_be_strided(make_kernels: MakeKernels) -> None:
    weight, _ = make_weight(48, 64, PLAIN, torch.bfloat16)
    kernel = make_kernels(2).linear(weight, None)
    wide = randn(7, 9, 200, dtype=torch.bfloat16)
    assert torch.equal(kernel(wide[:, 100:164]), kernel(wide[:, 100:164].contiguous()))
    assert torch.equal(kernel(wide[:, 10:138:2]), kernel(wide[:, 10:138:2].contiguous()))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpacking_gives_the_weight_back(
    make_kernels: MakeKernels, n: int, k: int, dtype: torch.dtype, is_gated: bool
) -> None:
    weight, _ = make_weight(n, k, LinearSpec(gated=is_gated), dtype)
    assert torch.equal(Matrix(make_kernels(2).context, weight, is_gated=is_gated).unpack(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding_is_table_and_head(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    table, ids = randn(8, 130, 48, dtype=dtype), torch.tensor([0, 129, 5, 5, 64])
    embedding, kernels = make_kernels(2).embedding(table, LOGITS), make_kernels(1)
    assert torch.equal(embedding.lookup(ids), table[ids])
    assert torch.equal(kernels.embedding(table, None).lookup(ids), table[ids])
    x = randn(9, 5, 48, dtype=dtype)
    assert torch.equal(embedding.project(x), kernels.linear(table, None, LOGITS)(x))
    for kernel in (embedding, kernels.embedding(table, None)):
        assert torch.equal(kernel.lookup(ids, x), TORCH_KERNELS.embedding(table, None).lookup(ids, x))


def test_a_float32_matrix_of_inputs_in_bfloat16(make_kernels: MakeKernels) -> None:
    x, (weight, _) = randn(10, 9, 70, dtype=torch.bfloat16)[:, 3:], make_weight(24, 67, PLAIN, torch.float32)
    linear = make_kernels(2).linear(weight, None, LinearSpec(float32_inputs=True))
    assert torch.equal(linear(x), linear(x.float()))


def test_not_a_number_stays_in_its_row(make_kernels: MakeKernels) -> None:
    weight, _ = make_weight(64, 64, PLAIN, torch.bfloat16)
    x = randn(10, 20, 64, dtype=torch.bfloat16)
    expected = make_kernels(1).linear(weight, None)(x)
    x[11, 3] = torch.nan
    y = make_kernels(1).linear(weight, None)(x)
    assert y[11].isnan().all()
    assert torch.equal(y[[*range(11), *range(12, 20)]], expected[[*range(11), *range(12, 20)]])


def test_sums_round_to_nearest_even(make_kernels: MakeKernels) -> None:
    """a + b / 256 lies on and around the middle between two bfloat16 numbers."""
    a = torch.arange(128, 256).repeat_interleave(5) / 128
    b = torch.tensor([-1.0, 0.99609375, 1.0, 1.0078125, 3.0]).repeat(128)
    x = torch.stack([a, b], dim=1).bfloat16()
    assert torch.equal(x.float(), torch.stack([a, b], dim=1))
    y = make_kernels(1).linear(torch.tensor([[1.0, 2**-8]]).bfloat16(), None)(x)
    assert torch.equal(y[:, 0], (a + b * 2**-8).bfloat16())
