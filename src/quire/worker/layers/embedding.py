"""Tables of vectors: tokens, and in older models positions."""

from __future__ import annotations

from torch import Tensor, nn

from quire.worker.kernels.base import EmbeddingKernel, Kernels, LinearSpec
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.weights import GIVEN_BACK, forget, weight


class Embedding(nn.Module):
    """A vector per id. `weight` is [num_embeddings, dim]. In a model with tied embeddings it is the logits head, too:
    then `head` says how logits are finished."""

    packed_parameters = ("weight",)

    def __init__(self, num_embeddings: int, dim: int, head: LinearSpec | None = None) -> None:
        super().__init__()
        self.weight = weight(num_embeddings, dim)
        self.head = head
        self._kernel: EmbeddingKernel | None = None

    def prepare(self, kernels: Kernels) -> EmbeddingKernel:
        """See Prepared."""
        self._kernel = kernel = kernels.embedding(self.weight.data, self.head)
        if not kernels.keeps_weights:
            forget(self, "weight")
        return kernel

    def discard(self) -> None:
        """See Prepared."""
        self._kernel = GIVEN_BACK

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [num_tokens] to [num_tokens, dim]."""
        return (self._kernel or self.prepare(TORCH_KERNELS)).lookup(ids)

    def project(self, x: Tensor) -> Tensor:
        """As a logits head. x: [num_tokens, dim] to float32 [num_tokens, num_embeddings]."""
        return (self._kernel or self.prepare(TORCH_KERNELS)).project(x)
