"""Measures sampling, from logits to tokens: the native kernel beside torch's. They take turns; the best run counts.

    python benchmarks/sampling.py [--rows 64] [--vocab 151936] [--spread 3]

Times are CPU milliseconds of one thread for all rows, so that neighbours on the machine do not count. `--spread` is the
standard deviation of the (normal) logits: 3 is about a language model's; with 1 almost all tokens are possible.
logprobs: those of the chosen token, its rank, and the 20 most likely.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from ceilings import Clock, best_seconds

from quire.cli.machine import cpu_facts
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native_sampling import NativeSampling
from quire.worker.sample.kernel import DrawRules
from quire.worker.sample.torch_kernel import TorchSampling

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 50, "top_p": 0.9},
}


def make_rules(n: int, temperature: float = 1.0, min_p: float = 0.0, top_k: float = 0, top_p: float = 1.0) -> DrawRules:
    """Returns the same rules for all rows."""
    temperatures, min_ps, top_ps = (np.full(n, value, np.float32) for value in (temperature, min_p, top_p))
    return DrawRules(temperatures, min_ps, np.full(n, int(top_k)), top_ps, np.arange(n, dtype=np.uint64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--instruction-set")
    args = parser.parse_args()
    library = native_library()
    assert library is not None, "the native library is not built: scripts/setup"
    torch.set_num_threads(1)
    Clock.count_processor_time()
    context = Context(library, 1, args.instruction_set or library.instruction_sets()[0])
    native, by_torch = NativeSampling(context), TorchSampling()
    logits = torch.randn(args.rows, args.vocab, generator=torch.Generator().manual_seed(0)) * args.spread
    indices, rows = np.zeros(args.rows, np.int64), np.arange(args.rows)
    print(f"{cpu_facts()['cpu']}, one thread, {context.instruction_set}, {args.rows} x {args.vocab}")
    print(f"{'':<16} | native ms   torch ms   ratio")

    def report(name: str, *runs: Callable[[], object]) -> None:
        mine, torchs = best_seconds(*runs, at_least=0.0, least_reps=args.reps)
        print(f"{name:<16} | {mine * 1e3:>9.2f} {torchs * 1e3:>10.2f} {torchs / mine:>7.1f}", flush=True)

    for name, case in CASES.items():
        rules = None if name == "greedy" else make_rules(args.rows, **case)
        report(
            name,
            partial(native.choose, logits, rules, indices),
            partial(by_torch.choose, logits, rules, indices),
        )
    tokens = native.choose(logits, None, indices)
    report(
        "logprobs",
        lambda: native.logprobs(logits, rows, tokens, 20),
        lambda: by_torch.logprobs(logits, rows, tokens, 20),
    )


if __name__ == "__main__":
    main()
