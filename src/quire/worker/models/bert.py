"""BERT (Devlin et al. 2019), RoBERTa and XLM-RoBERTa: learned positions, segments, a norm after each sum.

Checkpoints put the encoder at the root, or under the family's name beside a head.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.config.pooling import PoolingConfig
from quire.errors import UnsupportedModelError
from quire.worker.attention.backend import AttentionSpec, get_forward_context
from quire.worker.attention.layer import Attention
from quire.worker.kernels.specs import LOGITS, TANH, LinearSpec
from quire.worker.layers.linear import Embedding, Linear, PackedLinear
from quire.worker.layers.norm import LayerNorm

_PREFIX = re.compile(r"^(bert|roberta)\.")
_OTHER_HEADS = re.compile(r"^(cls|lm_head|pooler)\.|^embeddings\.position_ids$")


class BertEmbeddings(nn.Module):
    """Tokens, positions and segments, added and normalised."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        self.position_offset = hf.position_offset
        self.word_embeddings = Embedding(hf.vocab_size, hf.hidden_size)
        self.position_embeddings = Embedding(hf.max_position_embeddings, hf.hidden_size)
        self.token_type_embeddings = Embedding(hf.size("type_vocab_size"), hf.hidden_size)
        self.LayerNorm = _norm(hf)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        segments = get_forward_context().segments
        if segments is None:
            segments = torch.zeros_like(input_ids)
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(segments)
        y: Tensor = self.LayerNorm(x + self.position_embeddings(positions + self.position_offset))
        return y


class _Projections(nn.Module):
    """The matrices that checkpoints call attention.self."""

    def __init__(self, hf: HFConfig, name: str) -> None:
        super().__init__()
        size, num_heads = hf.hidden_size, hf.num_attention_heads
        head_dim = size // num_heads
        self.qkv = PackedLinear(size, {"query": size, "key": size, "value": size}, bias=True)
        self.attn = Attention(
            AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, ahead=None), name, is_encoder=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        attended: Tensor = self.attn(*self.qkv(x).chunk(3, dim=-1))
        return attended


class _SumAndNorm(nn.Module):
    """The end of each half of a layer, which checkpoints call output."""

    def __init__(self, hf: HFConfig, in_features: int) -> None:
        super().__init__()
        self.dense = Linear(in_features, hf.hidden_size, bias=True)
        self.LayerNorm = _norm(hf)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x: [num_tokens, in_features], residual: [num_tokens, hidden] to [num_tokens, hidden]."""
        y: Tensor = self.LayerNorm(self.dense(x, residual))
        return y


class BertAttention(nn.Module):
    """Attention in both directions, with its sum and norm."""

    def __init__(self, hf: HFConfig, name: str) -> None:
        super().__init__()
        self.self = _Projections(hf, name)
        self.output = _SumAndNorm(hf, hf.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        y: Tensor = self.output(self.self(x), x)
        return y


class _Dense(nn.Module):
    """One matrix in a module of its own: intermediate, and pooler."""

    def __init__(self, in_features: int, out_features: int, spec: LinearSpec) -> None:
        super().__init__()
        self.dense = Linear(in_features, out_features, bias=True, spec=spec)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, in_features] to [n, out_features]."""
        y: Tensor = self.dense(x)
        return y


class BertLayer(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, hf: HFConfig, name: str) -> None:
        super().__init__()
        inner = hf.size("intermediate_size")
        self.attention = BertAttention(hf, name)
        self.intermediate = _Dense(hf.hidden_size, inner, LinearSpec(activation=hf.get("hidden_act", "gelu")))
        self.output = _SumAndNorm(hf, inner)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        x = self.attention(x)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class BertEncoder(nn.Module):
    """The layers."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(hf, f"encoder.layer.{i}") for i in range(hf.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        for layer in self.layer:
            x = layer(x)
        return x


class BertModel(nn.Module):
    """An encoder, with the head that its task needs."""

    def __init__(self, hf: HFConfig, pooling: PoolingConfig) -> None:
        super().__init__()
        if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("is_decoder", False):
            raise UnsupportedModelError(
                f"{hf.path} asks for relative positions or a decoder, which are not implemented"
            )
        self.embeddings = BertEmbeddings(hf)
        self.encoder = BertEncoder(hf)
        self.pooler: nn.Module | None = None
        self.classifier: nn.Module | None = None
        self._add_head(hf, pooling)

    def _add_head(self, hf: HFConfig, pooling: PoolingConfig) -> None:
        if pooling.head == "classify":
            self.pooler = _Dense(hf.hidden_size, hf.hidden_size, TANH)
        if pooling.head != "embed":
            self.classifier = Linear(hf.hidden_size, len(pooling.labels), bias=True, spec=LOGITS)

    def checkpoint_name(self, name: str) -> str | None:
        name = _PREFIX.sub("", name)
        if _OTHER_HEADS.search(name) and not (self.pooler is not None and name.startswith("pooler.")):
            return None
        if self.classifier is None and name.startswith("classifier."):
            return None
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        hidden: Tensor = self.encoder(self.embeddings(input_ids, positions))
        return hidden

    def classify(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden], pooled or of single tokens; returns float32 [n, num_labels]."""
        assert self.classifier is not None
        scores: Tensor = self.classifier(hidden if self.pooler is None else self.pooler(hidden))
        return scores


class _RobertaHead(nn.Module):
    """The classifier of RoBERTa, which has two matrices."""

    def __init__(self, hf: HFConfig, num_labels: int) -> None:
        super().__init__()
        self.dense = Linear(hf.hidden_size, hf.hidden_size, bias=True, spec=TANH)
        self.out_proj = Linear(hf.hidden_size, num_labels, bias=True, spec=LOGITS)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] to float32 [n, num_labels]."""
        y: Tensor = self.out_proj(self.dense(x))
        return y


class RobertaModel(BertModel):
    """RoBERTa (Liu et al. 2019) and XLM-RoBERTa: positions are counted from the padding's id on."""

    def _add_head(self, hf: HFConfig, pooling: PoolingConfig) -> None:
        if pooling.head == "classify":
            self.classifier = _RobertaHead(hf, len(pooling.labels))
        else:
            super()._add_head(hf, pooling)


def _norm(hf: HFConfig) -> LayerNorm:
    return LayerNorm(hf.hidden_size, float(hf.get("layer_norm_eps", 1e-12)))
