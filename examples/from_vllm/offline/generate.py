"""Texts for a list of prompts."""

from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
args = parser.parse_args()

prompts = ["What is prefix caching?", "A KV block is", "The scheduler decides", "Continuous batching means"]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=1)

llm = LLM(model=args.model, gpu_memory_utilization=0.5, enforce_eager=True, trust_remote_code=False)
for output in llm.generate(prompts, params):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
