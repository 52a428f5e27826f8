"""Log-probabilities of a prompt's tokens, and the alternatives to each token it wrote."""

import math

from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
llm = LLM(parser.parse_args().model, max_logprobs=5, logprobs_mode="raw_logprobs")

params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1)
(output,) = llm.generate(["Prefix caching reuses the computed blocks"], params)

total = 0.0
for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
    logprob: Logprob = entry[token_id]
    total += logprob.logprob
    print(f"prompt {logprob.decoded_token!r}: rank {logprob.rank}, {logprob.logprob:.3f}")
print(f"perplexity of the prompt: {math.exp(-total / (len(output.prompt_token_ids) - 1)):.2f}")

completion = output.outputs[0]
for token_id, entry in zip(completion.token_ids, completion.logprobs):
    others = [other.decoded_token for id, other in entry.items() if id != token_id]
    print(f"written {entry[token_id].decoded_token!r}: {math.exp(entry[token_id].logprob):.0%}, rather than {others}")
print(f"sum: {completion.cumulative_logprob:.3f}")
