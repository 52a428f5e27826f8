"""A conversation by OpenAI's client, whole or streamed, with parameters that only vLLM has."""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()

client = OpenAI(api_key="EMPTY", base_url=args.base_url)
model = client.models.list().data[0].id
messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is a KV block?"},
    {"role": "assistant", "content": "A KV block holds the keys and values of a few tokens."},
    {"role": "user", "content": "What is prefix caching?"},
]
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    temperature=0,
    max_completion_tokens=48,
    stream=args.stream,
    extra_body={"top_k": 20, "repetition_penalty": 1.0, "chat_template_kwargs": {"enable_thinking": False}},
)
if args.stream:
    for chunk in answer:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
else:
    print(answer.choices[0].message.content)
    print(answer.choices[0].finish_reason, answer.usage.completion_tokens)
