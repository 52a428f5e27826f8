"""The class of texts, and the scores per token behind it."""

import argparse

import requests

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
root = parser.parse_args().base_url.removesuffix("/v1")
model = requests.get(f"{root}/v1/models").json()["data"][0]["id"]

texts = ["Prefix caching is wonderful.", "I do not like it."]
for data in requests.post(f"{root}/classify", json={"model": model, "input": texts}).json()["data"]:
    print(f"{texts[data['index']]!r}: {data['label']}, {max(data['probs']):.3f} of {data['num_classes']} classes")
pooled = requests.post(f"{root}/pooling", json={"model": model, "input": texts[0], "task": "classify"}).json()
print("pooled:", len(pooled["data"][0]["data"]))
