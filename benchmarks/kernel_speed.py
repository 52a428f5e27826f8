"""Measures the native kernels beside the machine's ceilings and torch's own, with one thread count in one process.

    python benchmarks/kernel_speed.py [--shapes half] [--threads N] [--dtype bfloat16]

For linear layers it prints GB/s of weights at few rows, GFLOP/s at many, and the ratio to the ceilings measured in the
same run: memory read once, products in registers. Times are the best of several interleaved runs, as neighbours only
ever slow them down.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from ceilings import MEMORY_BYTES, Clock, best_seconds, ceilings
from models import SHAPES
from torch.nn import functional

from quire.cli.machine import cpu_facts
from quire.wire.kv_cache import FullAttentionSpec
from quire.worker.attention.backend import AttentionBatch, AttentionSpec
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.attention.torch_backend import TorchAttentionBackend
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import ExpertsSpec, LinearSpec


def linear_shapes(model: str) -> dict[str, tuple[int, int, bool]]:
    """Returns (outputs, inputs, gated) of the linear layers of a benchmark model."""
    shape = SHAPES[model]
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    head = shape.get("head_dim", hidden // heads)
    return {
        "qkv": ((heads + 2 * shape["num_key_value_heads"]) * head, hidden, False),
        "o": (hidden, heads * head, False),
        "gate_up": (inner, hidden, True),
        "down": (hidden, inner, False),
        "logits": (shape["vocab_size"], hidden, False),
    }


def time_linear(
    kernels: NativeKernels, n: int, k: int, gated: bool, rows: int, dtype: torch.dtype
) -> tuple[float, ...]:
    """Returns the best seconds of the native kernel and of torch's, on weights that are in no cache."""
    total = n * (2 if gated else 1)
    copies = max(1, MEMORY_BYTES // (total * k * dtype.itemsize))
    weights = [torch.randn(total, k).to(dtype) for _ in range(copies)]
    spec = LinearSpec(activation="silu" if gated else None, gated=gated)
    native = [kernels.linear(w, None, spec) for w in weights]
    x = torch.randn(rows, k).to(dtype)

    def each(calls: list[Callable[[], object]]) -> Callable[[], None]:
        def run() -> None:
            for call in calls:
                call()

        return run

    seconds = best_seconds(
        each([lambda kernel=kernel: kernel(x) for kernel in native]),
        each([lambda weight=weight: functional.linear(x, weight) for weight in weights]),
    )
    return tuple(s / copies for s in seconds)


def time_attention(
    kernels: NativeKernels, model: str, reqs: int, new: int, length: int, dtype: torch.dtype
) -> tuple[float, ...]:
    """Returns the best seconds of one layer's attention: `reqs` requests of `length` tokens, `new` of them new."""
    shape, size = SHAPES[model], 16
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape.get("head_dim", shape["hidden_size"] // heads)
    spec = FullAttentionSpec(size, kv_heads, head, str(dtype).removeprefix("torch."))
    blocks = -(-length // size)
    table = torch.arange(1, reqs * blocks + 1, dtype=torch.int32).view(reqs, blocks)
    positions = torch.arange(length - new, length)
    slots = (table[:, positions // size] * size + positions % size).flatten().long()
    batch = AttentionBatch(np.full(reqs, new), np.full(reqs, length), table, slots)
    q = torch.randn(reqs * new, heads, head).to(dtype)
    k, v = (torch.randn(reqs * new, kv_heads, head).to(dtype) for _ in range(2))
    runs = []
    for backend in (NativeAttentionBackend(kernels), TorchAttentionBackend()):
        storage = torch.zeros((reqs * blocks + 1) * spec.page_size_bytes, dtype=torch.uint8)
        cache, metadata = backend.view_kv_cache(storage, spec, reqs * blocks + 1), backend.make_metadata(batch, spec)
        attention = AttentionSpec(heads, kv_heads, head, head**-0.5)
        runs.append(lambda b=backend, c=cache, m=metadata, a=attention: b.forward(q, k, v, c, m, a))
    return tuple(best_seconds(*runs))


def print_attention(kernels: NativeKernels, model: str, dtype: torch.dtype, bandwidth: float, rate: float) -> None:
    """Prints the table of attention: bytes of cache read once, and operations of the causal half."""
    shape = SHAPES[model]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape.get("head_dim", shape["hidden_size"] // heads)
    print("\nattention, one layer      |  native us   GB/s GFLOP/s   of ceiling |    torch us   ratio")
    for reqs, new, length in ATTENTION:
        native, by_torch = time_attention(kernels, model, reqs, new, length, dtype)
        what = f"{reqs} x {new} new of {length}"
        gbs = reqs * length * 2 * kv_heads * head * dtype.itemsize / native
        flops = reqs * new * (length - (new - 1) / 2) * 4 * heads * head / native
        share = max(gbs / bandwidth, flops / rate)
        print(
            f"{what:<25} | {native * 1e6:>10.1f} {gbs / 1e9:>6.1f} {flops / 1e9:>7.0f} {share:>12.0%} |"
            f" {by_torch * 1e6:>11.1f} {by_torch / native:>7.2f}",
            flush=True,
        )


ATTENTION = (
    (1, 1, 256), (64, 1, 256), (1, 1, 4096), (1, 1, 32768), (16, 1, 4096),
    (1, 512, 512), (8, 64, 1024), (1, 512, 4096), (1, 512, 16384),
)  # fmt: skip
"""(requests, new tokens of each, their length with those)"""
EXPERTS = {"mixtral": (8, 2, 1024, 3584), "qwen3_moe": (128, 8, 2048, 768)}
"""(experts, experts per token, hidden, expert size): Mixtral's at a quarter of its width, Qwen3-30B-A3B's as it is."""


def time_experts(kernels: NativeKernels, name: str, tokens: int, dtype: torch.dtype) -> tuple[float, float, int]:
    """Returns the best seconds of one layer's experts, natively and in torch, and the number of experts used."""
    num_experts, k, hidden, size = EXPERTS[name]
    gate_up = torch.randn(num_experts, 2 * size, hidden, dtype=dtype)
    down = torch.randn(num_experts, hidden, size, dtype=dtype)
    x = torch.randn(tokens, hidden, dtype=dtype)
    ids = torch.rand(tokens, num_experts).topk(k).indices
    weights = torch.full((tokens, k), 1 / k)
    native, by_torch = (
        kernels.experts(gate_up, down, ExpertsSpec()),
        TORCH_KERNELS.experts(gate_up, down, ExpertsSpec()),
    )
    seconds = best_seconds(lambda: native(x, ids, weights), lambda: by_torch(x, ids, weights))
    return seconds[0], seconds[1], len(ids.unique())


def print_experts(kernels: NativeKernels, names: list[str], dtype: torch.dtype) -> None:
    """Prints the table of mixtures of experts. Each run uses the same experts, so small ones may lie in a cache."""
    print("\nexperts, one layer  tokens  asked |  native us   GB/s GFLOP/s |   torch us   ratio")
    for name in names:
        _, k, hidden, size = EXPERTS[name]
        for tokens in (1, 16, 256):
            native, by_torch, asked = time_experts(kernels, name, tokens, dtype)
            elements = 3 * hidden * size
            gbs, flops = asked * elements * dtype.itemsize / native, 2 * elements * tokens * k / native
            print(
                f"{name:<20}{tokens:>6} {asked:>6} | {native * 1e6:>10.1f} {gbs / 1e9:>6.1f} {flops / 1e9:>7.0f} |"
                f" {by_torch * 1e6:>10.1f} {by_torch / native:>7.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="half", choices=sorted(SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--instruction-set")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with --threads 1")
    parser.add_argument("--experts", default="", help="mixtures of experts to time: " + ",".join(EXPERTS))
    args = parser.parse_args()
    if args.cpu_time:
        Clock.count_processor_time()
    library = native_library()
    assert library is not None, "the native library is not built: scripts/setup"
    torch.set_num_threads(args.threads)
    context = Context(library, args.threads, args.instruction_set or library.instruction_sets()[0])
    kernels, dtype = NativeKernels(context), getattr(torch, args.dtype)
    bandwidth, rate = ceilings(context)
    print(f"{cpu_facts()['cpu']}, {args.threads} threads, {context.instruction_set}, {args.dtype}")
    print(f"ceilings: {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.0f} GFLOP/s bfloat16 in registers\n")
    print("linear      rows |  native us   GB/s GFLOP/s   of ceiling |   torch us   ratio")
    for name, (n, k, gated) in linear_shapes(args.shapes).items():
        for rows in map(int, args.rows.split(",")):
            native, by_torch = time_linear(kernels, n, k, gated, rows, dtype)
            elements = n * (2 if gated else 1) * k
            gbs, flops = elements * dtype.itemsize / native, 2 * elements * rows / native
            share = max(gbs / bandwidth, flops / rate)
            print(
                f"{name:<10} {rows:>5} | {native * 1e6:>10.1f} {gbs / 1e9:>6.1f} {flops / 1e9:>7.0f} {share:>12.0%} |"
                f" {by_torch * 1e6:>10.1f} {by_torch / native:>7.2f}",
                flush=True,
            )
    print_attention(kernels, args.shapes, dtype, bandwidth, rate)
    if args.experts:
        print_experts(kernels, args.experts.split(","), dtype)


if __name__ == "__main__":
    main()
