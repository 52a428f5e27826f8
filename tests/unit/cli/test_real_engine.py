"""The commands on the real engine and the demo model: that the parts fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
