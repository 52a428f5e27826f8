"""The conversation of all drivers, in lines of JSON. Standard library only, for any interpreter.

A driver is a program that a peer's own interpreter runs. It loads a checkpoint and then runs workloads as they arrive:

    driver: {"version": "vLLM 0.32.0", "load_s": 1.2}                         once, when it can take requests
    versus: {"requests": [[[token ids], output length], ...], "prefix": 512}  one line per repetition
    driver: {"wall_s": 2.1, "ttft_s": ..., "tpot_s": ...}                     the last two for a single request
    driver: {"error": "..."}                                                  instead, after a failure

It ends at the end of its input. Output of the engine goes to standard error. `prefix` is the number of tokens that all
prompts share at the start, for engines that need it; other keys of a line are further arguments of the driver's
function. Clocks start with the requests in hand and stop at the last token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Request = tuple[list[int], int]
"""A request: prompt token ids, and the number of tokens to generate."""


@dataclass
class Result:
    """Seconds: of all requests, to the first token, and between tokens after it (the last two of single requests)."""

    wall_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass
class Setting:
    """The settings that all engines share."""

    model: str
    threads: int
    kv_cache_gib: float
    max_model_len: int = 2048
    max_num_seqs: int = 256
    dtype: str = "bfloat16"


Run = Callable[..., Result]
"""Called with requests, `prefix`, and what else the line has."""


def timed(start: float, stamps: list[float], num_tokens: int) -> Result:
    """Returns the result of one request whose tokens arrived at `stamps`, the first of them one token."""
    return Result(stamps[-1] - start, stamps[0] - start, (stamps[-1] - stamps[0]) / max(1, num_tokens - 1))


def check_lengths(got: list[int], requests: list[Request]) -> None:
    """Raises RuntimeError unless every output has its full length."""
    want = [length for _, length in requests]
    if got != want:
        bad = next(i for i, (g, w) in enumerate(zip(got, want, strict=True)) if g != w)
        raise RuntimeError(f"request {bad} has {got[bad]} tokens, not {want[bad]}")


def main(load: Callable[[Setting], tuple[str, Run]]) -> int:
    """Serves until the end of input.

    `load(setting)` returns the engine's name with its version, and a function that runs requests.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-cache-gib", type=float, default=2.0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    setting = Setting(**vars(parser.parse_args()))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is not an answer
    start = time.perf_counter()

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        version, run = load(setting)
    except Exception as e:
        answer({"error": _in_one_line(e)})
        raise
    answer({"version": version, "load_s": time.perf_counter() - start})
    for line in sys.stdin:
        task = json.loads(line)
        requests: list[Request] = [(ids, length) for ids, length in task.pop("requests")]
        try:
            answer(asdict(run(requests, **task)))
        except Exception as e:
            answer({"error": _in_one_line(e)})
    return 0


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
