"""Measures quantization: perplexity of the demo model, speed and memory of a larger one, beside bfloat16.

    python -m benchmarks.quantization [--shape half] [--rounds 3] [--documents 400] [--matrix 2048]

Perplexity is over the text that the demo model was trained to write, in documents its generator makes from a seed that
training did not use. Speed is that of random weights in the shape of a benchmark model (benchmarks/models.py): all
methods take turns in one process, and the best of several rounds counts, as neighbours only ever slow things down.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("QUIRE_ENABLE_MULTIPROCESSING", "0")

import torch
from tokenizers import Tokenizer
from tools.demo_model.corpus import documents
from tools.demo_model.tokenizer import encode_document

from benchmarks.models import SHAPES
from quire import LLM, SamplingParams
from quire.config.model import ASSETS_DIR
from quire.config.quantization import scheme_of
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.layers.weights import weight_bytes
from quire.worker.quantization.weight import quantize

METHODS = (None, "int8", "int4")
HELD_OUT_SEED = 977
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
DECODE_TOKENS = 32
PREFILL_TOKENS = 512

Encoded = tuple[list[int], list[bool]]


def held_out(num_documents: int) -> list[Encoded]:
    """Returns token ids of documents, and for each token whether training learned to write it."""
    tokenizer = Tokenizer.from_file(str(ASSETS_DIR / "demo" / "tokenizer.json"))
    source = itertools.islice(documents(HELD_OUT_SEED), num_documents)
    return [(ids[:2000], learned[:2000]) for ids, learned in (encode_document(tokenizer, d) for d in source)]


def log_probabilities(llm: LLM, texts: list[Encoded]) -> list[float]:
    """Returns the log-probability of each learned token, given those before it."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in texts], params, use_tqdm=False)
    found: list[float] = []
    for (ids, learned), output in zip(texts, outputs, strict=True):
        at = zip(ids[1:], learned[1:], (output.prompt_logprobs or [])[1:], strict=True)
        found += [logprobs[token].logprob for token, is_learned, logprobs in at if is_learned and logprobs]
    return found


def perplexity_table(num_documents: int) -> list[str]:
    """Returns a table with a line per method."""
    texts, lines, reference = held_out(num_documents), [], 0.0
    for method in METHODS:
        with LLM("demo", quantization=method, kv_cache_memory_bytes=64 << 20) as llm:
            found = log_probabilities(llm, texts)
            (memory,) = llm.apply_model(weight_bytes)
        perplexity = math.exp(-sum(found) / len(found))
        reference = reference or perplexity
        cells = (method or "bfloat16", f"{perplexity:.4f}", f"{perplexity / reference - 1:+.2%}")
        lines.append(f"| {' | '.join(cells)} | {memory / 2**20:.1f} MiB |")
    print(f"perplexity of the demo model on {len(found):,} held-out tokens of {len(texts)} documents\n")
    return ["| weights | perplexity | beside bfloat16 | weights in memory |", "|---|--:|--:|--:|", *lines]


def write_config(shape: str, directory: Path) -> Path:
    """Writes a checkpoint directory without weights."""
    config = {"architectures": [ARCHITECTURES[SHAPES[shape]["model_type"]]], "torch_dtype": "bfloat16"}
    tied = {"tie_word_embeddings": True, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config | tied | SHAPES[shape]))
    return directory


def time_decode(llm: LLM, batch: int) -> float:
    """Returns tokens per second of `batch` requests that have short prompts."""
    params = SamplingParams(max_tokens=DECODE_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": [5 + i, 6, 7]} for i in range(batch)], params, use_tqdm=False)
    return batch * DECODE_TOKENS / (time.perf_counter() - start)


def time_prefill(llm: LLM, _: int) -> float:
    """Returns prompt tokens per second of one request."""
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": [7 + i % 999 for i in range(PREFILL_TOKENS)]}], params, use_tqdm=False)
    return PREFILL_TOKENS / (time.perf_counter() - start)


WORKLOADS: dict[str, tuple[Callable[[LLM, int], float], int]] = {
    "1 request": (time_decode, 1),
    "4 requests": (time_decode, 4),
    "16 requests": (time_decode, 16),
    "64 requests": (time_decode, 64),
    "prefill": (time_prefill, 0),
}


def speed_table(shape: str, rounds: int) -> list[str]:
    """Returns a table with a line per method: tokens per second, and the ratio to bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(shape, Path(folder))
        flags: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048}
        flags["enable_prefix_caching"] = False
        engines = [LLM(str(path), quantization=m, kv_cache_memory_bytes=256 << 20, **flags) for m in METHODS]
    memory = [llm.apply_model(weight_bytes)[0] for llm in engines]
    best: dict[tuple[int, str], float] = {}
    for _, (name, (run, batch)), (i, llm) in itertools.product(range(rounds), WORKLOADS.items(), enumerate(engines)):
        best[i, name] = max(best.get((i, name), 0.0), run(llm, batch))
    print(f"\n{shape}: tokens per second, best of {rounds} interleaved rounds (ratio to bfloat16)\n")
    lines = [f"| weights | {' | '.join(WORKLOADS)} | weights in memory |", "|---" + "|--:" * (len(WORKLOADS) + 1) + "|"]
    for i, method in enumerate(METHODS):
        cells = [f"{best[i, name]:.1f} ({best[i, name] / best[0, name]:.2f})" for name in WORKLOADS]
        lines.append(f"| {method or 'bfloat16'} | {' | '.join(cells)} | {memory[i] / 2**20:.0f} MiB |")
    return lines


def matrix_table(size: int) -> list[str]:
    """Returns times of one square matrix, on one thread, in processor time, with copies so that none is in a cache."""
    library = native_library()
    assert library is not None, "there are no native kernels here"
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    weight, copies = (torch.randn(size, size) * 0.02).bfloat16(), max(2, (160 << 20) // (2 * size * size))
    quantized = [None if m is None else quantize(weight, scheme_of(m)) for m in METHODS]
    layers = [
        [kernels.linear(weight, None) if q is None else kernels.quantized_linear(q, None) for _ in range(copies)]
        for q in quantized
    ]
    lines = [f"| rows | {' | '.join(m or 'bfloat16' for m in METHODS)} |", "|--:" * (len(METHODS) + 1) + "|"]
    for rows in (1, 4, 8, 16, 64, 512):
        x, best = torch.randn(rows, size).bfloat16(), [math.inf] * len(METHODS)
        deadline, turn = time.perf_counter() + 1.5, itertools.count()
        while time.perf_counter() < deadline:
            copy = next(turn) % copies
            for i, made in enumerate(layers):
                start = time.thread_time()
                made[copy](x)
                best[i] = min(best[i], time.thread_time() - start)
        cells = [f"{seconds * 1e3:.3f} ms ({best[0] / seconds:.2f})" for seconds in best]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
    print(f"\na matrix of {size} x {size}, one thread, {kernels.context.instruction_set}: processor time (ratio)\n")
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="half")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=400, help="for perplexity; 0 leaves it out")
    parser.add_argument("--matrix", type=int, default=2048, help="size of a single matrix to time; 0 leaves it out")
    args = parser.parse_args()
    if args.documents:
        print("\n".join(perplexity_table(args.documents)))
    if args.rounds:
        print("\n".join(speed_table(args.shape, args.rounds)))
    if args.matrix:
        print("\n".join(matrix_table(args.matrix)))


if __name__ == "__main__":
    main()
