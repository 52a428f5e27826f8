"""Prompts to texts, all at once: python examples/generate.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

prompts = ["What is prefix caching?", "What is a KV block?", "What does num_preemptions mean?"]

llm = LLM(*sys.argv[1:])
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
for output in outputs:  # in the order of the prompts
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
