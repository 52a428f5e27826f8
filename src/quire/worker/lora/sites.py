"""The places of a model where adapters are installed: one per matrix that is computed as a whole, two per table that is
also the logits head, and two per mixture of experts.

One of several workers has places for its part of the model. It knows the shapes of the whole, so that each worker
accepts the same adapters: of a matrix that is cut it packs all of A and its rows of B, and of a matrix that only other
workers have nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quire.config.adapter import HEADS
from quire.config.adapter_targets import AdapterTarget, AdapterTargets, AllExperts, HeadTarget, Kind
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.lora import AdapterBatch, AdapterSite, LowRank, LowRankShape, PackedLowRank, Take
from quire.worker.layers.linear import Embedding, Linear, PackedLinear
from quire.worker.layers.moe import Experts, Router
from quire.worker.layers.weights import Elsewhere, NamedWeights, own_cuts, own_row_orders
from quire.worker.parallel.plan import Stage

HEAD = "lm_head"
POOLING_HEADS = ("classifier", "head", "pooler", "score", HEAD)
"""Modules that see pooled rows in a model that pools."""
_UNSUPPORTED: Mapping[str, str] = {
    "Router": "which chooses a mixture's experts and cannot be changed here; train without it, or merge the adapter",
    "HeadExpansion": "which is computed in absorbed form and cannot be changed here; train without it, or merge the "
    "adapter",
}
"""Why modules of these classes have no site."""
SHARED_AMONG_ENGINES = (
    "whose experts several engines share (--enable-expert-parallel with --data-parallel-size), so that only engines of "
    "one machine with native kernels apply adapters to them; train without them, merge the adapter, or leave out the "
    "flag"
)


@dataclass(frozen=True)
class Site:
    """One place. Its parts are rows of the matrix, from top to bottom."""

    kernel: AdapterSite
    shape: LowRankShape
    orders: tuple[Tensor | None, ...] = (None,)
    """Rows of each part, in their order, where the model has other rows than checkpoints: see row_order.py."""
    group_order: Tensor | None = None
    """The same for the parts of one group as a whole."""
    own_groups: Sequence[int] | None = None
    """Groups that this worker has; None: all."""

    def order_of(self, part: int) -> Tensor | None:
        """Returns the order of a part's rows; None: as in checkpoints."""
        return self.orders[part % len(self.shape.parts)]

    def has_part(self, part: int) -> bool:
        """Returns whether this worker has the group of a part."""
        return self.own_groups is None or part // len(self.shape.parts) in self.own_groups

    def pack(self, kernels: Kernels, parts: Sequence[LowRank | None], take: Take) -> PackedLowRank:
        """Returns the factors of all parts, None for those that the adapter leaves alone, as kernels read them; or
        those of each group as a whole. May be called on any thread."""
        shape = self.shape
        if len(parts) < shape.num_parts:
            shape = dataclasses.replace(shape, parts=(sum(shape.parts),))
        return kernels.pack_low_rank(parts, shape, take)


@dataclass
class AdapterSites:
    """All places of a model, by name, and the rows that they see."""

    tokens: AdapterBatch
    """Segments of a step's tokens."""
    logits: AdapterBatch
    """Segments of the rows whose logits are computed."""
    pooled: AdapterBatch
    """Segments of the tokens of all engines that share experts."""
    sites: dict[str, Site] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    """Sites of experts that engines share, which see the tokens of all."""
    targets: AdapterTargets = field(default_factory=lambda: AdapterTargets({}))
    head: Linear | None = None
    """The classifier that adapters may replace."""
    model: str = ""
    """The name of the model's class."""

    def fingerprint(self) -> str:
        """Returns a digest of all that packed adapters depend on."""
        digest = hashlib.sha256(self.model.encode())
        for name, site in self.sites.items():
            digest.update(f"{name} {site.shape} {site.own_groups}".encode())
            for order in site.orders:
                digest.update(b"-" if order is None else order.numpy().tobytes())
        for name, target in self.targets.targets.items():
            digest.update(f"{name} {target}".encode())
        return digest.hexdigest()


def make_sites(
    model: nn.Module,
    kernels: Kernels,
    dtype: torch.dtype,
    *,
    pools: bool,
    stage: Stage | None = None,
    shares: bool = False,
) -> AdapterSites:
    """Makes the sites of a loaded model and gives them to its layers. `pools`: it has a head for pooling; `stage`: the
    model is that part of a pipeline; `shares`: engines that share its experts read the adapters of one another."""
    batches = kernels.adapter_batch(), kernels.adapter_batch(), kernels.adapter_batch()
    making = _Making(kernels, dtype, AdapterSites(*batches), pools, stage, shares)
    for path, module in model.named_modules():
        making.visit(path, module)
    rename = model.checkpoint_name if isinstance(model, NamedWeights) else str
    made = making.made
    target = None if making.head is None else making.head[1]
    made.targets = AdapterTargets(making.targets, making.unsupported, rename, target)
    made.head = None if making.head is None else making.head[0]
    made.model = type(model).__qualname__
    return made


@dataclass
class _Making:
    """The sites of a model, on their way."""

    kernels: Kernels
    dtype: torch.dtype
    made: AdapterSites
    pools: bool
    stage: Stage | None = None
    shares: bool = False
    is_elsewhere: bool = False
    """True for modules that other workers have: they have targets, but no sites."""
    targets: dict[str, AdapterTarget] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    head: tuple[Linear, HeadTarget] | None = None
    """The classifier, where it is one matrix."""

    def visit(self, path: str, module: nn.Module) -> None:
        """Makes the sites of a module."""
        if self.pools and path.partition(".")[0] in POOLING_HEADS:
            self.unsupported[path] = "the head of a model that pools, which adapters can replace as a whole only"
            if path in HEADS and type(module) is Linear:
                labels, inputs = module.weight.shape
                self.head = module, HeadTarget(path, inputs, labels, module.bias is not None)
        elif isinstance(module, Elsewhere):
            self.is_elsewhere = True
            for name, original in module.originals(path):
                self.visit(name, original)
            self.is_elsewhere = False
        elif isinstance(module, Linear):
            self._add_linear(path, module)
        elif isinstance(module, Embedding) and not module.offset:
            self._add_embedding(path, module)
        elif isinstance(module, Experts) and module.is_pooled and not self.shares:
            self.unsupported[path] = SHARED_AMONG_ENGINES
        elif isinstance(module, Experts):
            self._add_experts(path, module)
        elif type(module).__name__ in _UNSUPPORTED and path:
            self.unsupported[path] = _UNSUPPORTED[type(module).__name__]
            assert isinstance(module, Router) or type(module).__name__ == "HeadExpansion"

    def _add_linear(self, path: str, module: Linear) -> None:
        parts, cuts = list(_parts(path, module)), own_cuts(path, module)
        shape = self._shape(module.weight.shape[1], *(size for _, size in parts), gated=module.spec.gated)
        orders = own_row_orders(path, module)
        ordered = tuple(orders.get(part) for part, _ in parts)
        site = self._add(path, shape, ordered, is_head=path == HEAD)
        if site is not None:
            module.set_site(site)
        for i, (part, size) in enumerate(parts):
            whole = cuts[part].num_rows if part in cuts else size
            self.targets[f"{part}.weight"] = self._target(path, i, shape.in_features, whole, own=size)

    def _add_embedding(self, path: str, module: Embedding) -> None:
        (rows, dim), cut = module.weight.shape, module.cuts.get("")
        whole, ids = (rows, None) if cut is None else (cut.num_rows, cut.rows)
        stage = self.stage or Stage(0, 1)
        lookup = self._add(path, self._shape(whole, dim)) if stage.is_first else None
        self.targets[f"{path}.weight"] = self._target(path, 0, whole, dim, "embedding", own=dim * stage.is_first)
        head = None
        if module.head is not None and not self.pools:
            head = self._add(HEAD, self._shape(dim, rows), (ids,), is_head=True) if stage.is_last else None
            self.targets[f"{HEAD}.weight"] = self._target(HEAD, 0, dim, whole, own=rows * stage.is_last)
        if not self.is_elsewhere:
            module.set_sites(lookup, head)

    def _add_experts(self, path: str, module: Experts) -> None:
        spec, hidden = module.spec, module.hidden_size
        size, count, inner = spec.expert_size, spec.num_experts, module.gate_up_proj.shape[1] // 2
        outputs, own = module.down_proj.shape[1], module.own_experts
        sites = f"{path}.gate_up_proj", f"{path}.down_proj"
        if module.is_pooled:  # each engine reads its adapters whole, for all
            own = range(count)
            self.made.shared += sites
        gates, ups, downs = self._orders_of_experts(path, module)
        both = None if gates is None or ups is None else torch.cat([gates, ups + size])
        shape = self._shape(hidden, inner, inner, gated=True, groups=count)
        gate_up = self._add(sites[0], shape, (gates, ups), group_order=both, own_groups=own)
        shape = self._shape(size, outputs, groups=count)
        down = self._add(sites[1], shape, (downs,), group_order=downs, own_groups=own)
        if gate_up is not None and down is not None:
            module.set_sites(gate_up, down)
        prefix = ".".join([*path.split(".")[:-1], module.name])
        for expert in range(count):
            name = prefix if spec.layout == "one" else f"{prefix}.{expert}"
            rows = (inner, outputs) if expert in own else (0, 0)
            for i, part in enumerate((spec.gate_name, spec.up_name)):
                target = self._target(sites[0], 2 * expert + i, hidden, size, own=rows[0])
                self.targets[f"{name}.{part}.weight"] = target
            self.targets[f"{name}.{spec.down_name}.weight"] = self._target(sites[1], expert, size, hidden, own=rows[1])
        # transformers has the matrices of one family transposed without saying so to peft
        are_flipped, own_part = spec.layout == "transposed" and not spec.gates_alternate, 0.0
        if not self.is_elsewhere:
            own_part = len(own) / count * max(inner / size, outputs / hidden)
        every = AllExperts(count, hidden, size, *sites, are_flipped, spec.gates_alternate, own_part)
        target = AdapterTarget(path, 0, hidden, size, "experts", every)
        self.targets |= {f"{path}.weight": target, f"{path}.base_layer.weight": target}

    @staticmethod
    def _orders_of_experts(path: str, module: Experts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the rows that this worker has of gates, of what they gate, and of the second matrices: the same of
        each of its experts. None: all."""
        spec, cuts = module.spec, module.cuts
        names = (spec.gate_name, spec.up_name, spec.down_name)
        found = [next((cut.rows for part, cut in cuts.items() if part.endswith(f".{name}")), None) for name in names]
        return found[0], found[1], found[2]

    def _shape(self, in_features: int, *parts: int, gated: bool = False, groups: int = 1) -> LowRankShape:
        return LowRankShape(in_features, parts, gated, self.dtype, groups)

    def _target(
        self, site: str, part: int, in_features: int, out_features: int, kind: Kind = "linear", *, own: int
    ) -> AdapterTarget:
        """Returns a target of which this worker has `own` outputs."""
        own_part = 0.0 if self.is_elsewhere else own / out_features
        return AdapterTarget(site, part, in_features, out_features, kind, own_part=own_part)

    def _add(
        self,
        path: str,
        shape: LowRankShape,
        orders: tuple[Tensor | None, ...] = (None,),
        *,
        is_head: bool = False,
        group_order: Tensor | None = None,
        own_groups: Sequence[int] | None = None,
    ) -> AdapterSite | None:
        """Adds a site, unless it is another worker's."""
        if self.is_elsewhere:
            return None
        batch = self.made.pooled if path in self.made.shared else self.made.logits if is_head else self.made.tokens
        kernel = self.kernels.adapter_site(batch, shape)
        self.made.sites[path] = Site(kernel, shape, orders, group_order, own_groups)
        return kernel


def _parts(path: str, module: Linear) -> Iterator[tuple[str, int]]:
    """Yields the model's name and the rows of each part."""
    if isinstance(module, PackedLinear):
        parent = path.rpartition(".")[0]
        yield from ((f"{parent}.{part}", rows) for part, rows in module.parts.items())
    else:
        yield path, module.weight.shape[0]
