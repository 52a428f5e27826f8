"""litellm, which speaks to vLLM servers as `hosted_vllm/...`."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # after the switch that keeps it from the network

PLACE = {"api_base": f"{os.environ['QUIRE_URL']}/v1", "api_key": os.environ["QUIRE_API_KEY"]}
QUESTION = [{"role": "user", "content": "What is prefix caching?"}]

answer = litellm.completion(model="hosted_vllm/demo", messages=QUESTION, temperature=0, **PLACE)
text = answer.choices[0].message.content
assert "KV blocks" in text, answer
stream = litellm.completion(model="hosted_vllm/demo", messages=QUESTION, temperature=0, stream=True, top_k=1, **PLACE)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
completion = litellm.text_completion(model="hosted_vllm/demo", prompt="Prefix caching is", max_tokens=4, **PLACE)
assert completion.choices[0].text
try:
    litellm.completion(model="hosted_vllm/demo", messages=QUESTION, temperature=9, **PLACE)
except litellm.BadRequestError:
    pass
else:
    raise AssertionError("a temperature of 9 was taken")
print("chat, stream, completion, error")
