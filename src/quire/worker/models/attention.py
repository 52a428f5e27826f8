"""Grouped-query attention as decoders use it: projections, norms of queries and keys, rotation, the paged cache."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from quire.config.hf_config import HFConfig
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.layer import Attention
from quire.worker.kernels.base import ActivationKernel, Kernels, RotationKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import LinearSpec, NormSpec
from quire.worker.layers.linear import Linear, side_by_side
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.row_order import attention_orders, half_order
from quire.worker.layers.weights import KernelModule, weight
from quire.worker.models.spec import DecoderSpec, LayerSpec, Rotations, make_qk_norm, projection_sizes
from quire.worker.parallel.collectives import Gather
from quire.worker.parallel.plan import HeadShare

Rotating = tuple[tuple[tuple[RotationKernel, bool], ...], RotationKernel | None, ActivationKernel | None]
"""Kernels for queries and keys, in order, each with whether it rotates; the kernel that norms values; the gate's."""


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj")
"""Names of the parts of qkv_proj, in order."""


class SelfAttention(KernelModule):
    """Grouped-query attention with optional biases, norms of queries and keys, rotation and window."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        hidden_size, num_heads = hf.hidden_size, layer.num_heads or hf.num_attention_heads
        num_kv_heads = layer.num_kv_heads or hf.num_key_value_heads
        self.spec, self.layer = spec, layer
        self.head_dim = layer.head_dim or hf.head_dim
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        sizes = projection_sizes(spec, layer, num_heads, q_size, kv_size)
        self.sizes = list(sizes.values())
        parts, inner = {part: size for part, size in sizes.items() if size}, LinearSpec(clip=spec.clip_qkv)
        self.qkv_proj = side_by_side(
            layer.input_size or hidden_size, parts, spec.qkv_bias, spec.fused_qkv is not None, inner
        )
        self.o_proj = Linear(q_size, hidden_size, spec.output_bias, spec.into_residual)
        paired_dim = 0
        if spec.rope_pairs and layer.rope is not None:
            paired_dim = int(self.head_dim * spec.ropes[layer.rope].partial_rotary_factor)
        self.qkv_proj.row_orders = attention_orders(
            *(num_heads, num_kv_heads, self.head_dim),
            paired_dim=paired_dim,
            fused=spec.fused_qkv,
            has_gates=spec.output_gate is not None and spec.output_gate.in_queries,
        )
        if spec.qk_norm != "none":
            self.q_norm = make_qk_norm(spec, num_heads, self.head_dim)
            self.k_norm = None if layer.kv_from else make_qk_norm(spec, num_kv_heads, self.head_dim)
            if paired_dim and self.k_norm is not None:
                q_heads, k_heads = (1, 1) if spec.qk_norm == "head" else (num_heads, num_kv_heads)
                self.q_norm.row_orders = {"": half_order(q_heads, self.head_dim, paired_dim)}
                self.k_norm.row_orders = {"": half_order(k_heads, self.head_dim, paired_dim)}
        self._kernel: Rotating | None = None
        attention = AttentionSpec(
            num_heads,
            num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            sliding_window=layer.sliding_window,
            logits_soft_cap=spec.attention_soft_cap,
            chunk=layer.chunk,
            scale_growth=layer.scale_growth,
        )
        self.attn = Attention(attention, name, slopes=spec.alibi_slopes, kv_from=layer.kv_from)
        self.sinks = weight(num_heads) if spec.attention_sinks else None
        self.share: HeadShare | None = None
        """The heads of this worker; None: all."""
        self._attended: Gather | None = None
        self._is_cut_late = False
        """True: all heads are projected and normed, and this worker's are taken then."""

    @property
    def norms_in_rotation(self) -> bool:
        """True if the kernel that rotates norms each head."""
        return self.spec.norm == "rms" and self.spec.qk_norm == "head"

    @property
    def norms_all_heads(self) -> bool:
        """True if a norm of queries or keys needs all heads."""
        return self.spec.qk_norm != "none" and not self.norms_in_rotation

    def cut(self, share: HeadShare, attended: Gather, projected: Gather | None) -> None:
        """Leaves this worker a share of the heads. `attended` is the answer of all heads; `projected` is what is
        projected for all heads, where `norms_all_heads`. Must be called before there are weights."""
        attention, (queries, keys, values, gates) = self.attn.spec, self.sizes
        q = share.rows(attention.num_heads * self.head_dim)
        if queries == 2 * attention.num_heads * self.head_dim:  # gates follow all queries
            q = torch.cat([q, q + queries // 2])
        rows = q, share.kv_rows(keys), share.kv_rows(values), share.rows(gates)
        self._is_cut_late = projected is not None
        if projected is not None:
            self.qkv_proj.cut_outputs(projected)
        else:
            starts = [sum(self.sizes[:i]) for i in range(len(rows))]
            named = dict(zip(PROJECTIONS, rows, strict=True))
            named[""] = torch.cat([own + start for own, start in zip(rows, starts, strict=True)])
            self.qkv_proj.cut({part: named[part] for part in self.qkv_proj.part_sizes}, None)
            self.sizes = [len(own) for own in rows]
        self.attn.spec = dataclasses.replace(attention, num_heads=share.num_heads, num_kv_heads=share.num_kv_heads)
        if self.attn.slopes is not None:
            self.attn.slopes = self.attn.slopes[share.heads.start : share.heads.stop]
        self.share, self._attended = share, attended

    def prepare(self, kernels: Kernels) -> Rotating:
        if self.sinks is not None:
            own = slice(None) if self.share is None else slice(self.share.heads.start, self.share.heads.stop)
            self.attn.sinks = self.sinks.data[own].float()
        rotates, plain = self.layer.rope is not None, kernels.rotation(self.head_dim)
        steps = ((plain, True),) if rotates else ()
        if self.norms_in_rotation:
            key_norm = self.q_norm if self.k_norm is None else self.k_norm  # without keys it norms nothing
            assert isinstance(self.q_norm, RMSNorm)
            assert isinstance(key_norm, RMSNorm)
            normed = kernels.rotation(self.head_dim, self.q_norm.weight.data, key_norm.weight.data, self.q_norm.spec)
            steps = (*steps, (normed, False)) if self.spec.qk_norm_after_rope else ((normed, rotates),)
        unit: RotationKernel | None = None
        if self.layer.unit_qk_norm or self.spec.unit_value_norm:
            parameter = self.qkv_proj.weight  # on the meta device once it is packed
            place = torch.device("cpu") if parameter.is_meta else parameter.device
            ones = torch.ones(self.head_dim, dtype=parameter.dtype, device=place)
            unit = kernels.rotation(self.head_dim, ones, ones, NormSpec(eps=self.spec.norm_eps, scale_in_float32=True))
            steps = (*steps, (unit, False)) if self.layer.unit_qk_norm else steps
        gate = None if self.spec.output_gate is None else kernels.activation(self.spec.output_gate.activation)
        self._kernel = steps, unit if self.spec.unit_value_norm else None, gate
        return self._kernel

    def forward(self, x: Tensor, rotations: Rotations, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        q, k, v, gate = self.qkv_proj(x).split(self.sizes, dim=-1)
        if self.spec.output_gate is not None and self.spec.output_gate.in_queries:
            q, gate = q.chunk(2, dim=-1)
        if self.spec.qk_norm != "none" and not self.norms_in_rotation:
            q, k = self.q_norm(q), k if self.k_norm is None else self.k_norm(k)
        if self._is_cut_late:
            assert self.share is not None
            q, k, v, gate = (
                self.share.columns(q),
                self.share.kv_columns(k),
                self.share.kv_columns(v),
                self.share.columns(gate),
            )
        if self.layer.values_are_keys:
            v = k.clone()  # k is normed and rotated in place
        steps, value_norm, gating = self.prepare(TORCH_KERNELS) if self._kernel is None else self._kernel
        for step, rotates in steps:
            q, k = step(q, k, rotations[self.layer.rope] if rotates and self.layer.rope is not None else None)
        if self.layer.kv_from:
            attended = self.attn(q)  # [num_tokens, num_heads * head_dim]
        else:
            attended = self.attn(q, k, v if value_norm is None else value_norm(v, v[:, :0], None)[0])
        if gating is not None:
            attended = gating(gate, attended)  # [num_tokens, gates] and [num_tokens, num_heads * head_dim]
        if self._attended is not None:
            attended = self._attended.put(attended)
        output: Tensor = self.o_proj(attended, residual)
        return output
