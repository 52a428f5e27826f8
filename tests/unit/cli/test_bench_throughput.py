"""`quire bench`: workloads are fixed numbers, times come out of a scripted clock, reports parse."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.bench import throughput as measure
from quire.cli.bench.outcomes import percentiles_ms
from quire.cli.bench.throughput import RunResult, run_requests, summarize
from quire.cli.bench.workloads import HIGHEST_ID, LOWEST_ID, WORKLOADS, BenchRequest, IdRange, mixed_requests
from quire.cli.generation import RequestTiming, timing_line
from quire.cli.main import main

from .scripted_engine import ScriptedEngine

Capture = pytest.CaptureFixture[str]


def totals(requests: list[BenchRequest]) -> tuple[int, int, int]:
    return len(requests), sum(len(r.prompt_token_ids) for r in requests), sum(r.output_len for r in requests)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("W1", (1, 128, 128)), ("W2", (64, 11929, 7550)), ("W3", (64, 34816, 2048)), ("W4", (512, 16384, 32768))],
)
def test_workloads_are_the_agreed_ones(name: str, expected: tuple[int, int, int]) -> None:
    """The totals that the peers' figures were taken with."""
    first, second = (WORKLOADS[name].make(rep, IdRange(), None) for rep in (0, 1))
    assert totals(first) == totals(second) == expected
    assert first == WORKLOADS[name].make(0, IdRange(), None)
    assert [r.prompt_token_ids for r in first] != [r.prompt_token_ids for r in second]
    assert all(LOWEST_ID <= t < HIGHEST_ID for r in first for t in r.prompt_token_ids)


def test_w3_shares_its_prefix_within_a_repetition_only() -> None:
    first, second = (WORKLOADS["W3"].make(rep, IdRange(), 4) for rep in (0, 1))
    assert len({tuple(r.prompt_token_ids[:512]) for r in first}) == 1
    assert len({tuple(r.prompt_token_ids[512:]) for r in first}) == 4
    assert first[0].prompt_token_ids[:512] != second[0].prompt_token_ids[:512]


@given(st.integers(1, 200_000))
def test_ids_stay_inside_any_vocabulary(vocab_size: int) -> None:
    ids = IdRange.of_vocabulary(vocab_size)
    assert 0 <= ids.low < ids.high <= vocab_size
    assert ids == IdRange() or vocab_size < HIGHEST_ID


def test_mixed_lengths_have_the_mean_asked_for() -> None:
    requests = mixed_requests(0, IdRange(), 2000, 200, 128)
    assert statistics.fmean(len(r.prompt_token_ids) for r in requests) == pytest.approx(200, rel=0.1)
    assert statistics.fmean(r.output_len for r in requests) == pytest.approx(128, rel=0.1)


# -- measuring ----------------------------------------------------------------------------------------------------


def test_times_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second per step, and a clock that moves with steps only."""
    engine = ScriptedEngine(lambda p, params: ["x"] * (params.max_tokens or 0))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(engine.num_steps))
    result = run_requests(engine, [BenchRequest([5] * 3, 4), BenchRequest([5], 2)])
    assert result.wall_s == 4
    long, short = result.timings
    assert (long.ttft_s, long.tpot_s, long.gaps_s) == (1, 1, [1, 1, 1])
    assert (short.last_token_s, short.num_output_tokens) == (2, 2)
    assert (result.num_prompt_tokens, result.num_output_tokens, result.num_cached_tokens) == (4, 6, 2)
    figures = summarize([result, RunResult(8.0, result.timings), RunResult(2.0, result.timings)])
    assert (figures["wall_s"], figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (4, 1.5, 2.5)
    assert figures["ttft_ms"] == {"mean": 1000, "p50": 1000, "p90": 1000, "p99": 1000}
    assert figures["e2e_ms"]["mean"] == 3000
    assert engine.params_seen[0].ignore_eos
    assert engine.params_seen[0].is_greedy


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles_ms([]) == {}
    figures = percentiles_ms([i / 1000 for i in range(101)])
    assert (figures["p50"], figures["p90"], figures["p99"], figures["mean"]) == (50, 90, 99, 50)


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_ordered_and_inside(values: list[float]) -> None:
    figures = percentiles_ms(values)
    low, high = round(min(values) * 1e3, 3), round(max(values) * 1e3, 3)
    assert low <= figures["p50"] <= figures["p90"] <= figures["p99"] <= high


def test_timing_line_before_the_first_token() -> None:
    timing = RequestTiming(added_s=0.0)
    assert timing.ttft_s is None
    assert timing.tpot_s is None
    assert timing_line([timing]) == "0 prompt tokens (0 cached), 0 generated"


# -- the commands -------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(model_dir: Path, use_engine: Callable[[ScriptedEngine], ScriptedEngine]) -> Callable[..., ScriptedEngine]:
    def run(*argv: str, code: int = 0) -> ScriptedEngine:
        engine = use_engine(ScriptedEngine(lambda p, params: ["x"] * (params.max_tokens or 0), max_model_len=10_000))
        assert main(["bench", *argv, "--model", str(model_dir)]) == code
        return engine

    return run


def test_the_latency_bench_counts_its_repetitions(bench: Callable[..., ScriptedEngine], capsys: Capture) -> None:
    engine = bench("latency", "--input-len", "7", "--output-len", "3", "--batch-size", "2", "--reps", "4", "--json")
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_requests"], figures["prompt_tokens"], figures["output_tokens"]) == (2, 14, 6)
    assert figures["reps"] == 4
    assert len(engine.prompts_seen) == 2 * (4 + 1)  # one repetition warms up
    prompts = [tuple(p["prompt_token_ids"]) for p in engine.prompts_seen]
    assert len(set(prompts)) == len(prompts)
    assert all(0 <= t < 512 for p in prompts for t in p)  # the model's vocabulary


def test_the_throughput_bench_writes_its_figures(
    bench: Callable[..., ScriptedEngine], capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    bench("throughput", "--workload", "W3", "--num-prompts", "3", "--num-iters", "2", "--output-json", str(path))
    out = capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert figures["benchmark"] == "throughput W3"
    assert (figures["num_requests"], figures["output_tokens"]) == (3, 96)
    assert {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "walls_s", "cpu", "quire"} <= set(figures)
    assert all(word in out for word in ("TTFT", "TPOT", "ITL", "tok/s", "p99", "median of 2"))


def test_mixed_and_uniform(bench: Callable[..., ScriptedEngine], capsys: Capture) -> None:
    bench("throughput", "--num-prompts", "5", "--num-iters", "1", "--json")
    assert json.loads(capsys.readouterr().out)["num_requests"] == 5
    bench(
        "throughput", "--workload", "uniform", "--num-prompts", "5", "--input-len", "9", "--output-len", "2", "--json"
    )
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 45


def test_a_wrong_argument_names_the_flag(bench: Callable[..., ScriptedEngine], capsys: Capture, tmp_path: Path) -> None:
    bench("latency", "--num-iters", "0", code=2)
    assert "--num-iters 0 is too small" in capsys.readouterr().err
    bench("latency", "--output-len", "1", "--output-json", str(tmp_path / "none" / "x.json"), code=2)
    assert "--output-json" in capsys.readouterr().err
