"""A file of prompts, larger than memory would hold at once, into a file of answers."""

import argparse
import json
from collections.abc import Iterator
from itertools import islice

from vllm import LLM, SamplingParams


def batches(path: str, size: int) -> Iterator[list[dict]]:
    with open(path) as file:
        rows = map(json.loads, file)
        while batch := list(islice(rows, size)):
            yield batch


parser = argparse.ArgumentParser()
parser.add_argument("input")
parser.add_argument("output")
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()

llm = LLM(model=args.model, enable_chunked_prefill=True, max_num_batched_tokens=4096, tensor_parallel_size=1)
params = SamplingParams(temperature=0.3, top_p=0.9, max_tokens=20, seed=0)
with open(args.output, "w") as file:
    for batch in batches(args.input, args.batch_size):
        outputs = llm.generate([row["text"] for row in batch], params, use_tqdm=False)
        for row, output in zip(batch, outputs):
            tokens = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
            file.write(json.dumps({"id": row["id"], "answer": output.outputs[0].text, "tokens": tokens}) + "\n")
