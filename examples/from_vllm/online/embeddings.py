"""Embeddings by OpenAI's client: of texts, of tokens, shorter ones, in base64."""

import argparse
import base64
import struct

import requests
from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
base_url = parser.parse_args().base_url
client = OpenAI(api_key="EMPTY", base_url=base_url)
model = client.models.list().data[0].id

texts = ["Prefix caching reuses blocks.", "The weather is fine."]
answer = client.embeddings.create(input=texts, model=model, encoding_format="float")
for data in answer.data:
    print(f"{texts[data.index]!r}: {len(data.embedding)} numbers")
packed = client.embeddings.create(input=texts[0], model=model, encoding_format="base64").data[0].embedding
numbers = struct.unpack(f"<{len(answer.data[0].embedding)}f", base64.b64decode(packed))
print("the same in base64:", max(abs(a - b) for a, b in zip(numbers, answer.data[0].embedding)) < 1e-6)
chat = requests.post(
    f"{base_url}/embeddings", json={"model": model, "messages": [{"role": "user", "content": texts[0]}]}
).json()
print("of a conversation:", len(chat["data"][0]["embedding"]))
