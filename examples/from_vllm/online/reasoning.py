"""Reasoning apart from the answer, whole and streamed. The server has --reasoning-parser deepseek_r1."""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
model = client.models.list().data[0].id
request = {
    "model": model,
    "messages": [{"role": "user", "content": "What is prefix caching?"}],
    "max_tokens": 48,
    "temperature": 0,
    "extra_body": {"thinking_token_budget": 8, "min_tokens": 24},
}

message = client.chat.completions.create(**request).choices[0].message
print("reasoning:", message.reasoning)
print("answer:", message.content)

reasoning, content = [], []
for chunk in client.chat.completions.create(**request, stream=True):
    delta = chunk.choices[0].delta
    reasoning.append(getattr(delta, "reasoning", None) or "")
    content.append(delta.content or "")
print("the same streamed:", ("".join(reasoning), "".join(content)) == (message.reasoning, message.content))
