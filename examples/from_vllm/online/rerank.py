"""Documents in the order of their fit to a question: by the routes of vLLM, Jina and Cohere."""

import argparse

import requests

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
root = parser.parse_args().base_url.removesuffix("/v1")
model = requests.get(f"{root}/v1/models").json()["data"][0]["id"]

query = "What is prefix caching?"
documents = ["The weather in Paris is fine.", "Prefix caching reuses computed blocks.", "A block holds 16 tokens."]
for route in ("/v1/rerank", "/v2/rerank"):
    body = {"model": model, "query": query, "documents": documents, "top_n": 2}
    answer = requests.post(root + route, json=body, headers={"accept": "application/json"}).json()
    print(route, [(result["index"], round(result["relevance_score"], 4)) for result in answer["results"]])

for text_2 in (documents[0], documents):
    answer = requests.post(f"{root}/score", json={"model": model, "text_1": query, "text_2": text_2}).json()
    print("/score", [round(data["score"], 4) for data in answer["data"]])
