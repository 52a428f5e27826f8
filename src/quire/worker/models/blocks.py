"""The layers of a decoder: a mixer (attention) and an MLP, wired with norms in the ways of `BLOCKS`.

Every block has the same parts by the same names, whatever a family calls them in its checkpoints: see
config/tensor_names.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from quire.config.hf_config import HFConfig
from quire.worker.kernels.base import ActivationKernel, Kernels, RotationKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import LinearSpec, XieluSpec
from quire.worker.layers.linear import Embedding, Linear, Scale, side_by_side
from quire.worker.layers.moe import MoE
from quire.worker.layers.norm import Norm, RMSNorm
from quire.worker.layers.weights import KernelModule, weight
from quire.worker.models.attention import SelfAttention
from quire.worker.models.latent import LatentAttention
from quire.worker.models.spec import DecoderSpec, LayerSpec, Rotations, make_norm

MIXERS: Mapping[str, type[nn.Module]] = {"attention": SelfAttention, "latent": LatentAttention}
"""Values of `LayerSpec.mixer`: the parts of a layer that mix tokens.

A mixer is a module made as `mixer(hf, spec, layer, name)`, where `name` is its path in the model. Its `forward(x,
rotations, residual)` maps [num_tokens, hidden] to the same shape and adds `residual`. What it keeps between steps it
declares by the layers it owns: see `worker/attention/layer.py:Attention.kv_cache_spec`.
"""


class Xielu(KernelModule):
    """An activation with learned numbers (Huang and Schlag 2024), by its names in the checkpoint: `specs.xielu`."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = weight(1), weight(1)
        self.beta, self.eps = weight(), weight()
        self._kernel: ActivationKernel | None = None

    def prepare(self, kernels: Kernels) -> ActivationKernel:
        slope = self.beta.data
        spec = XieluSpec(
            positive=functional.softplus(self.alpha_p.data).item(),
            negative=(slope + functional.softplus(self.alpha_n.data)).item(),
            slope=slope.item(),
            least=self.eps.data.item(),
        )
        self._kernel = kernel = kernels.xielu(spec)
        return kernel

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, dim] to the same shape."""
        return (self._kernel or self.prepare(TORCH_KERNELS))(x)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020); down(activation(up(x))) if the model has no gates."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec) -> None:
        super().__init__()
        hidden, size = hf.hidden_size, layer.intermediate_size or hf.size("intermediate_size")
        is_learned = spec.activation == "xielu" and not spec.gated_mlp
        inner = LinearSpec(activation=None if is_learned else spec.activation, gated=spec.gated_mlp)
        if spec.gated_mlp:
            parts = {"gate_proj": size, "up_proj": size}
            self.gate_up_proj = side_by_side(hidden, parts, spec.mlp_bias, spec.fused_gate_up, inner)
        else:
            self.up_proj = Linear(hidden, size, spec.mlp_bias, inner)
        self.inner = "gate_up_proj" if spec.gated_mlp else "up_proj"
        self.act_fn = Xielu() if is_learned else None
        self.down_proj = Linear(size, hidden, spec.mlp_bias, spec.into_residual)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        between: Tensor = getattr(self, self.inner)(x)  # [num_tokens, intermediate_size]
        if self.act_fn is not None:
            between = self.act_fn(between)
        output: Tensor = self.down_proj(between, residual)
        return output


def make_mlp(hf: HFConfig, spec: DecoderSpec, layer: LayerSpec) -> MLP | MoE:
    """Returns the layer's MLP, or its experts."""
    if layer.moe is not None:
        return MoE(layer.moe, hf.hidden_size, spec.activation, spec.into_residual)
    return MLP(hf, spec, layer)


class Block(nn.Module):
    """Base of all layers: a mixer, an MLP, and the norms that `norms` names."""

    norms: ClassVar[tuple[str, ...]]
    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        self.self_attn = MIXERS[layer.mixer](hf, spec, layer, f"{name}.self_attn")
        self.mlp = make_mlp(hf, spec, layer)
        for module in self.modules():
            if isinstance(module, Linear):
                module.is_transposed = spec.transposed
        for norm in self.norms:
            self.add_module(norm, make_norm(spec, hf.hidden_size))

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        raise NotImplementedError


class PreNormBlock(Block):
    """Norm, mixer, add; norm, MLP, add."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), rotations, x)
        y: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return y


class PostNormBlock(Block):
    """Mixer, norm, add; MLP, norm, add (OLMo 2)."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        x = self.post_attention_layernorm(self.self_attn(x, rotations), x)
        y: Tensor = self.post_feedforward_layernorm(self.mlp(x), x)
        return y


class SandwichBlock(Block):
    """Norm, mixer, norm, add; norm, MLP, norm, add (Gemma 2)."""

    norms = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        x = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotations), x)
        y: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)), x)
        return y


class ScaledSandwichBlock(SandwichBlock):
    """Norm, mixer, norm, scale, add; norm, MLP, norm, scale, add (HyperCLOVA X)."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(hf, spec, layer, name)
        self.scale = Scale(spec.residual_multiplier)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotations)
        x = self.scale(self.post_attention_layernorm(attended), x)
        y: Tensor = self.scale(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), x)
        return y


class ParallelBlock(Block):
    """Mixer and MLP of one norm, both added (GPT-J)."""

    norms = ("input_layernorm",)

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        normed = self.input_layernorm(x)
        y: Tensor = self.mlp(normed, self.self_attn(normed, rotations, x))
        return y


class ParallelTwoBlock(Block):
    """Mixer and MLP, each of its own norm of the layer's input, both added (GPT-NeoX)."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def forward(self, x: Tensor, rotations: Rotations) -> Tensor:
        y: Tensor = self.mlp(self.post_attention_layernorm(x), self.self_attn(self.input_layernorm(x), rotations, x))
        return y


class LayerInputs(KernelModule):
    """Makes inputs of layers, beside their hidden states: a vector of `size` elements for each token and layer, the sum
    of a row of the layer's own embedding table and of a projection of the token's embedding (Gemma 3n, 4)."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, size: int) -> None:
        super().__init__()
        self.size, self.vocab_size = size, hf.size("vocab_size_per_layer_input")
        self.lacks_ids = self.vocab_size < hf.vocab_size
        self.embed_tokens = Embedding(self.vocab_size, len(spec.layers) * size)
        self.scale = Scale(size**0.5, rounds=True)
        self.projection = Linear(hf.hidden_size, len(spec.layers) * size, spec=LinearSpec(divisor=hf.hidden_size**0.5))
        self.projection_norm = make_norm(spec, size)
        self.scale_of_sum = Scale(2.0**-0.5)
        self._kernel: RotationKernel | None = None

    def prepare(self, kernels: Kernels) -> RotationKernel:
        norm = self.projection_norm
        assert isinstance(norm, RMSNorm)
        self._kernel = kernel = kernels.rotation(self.size, norm.weight.data, norm.weight.data, norm.spec)
        return kernel

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Returns the inputs of all layers side by side, [num_tokens, num_layers * size]. input_ids: [num_tokens]; ids
        that the table lacks count as 0. x: [num_tokens, hidden], their embeddings."""
        ids = input_ids.where(input_ids < self.vocab_size, 0) if self.lacks_ids else input_ids
        rows = self.scale(self.embed_tokens(ids))  # [num_tokens, num_layers * size]
        projected = self.projection(x)
        projected, _ = (self._kernel or self.prepare(TORCH_KERNELS))(projected, projected[:, :0], None)
        inputs: Tensor = self.scale_of_sum(projected + rows)
        return inputs


def split_inputs(rows: Tensor, num_layers: int) -> list[tuple[Tensor]]:
    """Returns the input of each layer, [num_tokens, size], of the result of `LayerInputs`."""
    return [(own,) for own in rows.view(len(rows), num_layers, -1).unbind(1)]


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


class Gemma4Block(SandwichBlock, KernelModule):
    """A sandwich whose MLP may have experts beside it, and which may end with an input of the layer's own; the sum of
    all is scaled by a learned number (Gemma 4)."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(hf, spec, layer, name)
        self.moe: MoE | None = None
        if layer.moe_beside is not None:
            self.moe = MoE(layer.moe_beside, hf.hidden_size, spec.activation)
            self.post_feedforward_layernorm_1 = make_norm(spec, hf.hidden_size)
            self.pre_feedforward_layernorm_2 = make_norm(spec, hf.hidden_size)
            self.post_feedforward_layernorm_2 = make_norm(spec, hf.hidden_size)
        self.own = None if spec.layer_input_size is None else LayerInput(hf, spec, spec.layer_input_size)
        self.layer_scalar = weight(1)
        self._kernel: ActivationKernel | None = None

    def prepare(self, kernels: Kernels) -> ActivationKernel:
        factor = self.layer_scalar.item()
        self._kernel = kernel = kernels.xielu(XieluSpec(positive=0.0, negative=0.0, slope=factor))  # a product
        return kernel

    def forward(self, x: Tensor, rotations: Rotations, own: Tensor | None = None) -> Tensor:
        """`own`, [num_tokens, layer_input_size], is the layer's own input."""
        x = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotations), x)
        y: Tensor = self.mlp(self.pre_feedforward_layernorm(x))
        if self.moe is not None:
            experts: Tensor = self.moe(self.pre_feedforward_layernorm_2(x), router_input=x)
            y = self.post_feedforward_layernorm_2(experts, self.post_feedforward_layernorm_1(y))
        y = self.post_feedforward_layernorm(y, x)
        y = y if self.own is None else self.own(y, own)
        return (self._kernel or self.prepare(TORCH_KERNELS))(y)


BLOCKS: Mapping[str, type[Block]] = {
    "gemma4": Gemma4Block,
    "parallel": ParallelBlock,
    "parallel-two": ParallelTwoBlock,
    "post": PostNormBlock,
    "pre": PreNormBlock,
    "sandwich": SandwichBlock,
    "scaled-sandwich": ScaledSandwichBlock,
}
"""Values of `DecoderSpec.block`."""
