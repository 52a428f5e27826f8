"""The places of a model where adapters are installed: one per matrix that is computed as a whole, and two per table
that is also the logits head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quire.config.adapter import AdapterTarget, AdapterTargets
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.lora import AdapterBatch, AdapterSite, LowRank, PackedLowRank
from quire.worker.layers.linear import Embedding, Linear, PackedLinear
from quire.worker.layers.moe import Experts, Router
from quire.worker.layers.weights import NamedWeights, own_row_orders

HEAD = "lm_head"
POOLING_HEADS = ("classifier", "head", "pooler", "score", HEAD)
"""Modules that see pooled rows in a model that pools."""
_UNSUPPORTED: Mapping[str, str] = {
    "Experts": "a mixture's experts, which adapters cannot change here; train without them, or merge the adapter",
    "Router": "which chooses a mixture's experts and cannot be changed here; train without it, or merge the adapter",
    "HeadExpansion": "which is computed in absorbed form and cannot be changed here; train without it, or merge the "
    "adapter",
}
"""Why modules of these classes have no site."""


@dataclass(frozen=True)
class Site:
    """One place. Its parts are rows of the matrix, from top to bottom."""

    kernel: AdapterSite
    in_features: int
    part_sizes: tuple[int, ...]
    gated: bool = False
    orders: tuple[Tensor | None, ...] = (None,)
    """Orders of the parts' rows, where the model has others than checkpoints: see row_order.py."""

    def pack(self, kernels: Kernels, parts: Sequence[LowRank | None], dtype: torch.dtype) -> PackedLowRank:
        """Returns the factors of all parts, None for those that the adapter leaves alone, as kernels read them. May be
        called on any thread."""
        return kernels.pack_low_rank(parts, self.in_features, self.part_sizes, self.gated, dtype)


@dataclass
class AdapterSites:
    """All places of a model, by name, and the rows that they see."""

    tokens: AdapterBatch
    """Segments of a step's tokens."""
    logits: AdapterBatch
    """Segments of the rows whose logits are computed."""
    sites: dict[str, Site] = field(default_factory=dict)
    targets: AdapterTargets = field(default_factory=lambda: AdapterTargets({}))


def make_sites(model: nn.Module, kernels: Kernels, dtype: torch.dtype, *, pools: bool) -> AdapterSites:
    """Makes the sites of a loaded model and gives them to its layers. `pools`: it has a head for pooling."""
    made = AdapterSites(kernels.adapter_batch(), kernels.adapter_batch())
    targets: dict[str, AdapterTarget] = {}
    unsupported: dict[str, str] = {}
    for path, module in model.named_modules():
        if pools and path.partition(".")[0] in POOLING_HEADS:
            unsupported[path] = "the head of a model that pools, which adapters cannot change here"
        elif isinstance(module, Linear):
            batch = made.logits if path == HEAD else made.tokens
            parts = list(_parts(path, module))
            sizes = tuple(size for _, size in parts)
            in_features, orders = module.weight.shape[1], own_row_orders(path, module)
            kernel = kernels.adapter_site(batch, in_features, sizes, module.spec.gated, dtype)
            module.set_site(kernel)
            ordered = tuple(orders.get(part) for part, _ in parts)
            made.sites[path] = Site(kernel, in_features, sizes, module.spec.gated, orders=ordered)
            for i, (part, size) in enumerate(parts):
                targets[f"{part}.weight"] = AdapterTarget(path, i, in_features, size)
        elif isinstance(module, Embedding) and not module.offset:
            rows, dim = module.weight.shape
            lookup = kernels.adapter_site(made.tokens, rows, (dim,), False, dtype)
            made.sites[path] = Site(lookup, rows, (dim,))
            targets[f"{path}.weight"] = AdapterTarget(path, 0, rows, dim, "embedding")
            head = None
            if module.head is not None and not pools:
                head = kernels.adapter_site(made.logits, dim, (rows,), False, dtype)
                made.sites[HEAD] = Site(head, dim, (rows,))
                targets[f"{HEAD}.weight"] = AdapterTarget(HEAD, 0, dim, rows)
            module.set_sites(lookup, head)
        elif type(module).__name__ in _UNSUPPORTED and path:
            unsupported[path] = _UNSUPPORTED[type(module).__name__]
            assert isinstance(module, Experts | Router) or type(module).__name__ == "HeadExpansion"
    rename = model.checkpoint_name if isinstance(model, NamedWeights) else str
    made.targets = AdapterTargets(targets, unsupported, rename)
    return made


def _parts(path: str, module: Linear) -> Iterator[tuple[str, int]]:
    """Yields the model's name and the rows of each part."""
    if isinstance(module, PackedLinear):
        parent = path.rpartition(".")[0]
        yield from ((f"{parent}.{part}", rows) for part, rows in module.parts.items())
    else:
        yield path, module.weight.shape[0]
