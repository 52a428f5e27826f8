"""Drafts from the prompt's own words, and how many of them the model accepted."""

from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter, Vector

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--num-spec-tokens", type=int, default=2)
args = parser.parse_args()

llm = LLM(
    model=args.model,
    speculative_config={"method": "ngram", "num_speculative_tokens": args.num_spec_tokens, "prompt_lookup_max": 4},
    disable_log_stats=False,
    max_num_seqs=8,
)
outputs = llm.generate(["blocks of tokens, blocks of"] * 2, SamplingParams(temperature=0, max_tokens=16))
print("texts:", [output.outputs[0].text for output in outputs])

drafts = accepted = 0
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts" and isinstance(metric, Counter):
        drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos" and isinstance(metric, Vector):
        accepted += sum(metric.values)
print(f"mean length of what was accepted: {1 + accepted / drafts if drafts else 1:.2f}")
