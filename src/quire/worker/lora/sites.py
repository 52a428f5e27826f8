"""The places of a model where adapters are installed: one per matrix that is computed as a whole, two per table that is
also the logits head, and two per mixture of experts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quire.config.adapter import HEADS
from quire.config.adapter_targets import AdapterTarget, AdapterTargets, AllExperts, HeadTarget
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.lora import AdapterBatch, AdapterSite, LowRank, LowRankShape, PackedLowRank, Take
from quire.worker.layers.linear import Embedding, Linear, PackedLinear
from quire.worker.layers.moe import Experts, Router
from quire.worker.layers.weights import NamedWeights, own_row_orders

HEAD = "lm_head"
POOLING_HEADS = ("classifier", "head", "pooler", "score", HEAD)
"""Modules that see pooled rows in a model that pools."""
_UNSUPPORTED: Mapping[str, str] = {
    "Router": "which chooses a mixture's experts and cannot be changed here; train without it, or merge the adapter",
    "HeadExpansion": "which is computed in absorbed form and cannot be changed here; train without it, or merge the "
    "adapter",
}
"""Why modules of these classes have no site."""


@dataclass(frozen=True)
class Site:
    """One place. Its parts are rows of the matrix, from top to bottom."""

    kernel: AdapterSite
    shape: LowRankShape
    orders: tuple[Tensor | None, ...] = (None,)
    """Orders of the parts' rows, where the model has others than checkpoints: see row_order.py."""

    def order_of(self, part: int) -> Tensor | None:
        """Returns the order of a part's rows; None: as in checkpoints."""
        return self.orders[part % len(self.shape.parts)]

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
    sites: dict[str, Site] = field(default_factory=dict)
    targets: AdapterTargets = field(default_factory=lambda: AdapterTargets({}))
    head: Linear | None = None
    """The classifier that adapters may replace."""
    model: str = ""
    """The name of the model's class."""

    def fingerprint(self) -> str:
        """Returns a digest of all that packed adapters depend on."""
        digest = hashlib.sha256(self.model.encode())
        for name, site in self.sites.items():
            digest.update(f"{name} {site.shape}".encode())
            for order in site.orders:
                digest.update(b"-" if order is None else order.numpy().tobytes())
        for name, target in self.targets.targets.items():
            digest.update(f"{name} {target}".encode())
        return digest.hexdigest()


def make_sites(model: nn.Module, kernels: Kernels, dtype: torch.dtype, *, pools: bool) -> AdapterSites:
    """Makes the sites of a loaded model and gives them to its layers. `pools`: it has a head for pooling."""
    making = _Making(kernels, dtype, AdapterSites(kernels.adapter_batch(), kernels.adapter_batch()), pools)
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
        elif isinstance(module, Linear):
            self._add_linear(path, module)
        elif isinstance(module, Embedding) and not module.offset:
            self._add_embedding(path, module)
        elif isinstance(module, Experts):
            self._add_experts(path, module)
        elif type(module).__name__ in _UNSUPPORTED and path:
            self.unsupported[path] = _UNSUPPORTED[type(module).__name__]
            assert isinstance(module, Router) or type(module).__name__ == "HeadExpansion"

    def _add_linear(self, path: str, module: Linear) -> None:
        parts = list(_parts(path, module))
        shape = self._shape(module.weight.shape[1], *(size for _, size in parts), gated=module.spec.gated)
        orders = own_row_orders(path, module)
        ordered = tuple(orders.get(part) for part, _ in parts)
        module.set_site(self._add(path, shape, ordered, is_head=path == HEAD))
        for i, (part, size) in enumerate(parts):
            self.targets[f"{part}.weight"] = AdapterTarget(path, i, shape.in_features, size)

    def _add_embedding(self, path: str, module: Embedding) -> None:
        rows, dim = module.weight.shape
        lookup = self._add(path, self._shape(rows, dim))
        self.targets[f"{path}.weight"] = AdapterTarget(path, 0, rows, dim, "embedding")
        head = None
        if module.head is not None and not self.pools:
            head = self._add(HEAD, self._shape(dim, rows), is_head=True)
            self.targets[f"{HEAD}.weight"] = AdapterTarget(HEAD, 0, dim, rows)
        module.set_sites(lookup, head)

    def _add_experts(self, path: str, module: Experts) -> None:
        spec, hidden = module.spec, module.gate_up_proj.shape[2]
        size, count = spec.expert_size, spec.num_experts
        sites = f"{path}.gate_up_proj", f"{path}.down_proj"
        gate_up = self._add(sites[0], self._shape(hidden, size, size, gated=True, groups=count), (None, None))
        down = self._add(sites[1], self._shape(size, hidden, groups=count))
        module.set_sites(gate_up, down)
        prefix = ".".join([*path.split(".")[:-1], module.name])
        for expert in range(count):
            name = prefix if spec.layout == "one" else f"{prefix}.{expert}"
            for i, part in enumerate((spec.gate_name, spec.up_name)):
                self.targets[f"{name}.{part}.weight"] = AdapterTarget(sites[0], 2 * expert + i, hidden, size)
            self.targets[f"{name}.{spec.down_name}.weight"] = AdapterTarget(sites[1], expert, size, hidden)
        # transformers has the matrices of one family transposed without saying so to peft
        are_flipped = spec.layout == "transposed" and not spec.gates_alternate
        every = AllExperts(count, hidden, size, *sites, are_flipped=are_flipped, gates_alternate=spec.gates_alternate)
        target = AdapterTarget(path, 0, hidden, size, "experts", every)
        self.targets |= {f"{path}.weight": target, f"{path}.base_layer.weight": target}

    def _shape(self, in_features: int, *parts: int, gated: bool = False, groups: int = 1) -> LowRankShape:
        return LowRankShape(in_features, parts, gated, self.dtype, groups)

    def _add(
        self, path: str, shape: LowRankShape, orders: tuple[Tensor | None, ...] = (None,), *, is_head: bool = False
    ) -> AdapterSite:
        kernel = self.kernels.adapter_site(self.made.logits if is_head else self.made.tokens, shape)
        self.made.sites[path] = Site(kernel, shape, orders)
        return kernel


def _parts(path: str, module: Linear) -> Iterator[tuple[str, int]]:
    """Yields the model's name and the rows of each part."""
    if isinstance(module, PackedLinear):
        parent = path.rpartition(".")[0]
        yield from ((f"{parent}.{part}", rows) for part, rows in module.parts.items())
    else:
        yield path, module.weight.shape[0]
