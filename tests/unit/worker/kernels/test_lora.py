"""Adapters: near the float64 result in torch and natively; natively a row's bits are those of the row alone, and of an
engine without adapters where it has none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.base import Kernels, LinearKernel
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.lora import AdapterBatch, AdapterSite, LowRank, LowRankShape, PackedLowRank
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.plan import Plan
from quire.worker.kernels.reference import TORCH_KERNELS, TorchKernels
from quire.worker.kernels.specs import LOGITS, PLAIN, LinearSpec
from quire.worker.quantization.weight import QuantizedWeight, quantize_int4, quantize_int8

from ..conftest import MakeKernels

GATED = LinearSpec(activation="silu", gated=True)
SITES: list[tuple[LinearSpec, int, list[int]]] = [
    (PLAIN, 96, [100, 40, 40]),
    (GATED, 64, [72, 72]),
    (LinearSpec(float32_output=True, divisor=3.0, soft_cap=2.0), 70, [33]),
    (LinearSpec(activation="gelu", clip=1.5), 33, [64, 16]),
]
"""(spec, inputs, rows of the parts): parts that end within a block of 16, inputs that need padding."""
RANKS = [(16, 16, 16), (1, None, 7), (None, 40, 8), (512, 3, None), (12, 12, 64), (8, 33, 1)]
"""Ranks of the parts of one adapter each, from the first part on."""
DTYPES = [torch.bfloat16, torch.float32]
BASE = -1


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_parts(ranks: Sequence[int | None], k: int, sizes: list[int], dtype: torch.dtype) -> list[LowRank | None]:
    return [
        None
        if rank is None
        else LowRank(
            randn(rank, rank, k, dtype=dtype) * k**-0.5,
            randn(rank + 1, size, rank, dtype=dtype) * rank**-0.5,
            0.75,
            randn(rank, size, dtype=dtype) if rank % 2 else None,
        )
        for rank, size in zip(ranks, sizes, strict=False)
    ]


class Layer:
    """A layer with a site, and the adapters of RANKS in slots 0, 2, 4, ..."""

    def __init__(
        self, kernels: Kernels, spec: LinearSpec, k: int, sizes: list[int], dtype: torch.dtype, first_slot: int = 0
    ) -> None:
        n = sum(sizes)
        self.weight = (randn(1, n, k) * k**-0.5).to(dtype)
        self.bias = randn(2, n, dtype=dtype)
        self.kernel, self.plain = (kernels.linear(self.weight, self.bias, spec) for _ in range(2))
        self.adapters = [make_parts(ranks, k, sizes, dtype) for ranks in RANKS]
        self.batch, self.site = add_site(kernels, self.kernel, k, sizes, spec.gated, dtype)
        self.slots = [first_slot + 2 * i for i in range(len(RANKS))]
        for slot, parts in zip(self.slots, self.adapters, strict=True):
            self.site.install(slot, kernels.pack_low_rank(parts, LowRankShape(k, (*sizes,), spec.gated, dtype)))


def add_site(
    kernels: Kernels, kernel: LinearKernel, k: int, sizes: list[int], gated: bool, dtype: torch.dtype
) -> tuple[AdapterBatch, AdapterSite]:
    batch = kernels.adapter_batch()
    kernel.site = kernels.adapter_site(batch, LowRankShape(k, (*sizes,), gated, dtype))
    return batch, kernel.site


def add_product(weight: Tensor, bias: Tensor, parts: list[LowRank | None], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Returns weight and bias with an adapter in them, in float64."""
    weights, biases = (list(torch.split(t.double(), sizes)) for t in (weight, bias))
    for i, part in enumerate(parts):
        if part is not None:
            weights[i] = weights[i] + part.scale * (part.b.double() @ part.a.double())
            biases[i] = biases[i] if part.bias is None else biases[i] + part.scale * part.bias.double()
    return torch.cat(weights), torch.cat(biases)


def check_against_float64(kernels: Kernels, spec: LinearSpec, k: int, sizes: list[int], dtype: torch.dtype) -> None:
    layer = Layer(kernels, spec, k, sizes, dtype)
    rows = 9 * len(RANKS)
    x, residual = randn(3, rows, k, dtype=dtype), randn(4, rows, sum(sizes) // (1 + spec.gated), dtype=dtype)
    layer.batch.set(range(0, rows + 1, 9), layer.slots)
    y = layer.kernel(x, residual)
    plain = LinearSpec(
        activation=spec.activation, gated=spec.gated, divisor=spec.divisor, soft_cap=spec.soft_cap, clip=spec.clip
    )
    for i, parts in enumerate(layer.adapters):
        some = slice(9 * i, 9 * i + 9)
        merged = TORCH_KERNELS.linear(*add_product(layer.weight, layer.bias, parts, sizes), plain)
        expected = merged(x[some].double(), residual[some].double())
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(y[some].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "k", "sizes"), SITES, ids=str)
def test_torch_equals_the_float64_reference(spec: LinearSpec, k: int, sizes: list[int], dtype: torch.dtype) -> None:
    check_against_float64(TORCH_KERNELS, spec, k, sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "k", "sizes"), SITES, ids=str)
def test_native_kernels_equal_the_float64_reference(
    make_kernels: MakeKernels, spec: LinearSpec, k: int, sizes: list[int], dtype: torch.dtype
) -> None:
    check_against_float64(make_kernels(2), spec, k, sizes, dtype)


def draw_segments(rng: random.Random, rows: int, slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns segments whose first rows, or last ones, may be without a segment's adapter."""
    count = rng.randint(1, 12)
    starts = [0, *sorted(rng.choices(range(rows + 1), k=count))]
    return starts, [rng.choice([BASE, *slots]) for _ in range(count)]


def slots_of(starts: Sequence[int], slots: Sequence[int], rows: int) -> list[int]:
    """Returns each row's slot."""
    by_segment = [slot for a, b, slot in zip(starts, starts[1:], slots, strict=False) for _ in range(a, b)]
    return by_segment + [BASE] * (rows - len(by_segment))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "k", "sizes"), SITES[:3], ids=str)
def test_a_row_has_the_same_bits_in_any_company(
    make_kernels: MakeKernels, spec: LinearSpec, k: int, sizes: list[int], dtype: torch.dtype
) -> None:
    rows = 70
    x, residual = randn(5, rows, k, dtype=dtype), randn(6, rows, sum(sizes) // (1 + spec.gated), dtype=dtype)
    alone = Layer(make_kernels(1), spec, k, sizes, dtype, first_slot=1)
    expected = {BASE: alone.plain(x, residual)}
    for i, slot in enumerate(alone.slots):
        alone.batch.set([0, 1], [slot])
        expected[i] = torch.cat([alone.kernel(x[r : r + 1], residual[r : r + 1]) for r in range(rows)])
    rng = random.Random(k)
    for num_threads in (1, 2, 3):
        layer = Layer(make_kernels(num_threads), spec, k, sizes, dtype)
        assert torch.equal(layer.kernel(x, residual), expected[BASE])
        for _ in range(6):
            first = rng.randint(0, rows - 1)
            count = rng.choice([1, 2, 17, rows]) if num_threads > 1 else rng.randint(1, rows)
            some = slice(first, min(rows, first + count))
            here = some.stop - some.start
            starts, slots = draw_segments(rng, here, layer.slots)
            layer.batch.set(starts, slots)
            y = layer.kernel(x[some], residual[some])
            for row, slot in enumerate(slots_of(starts, slots, here)):
                assert torch.equal(y[row], expected[slot if slot == BASE else slot // 2][first + row]), (row, slot)
        layer.batch.clear()
        assert torch.equal(layer.kernel(x, residual), expected[BASE])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [(5, 40, 3), (48, 33, 70), (16, None, 24)], ids=str)
def test_outputs_have_the_same_bits_whichever_parts_they_are_computed_with(
    make_kernels: MakeKernels, ranks: tuple[int | None, ...], dtype: torch.dtype
) -> None:
    """Workers that share a layer have different outputs of each part in the blocks of 16."""
    kernels, k, sizes, rows = make_kernels(1), 64, [40, 24, 20], 35
    weight, x = randn(1, sum(sizes), k, dtype=dtype), randn(2, rows, k, dtype=dtype)
    parts = make_parts(ranks, k, sizes, dtype)

    def compute(own: list[Tensor]) -> Tensor:
        """Returns the outputs `own` of each part."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        kernel = kernels.linear(weight[torch.cat([o + s for o, s in zip(own, starts, strict=True)])], None, LOGITS)
        batch, site = add_site(kernels, kernel, k, [len(o) for o in own], False, dtype)
        cut = [
            p and LowRank(p.a, p.b[o], p.scale, None if p.bias is None else p.bias[o])
            for p, o in zip(parts, own, strict=True)
        ]
        shape = LowRankShape(k, tuple(len(o) for o in own), False, dtype)
        site.install(0, kernels.pack_low_rank(cut, shape))
        batch.set([0, rows], [0])
        return kernel(x)

    whole = torch.split(compute([torch.arange(size) for size in sizes]), sizes, dim=1)
    for own in ([range(20), range(8, 24), range(10)], [range(7, 40), range(3), range(20)], [range(16)] * 3):
        places = [torch.arange(o.start, o.stop) for o in own]
        found = torch.split(compute(places), [len(o) for o in own], dim=1)
        for part, expected, place in zip(found, whole, places, strict=True):
            assert torch.equal(part.view(torch.int32), expected[:, place].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_prompt_beside_many_rows(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    """More rows than go through a panel at once, and than are shrunk at once."""
    k, sizes, rows = 64, [64, 48], 300
    layers = [Layer(make_kernels(n), PLAIN, k, sizes, dtype) for n in (1, 3)]
    x = randn(7, rows, k, dtype=dtype)
    for layer in layers:
        layer.batch.set([0, 20, 270, 290], [4, 0, 2])
    one, three = (layer.kernel(x) for layer in layers)
    assert torch.equal(one, three)
    layers[0].batch.set([0, 250], [0])
    assert torch.equal(layers[0].kernel(x[20:270]), one[20:270])
    assert torch.equal(layers[0].plain(x[290:]), one[290:])


def test_a_slot_may_be_emptied_and_filled_again(make_kernels: MakeKernels) -> None:
    layer = Layer(make_kernels(2), PLAIN, 64, [40], torch.bfloat16)
    x, kernels = randn(8, 5, 64, dtype=torch.bfloat16), make_kernels(2)
    layer.batch.set([0, 5], [2])
    first, plain = layer.kernel(x), layer.plain(x)
    layer.site.install(2, None)
    assert torch.equal(layer.kernel(x), plain)
    layer.site.install(77, kernels.pack_low_rank(layer.adapters[1], LowRankShape(64, (40,), False, torch.bfloat16)))
    layer.batch.set([0, 5], [77])
    assert torch.equal(layer.kernel(x), first)
    layer.kernel.site = None
    assert torch.equal(layer.kernel(x), plain)


def test_not_a_number_stays_in_its_row(make_kernels: MakeKernels) -> None:
    layer = Layer(make_kernels(2), PLAIN, 96, [100, 40, 40], torch.bfloat16)
    x = randn(9, 20, 96, dtype=torch.bfloat16)
    layer.batch.set([0, 10, 20], layer.slots[2:4])
    expected = layer.kernel(x)
    x[11, 3] = torch.nan
    y, others = layer.kernel(x), [*range(11), *range(12, 20)]
    assert y[11].isnan().all()
    assert torch.equal(y[others], expected[others])


QUANTIZED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": lambda weight: quantize_int4(weight, 32),
}


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 100])
def test_quantized_layers(make_kernels: MakeKernels, form: str, dtype: torch.dtype, k: int) -> None:
    sizes, rows = [56, 56], 40
    if form == "int4" and k % 32:
        pytest.skip("groups of 32 inputs")
    weight = QUANTIZED[form](randn(1, sum(sizes), k) * k**-0.5)
    x = randn(2, rows, k, dtype=dtype)
    parts = make_parts((16, 5), k, sizes, dtype)
    results = []
    for kernels in (make_kernels(1), make_kernels(3), TORCH_KERNELS):
        kernel, plain = (kernels.quantized_linear(weight, None, GATED) for _ in range(2))
        batch, site = add_site(kernels, kernel, k, sizes, True, dtype)
        site.install(3, kernels.pack_low_rank(parts, LowRankShape(k, (*sizes,), True, dtype)))
        batch.set([0, 7, 31], [BASE, 3])
        y, base = kernel(x), plain(x)
        assert torch.equal(y[:7], base[:7])
        assert torch.equal(y[31:], base[31:])
        batch.set([0, 1], [3])
        if kernels is not TORCH_KERNELS:
            assert torch.equal(torch.cat([kernel(x[r : r + 1]) for r in range(7, 31)]), y[7:31])
        results.append(y)
    assert torch.equal(results[0], results[1])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(results[0], results[2], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding_has_two_sites(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    vocab, dim = 130, 72
    table, ids = randn(1, vocab, dim, dtype=dtype), torch.tensor([0, 129, 5, 5, 64, 31, 30])
    x, added = randn(2, 7, dim, dtype=dtype), randn(3, 7, dim, dtype=dtype)
    lookup = make_parts((12,), vocab, [dim], dtype)
    project = make_parts((7,), dim, [vocab], dtype)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for kernels in (make_kernels(1), make_kernels(3), TORCH_KERNELS):
        for table_kernel in (kernels.embedding(table, LOGITS), kernels.embedding(table, None)):
            batch, of_logits = kernels.adapter_batch(), kernels.adapter_batch()
            base = table_kernel.lookup(ids)
            table_kernel.lookup_site = kernels.adapter_site(batch, LowRankShape(vocab, (dim,), False, dtype))
            table_kernel.lookup_site.install(
                0, kernels.pack_low_rank(lookup, LowRankShape(vocab, (dim,), False, dtype))
            )
            batch.set([0, 2, 6], [BASE, 0])
            y = table_kernel.lookup(ids)
            assert torch.equal(y[[0, 1, 6]], base[[0, 1, 6]])
            assert torch.equal(table_kernel.lookup(ids, added), added + y)
        head = kernels.embedding(table, LOGITS)
        plain = head.project(x)
        head.project_site = kernels.adapter_site(of_logits, LowRankShape(dim, (vocab,), False, dtype))
        head.project_site.install(1, kernels.pack_low_rank(project, LowRankShape(dim, (vocab,), False, dtype)))
        of_logits.set([0, 3], [1])
        logits = head.project(x)
        assert torch.equal(logits[3:], plain[3:])
        batch.set([0, 1], [0])
        results.append((y, logits, table_kernel.lookup(ids[2:3])))
    part = lookup[0]
    assert part is not None
    expected = table[ids].double() + part.scale * (part.b.double() @ part.a.double()).T[ids]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(results[0][0][2:6].double(), expected[2:6], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(results[0][1], results[2][1], rtol=tolerance, atol=tolerance)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[0][0][2:3])


def test_a_plan_follows_the_segments_of_its_steps(make_kernels: MakeKernels) -> None:
    kernels, dtype, size = make_kernels(2), torch.bfloat16, 24
    layer = Layer(kernels, PLAIN, 64, [64], dtype)
    quantized = kernels.quantized_linear(quantize_int8(randn(1, 64, 64)), None)
    quantized.site = layer.site
    table = kernels.embedding(randn(2, 50, 64, dtype=dtype), None)
    table.lookup_site = kernels.adapter_site(layer.batch, LowRankShape(50, (64,), False, dtype))
    table.lookup_site.install(
        0, kernels.pack_low_rank(make_parts((4,), 50, [64], dtype), LowRankShape(50, (64,), False, dtype))
    )

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return quantized(layer.kernel(table.lookup(ids)))

    plan = Plan(kernels.context, forward, size, [])
    for n, starts, slots in (
        (5, [0], []),
        (size, [0, 7, 20], [0, BASE]),
        (3, [0, 3], [2]),
        (9, [0, 2, 9], [0, 4]),
        (9, [0, 40], [0]),
    ):
        inputs = torch.arange(n) % 50, torch.arange(n)
        layer.batch.set(starts, slots)
        y = plan.run(*inputs, [])
        assert isinstance(y, Tensor)
        assert torch.equal(y, forward(*inputs))


def test_a_site_makes_recorded_plans_invalid(make_kernels: MakeKernels) -> None:
    kernels = make_kernels(1)
    layer = Layer(kernels, PLAIN, 64, [64], torch.float32)
    before = kernels.context.num_kernels
    layer.plain.site = layer.site
    assert kernels.context.num_kernels > before


def test_packing_on_another_thread_while_kernels_run(library: NativeLibrary, make_kernels: MakeKernels) -> None:
    dtype, k, sizes = torch.bfloat16, 96, [100, 40, 40]
    layer = Layer(make_kernels(2), PLAIN, k, sizes, dtype)
    other = NativeKernels(Context(library, 1, library.instruction_sets()[-1]))
    x = randn(1, 6, k, dtype=dtype)
    layer.batch.set([0, 6], [layer.slots[-1]])
    expected = layer.kernel(x)
    packed: list[PackedLowRank] = []

    def pack() -> None:
        packed.extend(
            other.pack_low_rank(layer.adapters[-1], LowRankShape(k, (*sizes,), False, dtype)) for _ in range(20)
        )

    thread = threading.Thread(target=pack)
    thread.start()
    while thread.is_alive():
        assert torch.equal(layer.kernel(x), expected)
    thread.join()
    for one in packed:
        layer.site.install(layer.slots[-1], one)
        assert torch.equal(layer.kernel(x), expected)
    assert packed[0].rank == 33
    assert packed[0].num_bytes >= sum(part.a.nbytes + part.b.nbytes for part in layer.adapters[-1] if part is not None)


@pytest.mark.parametrize("kernels", [TorchKernels(), None], ids=["torch", "native"])
def test_shapes_that_do_not_fit_are_refused(kernels: Kernels | None, library: NativeLibrary) -> None:
    kernels = kernels or NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    good = LowRank(randn(1, 4, 32), randn(2, 16, 4), 1.0)
    bad: dict[str, list[LowRank | None]] = {
        "1 parts do not fit a site of 2": [good],
        r"\(4, 32\) and \(8, 4\) do not fit": [good, LowRank(good.a, randn(2, 8, 4), 1.0)],
        r"\(4, 16\) and \(16, 4\) do not fit": [LowRank(randn(1, 4, 16), good.b, 1.0), good],
        r"\(0, 32\) and \(16, 0\) do not fit": [LowRank(randn(1, 0, 32), randn(1, 16, 0), 1.0), None],
        r"bias of \(4,\) does not fit": [LowRank(good.a, good.b, 1.0, randn(3, 4)), None],
    }
    for message, parts in bad.items():
        with pytest.raises(ValueError, match=message):
            kernels.pack_low_rank(
                parts,
                LowRankShape(32, (16, 16), False, torch.float32),
            )
