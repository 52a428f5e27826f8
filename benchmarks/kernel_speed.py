"""Measures the native kernels beside the machine's ceilings and torch's own, with one thread count in one process.

    python benchmarks/kernel_speed.py [--shapes half] [--threads N] [--dtype bfloat16]
    python benchmarks/kernel_speed.py --only quantized,forms,rows --experts gpt_oss --experts-in plain,mxfp4
    python benchmarks/kernel_speed.py --only lora [--lora-rank 16] [--shapes oneb]

For linear layers it prints GB/s of weights at few rows, GFLOP/s at many, and the ratio to the ceilings measured in the
same run: memory read once, products in registers. Times are the best of several interleaved runs, as neighbours only
ever slow them down.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ceilings import MEMORY_BYTES, Clock, best_seconds, ceilings
from models import SHAPES
from torch.nn import functional

from quire.cli.machine import cpu_facts
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, LatentSpec
from quire.worker.attention.backend import AttentionBatch, AttentionSpec, ScaleGrowth
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.attention.torch_backend import TorchAttentionBackend
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.lora import LowRank, LowRankShape
from quire.worker.kernels.native import Matrix, NativeKernels, NativeLinear
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import (
    CLAMPED_SWIGLU,
    PLAIN,
    ExpertsSpec,
    LatentSizes,
    LinearSpec,
    NormSpec,
    RotaryAngles,
    RouterSpec,
)
from quire.worker.quantization.weight import Coding, QuantizedWeight, quantize_int4, quantize_int8

LINEAR_SHAPES = SHAPES | {
    "qwen3_0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
"""Models whose linear layers can be timed."""


def linear_shapes(model: str) -> dict[str, tuple[int, int, bool]]:
    """Returns (outputs, inputs, gated) of the linear layers of a benchmark model."""
    shape = LINEAR_SHAPES[model]
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

    by_torch = [functools.partial(functional.linear, weight=weight) for weight in weights]
    seconds = best_seconds(each(native, x), each(by_torch, x))
    return tuple(s / copies for s in seconds)


def make_quantized(form: str, n: int, k: int) -> QuantizedWeight:
    """Returns a matrix of random weights: a key of `FORMS`."""
    if form == "int8":
        return quantize_int8(torch.randn(n, k))
    if form == "int4":
        return quantize_int4(torch.randn(n, k), 128)
    if form == "fp8":
        codes = torch.randn(n, k).to(torch.float8_e4m3fn).view(torch.int8)
        scales = torch.ones(n, -(-k // 128))
        return QuantizedWeight(bits=8, values=codes, scales=scales, group_size=128, coding=Coding.E4M3)
    codes = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    scales = torch.full((n, k // 32), 120, dtype=torch.uint8)
    return QuantizedWeight(bits=4, values=codes, scales=scales, group_size=32, coding=Coding.MXFP4)


FORMS = ("int8", "int4", "fp8", "mxfp4")
"""int8 activations and weights; weights of 4 bits in groups of 128; e4m3 in blocks of 128; MXFP4."""


def print_quantized(kernels: NativeKernels, model: str, rows: list[int], dtype: torch.dtype) -> None:
    """Prints the table of one linear layer, `down`, in each form, beside its plain weights."""
    n, k, _ = linear_shapes(model)["down"]
    plain = kernels.linear(torch.randn(n, k).to(dtype), None, PLAIN)
    print("\nquantized, down    rows |  native us   GB/s GFLOP/s |   plain us   ratio")
    for form in FORMS:
        weight = make_quantized(form, n, k)
        copies = [kernels.quantized_linear(weight, None) for _ in range(max(1, MEMORY_BYTES // weight.num_bytes))]
        plains = [plain] if len(copies) == 1 else [kernels.linear(torch.randn(n, k).to(dtype), None) for _ in copies]
        for count in rows:
            x = torch.randn(count, k).to(dtype)
            native, beside = (s / len(copies) for s in best_seconds(each(copies, x), each(plains, x)))
            print(
                f"{form:<17} {count:>5} | {native * 1e6:>10.1f} {weight.num_bytes / native / 1e9:>6.1f}"
                f" {2 * n * k * count / native / 1e9:>7.0f} | {beside * 1e6:>10.1f} {beside / native:>7.2f}",
                flush=True,
            )


def each(kernels: Sequence[Callable[[torch.Tensor], object]], x: torch.Tensor) -> Callable[[], None]:
    """Returns a function that calls every kernel."""

    def run() -> None:
        for kernel in kernels:
            kernel(x)

    return run


def row_kernels(kernels: Kernels, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns calls of what treats each of 64 rows by itself, in sizes of 8B models and DeepSeek V3's."""
    n, hidden, heads, head = 64, 4096, 32, 128
    x, weight, positions = torch.randn(n, hidden).to(dtype), torch.ones(hidden).to(dtype), torch.arange(n)
    angles = RotaryAngles(*(torch.randn(n, head // 2).to(dtype) for _ in range(2)), positions)
    one, logits = torch.ones(head).to(dtype), torch.randn(n, 256)
    sizes = LatentSizes(query_rank=None, rank=512, plain=128, rotary=64, value=128)
    latent, up = torch.randn(n, 576).to(dtype), torch.randn(n, 16, 128).to(dtype)
    sigmoid = RouterSpec(num_experts_per_token=8, normalize=True, score="sigmoid", num_groups=8, num_kept_groups=4)
    norm, softmax = NormSpec(eps=1e-6), RouterSpec(num_experts_per_token=8, normalize=True)
    queries = torch.randn(n, 16 * 192).to(dtype)
    made = {
        "rms norm": (kernels.rms_norm(weight, norm), (x, x)),
        "layer norm": (kernels.layer_norm(hidden, weight, weight, norm), (x, x)),
        "layer norm of heads": (kernels.layer_norm(head, one, None, norm, heads), (x,)),
        "rotation": (kernels.rotation(head), (x, x[:, : 8 * head], angles)),
        "norms, rotation": (kernels.rotation(head, one, one, norm), (x, x[:, : 8 * head], angles)),
        "latent norm, rotation": (
            kernels.latent(sizes, torch.ones(512).to(dtype), norm),
            (queries, latent, RotaryAngles(angles.cos[:, :32], angles.sin[:, :32].contiguous(), positions)),
        ),
        "linear of heads": (kernels.batched_linear(torch.randn(16, 512, 128).to(dtype)), (up,)),
        "silu": (kernels.activation("silu", gated=True), (x,)),
        "gate of heads": (kernels.activation("softplus"), (x[:, :heads], x)),
        "position's row": (kernels.embedding(torch.randn(n, hidden).to(dtype), None).lookup, (positions, x)),
        "router": (kernels.router(softmax, dtype), (logits,)),
        "router, groups, bias": (kernels.router(sigmoid, dtype, torch.zeros(256)), (logits,)),
    }
    return {name: functools.partial(kernel, *args) for name, (kernel, args) in made.items()}


def print_rows(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Prints the table of `row_kernels`."""
    print("\nof 64 rows             |  native us |   torch us   ratio")
    by_torch = row_kernels(TORCH_KERNELS, dtype)
    for name, call in row_kernels(kernels, dtype).items():
        native, beside = best_seconds(call, by_torch[name])
        print(f"{name:<22} | {native * 1e6:>10.1f} | {beside * 1e6:>10.1f} {beside / native:>7.2f}", flush=True)


ATTENTION_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 128, sinks": {"sliding_window": 128, "sinks": True},
    "soft cap": {"logits_soft_cap": 50.0},
    "chunks of 1024": {"chunk": 1024},
    "slopes": {"slopes": True},
    "growing scale": {"scale_growth": ScaleGrowth(0.1, 512)},
    "latent": {"latent_size": 512},
}
"""Forms of attention, by what differs in AttentionSpec or the call."""


def print_forms(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Prints the table of forms of attention: 32 heads of 128 on 8 of keys, or of 576 on one with values of 512."""
    print("\nattention of 4096 keys           |  native us |   torch us   ratio")
    for name, form in ATTENTION_FORMS.items():
        for reqs, new in ((16, 1), (1, 256)):
            heads, kv_heads, head = (32, 1, 576) if "latent_size" in form else (32, 8, 128)
            native, by_torch = time_form(kernels, (heads, kv_heads, head), reqs, new, 4096, dtype, form)
            what = f"{name}, {reqs} x {new} new"
            print(f"{what:<32} | {native * 1e6:>10.1f} | {by_torch * 1e6:>10.1f} {by_torch / native:>7.2f}", flush=True)


def time_attention(
    kernels: NativeKernels, model: str, reqs: int, new: int, length: int, dtype: torch.dtype
) -> tuple[float, ...]:
    """Returns the best seconds of one layer's attention: `reqs` requests of `length` tokens, `new` of them new."""
    shape = LINEAR_SHAPES[model]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape.get("head_dim", shape["hidden_size"] // heads)
    return time_form(kernels, (heads, kv_heads, head), reqs, new, length, dtype, {})


def time_form(
    kernels: NativeKernels,
    sizes: tuple[int, int, int],
    reqs: int,
    new: int,
    length: int,
    dtype: torch.dtype,
    form: Mapping[str, Any],
) -> tuple[float, ...]:
    """Returns what `time_attention` does, for a form of ATTENTION_FORMS. `sizes`: heads, those of keys, their size."""
    (heads, kv_heads, head), size = sizes, 16
    kind = LatentSpec if "latent_size" in form else FullAttentionSpec
    spec: AnyKVCacheSpec = kind(size, kv_heads, head, str(dtype).removeprefix("torch."))
    given = {name: torch.linspace(0.1, 1.0, heads) for name in ("sinks", "slopes") if name in form}
    others = {name: value for name, value in form.items() if name not in given}
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
        attention = AttentionSpec(heads, kv_heads, head, head**-0.5, **others)
        runs.append(functools.partial(backend.forward, q, k, v, cache, metadata, attention, **given))
    return tuple(best_seconds(*runs))


def print_attention(kernels: NativeKernels, model: str, dtype: torch.dtype, bandwidth: float, rate: float) -> None:
    """Prints the table of attention: bytes of cache read once, and operations of the causal half."""
    shape = LINEAR_SHAPES[model]
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
EXPERTS = {"mixtral": (8, 2, 1024, 3584), "qwen3_moe": (128, 8, 2048, 768), "gpt_oss": (32, 4, 1440, 1440)}
"""(experts, experts per token, hidden, expert size): Mixtral's at a quarter of its width, Qwen3-30B-A3B's as it is,
gpt-oss-20b's at half its width."""


def time_experts(
    kernels: NativeKernels, name: str, form: str, tokens: int, dtype: torch.dtype
) -> tuple[float, float, int]:
    """Returns the best seconds of one layer's experts, natively and in torch, and the number of experts used. `form`
    is one of FORMS, or anything else for plain weights."""
    num_experts, k, hidden, size = EXPERTS[name]
    spec = ExpertsSpec(activation=CLAMPED_SWIGLU if name == "gpt_oss" else "silu")
    x = torch.randn(tokens, hidden, dtype=dtype)
    ids = torch.rand(tokens, num_experts).topk(k).indices
    weights = torch.full((tokens, k), 1 / k)
    if form in FORMS:
        blocks = [[make_quantized(form, *sizes)] * num_experts for sizes in ((2 * size, hidden), (hidden, size))]
        native, by_torch = (made.quantized_experts(*blocks, spec) for made in (kernels, TORCH_KERNELS))
    else:
        plain = [torch.randn(num_experts, *sizes, dtype=dtype) for sizes in ((2 * size, hidden), (hidden, size))]
        native, by_torch = (made.experts(*plain, spec) for made in (kernels, TORCH_KERNELS))
    seconds = best_seconds(lambda: native(x, ids, weights), lambda: by_torch(x, ids, weights))
    return seconds[0], seconds[1], len(ids.unique())


def print_experts(kernels: NativeKernels, names: list[str], forms: list[str], dtype: torch.dtype) -> None:
    """Prints the table of mixtures of experts. Each run uses the same experts, so small ones may lie in a cache."""
    print("\nexperts, one layer  tokens  asked |  native us   GB/s GFLOP/s |   torch us   ratio")
    for name, form in itertools.product(names, forms):
        _, k, hidden, size = EXPERTS[name]
        for tokens in (1, 16, 256):
            native, by_torch, asked = time_experts(kernels, name, form, tokens, dtype)
            elements, bits = 3 * hidden * size, {"int4": 4.25, "mxfp4": 4.25, "int8": 8, "fp8": 8.25}
            read = asked * elements * bits.get(form, 8 * dtype.itemsize) / 8
            gbs, flops = read / native, 2 * elements * tokens * k / native
            print(
                f"{name + ' ' + form:<20}{tokens:>6} {asked:>6} | {native * 1e6:>10.1f} {gbs / 1e9:>6.1f}"
                f" {flops / 1e9:>7.0f} | {by_torch * 1e6:>10.1f} {by_torch / native:>7.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="half", choices=sorted(LINEAR_SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--instruction-set")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with --threads 1")
    parser.add_argument("--experts", default="", help="mixtures of experts to time: " + ",".join(EXPERTS))
    parser.add_argument("--experts-in", default="plain", help="their weights: plain," + ",".join(FORMS))
    parser.add_argument("--only", default="linear,attention", help="also quantized, lora, forms of attention, rows")
    parser.add_argument("--lora-rank", type=int, default=16)
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
    tables, rows = args.only.split(","), list(map(int, args.rows.split(",")))
    if "linear" in tables:
        print_linear(kernels, args.shapes, rows, dtype, bandwidth, rate)
    if "quantized" in tables:
        print_quantized(kernels, args.shapes, rows, dtype)
    if "lora" in tables:
        print_lora(kernels, args.shapes, args.lora_rank, dtype)
    if "attention" in tables:
        print_attention(kernels, args.shapes, dtype, bandwidth, rate)
    if "forms" in tables:
        print_forms(kernels, dtype)
    if "rows" in tables:
        print_rows(kernels, dtype)
    if args.experts:
        print_experts(kernels, args.experts.split(","), args.experts_in.split(","), dtype)


LORA_CASES = ((1, 0), (1, 1), (64, 0), (64, 1), (64, 8), (64, 64), (512, 0), (512, 1))
"""(rows, different adapters among them)"""


def print_lora(kernels: NativeKernels, model: str, rank: int, dtype: torch.dtype) -> None:
    """Prints the table of adapters of one rank at all linear layers but the logits, beside the same layers without
    sites. There are as many layers as no cache holds, and each has its own adapters."""
    shapes = [sizes for name, sizes in linear_shapes(model).items() if name != "logits"]
    names = [name for name in linear_shapes(model) if name != "logits"]
    elements = sum(n * k * (2 if gated else 1) for n, k, gated in shapes)
    copies = max(1, MEMORY_BYTES // (elements * dtype.itemsize))
    batch, plain, adapted = kernels.adapter_batch(), [], []
    for name, (n, k, gated) in [*zip(names, shapes, strict=True)] * copies:
        parts = {"qkv": [n - 2 * (n // 4), n // 4, n // 4], "gate_up": [n, n]}.get(name, [n])
        spec = LinearSpec(activation="silu" if gated else None, gated=gated)
        matrix = Matrix(kernels.context, (torch.randn(sum(parts), k) * k**-0.5).to(dtype), is_gated=gated)
        plain.append((NativeLinear(matrix, None, spec), k))
        adapted.append((NativeLinear(matrix, None, spec), k))
        shape = LowRankShape(k, (*parts,), gated, dtype)
        site = adapted[-1][0].site = kernels.adapter_site(batch, shape)
        factors: list[LowRank | None] = [
            LowRank(torch.randn(rank, k) * k**-0.5, torch.randn(m, rank) * rank**-0.5, 0.5) for m in parts
        ]
        for slot in range(64):
            site.install(slot, kernels.pack_low_rank(factors, shape))
    print(f"\nadapters of rank {rank}, {model}: rows adapters | plain us a layer | with adapters | more")
    for rows, count in LORA_CASES:
        inputs = {k: torch.randn(rows, k).to(dtype) for _, k in plain}
        batch.set([rows * i // max(count, 1) for i in range(count + 1)], range(count))
        runs = [functools.partial(run_all, made, inputs) for made in (plain, adapted)]
        without, beside = (s / copies for s in best_seconds(*runs, at_least=1.0))
        print(
            f"{rows:>{32 + len(model)}} {count:>8} | {without * 1e6:>16.1f} | {beside * 1e6:>13.1f} |"
            f" {beside / without - 1:>6.1%}",
            flush=True,
        )


def run_all(kernels: Sequence[tuple[NativeLinear, int]], inputs: Mapping[int, torch.Tensor]) -> None:
    """Calls every kernel with the inputs of its size."""
    for kernel, k in kernels:
        kernel(inputs[k])


def print_linear(
    kernels: NativeKernels, model: str, counts: list[int], dtype: torch.dtype, bandwidth: float, rate: float
) -> None:
    """Prints the table of linear layers on plain weights."""
    print("linear      rows |  native us   GB/s GFLOP/s   of ceiling |   torch us   ratio")
    for name, (n, k, gated) in linear_shapes(model).items():
        for rows in counts:
            native, by_torch = time_linear(kernels, n, k, gated, rows, dtype)
            elements = n * (2 if gated else 1) * k
            gbs, flops = elements * dtype.itemsize / native, 2 * elements * rows / native
            share = max(gbs / bandwidth, flops / rate)
            print(
                f"{name:<10} {rows:>5} | {native * 1e6:>10.1f} {gbs / 1e9:>6.1f} {flops / 1e9:>7.0f} {share:>12.0%} |"
                f" {by_torch * 1e6:>10.1f} {by_torch / native:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
