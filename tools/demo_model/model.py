"""A small Llama in plain torch for training, and its export as a transformers ``LlamaForCausalLM`` checkpoint.

Owns the architecture and the parameter names. Attention is dense over packed documents, with a mask between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tools.demo_model.tokenizer import MAX_CONTEXT, VOCAB_SIZE, write_json
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Llama. Head size is ``hidden // heads``."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = VOCAB_SIZE
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "main": ModelShape(hidden=256, layers=6, heads=8, kv_heads=4, intermediate=688),
    "draft": ModelShape(hidden=128, layers=5, heads=4, kv_heads=2, intermediate=344),
}


@dataclass(frozen=True)
class Packed:
    """A batch of rows, each holding several documents one after another.

    ``ids`` and ``positions`` [rows, length], ``mask`` [rows, 1, length, length] (0 where seen, else very low),
    ``chosen`` the flat indices whose next token is learned, ``targets`` these tokens.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    chosen: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Packed:
        """The same batch on another device."""
        tensors = (self.ids, self.positions, self.mask, self.chosen, self.targets)
        return Packed(*(tensor.to(device, non_blocking=True) for tensor in tensors))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        split = (rows, length, -1, self.shape.head_size)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)  # [rows, heads, length, head_size]
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        # Three plain operations: at this size torch's fused attention takes 1.6 times as long on a CPU in bf16.
        scores = (q @ k.mT) * self.shape.head_size**-0.5 + mask.to(q.dtype)
        out = scores.softmax(-1).to(v.dtype) @ v
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class FeedForward(nn.Module):
    """The gated SiLU network."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The decoder with tied embeddings; its parameters bear the names of a transformers checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, weight in self.layers.named_parameters():
            if weight.ndim == 2:
                scale = (2 * self.shape.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)

    def forward(self, batch: Packed) -> Tensor:
        """Logits [chosen, vocab] at the positions whose next token is learned."""
        cos, sin = rope_tables(batch.positions, self.shape)
        x = self.embed_tokens(batch.ids)  # [rows, length, hidden]
        for layer in self.layers:
            x = layer(x, batch.mask, cos, sin)
        return functional.linear(self.norm(x.flatten(0, 1)[batch.chosen]), self.embed_tokens.weight)


def rope_tables(positions: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, 1, length, head_size / 2] of the rotation angles (Su et al. 2021, RoFormer)."""
    powers = torch.arange(0, shape.head_size, 2, device=positions.device).float() / shape.head_size
    angles = positions[:, None, :, None].float() * shape.rope_theta**-powers
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other."""
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def hf_config(shape: ModelShape, turn_end: int, text_end: int) -> dict[str, Any]:
    """The config.json of the exported checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": text_end,
        "torch_dtype": "bfloat16",
    }


def export(model: Llama, folder: Path, turn_end: int, text_end: int) -> None:
    """Write config.json and a bf16 model.safetensors that ``AutoModelForCausalLM`` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)
    write_json(folder / "config.json", hf_config(model.shape, turn_end, text_end))
