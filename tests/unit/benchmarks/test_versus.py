"""`benchmarks/versus` without engines: figures and tables from numbers, processes with a fake driver."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.versus import __main__ as versus
from benchmarks.versus.comparison import better_ceilings, parse
from benchmarks.versus.engine import Engine, EngineError, Repetition
from benchmarks.versus.figures import Figure, Row, Series, offline_rows, run_rounds
from benchmarks.versus.peers import PEERS, Peer, Place
from benchmarks.versus.serving import (
    Server,
    load_size,
    measure_serving,
    measure_starts,
    serving_rows,
    start_engine,
    start_server,
)
from benchmarks.versus.table import BEGIN, END, format_cell, format_report, format_table, merge, update_page
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.bench.workloads import WORKLOADS, BenchRequest, IdRange

FAKE_DRIVER = Path(__file__).with_name("fake_driver.py")
FAKE_SERVER = Path(__file__).with_name("fake_server.py")
FEW = [BenchRequest([1] * 3, 2), BenchRequest([1] * 4, 2)]
WORDS = ["--model", "tiny"]


def silent(text: str) -> None:
    pass


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """The letter of a process's state, as ps shows it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- figures ------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_median_and_half_the_range() -> None:
    assert Figure.of([1.0, 5.0, 2.0]) == Figure(2.0, 1.0)
    assert Figure.of([3.0]) == Figure(3.0, 0.0)
    assert Figure.of([1.0], "> 5 s") == Figure(failure="> 5 s")
    assert Figure.of([]) == Figure(failure="not measured")


def test_a_ratio_above_one_means_that_quire_is_ahead() -> None:
    figures = {"quire": Figure(2.0), "vllm": Figure(3.0), "hf": Figure(failure="> 5 s")}
    assert Row("s", figures).ratio("vllm") == 1.5
    assert Row("tokens/s", figures, is_rate=True).ratio("vllm") == pytest.approx(2 / 3)
    assert Row("s", figures).ratio("hf") is None
    assert Row("s", figures).ratio("never heard of") is None


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6), st.booleans())
def test_exactly_one_of_two_is_ahead(ours: float, theirs: float, is_rate: bool) -> None:
    ratio = Row("", {"quire": Figure(ours), "vllm": Figure(theirs)}, is_rate=is_rate).ratio("vllm")
    swapped = Row("", {"quire": Figure(theirs), "vllm": Figure(ours)}, is_rate=is_rate).ratio("vllm")
    assert ratio is not None
    assert swapped is not None
    assert ratio * swapped == pytest.approx(1.0)
    assert (ratio > 1) == ((ours > theirs) if is_rate else (ours < theirs))


def test_rows_of_the_workloads() -> None:
    repetitions = [Repetition(2.0, 0.01, 0.003, 0.0), Repetition(4.0, 0.03, 0.005, 0.1)]
    first, each = offline_rows("tiny", [Series("W1", "quire", repetitions)])
    assert (first.figures["quire"].value, each.figures["quire"].value) == (20.0, 4.0)
    (seconds,) = offline_rows("tiny", [Series("W2", "quire", repetitions)])
    assert (seconds.figures["quire"].value, seconds.is_rate) == (3.0, False)
    (rate,) = offline_rows("tiny", [Series("W4", "quire", repetitions), Series("W4", "hf", [], "> 9 s")])
    tokens = sum(r.output_len for r in WORKLOADS["W4"].make(0, IdRange(), None))
    assert rate.figures["quire"].value == (tokens / 2 + tokens / 4) / 2
    assert rate.figures["hf"].failure == "> 9 s"


# -- the table ----------------------------------------------------------------------------------------------------

ROWS = [
    Row("tiny W2, s", {"quire": Figure(1.0, 0.02), "vllm": Figure(2.0, 0.0), "hf": Figure(failure="> 9 s")}),
    Row("tiny W4, tokens/s", {"quire": Figure(1000.0, 0.0), "vllm": Figure(1500.0, 0.1)}, digits=0, is_rate=True),
]
REPORT = {
    "date": "2026-01-02",
    "command": "python -m benchmarks.versus --model tiny",
    "machine": {"cpu": "a CPU", "ceilings": {"instruction_set": "avx2", "1": {"read_gb_s": 9.5, "bf16_tflop_s": 0.1}}},
    "cpus": [0, 1],
    "reps": 3,
    "versions": {"quire": "quire 1", "vllm": "vllm 2"},
    "missing": {"llamacpp": "not installed"},
    "neighbours": 0.031,
    "rows": [row.to_json() for row in ROWS],
}


def test_cells() -> None:
    assert format_cell(ROWS[0], "quire") == "1.00 ± 2 %"
    assert format_cell(ROWS[0], "vllm") == "2.00 (2.00×)"
    assert format_cell(ROWS[0], "hf") == "> 9 s"
    assert format_cell(ROWS[0], "openvino") == "–"
    assert format_cell(ROWS[1], "vllm") == "1,500 ± 10 % (**0.67×**)"


def test_the_report_survives_json_and_names_losses_and_what_is_missing() -> None:
    text = format_report(json.loads(json.dumps(REPORT)))
    assert format_table(ROWS, ["quire", "vllm", "hf"]) in text
    assert "Quire loses:\n\n* tiny W4, tokens/s (vLLM 0.67×)" in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    assert "Not measured: llama.cpp (not installed)" in text
    words = " ".join(text.split())
    assert "9.5 GB/s read and 0.1 TFLOP/s of bfloat16 with 1 thread." in words
    assert "at most 3 % of the cores" in words
    assert "quire 1, vllm 2" in text


def test_reports_of_two_runs_become_one() -> None:
    newer = {**REPORT, "date": "2026-01-03", "neighbours": 0.5, "versions": {"hf": "transformers 3"}}
    again = dict.fromkeys(REPORT["rows"][1]["figures"], Figure(1.0))
    beside_another = {"quire": Figure(3.0), "hf": Figure(4.0)}
    newer["rows"] = [
        Row("tiny W4, tokens/s", again).to_json(),
        Row("half W1", {}).to_json(),
        Row("tiny W2, s", beside_another).to_json(),
    ]
    merged = merge([REPORT, newer])
    assert [row["title"] for row in merged["rows"]] == ["tiny W2, s", "tiny W2, s", "tiny W4, tokens/s", "half W1"]
    assert [row["figures"].get("quire", {}).get("value") for row in merged["rows"]] == [
        REPORT["rows"][0]["figures"]["quire"]["value"], 3.0, 1.0, None
    ]  # fmt: skip
    assert (merged["date"], merged["neighbours"]) == ("2026-01-03", 0.5)
    assert set(merged["versions"]) == {"quire", "vllm", "hf"}


def test_the_page_gets_the_table_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = BEGIN.format("families"), END.format("families")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    update_page(page, "new", "families")
    update_page(page, "newer", "families")
    assert page.read_text() == f"before\n{begin}\nnewer\n{end}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no lines"):
        update_page(page, "new")


def test_the_page_of_the_project_has_the_markers() -> None:
    text = versus.PAGE.read_text(encoding="utf-8")
    assert all(text.count(mark.format(name)) == 1 for mark in (BEGIN, END) for name in ("versus", "families"))


def test_ceilings_are_the_best_of_two_measurements() -> None:
    first = {"instruction_set": "avx2", "1": {"read_gb_s": 9.0, "bf16_tflop_s": 0.2}}
    second = {"instruction_set": "avx2", "1": {"read_gb_s": 8.0, "bf16_tflop_s": 0.3}}
    assert better_ceilings(first, second) == {
        "instruction_set": "avx2",
        "1": {"read_gb_s": 9.0, "bf16_tflop_s": 0.3},
    }
    assert better_ceilings(None, second) == second
    assert better_ceilings(None, None) is None


# -- the command line ---------------------------------------------------------------------------------------------


def test_what_the_command_line_means() -> None:
    options = parse(["--model", "tiny,half", "--workloads", "all", "--peers", "vllm", "--cpus", "0-1,3"], None)
    assert options.model == ["tiny", "half"]
    assert options.workloads == ["W1", "W2", "W3", "W4", "W5", "W6"]
    assert options.peers == ["quire", "vllm"]
    assert options.cpus == [0, 1, 3]
    assert parse([], None).peers == list(PEERS)


@pytest.mark.parametrize("words", [["--workloads", "W9"], ["--peers", "vlm"], ["--reps", "0"]])
def test_what_makes_no_sense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words, None)
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_the_report_shows_no_path_of_this_machine() -> None:
    words = ["--home", "/somewhere", "--model", "tiny", "--output-json=/else", "--update-docs", "--reps", "2"]
    assert parse(words, None).shown == "--model tiny --reps 2"


def test_a_table_of_earlier_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(REPORT))
    assert versus.main(["--from-json", str(path)]) == 0
    assert "Quire loses" in capsys.readouterr().out


# -- peers --------------------------------------------------------------------------------------------------------


def test_a_missing_peer_says_how_to_get_it(tmp_path: Path) -> None:
    place = Place(tmp_path, (0,))
    assert "benchmarks/peers/setup vllm" in str(PEERS["vllm"].missing(place, "tiny"))
    assert "benchmarks/peers/setup models" in str(PEERS["quire"].missing(place, "tiny"))
    python = tmp_path / "llamacpp" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert "benchmarks/peers/setup llamacpp" in str(PEERS["llamacpp"].missing(place, "tiny"))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert PEERS["quire"].missing(place, "tiny") is None


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_peer_has_a_driver_and_a_line_in_the_setup(peer: Peer) -> None:
    folder = FAKE_DRIVER.parents[3] / "benchmarks" / "peers"
    assert (folder / peer.driver).exists()
    assert peer.name == "quire" or f"setup_{peer.name}()" in (folder / "setup").read_text()


# -- engines ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Engine]]:
    """Makes engines out of the fake driver; none of their processes may be left afterwards."""
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "child"))
    engines: list[Engine] = []

    class FakePeer(Peer):
        def driver_command(self, place: Place, model: str) -> list[str]:
            return [sys.executable, str(FAKE_DRIVER), "--model", model, "--threads", str(place.num_threads)]

    def make(mode: str) -> Engine:
        peer = FakePeer("fake", "Fake", "", lambda place, model: place.home, lambda place: {"FAKE_MODE": mode})
        engines.append(Engine(peer, Place(tmp_path, (0, 1)), "m", tmp_path / "logs", load_limit_s=20.0))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_an_engine_answers_and_is_frozen_in_between(fake: Callable[[str], Engine], tmp_path: Path) -> None:
    engine = fake("")
    result = engine.run(FEW, 5, limit_s=20.0)
    assert (result.wall_s, result.ttft_s, result.tpot_s) == (16.0, None, None)
    single = engine.run(FEW[:1], 0, limit_s=20.0)
    assert (single.wall_s, single.ttft_s, single.tpot_s) == (5.0, 1.0, 0.5)
    assert engine.version == "fake 2"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: state(child) == "T")  # stopped, though it left the session of its parent
    assert engine.log.read_text() == "this is no answer\n"


def test_an_engine_over_the_limit_is_ended_and_can_be_used_again(fake: Callable[[str], Engine], tmp_path: Path) -> None:
    engine = fake("hang")
    with pytest.raises(EngineError, match="> 0 s"):
        engine.run(FEW, 0, limit_s=0.2)
    assert not is_alive(int((tmp_path / "child").read_text()))
    assert engine.run(FEW[:1], 0, limit_s=20.0).wall_s == 5.0


@pytest.mark.parametrize(
    ("mode", "message"),
    [("die", "it ended: out of luck"), ("short", "request 0 has 1 tokens, not 2"), ("no model", "OSError: no model")],
)
def test_what_an_engine_fails_at_is_said(fake: Callable[[str], Engine], mode: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        fake(mode).run(FEW, 0, limit_s=20.0)


def test_rounds_take_turns_and_a_failure_takes_one_engine_out(fake: Callable[[str], Engine]) -> None:
    said: list[str] = []
    good, bad = fake(""), fake("die")
    bad.peer = dataclasses.replace(bad.peer, name="bad")
    first, second = run_rounds([good, bad], "W3", 3, 20.0, said.append)
    assert [r.wall_s for r in first.repetitions] == [64 * (544 + 32) + 512] * 3
    assert second.failure == "failed: it ended: out of luck"
    assert second.repetitions == []
    assert [line.split(":")[0] for line in said] == ["W3 fake", "W3 bad", "W3 fake 1/3", "W3 fake 2/3", "W3 fake 3/3"]


def test_rounds_go_back_and_forth() -> None:
    order: list[str] = []

    class Instant:
        def __init__(self, name: str) -> None:
            self.peer = dataclasses.replace(PEERS["quire"], name=name)

        def run(self, requests: list[BenchRequest], prefix: int, limit_s: float) -> Repetition:
            order.append(self.peer.name)
            return Repetition(1.0, None, None, 0.0)

    run_rounds([Instant("a"), Instant("b")], "W2", 2, 1.0, silent)  # type: ignore[list-item]
    assert order == ["a", "b", "a", "b", "b", "a"]


def test_starts_are_repeated_until_one_fails() -> None:
    def broken() -> float:
        raise EngineError("> 1 s")

    good, bad = measure_starts([("a", lambda: 2.0), ("b", broken)], 2, "engine", silent)
    assert (good.seconds, bad.seconds, bad.failure) == ([2.0, 2.0], [], "> 1 s")


def test_the_start_of_an_engine_is_timed_and_leaves_none(fake: Callable[[str], Engine], tmp_path: Path) -> None:
    assert start_engine(fake("")) > 0
    assert not is_alive(int((tmp_path / "child").read_text()))


# -- servers ------------------------------------------------------------------------------------------------------


def server(tmp_path: Path, name: str, mode: str = "") -> Server:
    command = [sys.executable, str(FAKE_SERVER), mode]
    peer = Peer(name, name, "", lambda p, m: p.home, server=lambda place, model, port: [*command, str(port)])
    return Server(peer, Place(tmp_path, (0,)), "m", tmp_path, start_limit_s=20.0)


def test_servers_are_loaded_in_turn_at_shares_of_the_smaller_capacity(tmp_path: Path) -> None:
    servers = [server(tmp_path, "quire"), server(tmp_path, "vllm"), server(tmp_path, "bad", "end")]
    said: list[str] = []
    try:
        results = measure_serving(servers, 1, seconds=0.0, say=said.append)
    finally:
        for one in servers:
            one.close()
    good, other, bad = results
    assert good.capacity is not None
    assert other.capacity is not None
    smaller = min(good.capacity, other.capacity)
    assert list(good.loads) == list(other.loads) == [float(f"{share * smaller:.2g}") for share in (0.5, 0.9)]
    assert all(load["num_requests"] == 32 for loads in good.loads.values() for load in loads)
    assert bad.failure == "failed: the server ended: out of luck"
    rows = serving_rows("tiny", results)
    assert len(rows) == 1 + 2 * 4
    assert all((row.figures["quire"].value or 0) > 0 for row in rows)
    assert rows[1].figures["bad"].failure == bad.failure
    assert [line.split(" ")[1] for line in said[3:]] == ["quire", "vllm", "quire", "vllm"]


def test_given_rates_are_taken(tmp_path: Path) -> None:
    one = server(tmp_path, "quire")
    try:
        (result,) = measure_serving([one], 1, 0.0, silent, [500.0])
    finally:
        one.close()
    assert list(result.loads) == [500.0]


def test_a_server_that_refuses_requests_has_no_figures(tmp_path: Path) -> None:
    one = server(tmp_path, "quire", "refuse")
    with pytest.raises(EngineError, match="HTTP 400"):
        start_server(one)


def test_the_size_of_a_load() -> None:
    assert (load_size(0.5, 30.0), load_size(10.0, 30.0), load_size(1000.0, 30.0)) == (32, 300, 600)


def test_control_c_leaves_no_process(tmp_path: Path) -> None:
    """A run of the real command whose only engine is the fake one, interrupted in the middle of a repetition."""
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import dataclasses, sys
from benchmarks.versus import __main__, comparison, peers
class FakePeer(peers.Peer):
    def missing(self, place, model):
        return None
    def driver_command(self, place, model):
        return [sys.executable, {str(FAKE_DRIVER)!r}, "--model", model, "--threads", "1"]
peers.PEERS.clear()
peers.PEERS["quire"] = FakePeer("quire", "Fake", "", lambda place, model: place.home)
comparison._measure_ceilings = lambda: None
sys.exit(__main__.main(["--home", {str(tmp_path)!r}, "--workloads", "W2"]))
"""
    )
    child_file = tmp_path / "child"
    root = FAKE_DRIVER.parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "FAKE_MODE": "hang",
        "FAKE_CHILD": str(child_file),
    }
    run = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until(lambda: child_file.exists() and child_file.read_text() != "")
    child = int(child_file.read_text())
    driver = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0, output
    assert not is_alive(child)
    assert not is_alive(driver)
