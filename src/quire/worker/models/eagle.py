"""EAGLE (Li et al. 2024): a head of one layer that drafts from the last states of its target.

Its input at position i is the embedding of token i + 1 beside the target's state of token i, or its own state where the
target has none yet; from its result follows token i + 2. A head is made for one target, whose embedding and logits head
it shares. Those are modules of the target, not of the head.

Which biases a checkpoint has its config.json does not say: they follow from the names of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.worker.layers.linear import Linear
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.models.blocks import Block, PreNormBlock
from quire.worker.models.spec import DecoderSpec, LayerSpec, Rotations, common_spec

_PREFIX = re.compile(r"^(?:model\.)?(midlayer\.)?")


def head_name(name: str) -> str:
    """Returns a tensor's name in the form without "model.", whose first layer is layers.0."""
    return _PREFIX.sub(lambda found: "layers.0." if found[1] else "", name)


class EagleBlock(Block):
    """Llama's layer without a norm of what it reads."""

    norms = ("post_attention_layernorm",)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        x = self.self_attn(x, rotations, x)
        y: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return y


class EagleHead(nn.Module):
    """The head, in `hf` as config/speculators.py reads it. `stored`: its tensors, by `head_name`.

    taps: layers of the target whose inputs `combine` reads; empty: the target's last states.
    token_ids: [draft vocabulary] the target's id of each of its own, increasing; None if they are the same.
    """

    first_layer: type[Block] = EagleBlock

    def __init__(self, hf: HFConfig, target: Any, taps: tuple[int, ...], stored: Collection[str]) -> None:
        super().__init__()
        self.taps, self.token_ids = taps, None  # type: tuple[int, ...], Tensor | None
        self._stored, self._target = frozenset(stored), (target,)  # in a tuple: no module of the head's
        spec = self._spec(hf)
        rope = RotaryEmbedding(hf.rope(), hf.head_dim, hf.max_position_embeddings, hf.context_len)
        self.ropes = nn.ModuleDict({"rope": rope})
        blocks = [self.first_layer, *[PreNormBlock] * (hf.num_hidden_layers - 1)]
        self.layers = nn.ModuleList(
            block(hf, spec, layer, f"head.layers.{i}")
            for i, (block, layer) in enumerate(zip(blocks, spec.layers, strict=True))
        )
        self._make_ends(hf, spec)

    def _spec(self, hf: HFConfig) -> DecoderSpec:
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        layers = (LayerSpec(),) * hf.num_hidden_layers
        if not self._stored:
            return common_spec(hf, layers)
        return common_spec(
            hf,
            layers,
            qkv_bias=f"{attention}.q_proj.bias" in self._stored,
            output_bias=f"{attention}.o_proj.bias" in self._stored,
            mlp_bias=f"{mlp}.down_proj.bias" in self._stored,
            qk_norm="head" if f"{attention}.q_norm.weight" in self._stored else "none",
        )

    def _make_ends(self, hf: HFConfig, spec: DecoderSpec) -> None:
        """Makes what precedes and follows the layers."""
        has_bias = "fc.bias" in self._stored if self._stored else bool(hf.get("bias", False))
        self.fc: Linear | None = Linear(2 * hf.hidden_size, hf.hidden_size, has_bias)

    def checkpoint_name(self, name: str) -> str | None:
        name = head_name(name)
        return None if self._is_ignored(name) else name

    def _is_ignored(self, name: str) -> bool:
        """Returns whether a stored tensor is not needed: the target's is taken for it, or it is read apart."""
        return name in ("embed_tokens.weight", "lm_head.weight")

    def combine(self, states: Tensor) -> Tensor:
        """Returns what `forward` reads. states: [n, sizes of the target's states side by side] to [n, hidden]."""
        return states

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids: [n], each the token after that of `positions`; hidden: [n, hidden], of that token. Returns the
        states for `compute_logits`, and those to go on with, [n, hidden] each."""
        assert self.fc is not None
        x = self.fc(torch.cat([self._target[0].model.embed_tokens(input_ids), hidden], dim=-1))
        rotations = {name: rope(positions) for name, rope in self.ropes.items()}
        for layer in self.layers:
            x = layer(x, rotations)
        return x, x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden] to float32 [n, draft vocabulary]."""
        logits: Tensor = self._target[0].compute_logits(hidden)
        return logits
