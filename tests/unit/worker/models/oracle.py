"""Quire's logits and transformers' logits of one sequence.

The attention here is the textbook one on a whole sequence, without a cache: models are tested apart from the paged
backends, whose own tests compare them with the same formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.config.engine import LoadConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.worker.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    ForwardContext,
    KVCache,
    set_forward_context,
)
from quire.worker.attention.layer import Attention
from quire.worker.kernels.base import Kernels
from quire.worker.loader import Placement, load_model

CPU = torch.device("cpu")


class DenseAttention(AttentionBackend[None]):
    """softmax(mask(cap(q k^T * scale) + bias)) v over one whole sequence."""

    name: ClassVar[str] = "dense"

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by the address of a layer's cache."""

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: Kernels) -> bool:
        return True

    def view_kv_cache(self, storage: Tensor, spec: Any, num_blocks: int, offset: int = 0) -> KVCache:
        return KVCache(storage, storage)

    def make_metadata(self, batch: AttentionBatch, spec: Any) -> None:
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        metadata: None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        if key is not None:
            stored = key[..., : spec.latent_size] if value is None else value
            self._stored[kv_cache.key.data_ptr()] = (key, stored)
        key, value = self._stored[kv_cache.key.data_ptr()]
        positions = torch.arange(query.shape[0])
        query = query.transpose(0, 1)  # [num_heads, num_tokens, head_size]
        if spec.scale_growth is not None:
            times = (positions + spec.scale_growth.offset) // spec.scale_growth.length
            query = query * (1 + spec.scale_growth.factor * torch.log(1.0 + times))[:, None].to(query.dtype)
        key, value = (x.transpose(0, 1).repeat_interleave(spec.group_size, 0) for x in (key, value))
        scores = query @ key.transpose(1, 2) * spec.scale  # [num_heads, num_tokens, num_tokens]
        if spec.logits_soft_cap is not None:
            scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
        distance = positions[:, None] - positions[None, :]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance
        chunk = spec.chunk or len(positions)
        is_visible = (distance >= 0) & (positions[:, None] // chunk == positions[None, :] // chunk)
        if spec.sliding_window is not None:
            is_visible &= distance < spec.sliding_window
        scores = scores.masked_fill(~is_visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, len(positions), 1)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : len(positions)]
        return (weights @ value).transpose(0, 1)


def model_config_of(path: Path, **fields: Any) -> ModelConfig:
    """Returns what EngineArgs would make of a local checkpoint."""
    return ModelConfig(model=str(path), model_dir=path, hf_config=HFConfig.from_dir(path), **fields)


def load(path: Path, *, dtype: torch.dtype = torch.float32, load_format: str = "auto", **fields: Any) -> nn.Module:
    """The checkpoint at `path` as Quire loads it."""
    return load_model(model_config_of(path, **fields), LoadConfig(load_format=load_format), Placement(CPU, dtype))


@torch.inference_mode()
def quire_logits(model: nn.Module, token_ids: list[int]) -> Tensor:
    """[num_tokens, vocab] logits of one sequence."""
    names = [m.layer_name for m in model.modules() if isinstance(m, Attention)]
    caches = {name: KVCache(torch.empty(1), torch.empty(1)) for name in names}
    context = ForwardContext(DenseAttention(), [None], dict.fromkeys(names, 0), caches)
    with set_forward_context(context):
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)))
    logits: Tensor = model.compute_logits(hidden)
    return logits


def transformers_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint, with plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
