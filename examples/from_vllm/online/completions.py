"""Completions by OpenAI's client: one, several, streamed, with log-probabilities."""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()

client = OpenAI(api_key="EMPTY", base_url=args.base_url)
model = client.models.list().data[0].id

completion = client.completions.create(
    model=model,
    prompt="Prefix caching is",
    echo=False,
    n=2,
    stream=args.stream,
    logprobs=None if args.stream else 3,
    max_tokens=12,
    temperature=0.8,
    seed=1,
)
if args.stream:
    for chunk in completion:
        print(chunk.choices[0].index, repr(chunk.choices[0].text))
else:
    for choice in completion.choices:
        print(choice.index, repr(choice.text), round(sum(choice.logprobs.token_logprobs), 3))
    print("tokens:", completion.usage.total_tokens)
