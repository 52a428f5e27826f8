"""Compares an instruction set on this CPU with the next one: `python -m quire.worker.kernel_trial amx avx512`

Both compute a small fixed set of products, and attention, which must agree within rounding. Each row of the first,
alone and among others, must be the same to the bit. The trial is a process of its own, because kernels that this CPU
cannot run end the process. `registry.py` starts it and stores its verdict.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.failpoints import arm_failpoints, failpoint
from quire.wire.kv_cache import FullAttentionSpec
from quire.worker.attention.backend import AttentionBatch, AttentionSpec
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.kernels.base import ExpertsKernel, Kernels, LinearKernel
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.specs import ExpertsSpec, LinearSpec
from quire.worker.quantization.weight import MXFP4_GROUP, Coding, QuantizedWeight, quantize_int4, quantize_int8

AGREES, DISAGREES = 0, 3
"""Exit codes."""
SHAPES = ((64, 64), (37, 53), (130, 515), (256, 96))
"""(outputs, inputs): whole tiles, and odd remains of both."""
ROWS = (1, 2, 15, 16, 17, 33, 64)
SUM_STEP = 2.0**-19
"""Largest distance of two float32 sums, relative to the sum of the magnitudes of what is summed: 16 rounding steps."""
BFLOAT16_STEP = 2.0**-7
"""Largest distance of two numbers that were rounded to bfloat16."""

Words = Iterator[str]
"""Descriptions of what is wrong; none if all is well."""
Check = Callable[[Kernels, Kernels, Kernels], Words]
"""Check of (candidate, candidate with another number of threads, reference)."""


def check_linear(candidate: Kernels, other: Kernels, reference: Kernels) -> Words:
    """Plain and gated linear layers on bfloat16 weights."""
    for n, k in SHAPES:
        for is_gated in (False, True):
            weight = noise(2 * n if is_gated else n, k)
            spec = LinearSpec(activation="silu" if is_gated else None, gated=is_gated, float32_output=not is_gated)
            mine, others, theirs = (kernels.linear(weight, None, spec) for kernels in (candidate, other, reference))
            x = noise(max(ROWS), k)
            sizes = x.float().abs() @ weight.float().abs().T  # [max(ROWS), n or 2 n]
            limit = sizes * SUM_STEP
            if is_gated:  # |silu(a)| <= |a|, and its slope is below 1.1
                limit = theirs(x).float().abs() * BFLOAT16_STEP + 2.1 * sizes[:, :n] * sizes[:, n:] * SUM_STEP
            yield from compare_rows(f"linear of {k} by {'2 x ' * is_gated}{n}", (mine, others, theirs), x, limit)


def compare_rows(
    name: str, linears: tuple[LinearKernel, LinearKernel, LinearKernel], x: Tensor, limit: Tensor
) -> Words:
    """Compares layers of (candidate, candidate with another number of threads, reference) on the first rows of x;
    `limit` is the largest distance of each result from the reference's."""
    mine, others, theirs = linears
    rows = [mine(x[i : i + 1]) for i in range(max(ROWS))]
    for m in ROWS:
        y = mine(x[:m])
        if not same_bits(y, torch.cat(rows[:m])) or not same_bits(y, others(x[:m])):
            yield f"{name}, {m} rows: a row's bits depend on the rows beside it, or on threads"
        if not close(y, theirs(x[:m]), limit[:m]):
            yield f"{name}, {m} rows: results differ by more than rounding"


def check_experts(candidate: Kernels, other: Kernels, reference: Kernels) -> Words:
    """A mixture of experts: the same products, of the rows that chose an expert. Plain and quantized."""
    num_experts, hidden, size, n = 4, 80, 48, 19
    gate_up, down, x = noise(num_experts, 2 * size, hidden), noise(num_experts, hidden, size), noise(n, hidden)
    all_kernels = candidate, other, reference
    yield from compare_experts("experts", [kernels.experts(gate_up, down, ExpertsSpec()) for kernels in all_kernels], x)
    for name, quantize in (("int8", quantize_int8), ("int4", functools.partial(quantize_int4, group_size=32))):
        first, second = ([quantize(weight) for weight in block] for block in (gate_up, down))
        made = [kernels.quantized_experts(first, second, ExpertsSpec()) for kernels in all_kernels]
        yield from compare_experts(f"{name} experts", made, x)


def compare_experts(name: str, kernels: Sequence[ExpertsKernel], x: Tensor) -> Words:
    """Compares four experts of (candidate, candidate with another number of threads, reference), two for each token."""
    (mine, others, theirs), n, num_experts = kernels, len(x), 4
    ids = torch.stack([torch.arange(n) % num_experts, (torch.arange(n) + 1) % num_experts], dim=1)  # [n, 2]
    weights = torch.tensor([0.75, 0.25]).repeat(n, 1)  # [n, 2]
    y = mine(x, ids, weights)
    alone = torch.cat([mine(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(n)])
    if not same_bits(y, alone) or not same_bits(y, others(x, ids, weights)):
        yield f"{name}: a row's bits depend on the rows beside it, or on threads"
    expected = theirs(x, ids, weights)
    if not close(y, expected, 2 * BFLOAT16_STEP * expected.float().abs().amax()):  # sums of what was rounded
        yield f"{name}: results differ by more than rounding"


def check_quantized(candidate: Kernels, other: Kernels, reference: Kernels) -> Words:
    """Linear layers on int8 weights, whose sums are exact, and on those that are expanded to bfloat16."""
    for n, k in SHAPES:
        plain = noise(n, k).float()
        weights = [
            (quantize_int8(plain), SUM_STEP),
            (quantize_int4(plain, 32), BFLOAT16_STEP),
            (make_e4m3(n, k), SUM_STEP),
        ]
        if k % MXFP4_GROUP == 0:
            weights.append((make_mxfp4(n, k), SUM_STEP))
        for weight, step in weights:
            spec = LinearSpec(float32_output=True)
            mine, others, theirs = (
                kernels.quantized_linear(weight, None, spec) for kernels in (candidate, other, reference)
            )
            x = noise(max(ROWS), k)
            limit = x.float().abs() @ weight.dequantize().abs().T * step  # [max(ROWS), n]
            yield from compare_rows(
                f"{weight.coding.name.lower()} linear of {weight.bits} bits, of {k} by {n}",
                (mine, others, theirs),
                x,
                limit,
            )


def check_attention(candidate: Kernels, other: Kernels, reference: Kernels) -> Words:
    """Attention over a paged cache: heads of whole tiles, of half a tile more, and of neither."""
    n = 300  # tokens: more than a chunk of keys
    for size in (64, 80, 24):
        q, k, v = noise(n, 6, size), noise(n, 2, size), noise(n, 2, size + 1)[..., :size].contiguous()
        y = attend(candidate, q, k, v, (n,))
        parts = attend(candidate, q, k, v, (1, 19, 250, *(1,) * 30))
        if not same_bits(y, parts) or not same_bits(y, attend(other, q, k, v, (n,))):
            yield f"attention with heads of {size}: a row's bits depend on the rows beside it, or on threads"
        if not close(y, attend(reference, q, k, v, (n,)), torch.full_like(y, BFLOAT16_STEP, dtype=torch.float32)):
            yield f"attention with heads of {size}: results differ by more than rounding"


def attend(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int]) -> Tensor:
    """Returns what the tokens of one request attend to, computed in steps of that many tokens."""
    backend, (n, heads, size), block_size = make_backend(kernels), q.shape, 16
    spec = FullAttentionSpec(block_size, k.shape[1], size, "bfloat16")
    num_blocks = -(-n // block_size)
    cache = backend.view_kv_cache(torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8), spec, num_blocks)
    table, outputs, start = torch.arange(num_blocks, dtype=torch.int32)[None], list[Tensor](), 0
    for count in parts:
        own = slice(start, start := start + count)
        batch = AttentionBatch(np.array([count]), np.array([start]), table, torch.arange(own.start, start))
        metadata = backend.make_metadata(batch, spec)
        outputs.append(
            backend.forward(q[own], k[own], v[own], cache, metadata, AttentionSpec(heads, k.shape[1], size, size**-0.5))
        )
    return torch.cat(outputs)


def make_backend(kernels: Kernels) -> NativeAttentionBackend:
    """Returns the attention of native kernels."""
    assert isinstance(kernels, NativeKernels)
    return NativeAttentionBackend(kernels)


def make_e4m3(n: int, k: int) -> QuantizedWeight:
    """Returns a matrix of floats between -1 and 1."""
    values = noise(n, k).to(torch.float8_e4m3fn).view(torch.int8)
    return QuantizedWeight(bits=8, values=values, scales=torch.ones(n, 1), group_size=k, coding=Coding.E4M3)


def make_mxfp4(n: int, k: int) -> QuantizedWeight:
    """Returns a matrix of many codes, at four scales."""
    codes = (noise(n, k // 2).float() * 127).to(torch.int8)
    scales = (125 + (torch.arange(n * k // MXFP4_GROUP) % 4)).to(torch.uint8).view(n, -1)
    return QuantizedWeight(bits=4, values=codes, scales=scales, group_size=MXFP4_GROUP, coding=Coding.MXFP4)


CHECKS: tuple[Check, ...] = (check_linear, check_experts, check_quantized, check_attention)


def noise(*shape: int) -> Tensor:
    """Returns bfloat16 in [-1, 1), the same for the same shape."""
    count = int(torch.tensor(shape).prod())
    numbers = (torch.arange(count) * 2654435761) % 65521  # a multiplicative hash, which needs no generator
    return (numbers.float() / 32760.5 - 1.0).view(shape).bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors are equal to the bit."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def close(found: Tensor, expected: Tensor, limit: Tensor) -> bool:
    """Returns True if the tensors differ by no more than `limit` and are finite."""
    return bool(torch.isfinite(found).all() and ((found.float() - expected.float()).abs() <= limit).all())


def compare(candidate: str, reference: str) -> list[str]:
    """Returns descriptions of what is wrong with the kernels of `candidate`. Raises ValueError if either is missing."""
    library = native_library()
    if library is None:
        raise ValueError("there is no library of native kernels")
    mine, others, theirs = (
        NativeKernels(Context(library, num_threads, name))
        for num_threads, name in ((1, candidate), (2, candidate), (1, reference))
    )
    return [words for check in CHECKS for words in check(mine, others, theirs)]


def main() -> int:
    """Runs the process: its exit code is the verdict, its output the reasons."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a result here and needs no core file
    arm_failpoints()
    failpoint("kernels.trial")
    wrong = compare(*sys.argv[1:3])
    print("\n".join(wrong[:5]))
    return DISAGREES if wrong else AGREES


if __name__ == "__main__":
    sys.exit(main())
