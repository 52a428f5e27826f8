"""Recorded steps: the bits of the calls one by one, for any number of tokens; what cannot be repeated is refused."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.plan import LINE, Arena, NotPlannableError, Plan
from quire.worker.kernels.specs import PLAIN, ExpertsSpec, LinearSpec, NormSpec, RotaryAngles, RouterSpec

DIM, VOCAB, HEAD = 64, 40, 16


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Toy:
    """One of each kernel but attention, on views of one another's results."""

    def __init__(self, kernels: NativeKernels, dtype: torch.dtype) -> None:
        experts = randn(1, 4, 2 * 32, DIM, dtype=dtype), randn(2, 4, DIM, 32, dtype=dtype)
        self.embedding = kernels.embedding(randn(3, VOCAB, DIM, dtype=dtype), None)
        self.norm = kernels.rms_norm(randn(4, DIM, dtype=dtype), NormSpec(eps=1e-5))
        self.layer_norm = kernels.layer_norm(HEAD, randn(9, HEAD, dtype=dtype), None, NormSpec(eps=1e-5), DIM // HEAD)
        self.qkv = kernels.linear(randn(5, 3 * DIM, DIM, dtype=dtype) / 8, None)
        self.rotation = kernels.rotation(HEAD)
        self.tables = randn(6, 50, HEAD // 2, dtype=dtype), randn(7, 50, HEAD // 2, dtype=dtype)
        self.act = kernels.activation("silu", gated=True)
        self.places = kernels.embedding(randn(10, 50, DIM, dtype=dtype), None)
        self.gating = kernels.activation("softplus")
        wide = LinearSpec(float32_inputs=True, float32_output=True)
        self.gate = kernels.linear(randn(8, 4, DIM) / 8, None, wide)
        self.router = kernels.router(RouterSpec(num_experts_per_token=2, normalize=True), dtype)
        self.experts = kernels.experts(*experts, ExpertsSpec())

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.places.lookup(positions, self.embedding.lookup(ids))
        for _ in range(2):
            q, k, v = self.qkv(self.norm(x)).split(DIM, dim=-1)
            q, k = self.rotation(q, k, RotaryAngles(*self.tables, positions))
            x = self.layer_norm(q, self.norm(k, x))
            x = self.gating(v[:, :4], x, k)
            x = self.experts(x, *self.router(self.gate(x)), v, k)
        pair = self.qkv(x)[:, : 2 * DIM]
        return self.act(pair)


def make_inputs(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(VOCAB, (n,), generator=generator), torch.randint(50, (n,), generator=generator)


@pytest.fixture(params=[1, 2])
def kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> NativeKernels:
    return NativeKernels(Context(library, request.param, library.instruction_sets()[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plan_repeats_the_calls_to_the_bit(kernels: NativeKernels, dtype: torch.dtype) -> None:
    toy = Toy(kernels, dtype)
    plan = Plan(kernels.context, toy, 20, [])
    for n in (1, 20, 7, 2):
        inputs = make_inputs(n)
        expected = toy(*inputs)
        assert not expected.isnan().any()
        assert torch.equal(plan.run(*inputs, []), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_and_products_of_results_are_repeated(kernels: NativeKernels, dtype: torch.dtype) -> None:
    toy = Toy(kernels, dtype)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        x = toy.embedding.lookup(ids)[None]
        a, b, c = toy.qkv(x[0])[None].split(DIM, dim=-1)
        return toy.norm((x + a * b + torch.dropout(c, 0.5, False))[0])

    plan = Plan(kernels.context, forward, 20, [])
    for n in (1, 20, 7):
        inputs = make_inputs(n)
        assert torch.equal(plan.run(*inputs, []), forward(*inputs))


def test_nothing_is_computed_while_it_is_recorded(kernels: NativeKernels) -> None:
    written = torch.zeros(4, DIM)
    kernel = kernels.rms_norm(torch.ones(DIM), NormSpec(eps=1e-5))

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return kernel(written, written)

    Plan(kernels.context, forward, 4, [])
    assert not written.any()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda toy, ids, positions: toy.embedding.lookup(ids) * 2, r"aten\.mul\.Tensor is no native kernel"),
        (lambda toy, ids, positions: toy.tables[0][:20] + toy.embedding.lookup(ids)[:, :8], r"aten\.add\.Tensor is no"),
        (lambda toy, ids, positions: torch.cat([toy.embedding.lookup(ids), toy.tables[0][:20]], 1), r"aten\.cat\."),
        (lambda toy, ids, positions: torch.cat([toy.embedding.lookup(ids)] * 2), r"aten\.cat\.default is no"),
        (lambda toy, ids, positions: toy.norm(toy.qkv(toy.embedding.lookup(ids))[:, ::3]), r"aten\.\w+\.default"),
        (lambda toy, ids, positions: toy.embedding.lookup(ids[:3]), "something else than each token"),
        (lambda toy, ids, positions: toy.embedding.lookup(positions[1:]), "something else than each token"),
        (lambda toy, ids, positions: toy.rotation(*toy.qkv(toy.embedding.lookup(ids)).split(DIM, dim=-1)[:2],
                                                  RotaryAngles(*toy.tables, ids))[0], "something else than each token"),
    ],
)  # fmt: skip
def test_what_cannot_be_repeated_is_refused(forward: object, message: str, kernels: NativeKernels) -> None:
    toy = Toy(kernels, torch.float32)
    with pytest.raises(NotPlannableError, match=message):
        Plan(kernels.context, lambda ids, positions: forward(toy, ids, positions), 20, [])  # type: ignore[operator]
    inputs = make_inputs(3)
    assert torch.equal(toy(*inputs), toy(*inputs))  # the context computes again


def test_an_error_while_it_is_recorded_leaves_the_context_as_it_was(kernels: NativeKernels) -> None:
    toy = Toy(kernels, torch.float32)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        raise RuntimeError("the weights are gone")

    with pytest.raises(RuntimeError, match="the weights are gone"):
        Plan(kernels.context, forward, 20, [])
    inputs = make_inputs(5)
    assert torch.equal(toy(*inputs), Plan(kernels.context, toy, 8, []).run(*inputs, []))


def test_the_arena_uses_again_what_nobody_holds() -> None:
    arena = Arena(1 << 16)
    first, second = (arena.take((4, 16), torch.float32) for _ in range(2))
    assert first.data_ptr() % LINE == second.data_ptr() % LINE == 0
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all()
    address, view = first.data_ptr(), first[1:, 3:5]
    del first
    assert arena.take((4, 16), torch.float32).data_ptr() != address  # a view still holds it
    assert view.eq(1).all()
    del view
    gc.collect()
    assert arena.take((8, 16), torch.bfloat16).data_ptr() == address
    with pytest.raises(NotPlannableError, match="more than 65536 bytes"):
        arena.take((1 << 16,), torch.float32)


def test_a_system_that_refuses_address_space() -> None:
    with pytest.raises(NotPlannableError, match="bytes of address space for results"):
        Arena(1 << 62)


def test_a_plan_is_forgotten_by_the_library(library: NativeLibrary) -> None:
    """Plans come and go with their context alive; each is freed once."""
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    kernel = kernels.embedding(torch.ones(VOCAB, DIM), None)
    for _ in range(50):
        plan = Plan(kernels.context, lambda ids, positions: kernel.lookup(ids), 8, [])
        assert plan.run(*make_inputs(2), []).eq(1).all()
        del plan


def test_linear_layers_of_several_groups_are_kept_apart(kernels: NativeKernels) -> None:
    """A residual that is the input of the layer, and a result that is one: nothing is overwritten too early."""
    first, second = (kernels.linear(randn(seed, DIM, DIM) / 8, None, PLAIN) for seed in (20, 21))
    table = kernels.embedding(randn(22, VOCAB, DIM), None)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        x = table.lookup(ids)
        y = second(first(x, x), x)
        return first(second(y, x), y)

    inputs = make_inputs(11)
    assert torch.equal(Plan(kernels.context, forward, 16, []).run(*inputs, []), forward(*inputs))
