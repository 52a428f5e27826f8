"""The decoder that most open models share, with a switch for everything in which they differ.

A family's file (llama.py, gemma.py, ...) reads its config.json into a `DecoderSpec` and, where its layers are wired
differently, gives its own layer class. The tree of modules has the checkpoint's names: nothing is renamed at load.

All tokens of a step are one flat batch, without batch dimension or padding. The attention layer decides which tokens
see which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from quire.config.attention_layout import attention_windows
from quire.config.hf_config import HFConfig, RopeConfig
from quire.worker.attention.layer import Attention
from quire.worker.kernels.base import Kernels, RotationKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import PLAIN, LinearSpec, RotaryAngles
from quire.worker.layers.linear import Embedding, Linear, PackedLinear
from quire.worker.layers.moe import MoE, MoESpec
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.layers.weights import GIVEN_BACK

Rotations = Mapping[str, RotaryAngles]
"""Rotation angles of the step's tokens, for each rotary embedding of the model."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The properties in which the layers of a model differ."""

    sliding_window: int | None = None
    """Tokens a query sees, its own included; None for all before it."""
    rope: str | None = "rope"
    """Which of the model's rotary embeddings; None for no rotation at all."""
    moe: MoESpec | None = None
    """Experts instead of the MLP."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One model. The defaults are Llama's."""

    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeConfig] = field(default_factory=dict)
    """The rotary embeddings, by the names layers use."""
    rope_in_float32: bool = False
    """Rotate in float32 whatever the model's type."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_checkpoint: bool = False
    """The checkpoint already holds qkv_proj and gate_up_proj as single matrices."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norm of queries and keys: over each head, or over all heads together."""
    norm_offset: float = 0.0
    norm_in_float32: bool = False
    """Parameters of RMSNorm, like `norm_offset`."""
    activation: str = "silu"
    attention_scale: float | None = None
    """Factor of the query-key products; None for 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0


class SelfAttention(nn.Module):
    """Grouped-query attention with optional biases, norms of queries and keys, rotation and window."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        hidden_size, self.head_dim = hf.hidden_size, hf.head_dim
        self.q_size = hf.num_attention_heads * self.head_dim
        self.kv_size = hf.num_key_value_heads * self.head_dim
        self.rope = layer.rope
        self.qk_norm = spec.qk_norm
        parts = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv_proj = _side_by_side(hidden_size, parts, spec.qkv_bias, spec.fused_checkpoint)
        self.o_proj = Linear(self.q_size, hidden_size, spec.output_bias)
        if spec.qk_norm != "none":
            is_per_head = spec.qk_norm == "head"
            self.q_norm = make_norm(hf, spec, self.head_dim if is_per_head else self.q_size)
            self.k_norm = make_norm(hf, spec, self.head_dim if is_per_head else self.kv_size)
        self._rotation: RotationKernel | None = None
        self.attn = Attention(
            hf.num_attention_heads,
            self.head_dim,
            self.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            hf.num_key_value_heads,
            layer_name=name,
            sliding_window=layer.sliding_window,
            logits_soft_cap=spec.attention_soft_cap,
        )

    def prepare(self, kernels: Kernels) -> RotationKernel:
        if self.qk_norm == "head":
            norms = self.q_norm.weight.data, self.k_norm.weight.data, self.q_norm.spec
            rotation = kernels.rotation(self.head_dim, *norms)
        else:
            rotation = kernels.rotation(self.head_dim)
        self._rotation = rotation
        return rotation

    def discard(self) -> None:
        self._rotation = GIVEN_BACK

    def forward(self, x: Tensor, rotations: Rotations, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        q, k, v = self.qkv_proj(x).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None or self.qk_norm == "head":
            angles = None if self.rope is None else rotations[self.rope]
            q, k = (self._rotation or self.prepare(TORCH_KERNELS))(q, k, angles)
        attended = self.attn(q, k, v)  # [num_tokens, q_size]
        output: Tensor = self.o_proj(attended, residual)
        return output


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec) -> None:
        super().__init__()
        size = hf.size("intermediate_size")
        parts, inner = {"gate_proj": size, "up_proj": size}, LinearSpec(activation=spec.activation, gated=True)
        self.gate_up_proj = _side_by_side(hf.hidden_size, parts, spec.mlp_bias, spec.fused_checkpoint, inner)
        self.down_proj = Linear(size, hf.hidden_size, spec.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        output: Tensor = self.down_proj(self.gate_up_proj(x), residual)
        return output


class DecoderLayer(nn.Module):
    """Norm, attention, add; norm, MLP, add."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(hf, spec, layer, f"{name}.self_attn")
        self.mlp = make_mlp(hf, spec, layer)
        self.input_layernorm = make_norm(hf, spec, hf.hidden_size)
        self.post_attention_layernorm = make_norm(hf, spec, hf.hidden_size)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        x = self.self_attn(self.input_layernorm(x), rotations, x)
        y: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return y


class Decoder(nn.Module):
    """Embedding, layers, last norm: what checkpoints call `model`."""

    def __init__(
        self, hf: HFConfig, spec: DecoderSpec, layer_class: type[nn.Module], tied_head: LinearSpec | None
    ) -> None:
        super().__init__()
        self.embedding_multiplier = spec.embedding_multiplier
        self.embed_tokens = Embedding(hf.vocab_size, hf.hidden_size, tied_head)
        self.ropes = nn.ModuleDict(
            {
                name: RotaryEmbedding(
                    rope, hf.head_dim, hf.max_position_embeddings, hf.context_len, in_float32=spec.rope_in_float32
                )
                for name, rope in spec.ropes.items()
            }
        )
        self.layers = nn.ModuleList(
            layer_class(hf, spec, layer, f"model.layers.{i}") for i, layer in enumerate(spec.layers)
        )
        self.norm = make_norm(hf, spec, hf.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden]
        if self.embedding_multiplier != 1.0:  # Gemma was trained with the factor rounded to the model's type
            x = x * torch.tensor(self.embedding_multiplier, dtype=x.dtype).item()
        rotations = {name: rope(positions) for name, rope in self.ropes.items()}
        for layer in self.layers:
            x = layer(x, rotations)
        normed: Tensor = self.norm(x)
        return normed


class DecoderForCausalLM(nn.Module):
    """A decoder and its logits head. Families derive from it and describe themselves in their constructor."""

    layer_class: ClassVar[type[nn.Module]] = DecoderLayer

    def __init__(self, hf: HFConfig, spec: DecoderSpec) -> None:
        super().__init__()
        head = LinearSpec(float32_output=True, divisor=spec.logits_divisor, soft_cap=spec.logits_soft_cap)
        self.model = Decoder(hf, spec, self.layer_class, head if hf.tie_word_embeddings else None)
        self.lm_head = None if hf.tie_word_embeddings else Linear(hf.hidden_size, hf.vocab_size, spec=head)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [n, hidden], any rows of `forward`'s result; returns float32 [n, vocab]."""
        logits: Tensor = self.model.embed_tokens.project(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits


def make_norm(hf: HFConfig, spec: DecoderSpec, dim: int) -> RMSNorm:
    """Returns a norm over `dim` elements, of the model's kind."""
    eps = float(hf.get("rms_norm_eps", 1e-6))
    return RMSNorm(dim, eps, weight_offset=spec.norm_offset, scale_in_float32=spec.norm_in_float32)


def make_mlp(hf: HFConfig, spec: DecoderSpec, layer: LayerSpec) -> MLP | MoE:
    """Returns the layer's MLP, or its experts."""
    if layer.moe is not None:
        return MoE(layer.moe, hf.hidden_size, spec.activation)
    return MLP(hf, spec)


def make_layers(
    hf: HFConfig,
    *,
    rope: Callable[[int], str | None] = lambda layer: "rope",
    moe: Callable[[int], MoESpec | None] = lambda layer: None,
) -> tuple[LayerSpec, ...]:
    """Returns every layer of a model, with its window; `rope` and `moe` are called with the number of each layer.

    Windows come from config/attention_layout.py: a family that has them has a row there. Raises as its functions do.
    """
    windows = enumerate(attention_windows(hf))
    return tuple(LayerSpec(sliding_window=window, rope=rope(i), moe=moe(i)) for i, window in windows)


def common_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None) -> DecoderSpec:
    """Returns the spec that follows from the keys most families share; a family replaces what it does differently."""
    attention_bias = bool(hf.get("attention_bias", False))
    return DecoderSpec(
        layers=make_layers(hf) if layers is None else layers,
        ropes={"rope": hf.rope()},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        activation=hf.get("hidden_act", "silu"),
    )


def _side_by_side(
    in_features: int, parts: dict[str, int], bias: bool, is_fused: bool, spec: LinearSpec = PLAIN
) -> Linear:
    """Returns several projections as one matrix, fused in the checkpoint or not."""
    if not is_fused:
        return PackedLinear(in_features, parts, bias, spec)
    return Linear(in_features, sum(parts.values()) // (2 if spec.gated else 1), bias, spec)
