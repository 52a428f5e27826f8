"""Measures one layer's attention in a decode step of the torch backend, and other ways to compute it.

    python benchmarks/attention_decode.py [--dtype float32]

A step has `requests` decoding requests of `length` tokens each, in a paged cache. `backend` is Quire's way and includes
writing the new keys and values; `fused` reads whole slots and calls torch's fused kernel; `products` reads head by head
and multiplies matrices, as the backend does in bfloat16, but with scores rounded to bfloat16: the difference is the
price of exact scores. Figures are medians of interleaved runs; errors are against float64. Times are CPU times of one
thread, so that a busy machine matters less; several threads divide requests and heads among them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.wire.kv_cache import FullAttentionSpec
from quire.worker.attention.backend import AttentionBatch, AttentionSpec, KVCache
from quire.worker.attention.torch_backend import TorchAttentionBackend

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A model's attention and a step."""

    name: str
    requests: int
    length: int
    kv_heads: int
    group: int
    head_size: int


SHAPES = (
    Shape("tiny", 64, 545, 4, 2, 32),
    Shape("half", 16, 545, 2, 7, 64),
    Shape("oneb", 16, 545, 8, 4, 64),
    Shape("OPT-125m", 16, 545, 12, 1, 64),
    Shape("OPT-125m", 1, 545, 12, 1, 64),
    Shape("Llama-2-7B", 1, 2000, 32, 1, 128),
)


def make_forms(shape: Shape, dtype: torch.dtype) -> tuple[dict[str, Callable[[], Tensor]], Tensor]:
    """Returns the ways to compute one step's output, and the output in float64."""
    n, heads, group, size = shape.requests, shape.kv_heads, shape.group, shape.head_size
    blocks_each = -(-shape.length // BLOCK_SIZE)
    num_blocks = n * blocks_each + 1
    cache = KVCache(*torch.randn(2, num_blocks, BLOCK_SIZE, heads, size).to(dtype))
    table = torch.randperm(num_blocks - 1)[: n * blocks_each].view(n, blocks_each) + 1
    positions = torch.arange(shape.length)
    slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE  # [n, length]
    by_head = (slots[:, None] * heads + torch.arange(heads)[:, None]).flatten()  # [n * heads * length]
    query = torch.randn(n, heads * group, size).to(dtype)
    spec = AttentionSpec(heads * group, heads, size, size**-0.5)
    backend, ones = TorchAttentionBackend(), np.ones(n, np.int64)
    batch = AttentionBatch(ones, ones * shape.length, table.int(), slots[:, -1].contiguous())
    metadata = backend.make_metadata(batch, FullAttentionSpec(BLOCK_SIZE, heads, size, str(dtype).split(".")[1]))
    new = [part.view(-1, heads, size)[slots[:, -1]] for part in cache]

    def use_backend() -> Tensor:
        return backend.forward(query, *new, cache, metadata, spec)

    def fused(dtype: torch.dtype = dtype) -> Tensor:
        k, v = (x.view(-1, heads * size).index_select(0, slots.flatten()) for x in cache)
        k, v = (x.view(n, -1, heads, size).transpose(1, 2) for x in (k, v))
        q = query.view(n, heads, group, size)
        return scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), scale=spec.scale).view(query.shape)

    def products() -> Tensor:
        k, v = (x.view(-1, size).index_select(0, by_head).view(n * heads, -1, size) for x in cache)
        scores = torch.bmm(query.view(n * heads, group, size), k.transpose(1, 2)).float() * spec.scale
        return torch.bmm(scores.softmax(-1).to(dtype), v).view(query.shape)

    return {"backend": use_backend, "fused": fused, "products": products}, fused(torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--reps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{args.dtype}, torch {torch.__version__}; CPU milliseconds (largest error)")
    for shape in SHAPES:
        forms, exact = make_forms(shape, getattr(torch, args.dtype))
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        with torch.inference_mode():
            for _ in range(args.reps + 3):
                for name, form in forms.items():
                    start = time.thread_time()
                    form()
                    seconds[name].append(time.thread_time() - start)
            errors = {name: (form() - exact).abs().max().item() for name, form in forms.items()}
        figures = [f"{name} {statistics.median(s[3:]) * 1e3:.2f} ({errors[name]:.0e})" for name, s in seconds.items()]
        heads = f"{shape.kv_heads} x {shape.group} heads of {shape.head_size}"
        print(f"{shape.name}, {shape.requests} x {shape.length} tokens, {heads}: {', '.join(figures)}")


if __name__ == "__main__":
    main()
