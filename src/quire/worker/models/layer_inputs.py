"""Inputs of layers: besides the hidden state of the layer before it, a layer gets a small vector for each token.

It is the sum of a row of the layer's own embedding table and of a projection of the token's embedding (Gemma 3n, 4).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.worker.kernels.specs import LinearSpec
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.models.spec import DecoderSpec, make_norm


class LayerInputs(nn.Module):
    """Makes the inputs of all layers, of `size` elements each."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, size: int) -> None:
        super().__init__()
        self.size, self.vocab_size = size, hf.size("vocab_size_per_layer_input")
        self.embed_tokens = Embedding(self.vocab_size, len(spec.layers) * size)
        self.projection = Linear(hf.hidden_size, len(spec.layers) * size, spec=LinearSpec(divisor=hf.hidden_size**0.5))
        self.projection_norm = make_norm(spec, size)

    def forward(self, input_ids: Tensor, x: Tensor) -> Iterator[tuple[Tensor]]:
        """Yields the input of each layer, [num_tokens, size]. input_ids: [num_tokens]; ids that the table lacks count
        as 0. x: [num_tokens, hidden], their embeddings."""
        rows = self.embed_tokens(input_ids.where(input_ids < self.vocab_size, 0))
        rows = rows * torch.tensor(self.size**0.5, dtype=x.dtype).item()  # rounded as the embedding's multiplier is
        projected = self.projection(x).view(-1, self.size)  # [num_tokens * num_layers, size]
        inputs = (self.projection_norm(projected) + rows.view(-1, self.size)) * 2.0**-0.5
        for own in inputs.view(len(x), -1, self.size).unbind(1):
            yield (own,)


class LayerInput(nn.Module):
    """Adds a layer's input: x + norm(projection(activation(gate(x)) * input))."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, size: int) -> None:
        super().__init__()
        self.gate = Linear(hf.hidden_size, size, spec=LinearSpec(activation=spec.activation))
        self.projection = Linear(size, hf.hidden_size)
        self.norm = make_norm(spec, hf.hidden_size)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to that shape; own: [num_tokens, size]."""
        y: Tensor = self.norm(self.projection(self.gate(x) * own), x)
        return y
