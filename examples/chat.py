"""A conversation of two turns: python examples/chat.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0, max_tokens=64)

conversation = []
for question in ("What is chunked prefill?", "And what is preemption?"):
    conversation.append({"role": "user", "content": question})
    (output,) = llm.chat(conversation, params, use_tqdm=False)  # the whole conversation, every time
    answer = output.outputs[0].text
    conversation.append({"role": "assistant", "content": answer})

for message in conversation:
    print(f"{message['role']}: {message['content']}")
