"""Log-likelihoods by transformers: the oracle for lm-eval, in the environment that has torch.

Reads {"model": directory, "pairs": [[context ids, continuation ids], ...]} as JSON from stdin; writes
[[log-likelihood, whether greedy decoding would have given the continuation], ...].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def score(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Of one pair, in float32, alone in its batch."""
    ids = torch.tensor([context + continuation])
    logits = model(ids[:, :-1]).logits[0, len(context) - 1 :]  # [len(continuation), vocabulary]
    targets = torch.tensor(continuation)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(dim=-1) == targets).all())


def main() -> None:
    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    with torch.inference_mode():
        json.dump([score(model, context, continuation) for context, continuation in asked["pairs"]], sys.stdout)


if __name__ == "__main__":
    main()
