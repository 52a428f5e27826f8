"""Speculative decoding beside decoding alone, against goals, in one table.

    benchmarks/peers/setup models vllm                            # G9 needs vLLM, the others the checkpoints
    python -m benchmarks.speculation [--goals G1,G3] [--baseline CHECKOUT] [--update-docs]
    python -m benchmarks.speculation --from-json a.json b.json    # the table of earlier runs

| goal | what |
|---|---|
| G1, G2 | `half`, one stream: a drafter that knows the answer and errs with 20 and 5 % of its drafts |
| G3 | the same, always wrong; n-gram where nothing repeats, and where all that repeats goes on differently |
| G4 | workloads W2 and W4 of `benchmarks.versus`, with n-gram drafts |
| G5 | `demo` with `demo-draft`, questions that neither has seen, greedy and at temperature 1 |
| G6 | `demo`, n-gram: words to repeat, JSON from a sentence |
| G7 | microseconds of an n-gram proposal and of a token added to a suffix index |
| G8 | share of a model's drafts that are right at temperature 1: drawn with the target's random number, or likeliest |
| G9 | a text that is copied, one stream, n-gram, beside vLLM |
| G10 | a step without speculation, beside a checkout from before it (--baseline, with a .venv of its own) |

Every engine is a process of its own, frozen while another is measured. Turns go back and forth, and those that other
programs disturb are repeated; a ratio is the median of the turns' ratios. Outputs with and without speculation are the
same tokens, so times compare directly.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
from tools.demo_model import topics
from tools.demo_model.extraction import draw_extraction
from tools.demo_model.small_tasks import draw_words

from benchmarks.models import CACHE, make_copying_checkpoint
from benchmarks.versus.comparison import ROOT, say
from benchmarks.versus.engine import Engine, Repetition
from benchmarks.versus.peers import DEFAULT_HOME, PEERS, Peer, Place
from benchmarks.versus.table import update_page
from quire import LLM, SamplingParams
from quire.cli.bench.workloads import WORKLOADS, BenchRequest, IdRange
from quire.cli.machine import cpu_facts
from quire.config.model import DEMO_MODEL
from quire.frontend.text.tokenizer import Tokenizer
from quire.worker.sample.kernel import Ids
from quire.worker.sample.metadata import Rows
from quire.worker.spec_decode.draft_model import DraftModel
from quire.worker.spec_decode.drafter import DraftRow
from quire.worker.spec_decode.ngram import NgramDrafter
from quire.worker.spec_decode.suffix_index import make_suffix_store

PAGE = ROOT / "docs" / "performance.md"
ASSETS = ROOT / "src" / "quire" / "assets"
REPLAY = "benchmarks.replay_drafter:ReplayDrafter"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SHORT_NGRAM = NGRAM | {"num_speculative_tokens": 8, "prompt_lookup_min": 1}
DRAFT_MODEL = {"model": "demo-draft", "num_speculative_tokens": 4}
ANSWER_LEN = 128
DISTURBED = 0.1
"""Share of the cores that other programs may take in a turn before it is repeated."""
PAGE_LEN = 160
"""Tokens after which `copying` repeats itself."""


@dataclass(frozen=True)
class Row:
    """A line of the table. `values` are the turns'; the median of them is held against `goal`."""

    name: str
    what: str
    values: list[float]
    goal: float | None = None
    is_most: bool = False
    """True if values must not exceed the goal, instead of reaching it."""
    unit: str = "×"
    detail: str = ""
    failure: str | None = None

    @property
    def value(self) -> float:
        """The median of the turns."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Verdict: True if the goal is met; None if there is no goal or no value."""
        if self.goal is None or not self.values:
            return None
        return self.value <= self.goal if self.is_most else self.value >= self.goal


# -- engines and turns ------------------------------------------------------------------------------------------------


class Bench:
    """Starts engines when they are first used, and closes all of a goal's."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options = options
        self.reps: int = options.reps
        self.neighbours = 0.0
        """Largest share of the cores that other programs took in a turn that counts."""
        self._stack = stack
        self._place = Place(options.home, tuple(options.cpus), options.kv_cache_gib)

    def engine(
        self,
        model: str,
        drafting: dict[str, Any] | None = None,
        *,
        llm: dict[str, Any] | None = None,
        peer: str = "quire",
        params: dict[str, Any] | None = None,
        one_by_one: bool = False,
        environment: dict[str, str] | None = None,
        python: Path | None = None,
    ) -> Engine:
        """Returns an engine with a checkpoint of the peers, `demo` or `copying`."""
        options = {"speculative_config": drafting} if drafting else {}
        settings: dict[str, Any] = {"llm": options | (llm or {}), "params": params or {}}
        settings["one_by_one"] = one_by_one
        more = {"VERSUS_SETTINGS": json.dumps(settings), "PYTHONPATH": str(ROOT) if python is None else ""}
        base = PEERS[peer]
        own_checkpoints = {
            "demo": lambda: ASSETS / DEMO_MODEL,
            "copying": lambda: make_copying_checkpoint(CACHE, PAGE_LEN),
        }

        def checkpoint(place: Place, name: str) -> Path:
            return own_checkpoints[name]() if name in own_checkpoints else base.checkpoint(place, name)

        own = replace(
            base,
            checkpoint=checkpoint,
            environment=lambda place: {**base.environment(place), **more, **(environment or {})},
        )
        if python is not None:
            own = _OtherPython(**{**vars(own), "interpreter": python})
        if (why := own.missing(self._place, model)) is not None:
            raise MissingError(why)
        engine = Engine(own, self._place, model, self.options.home / "logs")
        words = [peer, model, *(str(v) for v in (drafting or {}).values()), *(llm or {}), "before" if python else ""]
        engine.log = engine.log.with_name("-".join(words).replace(":", "-") + ".log")
        self._stack.callback(engine.close)
        return engine

    def turns(
        self,
        engines: Sequence[Runnable],
        requests: Callable[[int], Sequence[BenchRequest]],
        reps: int | None = None,
        *,
        is_fresh: bool = False,
    ) -> list[list[Repetition]]:
        """Returns the repetitions of each engine, after two to warm up: `reps` turns of `requests(turn)`.

        Turns in which other programs disturb are repeated, each once at most; the quietest ones count. With `is_fresh`
        the engines start anew before each turn: where a process happens to lie in memory makes 5 % of difference.
        """
        reps = reps or self.reps

        def warm_up() -> None:
            for engine in [*engines, *engines]:
                engine.run(requests(-1), 0, self.options.limit_s)

        if not is_fresh:
            warm_up()
        turns: list[tuple[float, list[Repetition]]] = []
        most = reps if self.options.cpu_time else 2 * reps
        while len(turns) < most and sum(others < DISTURBED for others, _ in turns) < reps:
            number = len(turns)
            if is_fresh:
                for engine in engines:
                    engine.close()
                warm_up()
            order = list(enumerate(engines))
            done = {i: e.run(requests(number), 0, self.options.limit_s) for i, e in order[:: 1 - 2 * (number % 2)]}
            turns.append((max(each.neighbours for each in done.values()), [done[i] for i, _ in order]))
            words = ", ".join(f"{done[i].wall_s:.3f} s" for i, _ in order)
            say(f"{engines[-1].log.stem} {number + 1}/{reps}: {words}, others {turns[-1][0]:.0%}")
        turns = sorted(turns, key=lambda turn: turn[0])[:reps]
        self.neighbours = max(self.neighbours, turns[-1][0])
        return [[turn[i] for _, turn in turns] for i in range(len(engines))]


class Runnable(Protocol):
    """An engine, or one in a certain way."""

    @property
    def log(self) -> Path: ...

    def run(self, requests: Sequence[BenchRequest], prefix: int, limit_s: float) -> Repetition: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _OtherPython(Peer):
    """A peer with an interpreter of its own."""

    interpreter: Path = Path(sys.executable)

    def python(self, place: Place) -> Path:
        return self.interpreter


class MissingError(Exception):
    """A part that has to be installed is not there."""


def per_token(repetition: Repetition) -> float:
    """Returns the seconds per token after the first."""
    assert repetition.tpot_s is not None
    return repetition.tpot_s


def whole(repetition: Repetition) -> float:
    """Returns the seconds of all requests."""
    return repetition.wall_s


def processor(repetition: Repetition) -> float:
    """Returns the processor seconds of the engine."""
    return repetition.cpu_s


def ratios(off: list[Repetition], on: list[Repetition], seconds: Callable[[Repetition], float]) -> list[float]:
    """Returns how many times faster `on` is, turn by turn."""
    return [seconds(a) / seconds(b) for a, b in zip(off, on, strict=True)]


def in_words(off: list[Repetition], on: list[Repetition], seconds: Callable[[Repetition], float]) -> str:
    """Returns both medians."""
    a, b = (statistics.median(map(seconds, each)) for each in (off, on))
    if seconds is per_token:
        return f"{a * 1e3:.2f} → {b * 1e3:.2f} ms a token"
    return f"{a * 1e3:,.0f} → {b * 1e3:,.0f} ms"


# -- requests ---------------------------------------------------------------------------------------------------------


def one_stream(turn: int) -> list[BenchRequest]:
    """Returns W1, the same in every turn, so that a drafter can know the answer."""
    return WORKLOADS["W1"].make(0, IdRange(), None)


def to_copy(turn: int) -> list[BenchRequest]:
    """Returns a prompt for `copying` whose end it goes on with: tokens that stand in the prompt, then again."""
    rng = random.Random(turn)
    low, high = IdRange().low // PAGE_LEN + 1, IdRange().high // PAGE_LEN
    page = rng.randrange(low, high) * PAGE_LEN
    noise = [rng.randrange(high * PAGE_LEN, 2 * high * PAGE_LEN) for _ in range(256)]
    return [BenchRequest([*noise, *range(page, page + PAGE_LEN), page], ANSWER_LEN)]


def misleading(turn: int) -> list[BenchRequest]:
    """Returns a prompt for `copying` in which any two tokens of the answer stand, each time with another after them."""
    rng = random.Random(turn)
    page = rng.randrange(IdRange().low // PAGE_LEN + 1, IdRange().high // PAGE_LEN) * PAGE_LEN
    ids = [i for at in range(page, page + PAGE_LEN - 1) for i in (at, at + 1, rng.randrange(8192, 16384))]
    return [BenchRequest([*ids, page], ANSWER_LEN)]


def chats(questions: Sequence[str], most: int) -> list[BenchRequest]:
    """Returns the questions as `demo` reads them. It ends its answers by itself."""
    tokenizer = Tokenizer.from_dir(ASSETS / DEMO_MODEL)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in questions
    ]
    return [BenchRequest(list(tokenizer.encode(str(t), add_special_tokens=False)), most) for t in texts]


def held_out_questions(count: int) -> list[str]:
    """Returns questions about Quire in words that the demo models have not seen."""
    rng = random.Random(1)
    return [item.question for item in rng.sample(topics.held_written() + topics.held_templates(rng), count)]


def to_repeat(count: int) -> list[str]:
    """Returns lists of words to repeat that the demo models have not seen."""
    rng = random.Random(2)
    items = [draw_words(rng, held=True) for _ in range(4 * count)]
    return [item.question for item in items if item.kind == "repeat"][:count]


def to_extract(count: int) -> list[str]:
    """Returns sentences to write as JSON that the demo models have not seen."""
    rng = random.Random(3)
    return [draw_extraction(rng, held=True).question for _ in range(count)]


# -- goals ------------------------------------------------------------------------------------------------------------


def known_answer(bench: Bench, name: str, accuracy: float, drafts: int, goal: float) -> Row:
    """Compares `half` alone with `half` and a drafter of a given accuracy."""
    drafting = {"model": REPLAY, "num_speculative_tokens": drafts}
    on = bench.engine("half", drafting, environment={"REPLAY_ACCURACY": str(accuracy)})
    what = f"`half`, one stream, {accuracy:.0%} of drafts right, at most {drafts}"
    engines = [bench.engine("half"), on]
    return compare(bench, name, what, engines, one_stream, per_token, goal, is_fresh=accuracy == 0)


def compare(
    bench: Bench,
    name: str,
    what: str,
    engines: Sequence[Engine],
    requests: Callable[[int], Sequence[BenchRequest]],
    seconds: Callable[[Repetition], float],
    goal: float | None,
    reps: int | None = None,
    *,
    is_fresh: bool = False,
) -> Row:
    """Returns how many times faster the second engine is than the first."""
    off, on = bench.turns(engines, requests, reps, is_fresh=is_fresh)
    if bench.options.cpu_time:
        what, seconds = what + ", processor time", processor
    return Row(name, what, ratios(off, on, seconds), goal, detail=in_words(off, on, seconds))


def g1(bench: Bench) -> list[Row]:
    return [known_answer(bench, "G1", 0.8, 4, 2.3)]


def g2(bench: Bench) -> list[Row]:
    return [known_answer(bench, "G2", 0.95, 8, 4.0)]


def g3(bench: Bench) -> list[Row]:
    """Measures the losses of drafts that are wrong, and of looking for some where there are none."""
    wrong = known_answer(bench, "G3", 0.0, 4, 0.97)
    never = {"temperature": 1.0, "seed": 1}
    engines = [bench.engine("half", drafting, params=never) for drafting in (None, NGRAM)]
    what = "`half`, n-gram, nothing repeats"
    nothing = compare(bench, "G3", what, engines, one_stream, per_token, 0.97, is_fresh=True)
    engines = [bench.engine("copying", drafting) for drafting in (None, NGRAM)]
    what = "`copying`, n-gram, drafts always wrong"
    misled = compare(bench, "G3", what, engines, misleading, per_token, 0.97, is_fresh=True)
    return [wrong, nothing, misled]


def g4(bench: Bench) -> list[Row]:
    """Runs batches of random prompts with n-gram drafts."""
    rows = []
    for model, names, reps in (("tiny", ("W2", "W4"), 2 * bench.reps), ("half", ("W2",), 2)):
        engines = [bench.engine(model, drafting) for drafting in (None, NGRAM)]
        rows += [
            compare(bench, "G4", f"`{model}`, {name}, n-gram", engines, _workload(name), whole, 0.98, reps)
            for name in names
        ]
    return rows


def _workload(name: str) -> Callable[[int], Sequence[BenchRequest]]:
    return lambda turn: WORKLOADS[name].make(turn + 1, IdRange(), None)


def g5(bench: Bench) -> list[Row]:
    """Asks `demo` with its draft model."""
    requests = chats(held_out_questions(40), 128)
    rows = []
    for params, words, goal in (({}, "greedy", 1.3), ({"temperature": 1.0, "seed": 1}, "temperature 1", 1.15)):
        what = f"`demo` with `demo-draft`, held-out questions, {words}"
        engines = [_asked(bench, drafting, **params) for drafting in (None, DRAFT_MODEL)]
        rows.append(compare(bench, "G5", what, engines, lambda turn: requests, whole, goal, 2 * bench.reps))
    return rows


def g6(bench: Bench) -> list[Row]:
    """Lets `demo` copy with n-gram drafts; and answer questions, where there is nothing to copy."""
    rows = []
    engines = [_asked(bench, drafting) for drafting in (None, SHORT_NGRAM)]
    for words, questions, goal in (
        ("words to repeat", to_repeat(60), 1.5),
        ("JSON from a sentence", to_extract(60), 1.5),
        ("held-out questions", held_out_questions(40), None),
    ):
        requests = chats(questions, 128)
        turns = _always(requests)
        rows.append(compare(bench, "G6", f"`demo`, n-gram, {words}", engines, turns, whole, goal, 2 * bench.reps))
    return rows


def _always(requests: list[BenchRequest]) -> Callable[[int], Sequence[BenchRequest]]:
    return lambda turn: requests


def _asked(bench: Bench, drafting: dict[str, Any] | None, **params: Any) -> Engine:
    ends = {"ignore_eos": False, "min_tokens": 0}
    return bench.engine(DEMO_MODEL, drafting, params=ends | params, one_by_one=True)


def g7(bench: Bench) -> list[Row]:
    """Times model-free drafters on tokens as frequent as words are."""
    rng = np.random.default_rng(1)
    rows = []
    for size, most in ((8 << 10, 30.0), (128 << 10, 150.0)):
        ids = (rng.zipf(1.3, size) % 50_000).astype(np.int32)
        drafter = NgramDrafter(cast(Any, SimpleNamespace(drafting=SimpleNamespace(**NGRAM))))
        row = [DraftRow("a", 0, ids, size, size - 1, 4)]
        times = timed_calls(partial(drafter.propose, row), 1000, 20 * bench.reps)
        rows.append(Row("G7", f"n-gram proposal, {size >> 10}k tokens", times, most, True, " µs"))
    store = make_suffix_store(24, 256 << 20)
    index = store.open()
    assert index is not None
    tokens = iter((rng.zipf(1.3, 200_000) % 50_000).astype(np.int32)[:, None])
    times = timed_calls(lambda: store.extend(index, next(tokens)), 2000, 20 * bench.reps)
    rows.append(Row("G7", "suffix index, a token", times, 2.0, True, " µs"))
    return rows


def timed_calls(call: Callable[[], object], calls: int, rounds: int) -> list[float]:
    """Returns the microseconds of a call, in each round of calls."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls // rounds or 1):
            call()
        found.append((time.perf_counter() - start) / (calls // rounds or 1) * 1e6)
    return found


def g8(bench: Bench) -> list[Row]:
    """Counts right drafts in this process."""
    prompts = chats(held_out_questions(120), 128)
    same = acceptance(prompts)
    draw = DraftModel._draw

    def likeliest(self: DraftModel, logits: Any, rows: Rows, indices: Ids) -> Any:
        return draw(self, logits, rows, indices)._replace(token_ids=logits.argmax(dim=-1).numpy())

    DraftModel._draw = likeliest  # type: ignore[method-assign]
    try:
        greedy = acceptance(prompts)
    finally:
        DraftModel._draw = draw  # type: ignore[method-assign]
    words = f"{greedy:.1%} → {same:.1%} of drafts accepted"
    what = "`demo`, temperature 1: same random number instead of likeliest drafts"
    return [Row("G8", what, [100 * (same - greedy)], 3.0, unit=" points", detail=words)]


def acceptance(requests: Sequence[BenchRequest]) -> float:
    """Returns the share of drafts that were right, of four each, at temperature 1."""
    os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"
    try:
        llm = LLM(DEMO_MODEL, speculative_config=DRAFT_MODEL | {"adaptive": False}, disable_log_stats=False)
    finally:
        del os.environ["QUIRE_ENABLE_MULTIPROCESSING"]
    try:
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=r.output_len) for i, r in enumerate(requests)]
        llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
        counts = {m.name.rpartition(":")[2]: getattr(m, "value", 0) for m in llm.get_metrics()}
    finally:
        llm.shutdown()
    return float(counts["spec_decode_num_accepted_tokens"] / counts["spec_decode_num_draft_tokens"])


def g9(bench: Bench) -> list[Row]:
    """Lets Quire and vLLM copy with the same settings."""
    engines = [bench.engine("copying", NGRAM, peer=peer) for peer in ("vllm", "quire")]
    theirs, ours = bench.turns(engines, to_copy)
    medians = [ANSWER_LEN / statistics.median(map(whole, each)) for each in (theirs, ours)]
    detail = f"vLLM {medians[0]:.1f}, Quire {medians[1]:.1f} tokens/s"
    return [Row("G9", "`copying`, n-gram, beside vLLM", ratios(theirs, ours, whole), 1.5, detail=detail)]


def g10(bench: Bench) -> list[Row]:
    """Compares this checkout with one before speculation."""
    baseline: Path | None = bench.options.baseline
    if baseline is None:
        raise MissingError("needs --baseline CHECKOUT, with a .venv")
    before = bench.engine("tiny", python=baseline / ".venv" / "bin" / "python")
    engines = [before, bench.engine("tiny")]
    stream = compare(
        bench, "G10", "`tiny`, W1 per token, speculation off", engines, _workload("W1"), per_token, 0.99, 40
    )
    batch = compare(bench, "G10", "`tiny`, W4, speculation off", engines, _workload("W4"), whole, 0.99, 2 * bench.reps)
    return [stream, batch]


Goals = Mapping[str, Callable[[Bench], list[Row]]]
GOALS: Goals = {"G1": g1, "G2": g2, "G3": g3, "G4": g4, "G5": g5, "G6": g6, "G7": g7, "G8": g8, "G9": g9, "G10": g10}


# -- the report -------------------------------------------------------------------------------------------------------


def format_report(report: dict[str, Any]) -> str:
    """Returns the table with its conditions. What misses its goal is bold, and listed."""
    rows = [Row(**row) for row in report["rows"]]
    lines = ["| | what | goal | measured | |", "|---|---|--:|--:|---|"]
    lines += [f"| {row.name} | {row.what} | {_goal(row)} | {_measured(row)} | {row.detail} |" for row in rows]
    lost = [f"* {row.name}: {row.what}" for row in rows if row.is_met is False]
    verdict = ["Goals that are missed:", "\n".join(lost)] if lost else ["All goals are met."]
    conditions = f"{report['date']}. {report['cpu']}, {report['cpus']} cores, medians of turns ± half their range."
    disturbed = [f"{name} {100 * share:.0f} %" for name, share in report["neighbours"].items() if share >= DISTURBED]
    if disturbed:
        conditions += f"\nOther programs took up to these shares of the cores meanwhile: {', '.join(disturbed)}."
    return "\n\n".join([conditions, "\n".join(lines), *verdict])


def _goal(row: Row) -> str:
    return "" if row.goal is None else f"{'≤' if row.is_most else '≥'} {row.goal:g}{row.unit}"


def _measured(row: Row) -> str:
    if row.failure or not row.values:
        return row.failure or "not measured"
    spread = (max(row.values) - min(row.values)) / 2
    text = f"{row.value:.2f}{row.unit}" if len(row.values) == 1 else f"{row.value:.2f} ± {spread:.2f}{row.unit}"
    return f"**{text}**" if row.is_met is False else text


def measure(options: argparse.Namespace, goals: Goals = GOALS) -> dict[str, Any]:
    """Returns the report of the goals asked for, and writes it after each. A goal that cannot be measured has a row
    that says why."""
    report: dict[str, Any] = {}
    rows: list[Row] = []
    neighbours: dict[str, float] = {}
    for name in options.goals:
        with ExitStack() as stack:
            bench = Bench(options, stack)
            try:
                rows += goals[name](bench)
            except MissingError as e:
                rows.append(Row(name, "", [], failure=str(e)))
        neighbours[name] = bench.neighbours
        say(f"{name}: " + "; ".join(f"{row.what} {_measured(row)}" for row in rows if row.name == name))
        report = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "cpu": cpu_facts()["cpu"],
            "cpus": len(options.cpus),
            "neighbours": neighbours,
            "rows": [asdict(row) for row in rows],
        }
        options.output_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def merge(reports: Sequence[dict[str, Any]], goals: Goals = GOALS) -> dict[str, Any]:
    """Joins reports of one machine: of each row the last."""
    last = {(row["name"], row["what"]): (row, report["neighbours"]) for report in reports for row in report["rows"]}
    found = [last[key] for name in goals for key in last if key[0] == name]
    neighbours = {
        name: max((shares.get(name, 0.0) for row, shares in found if row["name"] == name), default=0.0)
        for name in goals
    }
    return {**reports[-1], "neighbours": neighbours, "rows": [row for row, _ in found]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="checkout from before speculation, for G10")
    return report_goals(parser, argv, GOALS, "speculation")


def report_goals(parser: argparse.ArgumentParser, argv: Sequence[str] | None, goals: Goals, section: str) -> int:
    """Adds the flags, measures, and prints the table. `section` names its markers in docs/performance.md."""
    parser.add_argument("--goals", default=",".join(goals), type=lambda text: text.split(","))
    parser.add_argument("--reps", type=int, default=5, help="turns; short ones have several times as many")
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="where benchmarks/peers/setup put everything")
    parser.add_argument("--cpus", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with one of --cpus; not for G9")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one repetition")
    parser.add_argument("--output-json", type=Path, default=Path(f"{section}.json"))
    parser.add_argument("--from-json", type=Path, nargs="+", help="measure nothing; the table of these files")
    parser.add_argument("--update-docs", action="store_true", help="put the table into docs/performance.md")
    options = parser.parse_args(argv)
    unknown = [name for name in options.goals if name not in goals]
    if unknown:
        parser.error(f"--goals: unknown {', '.join(unknown)}; known: {', '.join(goals)}")
    if options.from_json:
        report = merge([json.loads(path.read_text(encoding="utf-8")) for path in options.from_json], goals)
    else:
        os.sched_setaffinity(0, options.cpus)  # inherited by every process that is started here
        report = measure(options, goals)
    text = format_report(report)
    print(text)
    if options.update_docs:
        update_page(PAGE, text, section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
