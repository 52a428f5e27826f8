"""Adapters of a mixture's experts: near the float64 result, and a token has the same bits in any company."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.config.quantization import group_size_for
from quire.worker.kernels.base import ExpertsKernel, Kernels
from quire.worker.kernels.lora import LowRank, LowRankShape
from quire.worker.kernels.reference import TORCH_KERNELS, TorchExperts
from quire.worker.kernels.specs import ExpertsSpec
from quire.worker.quantization.weight import quantize_int4, quantize_int8

from ..conftest import MakeKernels
from .test_experts import DTYPES, SILU, choose, make_weights, randn
from .test_lora import BASE, draw_segments, slots_of

SHAPES = [(4, 64, 48, 2), (7, 33, 30, 3)]
"""(experts, hidden, expert size, experts per token): with and without padding."""
ALTERNATING = ExpertsSpec(activation="silu", halves_alternate=True)
RANKS = [(8, 8, 8), (1, None, 40), (None, 16, None)]
"""Ranks of gate, up and down of one adapter each; every third expert is left alone."""
Make = Callable[[Kernels, torch.dtype], ExpertsKernel]


def make_parts(seed: int, experts: int, hidden: int, size: int, dtype: torch.dtype) -> list[list[LowRank | None]]:
    """Returns the parts of both sites, of an adapter."""
    sites: list[list[LowRank | None]] = [[], []]
    for expert in range(experts):
        for i, rank in enumerate(RANKS[seed]):
            k, n = (size, hidden) if i == 2 else (hidden, size)
            part = None
            if rank is not None and expert % 3 != seed:
                first, second = (
                    randn(100 * seed + 10 * expert + i + j, *s) for j, s in ((0, (rank, k)), (5, (n, rank)))
                )
                part = LowRank((first * k**-0.5).to(dtype), (second * rank**-0.5).to(dtype), 0.75)
            sites[i // 2].append(part)
    return sites


class Layer:
    """Experts with sites, and the adapters of RANKS in slots 0, 2, 4."""

    def __init__(self, kernels: Kernels, kernel: ExpertsKernel, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        experts, hidden, size = shape[:3]
        self.kernel, self.batch = kernel, kernels.adapter_batch()
        shapes = (
            LowRankShape(hidden, (size, size), True, dtype, experts),
            LowRankShape(size, (hidden,), False, dtype, experts),
        )
        sites = [kernels.adapter_site(self.batch, sizes) for sizes in shapes]
        kernel.set_sites(*sites)
        for i in range(len(RANKS)):
            for site, parts, sizes in zip(sites, make_parts(i, experts, hidden, size, dtype), shapes, strict=True):
                site.install(2 * i, kernels.pack_low_rank(parts, sizes))


def merged(weights: tuple[Tensor, Tensor], seed: int, spec: ExpertsSpec, dtype: torch.dtype) -> TorchExperts:
    """Returns experts in float64 with an adapter in their weights."""
    gate_up, down = (weight.double().clone() for weight in weights)
    experts, hidden, size = len(down), down.shape[1], down.shape[2]
    first, second = make_parts(seed, experts, hidden, size, dtype)
    for i, part in enumerate(first):
        if part is not None:
            half = slice(i % 2, None, 2) if spec.halves_alternate else slice(i % 2 * size, i % 2 * size + size)
            gate_up[i // 2, half] += part.scale * (part.b.double() @ part.a.double())
    for i, part in enumerate(second):
        if part is not None:
            down[i] += part.scale * (part.b.double() @ part.a.double())
    return TorchExperts(gate_up, down, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [SILU, ALTERNATING], ids=["halves", "alternating"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_experts_with_adapters_equal_the_float64_reference(
    make_kernels: MakeKernels, is_native: bool, shape: tuple[int, int, int, int], spec: ExpertsSpec, dtype: torch.dtype
) -> None:
    experts, hidden, size, k = shape
    kernels = make_kernels(2) if is_native else TORCH_KERNELS
    weights = make_weights(experts, hidden, size, dtype)
    layer = Layer(kernels, kernels.experts(*weights, spec), shape, dtype)
    x, residual = randn(3, 33, hidden, dtype=dtype), randn(4, 33, hidden, dtype=dtype)
    ids, chosen = choose(5, 33, experts, k)
    layer.batch.set([0, 8, 16, 24, 30], [0, 2, BASE, 4])
    y = layer.kernel(x, ids, chosen, residual)
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-5
    for rows, seed in ((slice(0, 8), 0), (slice(8, 16), 1), (slice(24, 30), 2)):
        exact = merged(weights, seed, spec, dtype)
        expected = exact(x[rows].double(), ids[rows], chosen[rows].double(), residual[rows].double())
        torch.testing.assert_close(y[rows].double(), expected, rtol=tolerance, atol=tolerance)
    base = kernels.experts(*weights, spec)(x, ids, chosen, residual)
    for rows in (slice(16, 24), slice(30, 33)):
        assert torch.equal(y[rows], base[rows])


def plain(kernels: Kernels, dtype: torch.dtype) -> ExpertsKernel:
    return kernels.experts(*make_weights(*SHAPES[1][:3], dtype), SILU)


def int8(kernels: Kernels, dtype: torch.dtype) -> ExpertsKernel:
    gate_up, down = ([quantize_int8(w) for w in block] for block in make_weights(*SHAPES[1][:3], dtype))
    return kernels.quantized_experts(gate_up, down, SILU)


def int4(kernels: Kernels, dtype: torch.dtype) -> ExpertsKernel:
    blocks = make_weights(*SHAPES[1][:3], dtype)
    gate_up, down = ([quantize_int4(w, group_size_for(w.shape[1])) for w in block] for block in blocks)
    return kernels.quantized_experts(gate_up, down, SILU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [plain, int8, int4])
def test_a_token_has_the_same_bits_in_any_company(make_kernels: MakeKernels, make: Make, dtype: torch.dtype) -> None:
    experts, hidden, _, k = SHAPES[1]
    tokens, rng = 40, random.Random(experts)
    x = randn(7, tokens, hidden, dtype=dtype)
    ids, weights = choose(8, tokens, experts, k)
    alone = Layer(make_kernels(1), make(make_kernels(1), dtype), SHAPES[1], dtype)
    expected = {BASE: make(make_kernels(1), dtype)(x, ids, weights)}
    for slot in (0, 2, 4):
        alone.batch.set([0, 1], [slot])
        rows = [alone.kernel(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(tokens)]
        expected[slot] = torch.cat(rows)
        assert not torch.equal(expected[slot], expected[BASE])
    for num_threads in (1, 3):
        layer = Layer(make_kernels(num_threads), make(make_kernels(num_threads), dtype), SHAPES[1], dtype)
        for _ in range(6):
            first, count = rng.randint(0, tokens - 1), rng.choice([1, 5, tokens])
            some = slice(first, min(tokens, first + count))
            here = some.stop - some.start
            starts, slots = draw_segments(rng, here, (0, 2, 4))
            layer.batch.set(starts, slots)
            y = layer.kernel(x[some], ids[some], weights[some])
            for row, slot in enumerate(slots_of(starts, slots, here)):
                assert torch.equal(y[row], expected[slot][first + row]), (row, slot)
        layer.batch.clear()
        assert torch.equal(layer.kernel(x, ids, weights), expected[BASE])
