"""Native mixtures of experts: near the float64 result, and each token has the same bits in any company."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.worker.kernels.reference import TORCH_KERNELS, TorchExperts, route
from quire.worker.kernels.specs import CLAMPED_SWIGLU, ExpertsSpec, RouterSpec

from ..conftest import MakeKernels

SILU, GELU = ExpertsSpec(activation="silu"), ExpertsSpec(activation="gelu_pytorch_tanh")
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(4, 64, 48, 2), (7, 33, 30, 3), (3, 100, 130, 1), (16, 32, 64, 8)]
"""(experts, hidden, expert size, experts per token): with and without padding."""


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weights(experts: int, hidden: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = randn(1, experts, 2 * size, hidden) * hidden**-0.5
    return gate_up.to(dtype), (randn(2, experts, hidden, size) * size**-0.5).to(dtype)


def choose(seed: int, n: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    spec = RouterSpec(num_experts_per_token=k, normalize=True)
    return route(randn(seed, n, experts) * 2, spec=spec, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "hidden", "size", "k"), SHAPES)
def test_equals_the_float64_reference(
    make_kernels: MakeKernels, experts: int, hidden: int, size: int, k: int, dtype: torch.dtype
) -> None:
    gate_up, down = make_weights(experts, hidden, size, dtype)
    x, residual = randn(3, 21, hidden, dtype=dtype), randn(4, 21, hidden, dtype=dtype)
    ids, weights = choose(5, 21, experts, k)
    for r in (None, residual):
        y = make_kernels(2).experts(gate_up, down, SILU)(x, ids, weights, r)
        wide_residual = None if r is None else r.double()
        exact = TorchExperts(gate_up.double(), down.double(), SILU)
        expected = exact(x.double(), ids, weights.double(), wide_residual)
        assert y.dtype == dtype
        # between the two matrices bfloat16 is rounded once more
        tolerance = 2**-6 if dtype == torch.bfloat16 else 3e-6
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "hidden", "size", "k"), [*SHAPES, (2, 48, 80, 2)])
def test_a_token_has_the_same_bits_in_any_company(
    make_kernels: MakeKernels, experts: int, hidden: int, size: int, k: int, dtype: torch.dtype
) -> None:
    """300 tokens on two experts are more rows than go through a panel at once."""
    gate_up, down = make_weights(experts, hidden, size, dtype)
    n = 300
    x, residual, (ids, weights) = (
        randn(6, n, hidden, dtype=dtype),
        randn(7, n, hidden, dtype=dtype),
        choose(8, n, experts, k),
    )
    one = make_kernels(1).experts(gate_up, down, GELU)
    alone = torch.cat([one(*(t[i : i + 1] for t in (x, ids, weights, residual))) for i in range(0, n, 7)])
    rng = random.Random(experts)
    for num_threads in (1, 2, 3):
        kernel = make_kernels(num_threads).experts(gate_up, down, GELU)
        whole = kernel(x, ids, weights, residual)
        assert torch.equal(whole[::7], alone)
        for count in (2, 5, 17, 64):
            some = torch.tensor(rng.sample(range(n), count))
            assert torch.equal(kernel(x[some], ids[some], weights[some], residual[some]), whole[some])


def test_answers_are_added_in_the_order_of_the_choices(make_kernels: MakeKernels) -> None:
    """Two experts that answer a large number and its negative, and one that answers a small one: the order shows."""
    down = torch.tensor([1.0, -1.0, 2.0**-30]).view(3, 1, 1)
    kernel = make_kernels(1).experts(torch.ones(3, 2, 1), down, ExpertsSpec(activation="relu"))
    x, ones = torch.ones(3, 1), torch.ones(3, 3)
    y = kernel(x, torch.tensor([[0, 1, 2], [0, 2, 1], [2, 0, 1]]), ones)
    assert y.flatten().tolist() == [2.0**-30, 0.0, 0.0]


def test_idle_experts_are_not_touched(make_kernels: MakeKernels) -> None:
    gate_up, down = make_weights(5, 32, 32, torch.bfloat16)
    gate_up[[1, 2]] = torch.nan
    ids, weights = torch.tensor([[0, 3], [3, 0], [4, 3]]), torch.full((3, 2), 0.5)
    y = make_kernels(2).experts(gate_up, down, SILU)(randn(9, 3, 32, dtype=torch.bfloat16), ids, weights)
    assert not y.isnan().any()


def test_no_tokens_are_no_work(make_kernels: MakeKernels) -> None:
    gate_up, down = make_weights(2, 32, 32, torch.float32)
    kernels = make_kernels(2)
    ids, weights = kernels.router(RouterSpec(num_experts_per_token=1, normalize=True), torch.float32)(torch.empty(0, 2))
    assert kernels.experts(gate_up, down, SILU)(torch.empty(0, 32), ids, weights).shape == (0, 32)


@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (60, 4), (128, 8)])
def test_the_router_equals_the_reference(
    make_kernels: MakeKernels, experts: int, k: int, normalize: bool, in_float32: bool
) -> None:
    spec = RouterSpec(num_experts_per_token=k, normalize=normalize, weights_in_float32=in_float32)
    logits = randn(10, 50, experts) * 3
    ids, weights = make_kernels(3).router(spec, torch.bfloat16)(logits)
    expected_ids, expected = route(logits.double(), spec=spec, dtype=torch.bfloat16)
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    tolerance = 1e-6 if in_float32 else 2**-8
    torch.testing.assert_close(weights.double(), expected.double(), rtol=tolerance, atol=1e-9)
    if not in_float32:
        assert torch.equal(weights, weights.bfloat16().float())
    rows = [make_kernels(1).router(spec, torch.bfloat16)(row) for row in logits.split(1)]
    assert torch.equal(ids, torch.cat([row[0] for row in rows]))
    assert torch.equal(weights, torch.cat([row[1] for row in rows]))


def test_of_equal_experts_the_first_is_chosen_and_not_a_number_chooses_some(make_kernels: MakeKernels) -> None:
    router = make_kernels(1).router(RouterSpec(num_experts_per_token=2, normalize=True), torch.float32)
    ids, weights = router(torch.tensor([[1.0, 2.0, 2.0, 2.0], [torch.nan] * 4]))
    assert ids[0].tolist() == [1, 2]
    assert weights[0].tolist() == [0.5, 0.5]
    assert len(set(ids[1].tolist())) == 2
    assert ids[1].max() < 4


OAI = ExpertsSpec(activation=CLAMPED_SWIGLU, halves_alternate=True)


def gpt_oss_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor]
) -> Tensor:
    """The formula, token by token in float64."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            both = gate_up[expert].double() @ x[token].double() + biases[0][expert].double()
            gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
            between = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
            y[token] += weight * (down[expert].double() @ between + biases[1][expert].double())
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "hidden", "size", "k"), SHAPES[1:3])
def test_biases_and_gates_that_alternate(
    make_kernels: MakeKernels, experts: int, hidden: int, size: int, k: int, dtype: torch.dtype
) -> None:
    """gpt-oss's experts, with numbers on both sides of its limits; and each token alone has the same bits."""
    gate_up, down = make_weights(experts, hidden, size, dtype)
    gate_up = gate_up * 6
    biases = randn(8, experts, 2 * size, dtype=dtype), randn(9, experts, hidden, dtype=dtype)
    x, (ids, weights) = randn(3, 21, hidden, dtype=dtype), choose(5, 21, experts, k)
    expected = gpt_oss_experts(x, ids, weights, gate_up, down, biases)
    tolerance = 2**-5 if dtype == torch.bfloat16 else 2e-5
    for kernels in (make_kernels(2), TORCH_KERNELS):
        kernel = kernels.experts(gate_up, down, OAI, biases)
        torch.testing.assert_close(kernel(x, ids, weights).double(), expected, rtol=tolerance, atol=tolerance * 4)
    one = make_kernels(1).experts(gate_up, down, OAI, biases)
    alone = torch.cat([one(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(21)])
    assert torch.equal(make_kernels(2).experts(gate_up, down, OAI, biases)(x, ids, weights), alone)


def test_not_a_number_passes_the_limits(make_kernels: MakeKernels) -> None:
    for gate, up in ((torch.nan, 1.0), (1.0, torch.nan)):
        gate_up = torch.tensor([[[gate], [up]]])
        y = make_kernels(1).experts(gate_up, torch.ones(1, 1, 1), OAI)(
            torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        )
        assert y.isnan().all()


RULES: dict[str, RouterSpec] = {
    "sigmoid": RouterSpec(num_experts_per_token=3, normalize=False, score="sigmoid"),
    "sigmoid, eps, factor": RouterSpec(
        num_experts_per_token=3, normalize=True, score="sigmoid", norm_eps=0.5, factor=2.5
    ),
    "two best of groups": RouterSpec(
        num_experts_per_token=4,
        normalize=True,
        score="sigmoid",
        num_groups=4,
        num_kept_groups=2,
        group_score="two best",
    ),
    "best of groups": RouterSpec(num_experts_per_token=3, normalize=False, num_groups=3, num_kept_groups=1),
    "softmax, least sum": RouterSpec(num_experts_per_token=2, normalize=True, norm_min=0.7),
    "softmax, eps": RouterSpec(num_experts_per_token=5, normalize=True, norm_eps=0.1),
    "sparsemixer": RouterSpec(num_experts_per_token=2, normalize=False, score="sparsemixer", threshold=0.5),
}


@pytest.mark.parametrize("adds", ["nothing", "bias", "bias and scale"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_a_router_equals_the_reference(make_kernels: MakeKernels, rule: str, adds: str) -> None:
    spec, experts, n = RULES[rule], 12, 60
    bias = None if adds == "nothing" or spec.score == "sparsemixer" else randn(11, experts) * 0.3
    scale = randn(12, experts) if adds == "bias and scale" else None
    logits = randn(13, n, experts) * 2
    ids, weights = make_kernels(3).router(spec, torch.float32, bias, scale)(logits)
    wide = (None if t is None else t.double() for t in (bias, scale))
    kwargs = dict(zip(("choice_bias", "expert_scale"), wide, strict=True))
    expected_ids, expected = route(logits.double(), spec=spec, dtype=torch.float32, **kwargs)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-9)
    one = make_kernels(1).router(spec, torch.float32, bias, scale)
    alone = [one(row) for row in logits.split(1)]
    assert torch.equal(ids, torch.cat([row[0] for row in alone]))
    assert torch.equal(weights, torch.cat([row[1] for row in alone]))


def test_of_equal_groups_and_sums_the_first_are_chosen(make_kernels: MakeKernels) -> None:
    spec = RouterSpec(
        num_experts_per_token=2,
        normalize=True,
        score="sigmoid",
        num_groups=3,
        num_kept_groups=2,
        group_score="two best",
    )
    logits, bias = torch.tensor([[0.0, 0.0, 1.0, -1.0, 0.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    for kernels in (make_kernels(1), TORCH_KERNELS):
        ids, weights = kernels.router(spec, torch.float32, bias)(logits)
        assert ids.tolist() == [[0, 1]]
        assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RouterSpec(num_experts_per_token=7, normalize=True), "7 experts for each token cannot be chosen from 6"),
        (RouterSpec(num_experts_per_token=1, normalize=True, num_groups=4, num_kept_groups=2), "2 of 4 groups of 6"),
        (RouterSpec(num_experts_per_token=3, normalize=True, num_groups=3), "cannot be chosen from 2"),
        (RouterSpec(num_experts_per_token=1, normalize=True, num_groups=6, group_score="two best"), "no sum of two"),
    ],
)
def test_rules_that_cannot_choose_are_refused(spec: RouterSpec, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec.validate(6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_inputs_and_shared_answers_equal_the_reference(make_kernels: MakeKernels, dtype: torch.dtype) -> None:
    gate_up, down = make_weights(5, 40, 24, dtype)
    x, shared, residual = (randn(seed, 19, 40, dtype=dtype) for seed in (14, 15, 16))
    ids, weights = choose(17, 19, 5, 2)
    spec = ExpertsSpec(activation="silu", scales_inputs=True)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 3e-6
    for r in (None, residual):
        y = make_kernels(2).experts(gate_up, down, spec)(x, ids, weights, r, shared)
        wide = [None if t is None else t.double() for t in (r, shared)]
        expected = TorchExperts(gate_up.double(), down.double(), spec)(x.double(), ids, weights.double(), *wide)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        alone = make_kernels(1).experts(gate_up, down, spec)
        rows = [alone(*(None if t is None else t[i : i + 1] for t in (x, ids, weights, r, shared))) for i in range(19)]
        assert torch.equal(y, torch.cat(rows))
