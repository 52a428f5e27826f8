"""The commands on the real engine and the demo model: that the parts fit together."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cli.main import main
from quire.config.engine_args import EngineArgs
from quire.frontend.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def greedy() -> Callable[[str, int], str]:
    """The greedy continuation of a prompt, from the engine itself."""
    engine = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=True))

    def complete(prompt: str, max_tokens: int) -> str:
        engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        return outputs[-1].outputs[0].text  # type: ignore[union-attr,no-any-return]

    return complete


def test_complete_prints_the_greedy_text(greedy: Callable[[str, int], str], capsys: Capture) -> None:
    assert main(["complete", "The engine keeps", "--temperature", "0", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == greedy("The engine keeps", 12) + "\n"
    assert main(["complete", "a", "b c", "--json", "--temperature", "0", "--max-tokens", "5", "--logprobs", "1"]) == 0
    rows = {row["prompt"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {prompt: row["outputs"][0]["text"] for prompt, row in rows.items()} == {
        prompt: greedy(prompt, 5) for prompt in ("a", "b c")
    }
    assert len(rows["a"]["outputs"][0]["logprobs"]) == 5


def test_same_seed_same_text(capsys: Capture) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["complete", "x", "--seed", seed, "--max-tokens", "12", "--temperature", "2"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_chat_counts_its_context(stdin: Callable[[str], None], capsys: Capture) -> None:
    stdin("hello\n/stats\nand more of the same\n/stats\n")
    assert main(["chat", "--max-tokens", "20", "--temperature", "0", "--ignore-eos"]) == 0
    err = capsys.readouterr().err
    assert "20 generated" in err
    assert " of 2048 tokens of context used" in err


def test_a_batch_equals_its_requests_alone(greedy: Callable[[str, int], str], tmp_path: Path) -> None:
    rows = [
        {"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": "w " * i, "max_tokens": 6, "temperature": 0}}
        for i in range(1, 30)
    ]
    rows[4]["body"]["logit_bias"] = {"99999": 1}  # type: ignore[index]
    rows[6]["body"]["response_format"] = {  # type: ignore[index]
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"enum": ["a"]}},
    }
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tmp_path / "out.jsonl"
    assert main(["batch", str(tmp_path / "in.jsonl"), "-o", str(target), "--max-num-seqs", "4"]) == 1
    results = {row["custom_id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert len(results) == 29
    assert results["5"]["error"]["param"] == "logit_bias"
    assert results["7"]["response"]["body"]["choices"][0]["text"] == '"a"'
    for i in (1, 9, 29):
        assert results[str(i)]["response"]["body"]["choices"][0]["text"] == greedy("w " * i, 6)


def test_a_resumed_batch_draws_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks routes with a field for a seed, and without."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    own = {"max_tokens": 12, "temperature": 2}
    messages = [{"role": "user", "content": "Hi"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        *3 * [("/v1/completions", {"prompt": "Hi", "n": 2, **own})],
        ("/v1/messages", {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 1}),
        ("/api/generate", {"model": "demo", "prompt": "Hi", "options": {"num_predict": 12, "temperature": 2}}),
        ("/v1/completions", {"prompt": "Hi", "seed": 5, **own}),
    ]

    def run() -> dict[str, str]:
        assert main(["batch", str(source), "-o", str(target)]) == 0
        answers = {
            row["custom_id"]: row["response"]["body"] for row in map(json.loads, target.read_text().splitlines())
        }
        return {name: str(b.get("choices") or b.get("content") or b["response"]) for name, b in answers.items()}

    rows = [{"custom_id": str(i), "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = run()
    assert len(set(texts.values())) == 6
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(line for line in lines if json.loads(line)["custom_id"] == "0"))
    assert run() == texts


def test_benches_run_on_a_real_engine(capsys: Capture) -> None:
    assert main(["bench", "latency", "--input-len", "8", "--output-len", "4", "--reps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 4
    assert main(["bench", "throughput", "--workload", "W3", "--num-prompts", "3", "--reps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cached_tokens"] > 0


@pytest.mark.parametrize("flags", [{"kv_cache_memory_bytes": 30 << 20}, {"max_num_seqs": 3}, {}])
def test_info_tells_what_the_engine_then_does(flags: dict[str, int], capsys: Capture) -> None:
    assert main(["info", "--json", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    told = json.loads(capsys.readouterr().out)["capacity"]
    ready = LLMEngine.from_engine_args(EngineArgs(**flags)).engine_core.ready_response
    assert (ready.num_gpu_blocks, ready.max_model_len, ready.block_size, ready.kv_cache_size_tokens) == (
        told["blocks"],
        told["max_model_len"],
        16,
        told["tokens"],
    )
    assert ready.kv_cache_max_concurrency == pytest.approx(told["max_concurrency"], abs=0.01)


def test_a_batch_for_a_pooling_model_is_answered_as_its_routes_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    """Requests come from standard input; each error names its field."""
    texts = ["Prefix caching reuses blocks.", "The weather is fine."]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"model": "demo", "input": texts}),
        ("/v1/embeddings", {"input": texts[1], "encoding_format": "base64", "user": "me"}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": texts[0]}]}),
        ("/v1/score", {"text_1": texts[0], "text_2": texts}),
        ("/v2/rerank", {"query": texts[1], "documents": texts, "top_n": 1}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/embeddings", {"inputs": "x"}),
        ("/v1/embeddings", {"input": [[1, 99999]]}),
        ("/v1/embeddings", {"input": "x", "model": "other"}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/rerank", {"query": "x", "documents": 5}),
    ]
    rows = [{"custom_id": str(i), "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    target = tmp_path / "out.jsonl"
    assert main(["batch", "-", "-o", str(target), "--runner", "pooling"]) == 1
    assert "11 results" in capsys.readouterr().err
    results = {int(row["custom_id"]): row for row in map(json.loads, target.read_text().splitlines())}
    answers = {i: row["response"]["body"] for i, row in results.items() if row["error"] is None}
    first, second = (data["embedding"] for data in answers[0]["data"])
    assert answers[0]["usage"]["prompt_tokens"] > 8
    packed = base64.b64decode(answers[1]["data"][0]["embedding"])
    assert np.allclose(np.frombuffer(packed, "<f4"), second, atol=1e-6)
    assert len(answers[2]["data"][0]["embedding"]) == len(first)
    assert [data["score"] for data in answers[3]["data"]] == pytest.approx([1.0, np.dot(first, second)], abs=1e-4)
    assert [(r["index"], r["document"]) for r in answers[4]["results"]] == [(1, {"text": texts[1]})]
    errors = {i: (row["error"]["code"], row["error"]["param"]) for i, row in results.items() if row["error"]}
    assert errors == {
        5: (404, None),
        6: (400, "inputs"),
        7: (400, "input"),
        8: (404, "model"),
        9: (400, "text_1"),
        10: (400, "documents"),
    }
    assert "did you mean input?" in results[6]["error"]["message"]
    assert "it needs a model that generates" in results[5]["error"]["message"]
