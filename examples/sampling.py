"""Several answers, the same ones again, and what else the model thought of: python examples/sampling.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

llm = LLM(*sys.argv[1:], dtype="float32")  # in bfloat16, torch's kernels may round differently in another batch
prompt = "Once upon"

# Three answers to one prompt. They are drawn with the seeds 7, 8 and 9.
params = SamplingParams(n=3, seed=7, temperature=2.0, max_tokens=16)
(output,) = llm.generate(prompt, params, use_tqdm=False)
for completion in output.outputs:
    print(f"answer {completion.index}: {completion.text!r}")

# A draw depends on the seed, its place in the answer and the model, and on nothing else that runs: the answers are the
# same in a crowd, and drawn alone.
(_, crowded) = llm.generate(["Something else", prompt], params, use_tqdm=False)
(alone,) = llm.generate(prompt, SamplingParams(seed=8, temperature=2.0, max_tokens=16), use_tqdm=False)
print("again:", [c.text for c in crowded.outputs] == [c.text for c in output.outputs])
print("alone:", alone.outputs[0].text == output.outputs[1].text)

# For each token of an answer, its log-probability and those of the two likeliest.
(output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5, logprobs=2), use_tqdm=False)
for token_id, candidates in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True):
    others = ", ".join(f"{c.decoded_token!r} {c.logprob:.2f}" for i, c in candidates.items() if i != token_id)
    chosen = candidates[token_id]
    print(f"token {token_id}: {chosen.decoded_token!r} {chosen.logprob:.2f}, not {others}")
