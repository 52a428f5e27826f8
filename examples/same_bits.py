"""One request alone, in a crowd and from a warm cache, bit for bit: python examples/same_bits.py [MODEL]"""

import sys

from quire import LLM, RequestOutput, SamplingParams

PROMPT = "What is prefix caching?"
CROWD = [f"Question {number}: what does a scheduler do?" for number in range(30)]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=32, logprobs=5)


def bits(output: RequestOutput) -> list[tuple[int, list[tuple[int, str]]]]:
    """Every token, with the exact log-probabilities of its likeliest rivals."""
    (completion,) = output.outputs
    rivals = [[(i, each.logprob.hex()) for i, each in row.items()] for row in completion.logprobs or []]
    return list(zip(completion.token_ids, rivals, strict=True))


llm = LLM(*sys.argv[1:])
(alone,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
(warm,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
*_, crowded = llm.generate([*CROWD, PROMPT], PARAMS, use_tqdm=False)
print(f"{len(bits(alone))} tokens, each with 5 log-probabilities")
print("from a warm cache, the same bits:", bits(warm) == bits(alone))
print("among 30 others, the same bits:", bits(crowded) == bits(alone))
