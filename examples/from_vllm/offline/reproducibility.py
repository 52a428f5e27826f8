"""The same texts again: with a seed per request, in another batch, in another run."""

import random

from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
llm = LLM(model=parser.parse_args().model, seed=0, async_scheduling=False)

prompts = [f"Fact {i} about KV blocks:" for i in range(8)]
params = [SamplingParams(temperature=0.9, seed=i, max_tokens=16) for i in range(len(prompts))]
together = [output.outputs[0].text for output in llm.generate(prompts, params)]
alone = [llm.generate(prompt, each, use_tqdm=False)[0].outputs[0].text for prompt, each in zip(prompts, params)]
order = random.sample(range(len(prompts)), len(prompts))
shuffled = llm.generate([prompts[i] for i in order], [params[i] for i in order])
print("alone as together:", alone == together)
print("in any order:", all(out.outputs[0].text == together[i] for i, out in zip(order, shuffled)))
print("different seeds, different texts:", len(set(together)) > 1)
