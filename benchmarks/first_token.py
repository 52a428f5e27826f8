"""Measures the parts of the time to a first token: one request after the other on an otherwise idle engine.

    python -m benchmarks.first_token [--model tiny] [--prompt-len 128] [--reps 100] [--pause-ms 20]

The engine runs in two processes and in one. Times are milliseconds between the caller's clock and the stamps of the
core: both read the same monotonic clock.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

from benchmarks.models import SHAPES, find_checkpoint
from quire import LLM, SamplingParams
from quire.sampling_params import RequestOutputKind

NUM_TOKENS = 4
STAGES = ("add_request returns", "in the core's queue", "scheduled", "first token made", "first token here")


def measure(llm: LLM, prompt_len: int, reps: int, pause_s: float) -> list[list[float]]:
    """Returns for each request the seconds from its beginning to each of the stages."""
    engine, rng = llm.llm_engine, random.Random(0)
    states = engine.pipeline.output_processor.request_states
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    rows: list[list[float]] = []
    for rep in range(reps):
        prompt = {"prompt_token_ids": [rng.randrange(300, 3000) for _ in range(prompt_len)]}
        time.sleep(pause_s)
        start = time.monotonic()
        engine.add_request(f"request-{rep}", prompt, params)
        added = time.monotonic()
        is_first = True
        while engine.has_unfinished_requests():
            if engine.step() and is_first:
                here, is_first = time.monotonic(), False
                (state,) = states.values()
                stats = state.stats
                assert stats is not None  # they were not switched off
                moments = (added, stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, here)
                rows.append([moment - start for moment in moments])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a checkpoint directory")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--reps", type=int, default=100)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="before each request")
    args = parser.parse_args()
    path = find_checkpoint(args.model)
    print(f"| milliseconds until | {' | '.join(STAGES)} |\n|---|{'--:|' * len(STAGES)}")
    for processes in (2, 1):
        os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = str(processes - 1)
        llm = LLM(
            str(path),
            dtype="bfloat16",
            max_model_len=2 * args.prompt_len + NUM_TOKENS,
            kv_cache_memory_bytes=1 << 28,
            skip_tokenizer_init=True,
            disable_log_stats=False,
        )
        columns = list(zip(*measure(llm, args.prompt_len, args.reps, args.pause_ms / 1e3), strict=True))
        llm.shutdown()
        for name, take in (("median", statistics.median), ("best", min)):
            print(f"| {processes} process(es), {name} | " + " | ".join(f"{1e3 * take(c):.2f}" for c in columns) + " |")


if __name__ == "__main__":
    main()
