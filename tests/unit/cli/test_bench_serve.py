"""`quire bench serve` on a fake server: what is sent, what is reported, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.cli.bench.serve import command_line
from quire.cli.bench.serve_options import load_plan
from quire.cli.main import main
from quire.errors import ConfigError

from .fake_server import FakeServer, Reply, always, saying, serving

Capture = pytest.CaptureFixture[str]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


def bench(server: FakeServer, *flags: str) -> int:
    return main(["bench", "serve", "--url", server.url, "--num-warmups", "0", *flags])


def figures(server: FakeServer, capsys: Capture, *flags: str, code: int = 0) -> dict[str, Any]:
    assert bench(server, "--json", *flags) == code
    content = json.loads(capsys.readouterr().out)
    assert content["benchmark"] == "serve"
    return dict(content)


def test_a_load_of_completions(server: FakeServer, capsys: Capture) -> None:
    flags = ["--num-prompts", "6", "--input-len", "5-9", "--output-len", "4", "--prefix-len", "3"]
    content = figures(server, capsys, *flags, "--goodput", "ttft:60000", "e2e:60000")
    (load,) = content["loads"]
    assert (content["model"], content["endpoint"], content["dataset"]) == ("m", "completions", "random")
    assert (load["num_requests"], load["num_failed"], load["output_tokens"]) == (6, 0, 24)
    assert (load["prompt_tokens"], load["cached_tokens"]) == (30, 12)
    assert load["goodput"]["share"] == 1.0
    bodies = server.bodies(COMPLETIONS)
    assert len(bodies) == 6
    assert len({tuple(body["prompt"][:3]) for body in bodies}) == 1
    for body in bodies:
        assert 8 <= len(body["prompt"]) <= 12
        assert (body["model"], body["max_tokens"], body["min_tokens"], body["stream"]) == ("m", 4, 4, True)
        assert (body["ignore_eos"], body["skip_special_tokens"]) == (True, False)


def test_a_load_of_conversations_with_fields_of_ones_own(server: FakeServer, capsys: Capture) -> None:
    extra = ["--extra-body", '{"top_k": 3, "temperature": 0.7}', "--no-ignore-eos"]
    content = figures(server, capsys, "--endpoint", "/v1/chat/completions", "--num-prompts", "2", *extra)
    assert content["endpoint"] == "chat"
    for body in server.bodies(CHAT):
        assert body["messages"][0]["role"] == "user"
        assert isinstance(body["messages"][0]["content"], str)
        assert (body["top_k"], body["temperature"], body["max_tokens"]) == (3, 0.7, 128)
        assert "ignore_eos" not in body


def test_a_command_line_of_vllm(server: FakeServer, capsys: Capture) -> None:
    port = server.url.rpartition(":")[2]
    lengths = ["--random-input-len", "5", "--random-output-len", "3", "--num-prompts", "2", "--request-rate", "inf"]
    argv = ["--backend", "openai-chat", "--endpoint", CHAT, "--dataset-name", "random", *lengths, "--ignore-eos"]
    for place in (["--host", "127.0.0.1", "--port", port], ["--port", port], ["--base-url", server.url]):
        assert main(["bench", "serve", *place, *argv, "--model", "m", "--seed", "1", "--max-concurrency", "2"]) == 0
    assert len(server.bodies(CHAT)) == 3 * (2 + 4)
    for wrong in (["--url", "http://x", "--port", port], ["--port", port, "--backend", "vllm", "--endpoint", "chat"]):
        assert main(["bench", "serve", *wrong]) == 2
    assert "contradict one another" in capsys.readouterr().err


def test_the_table_shows_what_was_measured(server: FakeServer, capsys: Capture) -> None:
    assert bench(server, "--num-prompts", "3", "--request-rate", "1000", "--goodput", "tpot:9999") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"serve of m at {server.url}: completions, random, 256 + 128 tokens\n")
    for words in (
        "1000 requests/s: 3 requests, 15 prompt (6 cached) + 384 output",
        "100.0% within tpot:9999",
        "TTFT, sent",
    ):
        assert words in out
    assert "failed" not in out
    assert err == "" or err.startswith("warning: ")  # of a machine that is busy


def counters(num_drafts: int, num_tokens: int, accepted: Sequence[int]) -> str:
    """Returns counters of two engines that speculate, the second of which has one draft more."""
    positions = [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {count}.0'
        for position, count in enumerate(accepted)
    ]
    return "\n".join(
        [
            "# HELP vllm:spec_decode_num_drafts_total Verified drafts.",
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {num_drafts - 1}.0',
            'vllm:spec_decode_num_drafts_total{engine="1"} 1.0',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {num_tokens}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {sum(accepted)}.0',
            *reversed(positions),
        ]
    )


def test_speculation_is_read_from_the_counters(capsys: Capture) -> None:
    readings = [counters(10, 40, [8, 3, 0]), counters(20, 70, [15, 8, 2])] * 3

    async def metrics(request: Any) -> Reply:
        if not readings:
            return Reply({"error": "none"}, status=404)
        text = readings.pop(0).encode()
        return Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

    with serving(FakeServer(routes={"/metrics": metrics})) as server:
        flags = ["--num-prompts", "2", "--input-len", "5", "--output-len", "2"]
        (load,) = figures(server, capsys, *flags)["loads"]
        assert load["speculative_decoding"] == {
            "num_drafts": 10,
            "num_draft_tokens": 30,
            "num_accepted_tokens": 14,
            "acceptance_rate": 0.4667,
            "mean_acceptance_length": 2.4,
            "acceptance_per_position": [0.7, 0.5, 0.2],
        }
        assert bench(server, *flags) == 0
        out = capsys.readouterr().out
        assert "46.7% of draft tokens accepted: 14 of 30 in 10 drafts" in out
        assert "2.40 tokens per step with drafts" in out
        assert "70.0% 50.0% 20.0%" in out
        assert bench(server, *flags, "--sweep-concurrency", "1,2") == 0  # the second load finds no metrics
        rows = capsys.readouterr().out.splitlines()
        assert [row.split()[-2:] for row in rows if "concurrency" in row] == [["46.7%", "2.40"], ["-", "-"]]


def test_a_sweep_has_a_row_each_and_a_plot(server: FakeServer, capsys: Capture, tmp_path: Path) -> None:
    plot, result = tmp_path / "p.html", tmp_path / "r.json"
    flags = ["--sweep-concurrency", "1,2,4", "--num-prompts", "8", "--output-len", "3", "--save-detailed"]
    assert bench(server, *flags, "--plot", str(plot), "--save-result", str(result)) == 0
    out = capsys.readouterr().out
    assert [f"concurrency {n}" in out for n in (1, 2, 4)] == [True] * 3
    loads = json.loads(result.read_text())["loads"]
    assert [load["max_concurrency"] for load in loads] == [1, 2, 4]
    assert loads[0]["peak_in_flight"] == 1
    rows = loads[0]["requests"]
    assert len(rows) == 8
    for before, after in pairwise(rows):  # one at a time
        assert before["end_s"] <= after["intended_s"] <= after["sent_s"] <= after["first_token_s"] <= after["end_s"]
    assert plot.read_text().count("<svg") >= 5
    prompts = [tuple(body["prompt"]) for body in server.bodies(COMPLETIONS)]
    assert len(set(prompts)) == 24  # no load finds the prompts of another in the cache


def test_a_sweep_of_rates(server: FakeServer, capsys: Capture) -> None:
    content = figures(server, capsys, "--sweep-rate", "500,1000", "--duration", "0.01", "--output-len", "2")
    assert [(load["request_rate"], load["num_requests"]) for load in content["loads"]] == [(500, 5), (1000, 10)]


def test_the_search_finds_the_rate_a_server_sustains(capsys: Capture) -> None:
    """A server that takes one request at a time, and 10 ms for it, cannot sustain more than 100 a second."""
    turn: dict[str, asyncio.Lock] = {}

    async def slow(body: dict[str, Any]) -> AsyncIterator[str]:
        async with turn.setdefault("turn", asyncio.Lock()):
            await asyncio.sleep(0.01)
            yield "x"

    with serving(FakeServer(answer=slow)) as server:
        flags = ["--find-saturation", "--num-prompts", "20", "--output-len", "1", "--saturation-tolerance", "0.9"]
        content = figures(server, capsys, *flags, "--burstiness", "inf")
    found = content["saturation"]
    assert 0 < found["sustained_requests_per_s"] <= 100 / 0.95
    assert content["loads"][0]["request_rate"] is None
    assert len(content["loads"]) >= 3


def test_saturation_under_an_objective_nobody_can_meet(server: FakeServer, capsys: Capture) -> None:
    flags = ["--find-saturation", "--num-prompts", "1", "--output-len", "1", "--goodput", "ttft:0.0001"]
    content = figures(server, capsys, *flags)
    assert content["saturation"]["sustained_requests_per_s"] is None
    assert content["saturation"]["too_much_requests_per_s"] > 0
    assert len(content["loads"]) == 2  # alone it is too slow: so it is at any rate


def test_failures_are_counted_by_kind_and_told_by_the_exit_code(capsys: Capture) -> None:
    async def fickle(request: Any) -> Reply:
        if len(server.bodies(COMPLETIONS)) % 2:
            return Reply({"error": {"message": "the queue is full"}}, 503)
        return Reply(events=server._stream(False, request.body))

    with serving(FakeServer(routes={COMPLETIONS: fickle})) as server:
        load = figures(server, capsys, "--num-prompts", "6", "--max-concurrency", "1", code=1)["loads"][0]
        assert (load["num_requests"], load["num_failed"]) == (6, 3)
        assert load["failures"]["HTTP 503"]["count"] == 3
        assert bench(server, "--num-prompts", "2", "--max-concurrency", "1") == 1
        assert "failed: 1 HTTP 503: " in capsys.readouterr().out


def test_an_answer_that_is_too_short_is_a_failure_unless_it_may_be(capsys: Capture) -> None:
    with serving(FakeServer(answer=saying("one"))) as server:
        load = figures(server, capsys, "--num-prompts", "2", code=1)["loads"][0]
        assert "--no-ignore-eos" in load["failures"]["short answer"]["first"]
        assert figures(server, capsys, "--num-prompts", "2", "--no-ignore-eos")["loads"][0]["output_tokens"] == 2


def test_a_warm_up_that_fails_is_the_end(capsys: Capture) -> None:
    with serving(FakeServer(routes={COMPLETIONS: always(Reply({"error": {"message": "no"}}, 500))})) as server:
        assert main(["bench", "serve", "--url", server.url]) == 1
        assert len(server.bodies(COMPLETIONS)) == 4
    assert "4 HTTP 500" in capsys.readouterr().out


def test_a_server_without_tokenize_gets_words(capsys: Capture) -> None:
    routes = {"/tokenize": always(Reply({"detail": "Not Found"}, 404))}
    with serving(FakeServer(routes=routes)) as server:
        figures(server, capsys, "--num-prompts", "2", "--input-len", "30")
        assert [len(body["prompt"].split()) for body in server.bodies(COMPLETIONS)] == [30, 30]


def test_a_trace_keeps_its_times(server: FakeServer, capsys: Capture, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i / 100, "input_length": 4, "output_length": 2} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    result = tmp_path / "r.json"
    flags = ["--dataset-name", "trace", "--dataset-path", str(trace), "--save-detailed"]
    assert bench(server, *flags, "--save-result", str(result)) == 0
    sent = sorted(row["intended_s"] for row in json.loads(result.read_text())["loads"][0]["requests"])
    assert sent == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])


def test_files_are_asked_in_order_and_again_from_the_beginning(
    server: FakeServer, capsys: Capture, tmp_path: Path
) -> None:
    custom, share = tmp_path / "custom.jsonl", tmp_path / "share.json"
    custom.write_text('{"prompt": "a", "output_len": 2}\n{"prompt": [5, 6], "output_len": 3}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(custom), "--max-concurrency", "1"]
    figures(server, capsys, *flags, "--num-prompts", "3")
    assert [(b["prompt"], b["max_tokens"]) for b in server.bodies(COMPLETIONS)] == [("a", 2), ([5, 6], 3), ("a", 2)]
    assert bench(server, *flags, "--endpoint", "chat") == 2
    assert "holds token ids, which --endpoint chat does not take" in capsys.readouterr().err

    talk = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ann, of course."}]
    share.write_text(json.dumps([{"conversations": talk}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(share), "--endpoint", "chat"]
    content = figures(server, capsys, *flags)
    assert content["loads"][0]["num_requests"] == 1  # all that the file has
    (body,) = server.bodies(CHAT)
    assert (body["messages"], body["max_tokens"]) == ([{"role": "user", "content": "Who?"}], 3)


def test_ctrl_c_reports_what_there_is(capsys: Capture) -> None:
    reached = threading.Event()

    async def stuck(body: dict[str, Any]) -> AsyncIterator[str]:
        if len(server.bodies(COMPLETIONS)) > 3:
            reached.set()
            await asyncio.Event().wait()
        yield "x"

    def press() -> None:
        assert reached.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    with serving(FakeServer(answer=stuck)) as server:
        presser = threading.Thread(target=press)
        presser.start()
        flags = ["--num-prompts", "9", "--max-concurrency", "1", "--output-len", "1"]
        content = figures(server, capsys, *flags, code=130)
        presser.join()
        assert server.hung_up.wait(60)
    assert content["was_interrupted"]
    assert (content["loads"][0]["num_requests"], content["loads"][0]["num_unfinished"]) == (3, 6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sweep-rate", "1", "--find-saturation"], "cannot be combined"),
        (["--duration", "5"], "needs --request-rate"),
        (["--request-rate", "0"], "--request-rate 0 is not"),
        (["--request-rate", "nan"], "--request-rate nan is not"),
        (["--max-concurrency", "0"], "--max-concurrency 0 is below 1"),
        (["--sweep-concurrency", "1,0"], "must be 1 or more"),
        (["--sweep-rate", "1,inf"], "above 0"),
        (["--sweep-rate", "1", "--request-rate", "2"], "no --request-rate beside"),
        (["--sweep-concurrency", "1", "--max-concurrency", "2"], "no --max-concurrency beside"),
        (["--find-saturation", "--request-rate", "2"], "chooses the rates"),
        (["--request-rate", "2", "--duration", "2", "--num-prompts", "3"], "give one"),
        (["--goodput", "ttfb:5"], "ttft, tpot and e2e"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-path", "x"], "needs no --dataset-path"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "2"], "its own times"),
        (["--input-len", "3000"], "room for 2048"),
        (["--plot", "x.gif"], "must end in"),
        (["--save-result", "/nowhere/at/all.json"], "no directory"),
        (["--max-num-seqs", "4"], "--max-num-seqs is for a model that runs here"),
        (["--model", "other"], "does not serve 'other'"),
    ],
)
def test_misuse_is_refused_before_anything_is_measured(
    server: FakeServer, capsys: Capture, flags: list[str], words: str
) -> None:
    assert bench(server, *flags) == 2
    assert words in capsys.readouterr().err
    assert server.bodies(COMPLETIONS) == []


def test_a_missing_server_is_an_error(capsys: Capture) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_key_without_a_server(capsys: Capture) -> None:
    assert main(["bench", "serve", "--api-key", "k"]) == 2
    assert "it needs --url" in capsys.readouterr().err


def test_loads_of_a_plan() -> None:
    def count(*flags: str, rate: float = 2.0, size: int | None = None) -> int:
        return load_plan(command_line().parse(list(flags))).count(rate, size)

    assert count() == 100
    assert count(size=7) == 7
    assert count("--num-prompts", "5", size=7) == 5
    assert count("--request-rate", "2", "--duration", "30") == 60
    assert count("--find-saturation") == 40  # twenty seconds
    assert count("--find-saturation", rate=0.1) == 32


def test_every_option_is_in_the_help(capsys: Capture) -> None:
    assert main(["bench", "serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--goodput METRIC:MS" in out
    assert "--find-saturation" in out
    with pytest.raises(ConfigError, match="did you mean --sweep-rate"):
        command_line().parse(["--sweep-rates", "1"])
