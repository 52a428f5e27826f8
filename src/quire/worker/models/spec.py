"""The properties in which decoders differ: `DecoderSpec` for a whole model, `LayerSpec` for one layer.

A family's file (llama.py, gemma.py, ...) reads its config.json into a spec. `common_spec` reads the keys that most
families share; the family names what it does differently. A new difference is a new field here, with the behaviour
of Llama as its default, and is read in one place: attention.py, blocks.py or decoder.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from quire.config.attention_layout import attention_windows, kv_sources, layer_configs
from quire.config.hf_config import HFConfig, RopeConfig
from quire.errors import UnsupportedModelError
from quire.worker.attention.backend import ScaleGrowth
from quire.worker.kernels.specs import PLAIN, LatentSizes, LinearSpec, RotaryAngles
from quire.worker.layers.linear import Embedding
from quire.worker.layers.moe import MoESpec
from quire.worker.layers.norm import HeadNorms, LayerNorm, Norm, RMSNorm, UnitNorm
from quire.worker.layers.rotary import SinusoidalPositions

Rotations = Mapping[str, RotaryAngles]
"""Rotation angles of the step's tokens, for each rotary embedding of the model."""


@dataclass(frozen=True)
class OutputGate:
    """Gates of the answer of attention: one for each element, made by the matrix `gate_proj`."""

    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    in_queries: bool = False
    """q_proj makes them: a query and its gates for each head in turn."""
    per_head: bool = False
    """One gate for each head."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The properties in which the layers of a model differ."""

    mixer: str = "attention"
    """The part that mixes tokens: a key of `blocks.MIXERS`."""
    sliding_window: int | None = None
    """Tokens a query sees, its own included; None for all before it."""
    rope: str | None = "rope"
    """Which of the model's rotary embeddings; None for no rotation at all."""
    input_size: int | None = None
    """Elements that attention reads of each token; None for the config's `hidden_size`."""
    head_dim: int | None = None
    """Elements of a head; None for the config's `head_dim`."""
    num_heads: int | None = None
    """Heads of queries; None for the config's `num_attention_heads`."""
    num_kv_heads: int | None = None
    """Heads of keys and values; None for the config's `num_key_value_heads`."""
    intermediate_size: int | None = None
    """Inner size of the MLP; None for the config's `intermediate_size`."""
    moe: MoESpec | None = None
    """Experts instead of the MLP."""
    moe_beside: MoESpec | None = None
    """Experts beside the MLP, in the block "gemma4"."""
    kv_from: str | None = None
    """Name of the earlier attention layer whose keys and values it reads; None: it has its own."""
    values_are_keys: bool = False
    """A value is the key as it is before norm and rotation; there is no v_proj."""
    chunk: int | None = None
    """A query at position i sees keys from the last multiple of `chunk` on; None for no limit."""
    unit_qk_norm: bool = False
    """Heads of queries and keys are normed, without weights, after the rotation."""
    scale_growth: ScaleGrowth | None = None
    """Growth of the attention's scale with the position of the query."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One model. The defaults are Llama's."""

    layers: tuple[LayerSpec, ...]
    block: str = "pre"
    """The wiring of a layer's norms, mixer and MLP: a key of `blocks.BLOCKS`."""
    ropes: Mapping[str, RopeConfig] = field(default_factory=dict)
    """The rotary embeddings, by the names layers use."""
    rope_dims: Mapping[str, int] = field(default_factory=dict)
    """Elements of the heads that a rotary embedding is for; `head_dim` for those that are not named."""
    rope_in_float32: bool = False
    """Rotate in float32 whatever the model's type."""
    rope_rounds_tables: bool = False
    """With `rope_in_float32`: sines and cosines are rounded to the model's type first."""
    rope_backwards: bool = False
    """Angles are negative."""
    rope_pairs: bool = False
    """The checkpoint's heads rotate neighbouring elements (2i, 2i + 1) instead of the halves (i, i + r/2)."""
    position_offset: int | None = None
    """Positions are learned vectors, added to the embedding, and the first has this row in their table; None: they are
    not learned."""
    sinusoidal_positions: bool = False
    """With `position_offset`: the vectors are not learned, but sines and cosines."""
    embedding_norm: bool = False
    """A norm follows the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    """Bias of the logits head."""
    transposed: bool = False
    """The checkpoint holds the matrices of the layers as [in_features, out_features]."""
    fused_qkv: Literal["parts", "groups", "quarters"] | None = None
    """The checkpoint holds qkv_proj as a single matrix. Its rows are all queries, keys, values ("parts"); queries, key
    and value of each kv head ("groups"); or queries, values and keys of each quarter of the heads ("quarters")."""
    fused_gate_up: bool = False
    """The checkpoint holds gate_up_proj as a single matrix, the gates first."""
    gated_mlp: bool = True
    """False: the MLP is down(activation(up(x)))."""
    norm: Literal["rms", "layer"] = "rms"
    """Root mean square norm, or LayerNorm."""
    norm_eps: float = 1e-6
    norm_weight: bool = True
    """False: norms have no weights."""
    norm_bias: bool = False
    """LayerNorms have a bias."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    norm_in_float32: bool = False
    """RMSNorm rounds after the product with its weights."""
    qk_norm: Literal["none", "head", "heads", "listed heads", "full"] = "none"
    """Norm of queries and keys: over each head, all with the same weights ("head"), or over all heads together
    ("full"). LayerNorms may have weights for each head, in one tensor ("heads") or a tensor each ("listed heads")."""
    qk_norm_after_rope: bool = False
    """Norm of each head follows the rotation instead of preceding it."""
    unit_value_norm: bool = False
    """Heads of values are normed, without weights."""
    layer_input_size: int | None = None
    """Elements of an input of each layer's own for each token: `blocks.LayerInputs`; None for none."""
    activation: str = "silu"
    """A key of `specs.ACTIVATIONS`; "xielu", in an MLP without gates, for one with learned numbers."""
    clip_qkv: float | None = None
    """Queries, keys and values are cut to [-clip_qkv, clip_qkv]."""
    output_gate: OutputGate | None = None
    """The answer of attention is multiplied by activation(gate)."""
    latent: LatentSizes | None = None
    """Sizes of layers whose mixer is "latent"."""
    latent_norm_eps: float = 1e-6
    attention_scale: float | None = None
    """Factor of the query-key products; None for 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    """A score of head h grows by alibi_slopes[h] * (position of the key - position of the query); None: it does not."""
    attention_sinks: bool = False
    """Each head has a learned score of one more key, whose value is zero: self_attn.sinks."""
    logits_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    """The factor of embeddings is rounded to the model's type, as Gemma was trained with it."""
    residual_multiplier: float = 1.0
    """Factor of what the blocks "pre" and "scaled-sandwich" add."""
    logits_divisor: float = 1.0

    @property
    def into_residual(self) -> LinearSpec:
        """Returns what follows the products whose results are added to the residual stream."""
        is_scaled = self.block == "pre" and self.residual_multiplier != 1.0
        return LinearSpec(divisor=1.0 / self.residual_multiplier) if is_scaled else PLAIN


_HEADS = {"head_dim": "head_dim", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
"""Fields of LayerSpec that differ by layer where their keys do."""


def make_layers(
    hf: HFConfig,
    *,
    rope: Callable[[int], str | None] = lambda layer: "rope",
    moe: Callable[[int], MoESpec | None] = lambda layer: None,
    intermediate_size: int | None = None,
) -> tuple[LayerSpec, ...]:
    """Returns every layer of a model, with its window, heads, and keys of another layer; `rope` and `moe` are called
    with the number of each layer. `intermediate_size`: of every MLP, if it is not the config's.

    Windows come from config/attention_layout.py: a family that has them has a row there. Raises as its functions do.
    """
    windows, configs, sources = attention_windows(hf), layer_configs(hf), kv_sources(hf)
    return tuple(
        LayerSpec(
            sliding_window=windows[i],
            rope=rope(i),
            moe=moe(i),
            intermediate_size=intermediate_size,
            **{name: getattr(config, key) for name, key in _HEADS.items() if getattr(config, key) != getattr(hf, key)},
            kv_from=None if sources[i] is None else f"model.layers.{sources[i]}.self_attn",
        )
        for i, config in enumerate(configs)
    )


def common_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None, **changes: Any) -> DecoderSpec:
    """Returns the spec that follows from the keys most families share. `changes` are the fields of DecoderSpec in which
    a family differs."""
    attention_bias = bool(hf.get("attention_bias", False))
    spec = DecoderSpec(
        layers=make_layers(hf) if layers is None else layers,
        ropes={"rope": hf.rope()},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        activation=hf.get("hidden_act", "silu"),
    )
    return dataclasses.replace(spec, **changes)


def projection_sizes(spec: DecoderSpec, layer: LayerSpec, num_heads: int, q_size: int, kv_size: int) -> dict[str, int]:
    """Returns the rows of each projection of an attention layer, by its name: 0 for one that it does not have. Raises
    UnsupportedModelError for biases that gates lack."""
    k_size, gate = 0 if layer.kv_from else kv_size, spec.output_gate
    sizes = {"q_proj": q_size, "k_proj": k_size, "v_proj": 0 if layer.values_are_keys else k_size, "gate_proj": 0}
    if gate is None:
        return sizes
    if spec.qkv_bias and not gate.in_queries:
        raise UnsupportedModelError(
            "config.json asks for biases of queries, but not of gates, which is not implemented"
        )
    sizes["q_proj" if gate.in_queries else "gate_proj"] += num_heads if gate.per_head else q_size
    return sizes


def make_norm(spec: DecoderSpec, dim: int) -> Norm:
    """Returns a norm over `dim` elements, of the model's kind."""
    if spec.norm == "layer":
        return LayerNorm(
            dim, spec.norm_eps, affine=spec.norm_weight, bias=spec.norm_bias, weight_offset=spec.norm_offset
        )
    if not spec.norm_weight:
        return UnitNorm(dim, spec.norm_eps)
    return RMSNorm(dim, spec.norm_eps, weight_offset=spec.norm_offset, scale_in_float32=spec.norm_in_float32)


def make_positions(spec: DecoderSpec, hf: HFConfig) -> nn.Module | None:
    """Returns the vectors that are added for positions; None if there are none."""
    if spec.position_offset is None:
        return None
    if spec.sinusoidal_positions:
        return SinusoidalPositions(hf.context_len, hf.hidden_size, spec.position_offset, hf.get("pad_token_id"))
    return Embedding(hf.max_position_embeddings, hf.hidden_size, offset=spec.position_offset)


def make_qk_norm(spec: DecoderSpec, num_heads: int, head_dim: int) -> Norm:
    """Returns the norm of the queries, or the keys, of `num_heads` heads."""
    if spec.qk_norm == "full":
        return make_norm(spec, num_heads * head_dim)
    if spec.norm == "rms":
        return make_norm(spec, head_dim)
    if spec.qk_norm == "head":
        return LayerNorm(head_dim, spec.norm_eps, bias=spec.norm_bias, groups=num_heads)
    return HeadNorms(head_dim, spec.norm_eps, num_heads, is_list=spec.qk_norm == "listed heads")
