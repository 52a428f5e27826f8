"""Log-likelihoods by transformers: the oracle for lm-eval, in the environment that has torch.

`python -m tests.clients.transformers_scores MODEL` reads lines of [[context ids, continuation ids], ...] and answers
each with a line of [[log-likelihood, whether greedy decoding would have given the continuation], ...].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def score(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Returns the score of one pair, in float32, alone in its batch."""
    ids = torch.tensor([context + continuation])
    logits = model(ids[:, :-1]).logits[0, len(context) - 1 :]  # [len(continuation), vocabulary]
    targets = torch.tensor(continuation)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(dim=-1) == targets).all())


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps([score(model, *pair) for pair in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
