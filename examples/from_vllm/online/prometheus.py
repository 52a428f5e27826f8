"""The server's load and speed, from what Prometheus would scrape."""

import argparse
import re

import requests
from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
base_url = parser.parse_args().base_url
client = OpenAI(api_key="EMPTY", base_url=base_url)
model = client.models.list().data[0].id


def scrape() -> dict[str, float]:
    """Sums of all series by name."""
    totals: dict[str, float] = {}
    for line in requests.get(base_url.removesuffix("/v1") + "/metrics").text.splitlines():
        found = re.match(r"(vllm:\w+)(?:\{.*\})? (\S+)$", line)
        if found:
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals


before = scrape()
client.completions.create(model=model, prompt=["Prefix caching is", "A KV block is"], max_tokens=8, temperature=0)
after = scrape()
for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"):
    print(f"{name}: +{after[name] - before[name]:g}")
print("running:", after["vllm:num_requests_running"], "waiting:", after["vllm:num_requests_waiting"])
print("cache in use:", after["vllm:kv_cache_usage_perc"])
print("mean time to the first token is known:", after["vllm:time_to_first_token_seconds_count"] > 0)
