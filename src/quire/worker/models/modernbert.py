"""ModernBERT (Warner et al. 2024): an encoder with rotation, gated MLPs, and a window in two layers of three."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from quire.config.attention_layout import layer_kinds
from quire.config.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig, RopeConfig
from quire.config.pooling import PoolingConfig
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.layer import Attention
from quire.worker.kernels.base import Kernels, RotationKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import LOGITS, LinearSpec, RotaryAngles
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.layers.norm import LayerNorm
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.layers.weights import KernelModule


class ModernBertEmbeddings(nn.Module):
    """Tokens, normalised."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(hf.vocab_size, hf.hidden_size)
        self.norm = _norm(hf)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] to [num_tokens, hidden]."""
        x: Tensor = self.norm(self.tok_embeddings(input_ids))
        return x


class ModernBertAttention(KernelModule):
    """Attention in both directions, over all tokens or within a window."""

    def __init__(self, hf: HFConfig, kind: str, name: str) -> None:
        super().__init__()
        size, bias = hf.hidden_size, bool(hf.get("attention_bias", False))
        self.head_dim = hf.head_dim
        self.Wqkv = Linear(size, 3 * size, bias)
        self.Wo = Linear(size, size, bias)
        self._kernel: RotationKernel | None = None
        reach = hf.size("local_attention") // 2 if kind == SLIDING_ATTENTION else None
        window, heads = None if reach is None else reach + 1, hf.num_attention_heads
        spec = AttentionSpec(heads, heads, self.head_dim, self.head_dim**-0.5, window, ahead=reach)
        self.attn = Attention(spec, name, is_encoder=True)

    def prepare(self, kernels: Kernels) -> RotationKernel:
        self._kernel = rotation = kernels.rotation(self.head_dim)
        return rotation

    def forward(self, x: Tensor, angles: RotaryAngles, residual: Tensor) -> Tensor:
        """x, residual: [num_tokens, hidden] to [num_tokens, hidden]."""
        q, k, v = self.Wqkv(x).chunk(3, dim=-1)
        q, k = (self._kernel or self.prepare(TORCH_KERNELS))(q, k, angles)
        y: Tensor = self.Wo(self.attn(q, k, v), residual)
        return y


class ModernBertMLP(nn.Module):
    """Wo(activation(first half of Wi(x)) * second half)."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        size, bias = hf.size("intermediate_size"), bool(hf.get("mlp_bias", False))
        inner = LinearSpec(activation=hf.get("hidden_activation", "gelu"), gated=True)
        self.Wi = Linear(hf.hidden_size, size, bias, inner)
        self.Wo = Linear(size, hf.hidden_size, bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: [num_tokens, hidden] to [num_tokens, hidden]."""
        y: Tensor = self.Wo(self.Wi(x), residual)
        return y


class ModernBertLayer(nn.Module):
    """Norm, attention, add; norm, MLP, add. The first layer has no first norm: that of the embeddings takes its
    place."""

    def __init__(self, hf: HFConfig, index: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attn_norm = _norm(hf) if index else None
        self.attn = ModernBertAttention(hf, kind, f"layers.{index}.attn")
        self.mlp_norm = _norm(hf)
        self.mlp = ModernBertMLP(hf)

    def forward(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        x = self.attn(x if self.attn_norm is None else self.attn_norm(x), angles, x)
        y: Tensor = self.mlp(self.mlp_norm(x), x)
        return y


class ModernBertHead(nn.Module):
    """The layer between pooling and classifier."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        spec = LinearSpec(activation=hf.get("classifier_activation", "gelu"))
        self.dense = Linear(hf.hidden_size, hf.hidden_size, bool(hf.get("classifier_bias", False)), spec)
        self.norm = _norm(hf)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] to [n, hidden]."""
        y: Tensor = self.norm(self.dense(x))
        return y


class ModernBertModel(nn.Module):
    """An encoder, with the head that its task needs."""

    def __init__(self, hf: HFConfig, pooling: PoolingConfig) -> None:
        super().__init__()
        kinds = layer_kinds(hf)
        self.embeddings = ModernBertEmbeddings(hf)
        self.ropes = nn.ModuleDict(
            {
                kind: RotaryEmbedding(_rope(hf, kind), hf.head_dim, hf.max_position_embeddings, hf.context_len)
                for kind in dict.fromkeys(kinds)
            }
        )
        self.layers = nn.ModuleList(ModernBertLayer(hf, i, kind) for i, kind in enumerate(kinds))
        self.final_norm = _norm(hf)
        has_head = pooling.head != "embed"
        self.head = ModernBertHead(hf) if has_head else None
        self.classifier = Linear(hf.hidden_size, len(pooling.labels), bias=True, spec=LOGITS) if has_head else None

    def checkpoint_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        is_other = name.startswith("decoder.") or (self.head is None and name.startswith(("head.", "classifier.")))
        return None if is_other else name

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        x: Tensor = self.embeddings(input_ids)
        angles = {kind: rope(positions) for kind, rope in self.ropes.items()}
        for layer in self.layers:
            x = layer(x, angles[str(layer.kind)])
        hidden: Tensor = self.final_norm(x)
        return hidden

    def classify(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden], pooled or of single tokens; returns float32 [n, num_labels]."""
        assert self.head is not None
        assert self.classifier is not None
        scores: Tensor = self.classifier(self.head(hidden))
        return scores


def _rope(hf: HFConfig, kind: str) -> RopeConfig:
    """Returns the rotary embedding of one kind of layer; the older spelling has a base for each, at the top."""
    old = hf.get("global_rope_theta" if kind == FULL_ATTENTION else "local_rope_theta")
    default = 160_000.0 if kind == FULL_ATTENTION else 10_000.0
    rope = hf.rope(kind)
    is_given = bool(hf.get("rope_parameters")) or hf.get("rope_theta") is not None
    return rope if is_given else dataclasses.replace(rope, rope_theta=float(default if old is None else old))


def _norm(hf: HFConfig) -> LayerNorm:
    return LayerNorm(hf.hidden_size, float(hf.get("norm_eps", 1e-5)), bias=bool(hf.get("norm_bias", False)))
