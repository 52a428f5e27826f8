"""Tables of vectors: tokens, and in older models positions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from quire.worker.layers.weights import weight


class Embedding(nn.Module):
    """A vector per id. `weight` is [num_embeddings, dim]; a model with tied embeddings uses it as its logits head."""

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = weight(num_embeddings, dim)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [num_tokens] to [num_tokens, dim]."""
        return functional.embedding(ids, self.weight)
