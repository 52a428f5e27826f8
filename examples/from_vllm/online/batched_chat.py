"""Several conversations in one request."""

import argparse

import requests

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
base_url = parser.parse_args().base_url

model = requests.get(f"{base_url}/models").json()["data"][0]["id"]
body = {
    "model": model,
    "messages": [
        [{"role": "user", "content": "What is prefix caching?"}],
        [{"role": "user", "content": "What is a KV block?"}],
    ],
    "max_tokens": 40,
    "temperature": 0,
}
answer = requests.post(f"{base_url}/chat/completions/batch", json=body)
answer.raise_for_status()
for choice in answer.json()["choices"]:
    print(choice["index"], choice["message"]["content"])
