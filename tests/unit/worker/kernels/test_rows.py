"""Native norms, rotations and activations against the torch reference, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.reference import TORCH_KERNELS, activate, layer_norm, rms_norm, rotate_heads
from quire.worker.kernels.specs import ACTIVATIONS, NormSpec, RotaryAngles, XieluSpec, xielu

from ..conftest import MakeKernels

DTYPES = [torch.bfloat16, torch.float32]
NORMS = [NormSpec(eps=1e-5), NormSpec(eps=1e-6, weight_offset=1.0, scale_in_float32=True)]


def randn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within a unit in the last place of the type, or two for a value that was rounded twice."""
    assert found.dtype == expected.dtype
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", NORMS, ids=str)
@pytest.mark.parametrize("dim", [1, 12, 48, 64, 200, 896])
def test_the_norm_equals_the_reference_alone_and_in_company(
    make_kernels: MakeKernels, dim: int, spec: NormSpec, dtype: torch.dtype
) -> None:
    x, weight, residual = randn(1, 40, dim, dtype=dtype), randn(2, dim, dtype=dtype), randn(3, 40, dim, dtype=dtype)
    for r in (None, residual):
        y = make_kernels(3).rms_norm(weight, spec)(x, r)
        assert_close(y, rms_norm(x, r, weight=weight, spec=spec))
        alone = [
            make_kernels(1).rms_norm(weight, spec)(x[i : i + 1], None if r is None else r[i : i + 1]) for i in range(40)
        ]
        assert torch.equal(y, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_strided_view(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    wide, weight = randn(4, 7, 200, dtype=dtype), randn(5, 64, dtype=dtype)
    norm = make_kernels(1).rms_norm(weight, NORMS[0])
    assert torch.equal(norm(wide[:, 70:134]), norm(wide[:, 70:134].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["", "w", "wb", "b"])
@pytest.mark.parametrize("dim", [1, 12, 48, 200, 896])
def test_the_layer_norm_equals_the_reference_alone_and_in_company(
    make_kernels: MakeKernels, dim: int, parts: str, dtype: torch.dtype
) -> None:
    x, residual = randn(1, 40, dim, dtype=dtype) + 3, randn(3, 40, dim, dtype=dtype)
    weight, bias = (randn(seed, dim, dtype=dtype) if letter in parts else None for seed, letter in ((2, "w"), (4, "b")))
    spec = NormSpec(eps=1e-3, weight_offset=1.0 if parts == "wb" else 0.0)
    for r in (None, residual):
        y = make_kernels(3).layer_norm(dim, weight, bias, spec)(x, r)
        assert_close(y, layer_norm(x, r, dim=dim, weight=weight, bias=bias, spec=spec))
        alone = [
            make_kernels(1).layer_norm(dim, weight, bias, spec)(x[i : i + 1], None if r is None else r[i : i + 1])
            for i in range(40)
        ]
        assert torch.equal(y, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (24,), None], ids=str)
def test_the_layer_norm_of_heads(make_kernels: MakeKernels, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    """Each head of a strided view by itself, with the same weights or its own: those of its slice."""
    groups, dim, spec = 5, 24, NormSpec(eps=1e-5)
    x = randn(5, 9, 300, dtype=dtype)[:, 70 : 70 + groups * dim]
    weight, bias = (None, None) if shape is None else (randn(6, *shape, dtype=dtype), randn(7, *shape, dtype=dtype))
    y = make_kernels(2).layer_norm(dim, weight, bias, spec, groups)(x)
    assert_close(y, layer_norm(x, dim=dim, weight=weight, bias=bias, spec=spec, groups=groups))
    for i in range(groups):
        own = [None if t is None else t.view(-1, dim)[i % t.view(-1, dim).shape[0]] for t in (weight, bias)]
        head = make_kernels(1).layer_norm(dim, *own, spec)(x[:, i * dim : (i + 1) * dim])
        assert torch.equal(y[:, i * dim : (i + 1) * dim], head)


def test_the_layer_norm_of_rows_far_from_zero(make_kernels: MakeKernels) -> None:
    """The variance is that of the distances from the mean, not a difference of two large sums."""
    x = randn(8, 6, 200, dtype=torch.float32) + 1000.0
    expected = layer_norm(x.double(), dim=200, weight=None, bias=None, spec=NormSpec(eps=1e-5))
    found = make_kernels(1).layer_norm(200, None, None, NormSpec(eps=1e-5))(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [None, *NORMS], ids=str)
@pytest.mark.parametrize(
    ("dtype", "table_dtype"), [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2]
)
@pytest.mark.parametrize(("head_size", "half"), [(64, 32), (64, 16), (12, 6), (80, 10), (128, 0)])
def test_the_rotation_equals_the_reference_alone_and_in_company(
    make_kernels: MakeKernels,
    head_size: int,
    half: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    norm: NormSpec | None,
) -> None:
    n, heads, kv_heads = 33, 4, 2
    qkv = randn(6, n, (heads + 2 * kv_heads) * head_size, dtype=dtype)
    cos, sin = (randn(seed, 50, half, dtype=torch.float32).to(table_dtype) for seed in (7, 8))
    positions = torch.randint(50, (n,), generator=torch.Generator().manual_seed(9))
    angles = RotaryAngles(cos, sin, positions) if half else None
    norms = (randn(9, head_size, dtype=dtype), randn(10, head_size, dtype=dtype), norm) if norm else (None, None, None)
    sizes = (heads * head_size, kv_heads * head_size, kv_heads * head_size)
    q, k, v = qkv.split(sizes, dim=1)
    expected = rotate_heads(q, k, angles, head_size=head_size, query_norm=norms[0], key_norm=norms[1], spec=norms[2])
    in_place = qkv.clone()
    found = make_kernels(2).rotation(head_size, *norms)(*in_place.split(sizes, dim=1)[:2], angles)
    for f, e in zip(found, expected, strict=True):
        tolerance = 2**-5 if dtype == torch.bfloat16 else 4e-6  # the reference rounds each product
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)
    assert torch.equal(in_place.split(sizes, dim=1)[2], v)
    for i in (0, 17):
        one = qkv[i : i + 1].clone().split(sizes, dim=1)[:2]
        row_turns = RotaryAngles(cos, sin, positions[i : i + 1]) if half else None
        alone = make_kernels(1).rotation(head_size, *norms)(*one, row_turns)
        assert all(torch.equal(a, f[i : i + 1]) for a, f in zip(alone, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("is_gated", [False, True])
def test_activations_equal_the_reference(
    make_kernels: MakeKernels, name: str, is_gated: bool, dtype: torch.dtype
) -> None:
    edges = torch.tensor([-1e30, -100.0, -20.0, -1e-3, -0.0, 0.0, 1e-3, 0.624, 0.626, 20.0, 100.0, 1e30, 1e-30, 3.0])
    x = torch.cat([edges.repeat(20, 1), randn(11, 20, 200, dtype=torch.float32) * 4], dim=1).to(dtype)  # [20, 214]
    y = make_kernels(3).activation(name, is_gated)(x)
    expected = activate(x.double(), name=name, is_gated=is_gated)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(y.double(), expected.to(dtype).double(), rtol=tolerance, atol=tolerance)
    assert torch.equal(torch.cat([make_kernels(1).activation(name, is_gated)(row) for row in x.split(1)]), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [1, 3, 24, 64])
def test_an_activation_times_factors_plus_a_residual(
    make_kernels: MakeKernels, repeats: int, dtype: torch.dtype
) -> None:
    x, factors = randn(1, 30, 50, dtype=dtype)[:, 7:42], randn(2, 30, 35 * repeats + 9, dtype=dtype)[:, 9:]
    residual = randn(3, 30, 35 * repeats + 5, dtype=dtype)[:, 5:]
    kernel, twin = make_kernels(3).activation("softplus"), TORCH_KERNELS.activation("softplus")
    for r in (None, residual):
        y = kernel(x, factors, r)
        expected = twin(x.double(), factors.double(), None if r is None else r.double())
        torch.testing.assert_close(y, expected.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 2e-6, atol=2e-6)
        alone = make_kernels(1).activation("softplus")
        rows = [alone(x[i : i + 1], factors[i : i + 1], None if r is None else r[i : i + 1]) for i in range(30)]
        assert torch.equal(torch.cat(rows), y)
    assert_close(kernel(x, None, x), twin(x, None, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu_equals_the_reference(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    edges = torch.tensor([-100.0, -20.0, -0.35, -0.33, -1e-3, -1e-6, -1e-7, 0.0, 1e-3, 20.0])
    x = torch.cat([edges.repeat(20, 1), randn(12, 20, 201, dtype=torch.float32) * 4], dim=1).to(dtype)  # [20, 211]
    spec = XieluSpec(positive=0.7, negative=1.3, slope=0.4, least=-1e-3)
    y = make_kernels(3).xielu(spec)(x)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-6
    expected = xielu(x.double(), spec).to(dtype)
    torch.testing.assert_close(
        y.double(), expected.double(), rtol=tolerance, atol=0 if dtype == torch.bfloat16 else 1e-7
    )
    assert torch.equal(torch.cat([make_kernels(1).xielu(spec)(row) for row in x.split(1)]), y)
