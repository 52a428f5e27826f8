"""Multi-head latent attention (DeepSeek-AI 2024), in its absorbed form.

A token's keys and values are linear functions of one latent, which alone is cached, with a rotary part that all heads
share. Instead of making every head's keys and values of all latents, queries are multiplied by the matrix that makes
keys, and sums of latents by the one that makes values: the scores and answers are the same sums in another order.
Prompts are computed so, too, although that takes more products: with two forms a token's bits would depend on the step
that computed it.
"""

from __future__ import annotations

from torch import Tensor

from quire.config.hf_config import HFConfig
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.layer import Attention
from quire.worker.kernels.base import BatchedLinearKernel, Kernels, LatentKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.linear import Linear
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.row_order import latent_key_order, latent_query_order
from quire.worker.layers.weights import KernelModule, forget, weight
from quire.worker.models.spec import DecoderSpec, LayerSpec, Rotations


class HeadExpansion(KernelModule):
    """The matrix that makes keys and values of a latent: `weight` is [num_heads * (plain + value), rank], for each
    head the rows of its key, then those of its value."""

    packed_parameters = ("weight",)

    def __init__(self, num_heads: int, plain: int, value: int, rank: int) -> None:
        super().__init__()
        self.weight = weight(num_heads * (plain + value), rank)
        self.num_heads, self.plain = num_heads, plain
        self._kernel: tuple[BatchedLinearKernel, BatchedLinearKernel] | None = None

    def prepare(self, kernels: Kernels) -> tuple[BatchedLinearKernel, BatchedLinearKernel]:
        heads = self.weight.data.view(self.num_heads, -1, self.weight.shape[1])
        keys = kernels.batched_linear(heads[:, : self.plain].transpose(1, 2))
        self._kernel = keys, kernels.batched_linear(heads[:, self.plain :])
        if not kernels.keeps_weights:
            forget(self, "weight")
        return self._kernel

    def forward(self) -> tuple[BatchedLinearKernel, BatchedLinearKernel]:
        """Returns the kernels that multiply queries, [n, heads, plain] to [n, heads, rank], and sums of latents, [n,
        heads, rank] to [n, heads, value]."""
        return self._kernel or self.prepare(TORCH_KERNELS)


class LatentAttention(KernelModule):
    """A mixer: see the module. The sizes are those of `DecoderSpec.latent`."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        sizes = spec.latent
        assert sizes is not None, "a model with latent attention has its sizes"
        self.sizes, self.rope, self.num_heads = sizes, layer.rope, hf.num_attention_heads
        hidden, head_size = hf.hidden_size, sizes.rotary + sizes.plain
        if sizes.query_rank is None:
            self.q_proj = Linear(hidden, self.num_heads * head_size)
        else:
            self.q_a_proj = Linear(hidden, sizes.query_rank, spec.qkv_bias)
            self.q_a_layernorm = RMSNorm(sizes.query_rank, spec.latent_norm_eps)
            self.q_b_proj = Linear(sizes.query_rank, self.num_heads * head_size)
        self.kv_a_proj_with_mqa = Linear(hidden, sizes.rank + sizes.rotary, spec.qkv_bias)
        self.kv_a_layernorm = RMSNorm(sizes.rank, spec.latent_norm_eps)
        self.kv_b_proj = HeadExpansion(self.num_heads, sizes.plain, sizes.value, sizes.rank)
        self.o_proj = Linear(self.num_heads * sizes.value, hidden, spec.output_bias, spec.into_residual)
        queries = self.q_proj if sizes.query_rank is None else self.q_b_proj
        is_paired = spec.rope_pairs and layer.rope is not None
        queries.row_orders = {"": latent_query_order(self.num_heads, sizes.plain, sizes.rotary, is_paired)}
        if is_paired:
            self.kv_a_proj_with_mqa.row_orders = {"": latent_key_order(sizes.rank, sizes.rotary)}
        self._kernel: LatentKernel | None = None
        scale = head_size**-0.5 if spec.attention_scale is None else spec.attention_scale
        attention = AttentionSpec(self.num_heads, 1, sizes.rank + sizes.rotary, scale, latent_size=sizes.rank)
        self.attn = Attention(attention, name)

    def prepare(self, kernels: Kernels) -> LatentKernel:
        norm = self.kv_a_layernorm
        self._kernel = kernel = kernels.latent(self.sizes, norm.weight.data, norm.spec)
        return kernel

    def forward(self, x: Tensor, rotations: Rotations, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        sizes, n = self.sizes, x.shape[0]
        if sizes.query_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        key = self.kv_a_proj_with_mqa(x)  # [num_tokens, rank + rotary]
        angles = None if self.rope is None else rotations[self.rope]
        query, key = (self._kernel or self.prepare(TORCH_KERNELS))(query, key, angles)
        multiply_queries, make_values = self.kv_b_proj()
        heads = query.view(n, self.num_heads, sizes.rotary + sizes.plain)
        query = multiply_queries(heads[:, :, sizes.rotary :], heads[:, :, : sizes.rotary])
        latents = self.attn(query.view(n, -1), key).view(n, self.num_heads, sizes.rank)
        output: Tensor = self.o_proj(make_values(latents).flatten(1), residual)
        return output
