"""OPT (Zhang et al. 2022): learned positions, LayerNorm and biases."""

from __future__ import annotations

from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.layer import Attention
from quire.worker.kernels.specs import LOGITS, LinearSpec
from quire.worker.layers.linear import Embedding, Linear, PackedLinear, Scale
from quire.worker.layers.norm import LayerNorm


class OPTAttention(nn.Module):
    """Multi-head attention without rotation."""

    def __init__(self, hf: HFConfig, name: str) -> None:
        super().__init__()
        size, num_heads, bias = hf.hidden_size, hf.num_attention_heads, bool(hf.get("enable_bias", True))
        head_dim = size // num_heads
        self.qkv_proj = PackedLinear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias)
        self.out_proj = Linear(size, size, bias)
        self.scale = Scale(head_dim**-0.5)
        self.attn = Attention(AttentionSpec(num_heads, num_heads, head_dim, 1.0), name)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: [num_tokens, hidden] to [num_tokens, hidden]."""
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        output: Tensor = self.out_proj(self.attn(self.scale(q), k, v), residual)  # scaled here, rounded as in training
        return output


class OPTLayer(nn.Module):
    """Attention and MLP, each with a norm: before it (most sizes) or after its sum (the 350m model)."""

    def __init__(self, hf: HFConfig, name: str) -> None:
        super().__init__()
        affine, bias = bool(hf.get("layer_norm_elementwise_affine", True)), bool(hf.get("enable_bias", True))
        self.norm_before = bool(hf.get("do_layer_norm_before", True))
        self.self_attn = OPTAttention(hf, f"{name}.self_attn")
        self.self_attn_layer_norm = LayerNorm(hf.hidden_size, affine=affine)
        inner = LinearSpec(activation=hf.get("activation_function", "relu"))
        self.fc1 = Linear(hf.hidden_size, hf.size("ffn_dim"), bias, inner)
        self.fc2 = Linear(hf.size("ffn_dim"), hf.hidden_size, bias)
        self.final_layer_norm = LayerNorm(hf.hidden_size, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]."""
        if self.norm_before:
            x = self.self_attn(self.self_attn_layer_norm(x), x)
            return self._mlp(self.final_layer_norm(x), x)
        x = self.self_attn_layer_norm(self.self_attn(x, x))
        y: Tensor = self.final_layer_norm(self._mlp(x, x))
        return y

    def _mlp(self, x: Tensor, residual: Tensor) -> Tensor:
        output: Tensor = self.fc2(self.fc1(x), residual)
        return output


class OPTDecoder(nn.Module):
    """Embeddings of tokens and positions, layers, and a last norm where layers norm before. Token embeddings may be
    narrower than the layers (word_embed_proj_dim)."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        hidden, word_dim = hf.hidden_size, hf.size("word_embed_proj_dim", hf.hidden_size)
        self.embed_tokens = Embedding(hf.vocab_size, word_dim, LOGITS if hf.tie_word_embeddings else None)
        self.embed_positions = Embedding(hf.max_position_embeddings, hidden, offset=2)
        self.project_in = Linear(word_dim, hidden) if word_dim != hidden else None
        self.project_out = Linear(hidden, word_dim) if word_dim != hidden else None
        self.layers = nn.ModuleList(OPTLayer(hf, f"model.decoder.layers.{i}") for i in range(hf.num_hidden_layers))
        has_final_norm = hf.get("do_layer_norm_before", True) and not hf.get("_remove_final_layer_norm", False)
        affine = bool(hf.get("layer_norm_elementwise_affine", True))
        self.final_layer_norm = LayerNorm(hidden, affine=affine) if has_final_norm else None

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: [num_tokens] to [num_tokens, word_embed_proj_dim]."""
        x: Tensor = self.embed_tokens(input_ids)  # [num_tokens, word_embed_proj_dim]
        if self.project_in is not None:
            x = self.project_in(x)  # [num_tokens, hidden]
        x = self.embed_positions(positions, x)
        for layer in self.layers:
            x = layer(x)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return x if self.project_out is None else self.project_out(x)


class OPTModel(nn.Module):
    """The decoder, one level deeper: checkpoints say model.decoder."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        self.decoder = OPTDecoder(hf)


class OPTForCausalLM(nn.Module):
    """OPT and its logits head."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__()
        self.model = OPTModel(hf)
        word_dim = hf.size("word_embed_proj_dim", hf.hidden_size)
        self.lm_head = None if hf.tie_word_embeddings else Linear(word_dim, hf.vocab_size, spec=LOGITS)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, word_embed_proj_dim]."""
        hidden: Tensor = self.model.decoder(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [n, word_embed_proj_dim]; returns float32 [n, vocab]."""
        head = self.model.decoder.embed_tokens.project if self.lm_head is None else self.lm_head
        logits: Tensor = head(hidden)
        return logits
