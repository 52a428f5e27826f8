"""Texts to tokens and back, without generating."""

import argparse

import requests

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
root = parser.parse_args().base_url.removesuffix("/v1")
model = requests.get(f"{root}/v1/models").json()["data"][0]["id"]

text = requests.post(
    f"{root}/tokenize", json={"model": model, "prompt": "Prefix caching", "return_token_strs": True}
).json()
print("tokens:", text["tokens"], text["token_strs"], "of at most", text["max_model_len"])
messages = [{"role": "user", "content": "What is prefix caching?"}]
chat = requests.post(f"{root}/tokenize", json={"model": model, "messages": messages}).json()
print("tokens of a conversation:", chat["count"])
back = requests.post(f"{root}/detokenize", json={"model": model, "tokens": text["tokens"]}).json()
print("text:", back["prompt"])
