"""lm-eval's `local-completions` on a task of its own: log-likelihoods, and so scores, are those of transformers.

The same task runs twice through lm-eval's evaluator, in the same tokens: once by the server (prompts as token ids, echo
and logprobs), once by transformers, which lives in another environment (`QUIRE_DEV_PYTHON`).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["OPENAI_API_KEY"] = os.environ["QUIRE_API_KEY"]

import lm_eval  # after the switches that keep it from the network
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

ROWS = [
    ("Prefix caching keeps the KV blocks of finished", ["requests", "bananas", "weather", "elephants"], 0),
    ("A KV block is a fixed piece of the KV", ["garden", "cache", "song", "river"], 1),
    ("Chunked prefill cuts a long", ["tree", "rope", "prompt", "holiday"], 2),
    ("The scheduler decides which requests", ["sing", "swim", "sleep", "run"], 3),
    ("What is the capital of Norway?", ["Oslo", "Rome", "Paris", "Berlin"], 0),
    ("One two three", ["four", "blue", "cat", "green"], 0),
]
CHOICE_TASK = """
task: quire_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT_TASK = """
task: quire_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
ANSWER_TASK = """
task: quire_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


class ByTransformers(LocalCompletionsAPI):
    """The same requests in the same tokens, scored by transformers instead of the server."""

    def _loglikelihood_tokens(self, requests, **_):  # type: ignore[no-untyped-def]
        pairs = [[context, continuation] for _, context, continuation in requests]
        oracle.stdin.write(json.dumps(pairs) + "\n")
        oracle.stdin.flush()
        return [(value, greedy) for value, greedy in json.loads(oracle.stdout.readline())]


def evaluate(model: LocalCompletionsAPI, tasks: list[str], folder: Path) -> dict:
    return lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )


def likelihoods(result: dict, task: str) -> list[float]:
    samples = sorted(result["samples"][task], key=lambda s: s["doc_id"])
    responses = [response for sample in samples for response in sample["filtered_resps"]]
    return [float(r[0] if isinstance(r, (list, tuple)) else r) for r in responses]


def scores(result: dict, task: str) -> dict[str, float]:
    return {name: value for name, value in result["results"][task].items() if isinstance(value, float)}


command = [os.environ["QUIRE_DEV_PYTHON"], "-m", "tests.clients.transformers_scores", os.environ["QUIRE_DEMO_MODEL"]]
root = Path(__file__).resolve().parents[3]
with (
    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as oracle,
    tempfile.TemporaryDirectory() as directory,
):
    folder = Path(directory)
    os.environ["HF_HOME"] = str(folder / "hf")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": q, "choices": c, "answer": a}) + "\n" for q, c, a in ROWS))
    for name, text in (("choice", CHOICE_TASK), ("text", TEXT_TASK), ("answer", ANSWER_TASK)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    options = {
        "base_url": f"{os.environ['QUIRE_URL']}/v1/completions",
        "model": "demo",
        "tokenizer_backend": "remote",
        "auth_token": os.environ["QUIRE_API_KEY"],
        "max_length": 512,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    served = evaluate(LocalCompletionsAPI(**options), ["quire_choice", "quire_text", "quire_answer"], folder)
    expected = evaluate(ByTransformers(**options), ["quire_choice", "quire_text"], folder)

for task in ("quire_choice", "quire_text"):
    ours, theirs = likelihoods(served, task), likelihoods(expected, task)
    assert len(ours) == len(theirs) == (24 if task == "quire_choice" else 6)
    furthest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert furthest < 1e-3, (task, furthest)
    print(f"{task}: {scores(served, task)}; log-likelihoods within {furthest:.1e} of transformers'")
    for name, value in scores(expected, task).items():
        allowed = 0.0 if name.startswith("acc") else 1e-3 * abs(value)
        assert abs(scores(served, task)[name] - value) <= allowed, (name, value)
answers = [sample["filtered_resps"][0] for sample in served["samples"]["quire_answer"]]
assert all(isinstance(answer, str) for answer in answers)
print("loglikelihood, rolling loglikelihood, generate_until:", answers)
