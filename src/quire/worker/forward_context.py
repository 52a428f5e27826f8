"""What a forward pass needs beside its arguments: the attention metadata and KV caches of the current step.

Attention layers sit deep in a model; passing these through every module would put them in each signature. They are
set around the forward pass and read by the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.worker.attention.backend import AttentionBackend, KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step. `metadata` has an entry per KV cache group; `layer_groups` says which group a layer belongs to."""

    backend: AttentionBackend[Any]
    metadata: Sequence[Any]
    layer_groups: Mapping[str, int]
    kv_caches: Mapping[str, KVCache]
    segments: Tensor | None = None
    """[num_tokens] int64, 1 for tokens of the second text of a pair; None if there is no such pair."""


_current: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current inside the block (and only in this thread)."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass. LookupError outside of one: a layer was called by hand."""
    return _current.get()
