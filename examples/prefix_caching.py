"""Questions about one text, which is computed only once: python examples/prefix_caching.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

text = """\
The lighthouse stands on a rock two miles from the harbour. It was built of granite blocks, each cut to fit its
neighbours, so that the weight of the tower holds it together. Its lamp was first an oil lamp with a clockwork that a
keeper had to wind every four hours; now it is electric and looks after itself. A boat brings supplies when the sea
allows it. In winter that may be once a month. The last keeper left a logbook in which every ship of thirty years is
written down, with the weather of the day and, on Sundays, what there was for dinner.
"""
questions = ["How far is the harbour?", "Who wound the clockwork?", "How often does the boat come?", "What is granite?"]

llm = LLM(*sys.argv[1:], disable_log_stats=False)  # statistics on
params = SamplingParams(temperature=0, max_tokens=8)

print("prompt tokens  cached  ms to the first token")
for question in questions:
    (output,) = llm.generate(f"{text}\n{question}\n", params, use_tqdm=False)
    num_prompt, num_cached = len(output.prompt_token_ids or []), output.num_cached_tokens
    print(f"{num_prompt:13} {num_cached:7} {output.metrics.first_token_latency * 1e3:10.1f}")

llm.llm_engine.do_log_stats()  # a line in the log: throughput, load and the hit rate so far
