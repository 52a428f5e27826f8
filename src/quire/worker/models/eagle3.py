"""EAGLE-3 (Li et al. 2025): a head that drafts from the states of several layers of its target, with a vocabulary of
its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError
from quire.worker.kernels.specs import LOGITS
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.layers.norm import Norm
from quire.worker.models.blocks import Block
from quire.worker.models.eagle import EagleHead
from quire.worker.models.spec import DecoderSpec, LayerSpec, Rotations, make_norm


class Eagle3Block(Block):
    """Llama's layer on embeddings and states side by side, each with a norm of its own."""

    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    hidden_norm: Norm

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(hf, spec, layer, name)
        self.norm_before_residual = bool(hf.get("norm_before_residual", False))

    def forward(self, x: Tensor, rotations: Rotations, embeddings: Tensor | None = None) -> Tensor:
        """x: [n, hidden] states; embeddings: [n, hidden]."""
        assert embeddings is not None, "it is the first layer"
        normed = self.hidden_norm(x)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # [n, 2 * hidden]
        x = self.self_attn(both, rotations, normed if self.norm_before_residual else x)
        y: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return y


class Eagle3Head(EagleHead):
    """The head. The target's embedding is taken where sizes agree, as files may hold a random one; its logits head only
    where the file has none."""

    first_layer = Eagle3Block

    def _spec(self, hf: HFConfig) -> DecoderSpec:
        spec = super()._spec(hf)
        first = dataclasses.replace(spec.layers[0], input_size=2 * hf.hidden_size)
        return dataclasses.replace(spec, layers=(first, *spec.layers[1:]))

    def _make_ends(self, hf: HFConfig, spec: DecoderSpec) -> None:
        target, size = self._target[0], hf.hidden_size
        vocab_size, target_size = target.model.embed_tokens.weight.shape
        draft_vocab_size, num_states = hf.size("draft_vocab_size", vocab_size), max(1, len(self.taps))
        is_like_target = size == target_size
        self.embed_tokens = None if is_like_target else Embedding(vocab_size, size)
        self.fc = None
        if self.taps or "fc.weight" in self._stored:
            self.fc = Linear(num_states * target_size, size, "fc.bias" in self._stored)
        elif not is_like_target:
            raise ModelLoadError(
                f"{hf.path} has the hidden size {size}, but the target's is {target_size}, and there is no fc.weight "
                "between them"
            )
        has_input_norm = bool(hf.get("norm_before_fc", "input_norm.weight" in self._stored))
        self.input_norm = make_norm(spec, num_states * target_size) if has_input_norm else None
        has_state_norms = bool(hf.get("fc_norm", "fc_norm.0.weight" in self._stored))
        self.fc_norm = nn.ModuleList(make_norm(spec, target_size) for _ in range(num_states * has_state_norms))
        self.norm = make_norm(spec, size)
        self.norm_output = bool(hf.get("norm_output", False))
        self.lm_head = None
        if "lm_head.weight" in self._stored or (not self._stored and draft_vocab_size != vocab_size):
            self.lm_head = Linear(size, draft_vocab_size, "lm_head.bias" in self._stored, LOGITS)
        elif draft_vocab_size != vocab_size or not is_like_target:
            raise ModelLoadError(
                f"the checkpoint of {hf.path} has no lm_head.weight, and the target's cannot take its place: that has "
                f"{vocab_size} tokens and hidden size {target_size}, the head {draft_vocab_size} and {size}"
            )

    def _is_ignored(self, name: str) -> bool:
        return name in ("d2t", "t2d") or (name == "embed_tokens.weight" and self.embed_tokens is None)

    def combine(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return states if self.fc is None else self.fc(states)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embed: Any = self._target[0].model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        rotations = {name: rope(positions) for name, rope in self.ropes.items()}
        first, *others = self.layers
        x = first(hidden, rotations, embed(input_ids))
        for layer in others:
            x = layer(x, rotations)
        normed = self.norm(x)
        return normed, normed if self.norm_output else x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = super().compute_logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits
