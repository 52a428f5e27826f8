"""Matrices: y = x W^T + b, one or several merged; and tables of vectors, which may also be the logits head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.config.quantization import QuantizationScheme
from quire.worker.kernels.base import ActivationKernel, EmbeddingKernel, Kernels, LinearKernel
from quire.worker.kernels.lora import AdapterSite
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import PLAIN, LinearSpec, XieluSpec, get_activation
from quire.worker.layers.weights import Cut, KernelModule, forget, weight
from quire.worker.parallel.collectives import Gather
from quire.worker.quantization.weight import Kind, QuantizedWeight, quantize, same_kind


class Linear(KernelModule):
    """One projection. `weight` is [out_features, in_features]; [2 * out_features, in_features] if the spec is gated.

    Is a QuantizableWeights: `weight` is given back when the kernel is made of integers.
    Raises UnsupportedModelError if the spec names an activation that is not implemented.
    """

    packed_parameters = ("weight",)

    def __init__(self, in_features: int, out_features: int, bias: bool = False, spec: LinearSpec = PLAIN) -> None:
        super().__init__()
        if spec.activation is not None:
            get_activation(spec.activation)
        rows = 2 * out_features if spec.gated else out_features
        self.weight = weight(rows, in_features)
        self.bias = weight(rows) if bias else None
        self.spec = spec
        self.row_orders: Mapping[str, Tensor] = {}
        self.is_transposed = False
        """The checkpoint holds `weight` as [in_features, out_features]."""
        self.scheme: QuantizationScheme | None = None
        self._stored: QuantizedWeight | None = None
        self.quantized_bytes: int | None = None
        self.cuts: Mapping[str, Cut] = {}
        self.gather: Gather | None = None
        """The result that this worker computes a part of; None: the layer's outputs are all of it."""
        self._site: AdapterSite | None = None
        self._kernel: LinearKernel | None = None

    def set_site(self, site: AdapterSite) -> None:
        """Gives the kernel, and those made later, the place where adapters are installed."""
        self._site = site
        if self._kernel is not None:
            self._kernel.site = site

    @contextmanager
    def replaced(self, kernel: LinearKernel) -> Iterator[None]:
        """Computes with another kernel inside the block."""
        own, self._kernel = self._kernel, kernel
        try:
            yield
        finally:
            self._kernel = own

    @property
    def part_sizes(self) -> dict[str, int]:
        """Rows of each part; a single matrix has an empty name."""
        return {"": self.weight.shape[0]}

    def cut(self, rows: Mapping[str, Tensor], gather: Gather | None) -> None:
        """Leaves this worker those rows of each part. Must be called before there are weights."""
        self.cuts = {part: Cut(own, self.part_sizes[part]) for part, own in rows.items()}
        num_rows, in_features = sum(map(len, rows.values())), self.weight.shape[1]
        self.weight = weight(num_rows, in_features)
        self.bias = None if self.bias is None else weight(num_rows)
        self.gather = gather

    @property
    def out_features(self) -> int:
        """Elements of the output."""
        return self.weight.shape[0] // (2 if self.spec.gated else 1)

    def cut_outputs(self, gather: Gather) -> None:
        """Leaves this worker the rows that make its columns of the result."""
        own = torch.arange(gather.start, gather.end, device="cpu")
        rows, start = dict[str, Tensor](), 0
        for part, size in self.part_sizes.items():
            if not self.spec.gated:
                rows[part] = own[(own >= start) & (own < start + size)] - start
            elif size == self.out_features:  # gates, or what they gate
                rows[part] = own
            else:
                rows[part] = torch.cat([own, own + self.out_features])
            start += size
        self.cut(rows, gather)

    def stored_tensors(self, path: str) -> list[tuple[str, Tensor]]:
        prefix, tensors = path + "." if path else "", dict(self.named_parameters(recurse=False))
        return [
            (prefix + name, tensor.data.T if name == "weight" and self.is_transposed else tensor.data)
            for name, tensor in tensors.items()
        ]

    def store(self, parts: Sequence[QuantizedWeight]) -> bool:
        self._stored = QuantizedWeight.stack(parts) if same_kind(parts) else None
        return self._stored is not None

    @property
    def stored_kinds(self) -> tuple[Kind, ...]:
        return () if self._stored is None else (self._stored.kind,)

    def store_outlines(self, kinds: Sequence[Kind]) -> None:
        self._stored = QuantizedWeight.outline(self.weight.shape, kinds[0]) if kinds else None

    def prepare(self, kernels: Kernels) -> LinearKernel:
        bias = None if self.bias is None else self.bias.data
        weight = self._quantized_weight(kernels)
        self.quantized_bytes = None if weight is None else weight.num_bytes
        if weight is None:
            self._kernel = kernel = kernels.linear(self.weight.data, bias, self.spec)
        else:
            self._kernel = kernel = kernels.quantized_linear(weight, bias, self.spec)
        if self._site is not None:
            kernel.site = self._site
        if weight is not None or not kernels.keeps_weights:
            forget(self, "weight")
        return kernel

    def _quantized_weight(self, kernels: Kernels) -> QuantizedWeight | None:
        """Returns the weight in integers, if it was stored so, or is to be quantized and `kernels` can compute with
        it."""
        weight, self._stored = self._stored, None
        if weight is None and self.scheme is not None:
            weight = quantize(self.weight.data, self.scheme)
            return weight if kernels.can_quantize(weight) else None
        return weight

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, in_features] to [num_tokens, out_features]; `residual`, of that shape, is added."""
        kernel, gather = self._kernel or self.prepare(TORCH_KERNELS), self.gather
        if gather is None:
            return kernel(x, residual)
        own = None if residual is None else residual[:, gather.start : gather.end]
        dtype = torch.float32 if self.spec.float32_output else self.weight.dtype
        return gather.compute(x.shape[0], dtype, lambda out: kernel(x, own, out))


class PackedLinear(Linear):
    """Several projections of one input as one matrix: one product instead of three, and one read of x.

    `parts` maps the checkpoint's name of each projection to its rows, from top to bottom.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False, spec: LinearSpec = PLAIN) -> None:
        super().__init__(in_features, sum(parts.values()) // (2 if spec.gated else 1), bias, spec)
        self.parts = parts

    @property
    def part_sizes(self) -> dict[str, int]:
        return self.parts

    def cut(self, rows: Mapping[str, Tensor], gather: Gather | None) -> None:
        super().cut(rows, gather)
        self.parts = {part: len(own) for part, own in rows.items()}

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for parameter, tensor in self.named_parameters(recurse=False):
            rows = torch.split(tensor.data, list(self.parts.values()))
            yield from ((f"{part}.{parameter}", view) for part, view in zip(self.parts, rows, strict=True))


def side_by_side(
    in_features: int, parts: dict[str, int], bias: bool, is_fused: bool, spec: LinearSpec = PLAIN
) -> Linear:
    """Returns several projections as one matrix, fused in the checkpoint or not."""
    if not is_fused:
        return PackedLinear(in_features, parts, bias, spec)
    return Linear(in_features, sum(parts.values()) // (2 if spec.gated else 1), bias, spec)


class Embedding(KernelModule):
    """A vector for each id. `weight` is [num_embeddings, dim]. In a model with tied embeddings the table is the logits
    head, too; then `head` is what follows its product. The first `offset` rows are no vectors of ids."""

    packed_parameters = ("weight",)

    def __init__(self, num_embeddings: int, dim: int, head: LinearSpec | None = None, offset: int = 0) -> None:
        super().__init__()
        self.weight = weight(offset + num_embeddings, dim)
        self.head, self.offset = head, offset
        self.cuts: Mapping[str, Cut] = {}
        self.gathers: tuple[Gather, Gather] | None = None
        """Vectors and logits that this worker computes a part of: those of its own ids; None: it has all ids."""
        self._sites: tuple[AdapterSite | None, AdapterSite | None] = None, None
        self._kernel: EmbeddingKernel | None = None

    def cut(self, ids: Tensor, vectors: Gather, logits: Gather) -> None:
        """Leaves this worker the vectors of adjacent `ids`. Must be called before there are weights."""
        self.cuts = {"": Cut(ids, self.weight.shape[0])}
        self.weight = weight(len(ids), self.weight.shape[1])
        self.gathers = vectors, logits

    def set_sites(self, lookup: AdapterSite | None, project: AdapterSite | None) -> None:
        """Gives the kernel, and those made later, the places where adapters of both uses are installed."""
        self._sites = lookup, project
        if self._kernel is not None:
            self._give_sites(self._kernel)

    def _give_sites(self, kernel: EmbeddingKernel) -> None:
        lookup, project = self._sites
        if lookup is not None:
            kernel.lookup_site = lookup
        if project is not None:
            kernel.project_site = project

    def prepare(self, kernels: Kernels) -> EmbeddingKernel:
        self._kernel = kernel = kernels.embedding(self.weight.data[self.offset :], self.head)
        self._give_sites(kernel)
        if not kernels.keeps_weights:
            forget(self, "weight")
        return kernel

    def forward(self, ids: Tensor, residual: Tensor | None = None) -> Tensor:
        """ids: [num_tokens] to [num_tokens, dim]; `residual`, of that shape, is added."""
        kernel = self._kernel or self.prepare(TORCH_KERNELS)
        if self.gathers is None:
            return kernel.lookup(ids, residual)
        vectors, logits = self.gathers
        dtype = self.weight.dtype
        found = vectors.by_rows(
            ids.shape[0],
            dtype,
            lambda out: kernel.lookup_share(ids, logits.start, out),
            lambda: torch.nonzero((ids >= logits.start) & (ids < logits.end)).flatten(),
        )
        return found if residual is None else residual + found

    def project(self, x: Tensor) -> Tensor:
        """Computes logits. x: [num_tokens, dim]; returns float32 [num_tokens, num_embeddings]."""
        kernel = self._kernel or self.prepare(TORCH_KERNELS)
        if self.gathers is None:
            return kernel.project(x)
        return self.gathers[1].compute(x.shape[0], torch.float32, lambda out: kernel.project(x, out))


class Scale(KernelModule):
    """A product with a number; with `rounds` the number is rounded to the model's type first."""

    def __init__(self, factor: float, *, rounds: bool = False) -> None:
        super().__init__()
        self.factor, self.rounds = factor, rounds
        self._kernel: ActivationKernel | None = None

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Rounds the number."""
        self.factor = torch.tensor(self.factor, dtype=dtype).item() if self.rounds else self.factor

    def prepare(self, kernels: Kernels) -> ActivationKernel:
        self._kernel = kernel = kernels.xielu(XieluSpec(positive=0.0, negative=0.0, slope=self.factor))
        return kernel

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, dim] to the same shape; `residual`, of that shape, is added."""
        return (self._kernel or self.prepare(TORCH_KERNELS))(x, None, residual)
