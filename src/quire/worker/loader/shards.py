"""Cuts a model that is built, but has no weights yet, to one worker's part.

Every matrix is cut by its outputs, so that each output stays one sum over all inputs. Layers then return whole results:
`Gather`. Attention is cut by heads. What is small (norms, routers) or cannot be cut is computed by every worker alike.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.models.attention import SelfAttention
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.latent import LatentAttention
from quire.worker.parallel.collectives import Collectives, Gather
from quire.worker.parallel.plan import share_heads, share_outputs


class Sharding:
    """One worker's part of models."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._uses = Counter[str]()

    @property
    def name(self) -> str:
        """Name of the part: the same name means the same part."""
        group = self.collectives.group
        return f"{group.kind} {group.index} of {group.size}"

    def cut(self, model: nn.Module) -> None:
        """Leaves `model`, which is on the meta device, this worker's part. Raises UnsupportedModelError."""
        if not isinstance(model, DecoderForCausalLM):
            raise UnsupportedModelError(
                f"--tensor-parallel-size {self.collectives.group.size}: {type(model).__name__} cannot be divided among "
                "workers; only text generation by decoders can be; leave the flag out"
            )
        with torch.device("meta"):
            for path, module in model.named_modules():
                if isinstance(module, SelfAttention):
                    self._cut_attention(path, module)
            for path, module in model.named_modules():
                if isinstance(module, Linear) and not module.cuts and self._is_cut(model, path):
                    self._cut_linear(path, module)
            self._cut_vocabulary(model)

    def _is_cut(self, model: nn.Module, path: str) -> bool:
        """Returns whether a matrix is cut: not those whose results are changed in place."""
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, LatentAttention):
            return name == "o_proj"
        return parent != "model.layer_inputs"

    def _gather(self, path: str, width: int, *, copies: bool = False, guards: bool = False) -> Gather:
        """Returns the gather of a layer's result. Layers that differ by their number only share buffers: two for
        each name, in turn."""
        role = " ".join([*(part for part in path.split(".") if not part.isdigit()), str(width)])
        number = self._uses[role] % 2
        self._uses[role] += 1
        group = self.collectives.group
        start, end = share_outputs(group, width)
        return Gather(self.collectives, f"{role} {number}", width, start, end, copies=copies, guards=guards)

    def _cut_linear(self, path: str, linear: Linear) -> None:
        linear.cut_outputs(self._gather(path, linear.out_features, guards=path == "lm_head"))

    def _cut_attention(self, path: str, attention: SelfAttention) -> None:
        spec, whole = attention.attn.spec, None
        share = share_heads(self.collectives.group, spec.num_heads, spec.num_kv_heads)
        if attention.norms_all_heads:
            whole = self._gather(f"{path}.qkv_proj", sum(attention.sizes), copies=True)
        attended = self._gather(f"{path}.attn", spec.num_heads * spec.value_size)
        attended.start, attended.end = share.heads.start * spec.value_size, share.heads.stop * spec.value_size
        attention.cut(share, attended, whole)

    def _cut_vocabulary(self, model: DecoderForCausalLM) -> None:
        table: Embedding = model.model.embed_tokens
        num_ids, dim = table.weight.shape
        logits = self._gather("logits", num_ids, guards=True)
        vectors = self._gather("vectors", dim)
        table.cut(torch.arange(logits.start, logits.end, device="cpu"), vectors, logits)
