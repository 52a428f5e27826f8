"""transformers: `generate` on left-padded batches of 16, sorted by output length, which is the kindest order for it."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from driver import Request, Result, Run, Setting, check_lengths, main, timed

BATCH_SIZE = 16


class _Stopwatch:
    """A streamer that stores only when tokens arrived. Its first call brings the prompt."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: Any) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(setting: Setting) -> tuple[str, Run]:
    """Loads the model."""
    torch.set_num_threads(setting.threads)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, setting.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype).eval()

    def run(requests: list[Request], prefix: int) -> Result:
        stopwatch = _Stopwatch() if len(requests) == 1 else None
        start = time.perf_counter()
        ordered = sorted(requests, key=lambda r: (r[1], len(r[0])))
        for i in range(0, len(ordered), BATCH_SIZE):
            _generate(model, ordered[i : i + BATCH_SIZE], stopwatch)
        if stopwatch is not None:
            return timed(start, stopwatch.stamps[1:], requests[0][1])
        return Result(time.perf_counter() - start)

    return f"transformers {transformers.__version__}", run


def _generate(model: Any, requests: list[Request], stopwatch: _Stopwatch | None) -> None:
    """Generates one batch, as long as its longest output: each request then has its full length."""
    width, longest = max(len(ids) for ids, _ in requests), max(length for _, length in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.long)  # [requests, width]
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(requests):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        outputs = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, min_new_tokens=longest,
            eos_token_id=None, pad_token_id=0, streamer=stopwatch,
        )  # fmt: skip
    check_lengths([outputs.shape[1] - width], [([], longest)])


if __name__ == "__main__":
    sys.exit(main(load))
