"""Attention in both directions: both backends against the textbook, and each token the same bits in any company."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.worker.attention.backend import AttentionBackend, AttentionSpec, ForwardContext, set_forward_context
from quire.worker.attention.layer import Attention
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.attention.torch_backend import TorchAttentionBackend
from quire.worker.kv_cache import TransientKVCache

from ..conftest import MakeKernels

HEADS = 3
CPU = torch.device("cpu")
LENGTHS = [1, 2, 16, 17, 40, 130, 257, 600]
"""Around blocks of 16 keys, tiles of 48 queries, and chunks of 256 keys."""


def textbook(q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
    """q, k, v: [num_tokens, heads, head_size] of one text."""
    q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    distance = (torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])).abs()
    if reach is not None:
        scores = scores.masked_fill(distance > reach, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


class Scene:
    """Texts of these lengths, and a layer that sees `reach` tokens on either side."""

    def __init__(self, lengths: list[int], head_size: int, reach: int | None, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(head_size)
        window = None if reach is None else reach + 1
        spec = AttentionSpec(HEADS, HEADS, head_size, head_size**-0.5, window, ahead=reach)
        self.layer = Attention(spec, "a", is_encoder=True)
        self.texts = [torch.randn(3, n, HEADS, head_size, generator=generator).to(dtype) for n in lengths]
        self.reach, self.dtype = reach, dtype

    def attend(self, backend: AttentionBackend[Any], texts: list[Tensor]) -> list[Tensor]:
        """One step of these texts, over memory full of NaN."""
        lens = np.array([text.shape[1] for text in texts])
        cache = TransientKVCache(
            [self.layer], backend, CPU, self.dtype, max_num_tokens=int(lens.sum()), max_num_reqs=len(lens)
        )
        memory = cache.memory
        for tensor in memory.caches["a"]:
            tensor.fill_(torch.nan)
        metadata = [backend.make_metadata(cache.place(lens), memory.specs[0])]
        with set_forward_context(ForwardContext(backend, metadata, memory.layer_groups, memory.caches)):
            q, k, v = (x.flatten(1) for x in torch.cat(texts, dim=1))
            out: Tensor = self.layer(q, k, v)
        return [x.view(-1, HEADS, text.shape[-1]) for x, text in zip(out.split(lens.tolist()), texts, strict=True)]

    def check(self, found: list[Tensor], texts: list[Tensor]) -> None:
        tolerance = 0.02 if self.dtype is torch.bfloat16 else 2e-5
        for x, text in zip(found, texts, strict=True):
            expected = textbook(*text, self.reach)
            torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reach", [None, 0, 5, 64, 300])
def test_torch_follows_the_textbook(reach: int | None) -> None:
    scene = Scene(LENGTHS, 8, reach, torch.float32)
    scene.check(scene.attend(TorchAttentionBackend(), scene.texts), scene.texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [None, 5, 64, 300])
@pytest.mark.parametrize("head_size", [12, 32])
def test_native_follows_it_and_company_changes_no_bit(
    make_kernels: MakeKernels, head_size: int, reach: int | None, dtype: torch.dtype
) -> None:
    scene = Scene(LENGTHS, head_size, reach, dtype)
    alone = [scene.attend(NativeAttentionBackend(make_kernels(1)), [text])[0] for text in scene.texts]
    scene.check(alone, scene.texts)
    for num_threads in (1, 3):
        order = random.Random(num_threads).sample(range(len(LENGTHS)), len(LENGTHS))
        together = scene.attend(NativeAttentionBackend(make_kernels(num_threads)), [scene.texts[i] for i in order])
        assert all(torch.equal(x, alone[i]) for x, i in zip(together, order, strict=True))
