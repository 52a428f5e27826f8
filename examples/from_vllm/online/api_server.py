"""A server as a part of one's own program: started, waited for, asked, ended."""

import argparse
import socket
import subprocess
import sys
import time

import requests

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
args = parser.parse_args()

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port", str(port)]
command += ["--host", "127.0.0.1", "--served-model-name", "mine", "--max-model-len", "1024", "--dtype", "auto"]
command += ["--api-key", "token-abc123", "--disable-log-requests", "--enforce-eager"]
server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
try:
    url = f"http://127.0.0.1:{port}"
    for _ in range(3000):
        try:
            if requests.get(f"{url}/health").status_code == 200:
                break
        except requests.ConnectionError:
            pass
        time.sleep(0.1)
    headers = {"Authorization": "Bearer token-abc123"}
    body = {"model": "mine", "prompt": "Prefix caching is", "max_tokens": 8, "temperature": 0}
    print("without a key:", requests.post(f"{url}/v1/completions", json=body).status_code)
    answer = requests.post(f"{url}/v1/completions", json=body, headers=headers)
    print("with it:", answer.status_code, repr(answer.json()["choices"][0]["text"]))
finally:
    server.terminate()
    print("ended:", server.wait(120))
