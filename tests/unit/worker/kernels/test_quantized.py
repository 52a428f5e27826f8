"""Quantized linear layers: native kernels and torch reference agree; a row has the same bits in any company."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.native_quantized import can_pack
from quire.worker.kernels.reference import TORCH_KERNELS, TorchExperts, multiply_int8, quantize_rows, route
from quire.worker.kernels.specs import CLAMPED_SWIGLU, LOGITS, PLAIN, ExpertsSpec, LinearSpec, RouterSpec
from quire.worker.quantization.weight import Coding, QuantizedWeight, quantize_int4, quantize_int8

from ..conftest import MakeKernels

SHAPES = [(64, 64), (100, 48), (17, 80), (160, 352), (33, 7), (1, 32)]
"""(outputs, inputs): whole panels and parts of them, inputs that need padding, an odd number of them."""
GATED = LinearSpec(activation="silu", gated=True)
SPECS = [PLAIN, GATED, LinearSpec(float32_output=True, divisor=3.0, soft_cap=2.0), LinearSpec(clip=0.7)]
SILU, GELU = ExpertsSpec(activation="silu"), ExpertsSpec(activation="gelu_pytorch_tanh")
DTYPES = [torch.bfloat16, torch.float32]
KINDS = ["int8", "w8 with zeros", "int4", "int4 with zeros", "int4 in groups of 128", "int4 in one group"]
KINDS += ["e4m3 in groups of 128", "e4m3 in one group", "mxfp4"]
MAX_ROWS = 300


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight(kind: str, n: int, k: int, seed: int = 1) -> QuantizedWeight:
    """Integers over the whole range, which rounding does not always use."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "int8":
        return quantize_int8(randn(seed, n, k) * k**-0.5)
    if kind == "mxfp4":
        return make_mxfp4(n, k, generator)
    bits = 4 if kind.startswith("int4") else 8
    group_size = k if "one group" in kind else 128 if "128" in kind else 32
    half, groups = 1 << (bits - 1), -(-k // group_size)
    if kind.startswith("e4m3"):
        codes = torch.randint(0, 256, (n, k), generator=generator)
        return QuantizedWeight(
            bits=8,
            values=torch.where(codes & 0x7F == 0x7F, 0, codes).to(torch.uint8).view(torch.int8),
            scales=(torch.rand(n, groups, generator=generator) + 0.5) * k**-0.5 / 448,
            group_size=group_size,
            coding=Coding.E4M3,
        )
    zeros = torch.randint(-half, half + 1, (n, groups), generator=generator).to(torch.int16)
    return QuantizedWeight(
        bits=bits,
        values=torch.randint(-half, half, (n, k), generator=generator).to(torch.int8),
        scales=(torch.rand(n, groups, generator=generator) + 0.5) * k**-0.5 / half,
        zeros=zeros if "zeros" in kind else None,
        group_size=group_size,
    )


def make_mxfp4(n: int, k: int, generator: torch.Generator) -> QuantizedWeight:
    """All codes, and scales that differ by large powers of two."""
    return QuantizedWeight(
        bits=4,
        values=torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8).view(torch.int8),
        scales=torch.randint(118, 125, (n, k // 32), generator=generator).to(torch.uint8),
        group_size=32,
        coding=Coding.MXFP4,
    )


def whole_groups(kind: str, k: int) -> int:
    """A number of inputs near `k` that there are weights of `kind` for."""
    return -(-k // 32) * 32 if kind == "mxfp4" else k


def test_the_reference_multiplies_what_the_integers_stand_for() -> None:
    x, bias, residual = randn(1, 5, 96), randn(2, 40), randn(3, 5, 40)
    for kind in KINDS[1:]:
        weight = make_weight(kind, 40, 96)
        y = TORCH_KERNELS.quantized_linear(weight, bias)(x, residual)
        torch.testing.assert_close(y, x @ weight.dequantize().T + bias + residual)
    weight = make_weight("int8", 40, 96)
    y = TORCH_KERNELS.quantized_linear(weight, bias)(x, residual)
    torch.testing.assert_close(y, x @ weight.dequantize().T + bias + residual, rtol=0.02, atol=0.05)


def test_rows_of_int8() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0] * 4, [1.0, torch.inf, 0.0, 0.0], [torch.nan, 1.0, 2.0, 3.0]])
    values, scales = quantize_rows(x)
    assert values[:2].tolist() == [[64, -127, 32, 0], [0] * 4]
    assert scales[:2, 0].tolist() == pytest.approx([2 / 127, 0.0])
    assert scales[2:].isnan().all()


def test_integer_sums_are_exact() -> None:
    x, w = torch.full((2, 70_000), 127, dtype=torch.int8), torch.full((3, 70_000), -127, dtype=torch.int8)
    assert multiply_int8(x, w).tolist() == [[-127 * 127 * 70_000] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(make_kernels: MakeKernels, kind: str, spec: LinearSpec, dtype: torch.dtype) -> None:
    for n, k in ((n, whole_groups(kind, k)) for n, k in SHAPES):
        rows = 2 * n if spec.gated else n
        weight, bias = make_weight(kind, rows, k), randn(2, rows, dtype=dtype)
        x, residual = randn(3, 21, k, dtype=dtype), randn(4, 21, n, dtype=dtype)
        for b, r in ((None, None), (bias, residual)):
            y = make_kernels(1).quantized_linear(weight, b, spec)(x, r)
            expected = TORCH_KERNELS.quantized_linear(weight, b, spec)(x, r)
            assert y.dtype == expected.dtype == (torch.float32 if spec.float32_output else dtype)
            tolerance = 2**-7 if y.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(100, 48), (136, 330), (40, 600)])
def test_a_row_has_the_same_bits_in_any_company(
    make_kernels: MakeKernels, n: int, k: int, kind: str, dtype: torch.dtype
) -> None:
    k = whole_groups(kind, k)
    weight, bias = make_weight(kind, 2 * n, k), randn(2, 2 * n, dtype=dtype)
    x, residual = randn(5, MAX_ROWS, k, dtype=dtype), randn(6, MAX_ROWS, n, dtype=dtype)
    kernel = make_kernels(1).quantized_linear(weight, bias, GATED)
    alone = torch.cat([kernel(x[i : i + 1], residual[i : i + 1]) for i in range(0, MAX_ROWS, 23)])
    rng = random.Random(n * k)
    for num_threads in (1, 3):
        kernel = make_kernels(num_threads).quantized_linear(weight, bias, GATED)
        whole = kernel(x, residual)
        assert torch.equal(whole[::23], alone)
        for rows in (1, 2, 5, 6, 7, 12, 13, 16, 17, 33, 255):
            start = rng.randint(0, MAX_ROWS - rows)
            some = slice(start, start + rows)
            assert torch.equal(kernel(x[some], residual[some]), whole[some]), (num_threads, rows)


def test_int8_has_the_same_bits_everywhere(make_kernels: MakeKernels) -> None:
    """Integer sums leave the instruction set no choice; neither does the torch reference."""
    weight, x = make_weight("int8", 48, 200), randn(3, 9, 200)
    y = make_kernels(2).quantized_linear(weight, None, LOGITS)(x)
    assert torch.equal(y, TORCH_KERNELS.quantized_linear(weight, None, LOGITS)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_has_the_bits_of_plain_weights(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    """Codes times powers of two are exact in bfloat16, and the sums are those of a plain layer: a checkpoint in MXFP4
    and one of the same weights in bfloat16 answer alike."""
    n, k = 100, 416
    weight, bias, x = make_weight("mxfp4", 2 * n, k), randn(2, 2 * n, dtype=dtype), randn(3, 300, k, dtype=dtype)
    plain = make_kernels(1).linear(weight.dequantize(dtype), bias, GATED)
    assert torch.equal(weight.dequantize(torch.bfloat16).float(), weight.dequantize())
    for rows in (1, 6, 12, 13, 40, 300):
        assert torch.equal(make_kernels(2).quantized_linear(weight, bias, GATED)(x[:rows]), plain(x[:rows])), rows


@pytest.mark.parametrize("kind", ["e4m3", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_is_its_number(make_kernels: MakeKernels, kind: str, dtype: torch.dtype) -> None:
    """An identity matrix of inputs shows each weight: every code, at every scale of MXFP4, down to the smallest."""
    if kind == "mxfp4":
        codes = torch.tensor([i | (15 - i) << 4 for i in range(16)]).to(torch.uint8).view(torch.int8)
        scales = torch.arange(2, 253, dtype=torch.uint8).unsqueeze(1)
        weight = QuantizedWeight(bits=4, values=codes.repeat(251, 1), scales=scales, group_size=32, coding=Coding.MXFP4)
    else:
        codes = torch.arange(256).where(torch.arange(256) % 128 != 127, 0)
        weight = QuantizedWeight(
            bits=8,
            values=codes.to(torch.uint8).view(torch.int8).view(1, 256),
            scales=torch.ones(1, 1),
            group_size=256,
            coding=Coding.E4M3,
        )
    exact = weight.dequantize()
    for rows in (1, weight.shape[1]):
        y = make_kernels(1).quantized_linear(weight, None, LOGITS)(torch.eye(weight.shape[1], dtype=dtype)[:rows])
        assert torch.equal(y, exact.T[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_mxfp4_have_the_bits_of_plain_ones(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    """The layout is that of gpt-oss: biases, and gates and what they gate in turn."""
    experts, hidden, size, n = 3, 96, 64, 40
    gate_up, down = make_experts("mxfp4", experts, hidden, size)
    biases = randn(8, experts, 2 * size, dtype=dtype), randn(9, experts, hidden, dtype=dtype)
    spec = ExpertsSpec(activation=CLAMPED_SWIGLU, halves_alternate=True)
    x, (ids, weights) = randn(6, n, hidden, dtype=dtype), choose(n, experts, 2)
    plain = [torch.stack([weight.dequantize(dtype) for weight in block]) for block in (gate_up, down)]
    y = make_kernels(2).quantized_experts(gate_up, down, spec, biases)(x, ids, weights)
    assert torch.equal(y, make_kernels(1).experts(plain[0], plain[1], spec, biases)(x, ids, weights))
    expected = TORCH_KERNELS.quantized_experts(gate_up, down, spec, biases)(x, ids, weights)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_the_extremes_of_int8(make_kernels: MakeKernels) -> None:
    """-128 is a value that checkpoints hold; nothing saturates on the way."""
    weight = QuantizedWeight(
        bits=8,
        values=torch.full((16, 256), -128, dtype=torch.int8),
        scales=torch.ones(16, 1),
        group_size=256,
        quantizes_inputs=True,
    )
    for sign in (1.0, -1.0):
        y = make_kernels(1).quantized_linear(weight, None, LOGITS)(torch.full((1, 256), 127.0 * sign))
        assert y.tolist() == [[-128.0 * 127 * 256 * sign] * 16]


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_stays_in_its_row(make_kernels: MakeKernels, kind: str) -> None:
    kernel = make_kernels(1).quantized_linear(make_weight(kind, 64, 64), None)
    x = randn(10, 20, 64, dtype=torch.bfloat16)
    expected = kernel(x)
    x[11, 3] = torch.nan
    y = kernel(x)
    assert y[11].isnan().all()
    others = [*range(11), *range(12, 20)]
    assert torch.equal(y[others], expected[others])


def test_rows_may_be_strided(make_kernels: MakeKernels) -> None:
    for kind in KINDS:
        kernel = make_kernels(2).quantized_linear(make_weight(kind, 48, 64), None)
        wide = randn(7, 9, 200, dtype=torch.bfloat16)
        assert torch.equal(kernel(wide[:, 100:164]), kernel(wide[:, 100:164].contiguous()))
        assert torch.equal(kernel(wide[:, 10:138:2]), kernel(wide[:, 10:138:2].contiguous()))


def test_groups_that_are_no_multiple_of_a_step(make_kernels: MakeKernels) -> None:
    weight = quantize_int4(randn(0, 16, 64), 16)
    assert not can_pack(weight)
    assert not make_kernels(1).can_quantize(weight)
    assert TORCH_KERNELS.can_quantize(weight)


EXPERTS = [(4, 64, 48, 2), (7, 33, 30, 3), (3, 160, 300, 1)]
"""(experts, hidden, expert size, experts per token): with and without padding, and more than a span of inputs."""


def make_experts(
    kind: str, experts: int, hidden: int, size: int
) -> tuple[list[QuantizedWeight], list[QuantizedWeight]]:
    gate_up = [make_weight(kind, 2 * size, hidden, seed=e) for e in range(experts)]
    return gate_up, [make_weight(kind, hidden, size, seed=100 + e) for e in range(experts)]


def choose(n: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    return route(
        randn(n, n, experts) * 2, spec=RouterSpec(num_experts_per_token=k, normalize=True), dtype=torch.float32
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "hidden", "size", "k"), EXPERTS)
def test_experts_equal_plain_ones_of_what_the_integers_stand_for(
    make_kernels: MakeKernels, experts: int, hidden: int, size: int, k: int, kind: str, dtype: torch.dtype
) -> None:
    hidden, size = whole_groups(kind, hidden), whole_groups(kind, size)
    gate_up, down = make_experts(kind, experts, hidden, size)
    x, residual = randn(3, 21, hidden, dtype=dtype), randn(4, 21, hidden, dtype=dtype)
    ids, weights = choose(21, experts, k)
    for r in (None, residual):
        y = make_kernels(2).quantized_experts(gate_up, down, SILU)(x, ids, weights, r)
        assert y.dtype == dtype
        expected = TORCH_KERNELS.quantized_experts(gate_up, down, SILU)(x, ids, weights, r)
        # between the two matrices bfloat16 is rounded once more, and int8 may round to a neighbour after that
        tolerance = 2**-6 if dtype == torch.bfloat16 else 3e-2 if kind == "int8" else 2e-5
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        if kind != "int8" and dtype == torch.float32:
            wide = [torch.stack([w.dequantize() for w in block]).double() for block in (gate_up, down)]
            wide_r = None if r is None else r.double()
            exact = TorchExperts(*wide, SILU)(x.double(), ids, weights.double(), wide_r)
            torch.testing.assert_close(y.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_from_experts_in_any_company(
    make_kernels: MakeKernels, kind: str, dtype: torch.dtype
) -> None:
    """300 tokens on two experts are more rows than go through a panel at once."""
    experts, hidden, size, k, n = 2, whole_groups(kind, 72), whole_groups(kind, 80), 2, MAX_ROWS
    gate_up, down = make_experts(kind, experts, hidden, size)
    x, residual, (ids, weights) = (
        randn(6, n, hidden, dtype=dtype),
        randn(7, n, hidden, dtype=dtype),
        choose(n, experts, k),
    )
    one = make_kernels(1).quantized_experts(gate_up, down, GELU)
    alone = torch.cat([one(*(t[i : i + 1] for t in (x, ids, weights, residual))) for i in range(0, n, 23)])
    rng = random.Random(experts)
    for num_threads in (1, 3):
        kernel = make_kernels(num_threads).quantized_experts(gate_up, down, GELU)
        whole = kernel(x, ids, weights, residual)
        assert torch.equal(whole[::23], alone)
        for count in (2, 7, 13, 64):
            some = torch.tensor(rng.sample(range(n), count))
            assert torch.equal(kernel(x[some], ids[some], weights[some], residual[some]), whole[some])
