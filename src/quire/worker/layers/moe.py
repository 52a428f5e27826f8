"""Mixture of experts: a router sends each token to its k best MLPs and adds their answers (Shazeer et al. 2017)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire.config.quantization import QuantizationScheme
from quire.worker.kernels.base import ExpertsKernel, ExpertsShare, Kernels, LinearKernel, RouterKernel
from quire.worker.kernels.lora import AdapterSite
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import (
    CLAMPED_SWIGLU,
    LOGITS,
    PLAIN,
    ExpertsSpec,
    LinearSpec,
    RouterSpec,
    get_activation,
)
from quire.worker.layers.linear import Linear, side_by_side
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.weights import Cut, KernelModule, forget, weight
from quire.worker.quantization.weight import Kind, QuantizedWeight, quantize, same_kind

Layout = Literal["each", "one", "stacked", "transposed"]


@dataclass(frozen=True, kw_only=True)
class SharedExpertSpec:
    """A gated MLP that every token goes through, beside its experts: `shared_experts` in the tree of modules."""

    size: int
    is_weighted: bool = False
    """True: its answer is weighted by the sigmoid of one more logit, of the matrix `shared_expert_gate`."""
    is_fused: bool = False
    """The checkpoint holds gate_up_proj as a single matrix."""
    bias: bool = False
    divisor: float = 1.0
    """Number by which the output of the shared expert is divided."""


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The experts of one layer. Tensors that a family's checkpoints call otherwise are renamed when they are found."""

    num_experts: int
    expert_size: int
    router: RouterSpec
    activation: str | None = None
    """None: the decoder's."""
    layout: Layout = "each"
    """Tensors in the checkpoint. each: three matrices of every expert, experts.E.gate_proj.weight and so on; one: those
    of a single expert, without its number; stacked: experts.gate_up_proj [num_experts, 2 * expert_size, hidden], the
    gates first, and experts.down_proj [num_experts, hidden, expert_size]; transposed: the same with the last two
    dimensions swapped."""
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"
    """Names of the three matrices, with the layouts each and one."""
    gates_alternate: bool = False
    """Stacked and transposed: gates and what they gate take turns in gate_up_proj (gpt-oss)."""
    expert_bias: bool = False
    """Stacked and transposed: the matrices have biases, experts.gate_up_proj_bias [num_experts, 2 * expert_size] and
    experts.down_proj_bias [num_experts, hidden]."""
    scales_inputs: bool = False
    """The weights scale the experts' inputs instead of their answers (Llama 4)."""
    router_bias: bool = False
    """The router's logits have a bias: gate.bias."""
    router_norm_eps: float | None = None
    """The router sees its input normed, by a root mean square norm of this eps: gate.norm.weight (Gemma 4)."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    logits_in_float32: bool = False
    """The family computes logits in float32. (Native kernels always do.)"""
    router_in_float32: bool = False
    """The router's matrix stays in float32 whatever the model's type."""
    choice_bias: bool = False
    """Experts are chosen by their scores plus gate.e_score_correction_bias, which does not enter into weights."""
    choice_bias_is_row: bool = False
    """The bias is stored as [1, num_experts]."""
    expert_scale: bool = False
    """Each expert's weight has a factor, of gate.per_expert_scale."""
    shared: SharedExpertSpec | None = None


@dataclass(frozen=True)
class QuantizedExperts:
    """Quantized matrices of all experts: each list of one kind."""

    gate_up: Sequence[QuantizedWeight]
    """(2 * expert_size, hidden) each."""
    down: Sequence[QuantizedWeight]
    """(hidden, expert_size) each."""

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in (*self.gate_up, *self.down))


class Experts(KernelModule):
    """All experts' matrices: gate_up_proj [num_experts, 2 * expert_size, hidden], down_proj [num_experts, hidden,
    expert_size]. Is a QuantizableWeights; the kinds are those of the two."""

    packed_parameters = ("gate_up_proj", "down_proj")

    def __init__(self, spec: MoESpec, hidden_size: int, activation: str, name: str = "experts") -> None:
        super().__init__()
        if activation != CLAMPED_SWIGLU:
            get_activation(activation)
        self.spec = spec
        self.name = name
        self.kernel_spec = ExpertsSpec(
            activation=activation, scales_inputs=spec.scales_inputs, halves_alternate=spec.gates_alternate
        )
        self.scheme: QuantizationScheme | None = None
        self.quantized_bytes: int | None = None
        self._stored: QuantizedExperts | None = None
        self._kernel: ExpertsKernel | None = None
        self._sites: tuple[AdapterSite, AdapterSite] | None = None
        self.gate_up_proj = weight(spec.num_experts, 2 * spec.expert_size, hidden_size)
        self.down_proj = weight(spec.num_experts, hidden_size, spec.expert_size)
        self.gate_up_proj_bias = weight(spec.num_experts, 2 * spec.expert_size) if spec.expert_bias else None
        self.down_proj_bias = weight(spec.num_experts, hidden_size) if spec.expert_bias else None
        self.own_experts: Sequence[int] = range(spec.num_experts)
        """Experts whose matrices this worker has."""
        self.cuts: Mapping[str, Cut] = {}
        self.is_pooled = False
        """True if engines share these experts: each computes its own for the tokens of all."""
        self._make_share: Callable[[torch.dtype], ExpertsShare] | None = None

    @property
    def hidden_size(self) -> int:
        """Elements of a token."""
        return self.gate_up_proj.shape[2]

    def cut(
        self,
        experts: Sequence[int],
        inner: range,
        outputs: range,
        make_share: Callable[[torch.dtype], ExpertsShare],
    ) -> None:
        """Leaves this worker some experts, and of their matrices the rows `inner` of gates and what they gate, and
        `outputs` of the second ones. Must be called before there are weights, and with a matrix of each in the
        checkpoint."""
        spec, hidden_size = self.spec, self.hidden_size
        assert spec.layout in ("each", "one")
        assert not spec.expert_bias
        rows = {spec.gate_name: (inner, spec.expert_size), spec.up_name: (inner, spec.expert_size)}
        rows[spec.down_name] = outputs, hidden_size
        self.cuts = {
            f"{self._prefix(expert)}.{name}": Cut(torch.arange(own.start, own.stop, device="cpu"), count)
            for expert in experts
            for name, (own, count) in rows.items()
            if len(own) < count
        }
        self.own_experts, self._make_share = experts, make_share
        self.gate_up_proj = weight(len(experts), 2 * len(inner), hidden_size)
        self.down_proj = weight(len(experts), len(outputs), spec.expert_size)

    def _prefix(self, expert: int) -> str:
        return self.name if self.spec.layout == "one" else f"{self.name}.{expert}"

    @property
    def absent_tensors(self) -> set[str]:
        """Names of the checkpoint's tensors that `checkpoint_tensors` yields for the experts of other workers."""
        spec = self.spec
        others = set(range(spec.num_experts)) - set(self.own_experts)
        names = (spec.gate_name, spec.up_name, spec.down_name)
        return {f"{self._prefix(expert)}.{name}.weight" for expert in others for name in names}

    @property
    def sites(self) -> tuple[AdapterSite, AdapterSite] | None:
        """The places of adapters; None: there are none."""
        return self._sites

    def set_sites(self, gate_up: AdapterSite, down: AdapterSite) -> None:
        """Gives the kernel, and those made later, the places where adapters of the two matrices are installed."""
        self._sites = gate_up, down
        if self._kernel is not None:
            self._kernel.set_sites(gate_up, down)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        spec, name = self.spec, self.name
        if spec.layout in ("stacked", "transposed"):
            for block, parameter in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)):
                yield f"{name}.{block}", parameter.data if spec.layout == "stacked" else parameter.data.transpose(1, 2)
            for block, bias in (("gate_up_proj", self.gate_up_proj_bias), ("down_proj", self.down_proj_bias)):
                if bias is not None:
                    yield f"{name}.{block}_bias", bias.data
            return
        places, hidden = {expert: i for i, expert in enumerate(self.own_experts)}, self.hidden_size
        for expert in range(spec.num_experts):
            if expert in places:
                gate, up = self.gate_up_proj.data[places[expert]].chunk(2)
                down = self.down_proj.data[places[expert]]
            else:  # its shapes only
                gate = up = torch.empty((spec.expert_size, hidden), device="meta")
                down = torch.empty((hidden, spec.expert_size), device="meta")
            yield f"{self._prefix(expert)}.{spec.gate_name}.weight", gate
            yield f"{self._prefix(expert)}.{spec.up_name}.weight", up
            yield f"{self._prefix(expert)}.{spec.down_name}.weight", down

    def store(self, parts: Sequence[QuantizedWeight]) -> bool:
        if self.spec.layout in ("stacked", "transposed"):
            count = self.spec.num_experts
            self._stored = QuantizedExperts(*(part.split(count) for part in parts))
            return True
        gate_up, down = [part for i, part in enumerate(parts) if i % 3 < 2], list(parts[2::3])
        if not (same_kind(gate_up) and same_kind(down)):
            return False
        pairs = zip(gate_up[::2], gate_up[1::2], strict=True)
        self._stored = QuantizedExperts([QuantizedWeight.stack(pair) for pair in pairs], down)
        return True

    @property
    def stored_kinds(self) -> tuple[Kind, ...]:
        return () if self._stored is None else (self._stored.gate_up[0].kind, self._stored.down[0].kind)

    def store_outlines(self, kinds: Sequence[Kind]) -> None:
        both = zip((self.gate_up_proj, self.down_proj), kinds, strict=False)
        outlines = [[QuantizedWeight.outline(block.shape[1:], kind)] * len(block) for block, kind in both]
        self._stored = QuantizedExperts(*outlines) if outlines else None

    def prepare(self, kernels: Kernels) -> ExpertsKernel:
        quantized, dtype = self._quantized_experts(kernels), self.gate_up_proj.dtype
        self.quantized_bytes = None if quantized is None else quantized.num_bytes
        if quantized is None:
            blocks = self.gate_up_proj.data, self.down_proj.data
            self._kernel = kernel = kernels.experts(*blocks, self.kernel_spec, self._biases)
        else:
            matrices = quantized.gate_up, quantized.down
            self._kernel = kernel = kernels.quantized_experts(*matrices, self.kernel_spec, self._biases)
        if self._make_share is not None:
            kernel.set_share(self._make_share(dtype))
        if self._sites is not None:
            kernel.set_sites(*self._sites)
        if quantized is not None or not kernels.keeps_weights:
            forget(self, "gate_up_proj")
            forget(self, "down_proj")
        return kernel

    def move_to(self, kernels: Kernels) -> None:
        """Computes with the threads of `kernels` from now on."""
        if self._kernel is not None:
            self._kernel.move_to(kernels)

    @property
    def _biases(self) -> tuple[Tensor, Tensor] | None:
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None
        return self.gate_up_proj_bias.data, self.down_proj_bias.data

    def _quantized_experts(self, kernels: Kernels) -> QuantizedExperts | None:
        """Returns the experts in integers, if they were stored so, or are to be quantized and `kernels` can compute
        with them."""
        experts, self._stored = self._stored, None
        if experts is None and (scheme := self.scheme) is not None:
            experts = QuantizedExperts(
                *([quantize(w, scheme) for w in block.data] for block in (self.gate_up_proj, self.down_proj))
            )
            can_quantize = kernels.can_quantize(experts.gate_up[0]) and kernels.can_quantize(experts.down[0])
            return experts if can_quantize else None
        return experts

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Returns the weighted sum of each token's experts.

        x: [num_tokens, hidden]; expert_ids: [num_tokens, k] int64; expert_weights: [num_tokens, k]. An expert runs
        once, on its own tokens, and experts without tokens cost nothing. A token's outputs are added in the order of
        its own choices, independent of the rest of the batch; `shared` and `residual`, of x's shape, are added.
        """
        kernel = self._kernel or self.prepare(TORCH_KERNELS)
        return kernel(x, expert_ids, expert_weights, residual, shared)


class Router(KernelModule):
    """The matrix of the experts' logits, whose sums stay in float32, and the rule of choice."""

    packed_parameters = ("weight",)

    def __init__(self, spec: MoESpec, hidden_size: int) -> None:
        super().__init__()
        spec.router.validate(spec.num_experts)
        self.rule = spec.router
        self.is_wide = spec.router_in_float32
        self.float32_parameters = ("e_score_correction_bias", "per_expert_scale", *("weight", "bias") * self.is_wide)
        self.linear_spec = dataclasses.replace(
            *(LOGITS,),
            divisor=spec.logits_divisor,
            soft_cap=spec.logits_soft_cap,
            float32_inputs=spec.logits_in_float32 or spec.router_in_float32,
        )
        self.weight = weight(spec.num_experts, hidden_size)
        self.bias = weight(spec.num_experts) if spec.router_bias else None
        bias_shape = (1, spec.num_experts) if spec.choice_bias_is_row else (spec.num_experts,)
        self.e_score_correction_bias = weight(*bias_shape) if spec.choice_bias else None
        self.per_expert_scale = weight(spec.num_experts) if spec.expert_scale else None
        self.norm = None if spec.router_norm_eps is None else RMSNorm(hidden_size, spec.router_norm_eps)
        self._kernel: tuple[LinearKernel, dict[torch.dtype, RouterKernel]] | None = None
        """The router's linear layer, and the kernel that chooses experts for each type of input."""

    def prepare(self, kernels: Kernels) -> tuple[LinearKernel, dict[torch.dtype, RouterKernel]]:
        bias, choice_bias, scale = (
            None if p is None else p.data.view(-1)
            for p in (self.bias, self.e_score_correction_bias, self.per_expert_scale)
        )
        linear = kernels.linear(self.weight.data, bias, self.linear_spec)
        types = (torch.float32, torch.bfloat16, torch.float16) if self.is_wide else (self.weight.dtype,)
        made = linear, {dtype: kernels.router(self.rule, dtype, choice_bias, scale) for dtype in types}
        if not kernels.keeps_weights:
            forget(self, "weight")
        self._kernel = made
        return made

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [num_tokens, hidden] to the experts' ids [num_tokens, k] and their weights, of that shape."""
        linear, choose = self._kernel or self.prepare(TORCH_KERNELS)
        normed = x if self.norm is None else self.norm(x)
        return choose[x.dtype](linear(normed))


class MoE(nn.Module):
    """Router, experts, and the expert that all tokens share. Their sum is divided by `output.divisor`."""

    def __init__(self, spec: MoESpec, hidden_size: int, activation: str, output: LinearSpec = PLAIN) -> None:
        super().__init__()
        if output.divisor != 1.0:
            assert not spec.scales_inputs
            assert spec.shared is None or not spec.shared.is_weighted
            rule = dataclasses.replace(spec.router, factor=spec.router.factor / output.divisor)
            shared = spec.shared and dataclasses.replace(spec.shared, divisor=spec.shared.divisor * output.divisor)
            spec = dataclasses.replace(spec, router=rule, shared=shared)
        self.spec = spec
        activation = spec.activation or activation
        self.gate = Router(spec, hidden_size)
        self.experts = Experts(spec, hidden_size, activation)
        shared = spec.shared
        self.shared_experts: SharedMLP | Experts | None = None
        self.shared_expert_gate: Router | None = None
        if shared is not None and shared.is_weighted:
            one = weighted_expert(shared)
            self.shared_expert_gate = Router(one, hidden_size)
            self.shared_experts = Experts(one, hidden_size, activation, "shared_experts")
        elif shared is not None:
            self.shared_experts = SharedMLP(shared, hidden_size, activation)

    def forward(self, x: Tensor, residual: Tensor | None = None, router_input: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added. `router_input`, of that
        shape, is what the router sees; None for x."""
        ids, weights = self.gate(x if router_input is None else router_input)  # [num_tokens, k] each
        shared: Tensor | None = None
        if self.shared_expert_gate is not None and self.shared_experts is not None:
            shared = self.shared_experts(x, *self.shared_expert_gate(x))
        elif self.shared_experts is not None:
            shared = self.shared_experts(x)
        answer: Tensor = self.experts(x, ids, weights, residual, shared)
        return answer


class SharedMLP(nn.Module):
    """The shared expert: down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: SharedExpertSpec, hidden_size: int, activation: str) -> None:
        super().__init__()
        parts, inner = {"gate_proj": spec.size, "up_proj": spec.size}, LinearSpec(activation=activation, gated=True)
        self.gate_up_proj = side_by_side(hidden_size, parts, spec.bias, spec.is_fused, inner)
        self.down_proj = Linear(spec.size, hidden_size, spec.bias, LinearSpec(divisor=spec.divisor))

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        output: Tensor = self.down_proj(self.gate_up_proj(x))
        return output


def weighted_expert(shared: SharedExpertSpec) -> MoESpec:
    """Returns the shared expert as a mixture of one, whose weight is the sigmoid of its logit."""
    rule = RouterSpec(num_experts_per_token=1, normalize=False, score="sigmoid", weights_in_float32=False)
    return MoESpec(num_experts=1, expert_size=shared.size, router=rule, layout="one")
