"""A file of requests in OpenAI's batch format, run without a server."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
model = parser.parse_args().model

questions = ["What is prefix caching?", "What is a KV block?"]
rows = [
    {
        "custom_id": f"request-{i}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": question}], "max_completion_tokens": 40},
    }
    for i, question in enumerate(questions, start=1)
]
with tempfile.TemporaryDirectory() as directory:
    source, target = Path(directory) / "requests.jsonl", Path(directory) / "results.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o", str(target)]
    subprocess.run([*command, "--model", model], check=True)
    for result in sorted(map(json.loads, target.read_text().splitlines()), key=lambda result: result["custom_id"]):
        print(result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"])
