"""`quire bench serve`: loads a server, Quire's or another, from outside (docs/benchmarking.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli.bench.datasets import (
    Dataset,
    Material,
    RandomDataset,
    TraceDataset,
    find_material,
    read_custom,
    read_sharegpt,
    read_trace,
)
from quire.cli.bench.load import Endpoint, Sender
from quire.cli.bench.outcomes import LATENCIES, Level, Outcome, client_warning, draft_lines, latency_lines
from quire.cli.bench.plots import check_plot_path, run_charts, sweep_charts, write_plot
from quire.cli.bench.serve_options import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    endpoint_of,
    load_plan,
    serve_options,
    server_url,
)
from quire.cli.bench.serve_run import LoadPlan, LoadRunner, ServeRun
from quire.cli.bench.startup import flag_words, own_server
from quire.cli.command_line import Arguments, CommandLine
from quire.cli.machine import cpu_facts
from quire.cli.option_groups import engine_args, engine_options, validate_remote
from quire.cli.remote.protocol import ModelCard, ServerAddress, given_api_key
from quire.cli.server_watch import Metrics
from quire.cli.terminal import Style, write_file
from quire.errors import ConfigError, QuireError
from quire.resolve import resolve

_ROWS = (*LATENCIES, ("TTFT, sent", "sent_ttft_ms"), ("end to end, sent", "sent_e2e_ms"))
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
TEMPLATE_ROOM = 64
"""Tokens that a chat template may add to a prompt."""
METRICS_LIMIT_S = 10.0
"""Longest wait for a server's metrics, without which there are no figures of speculation."""


def command_line() -> CommandLine:
    return CommandLine(
        "quire bench serve",
        "Send requests on a schedule to a running server (--url), or to one that is started and ended for it, and "
        "measure what its users would see.",
        [*serve_options(), *engine_options(without=("seed",))],
        epilog="Exit code 1: some request failed. Ctrl-C ends the load and reports what there is.",
    )


def run(args: Arguments) -> int:
    plan = load_plan(args)
    for path in args["plot"] or ():
        check_plot_path(Path(path))
    _check_result_path(args["save_result"])
    read_dataset = dataset_reader(args)
    with _server(args) as (url, key):
        address = ServerAddress.parse(url)
        with asyncio.Runner(loop_factory=resolve("uvloop:new_event_loop")) as runner:
            card, done = runner.run(_measure(args, address, key, plan, read_dataset))
    return _report(args, address, card, plan, done)


def dataset_reader(args: Arguments) -> Callable[[Material, ModelCard], Dataset]:
    """Reads the file, if there is one, at once; the dataset is made when the server's words are known."""
    name, path = args["dataset_name"], args["dataset_path"]
    if (path is None) != (name == "random"):
        raise ConfigError(f"--dataset-name {name} needs {'no ' if path else ''}--dataset-path")
    is_chat = endpoint_of(args) is Endpoint.CHAT
    seed, output_len = args["seed"], args["output_len"]
    if name == "sharegpt":
        conversations = read_sharegpt(Path(path), output_len, seed)
        return lambda material, card: conversations
    if name == "custom":
        rows = read_custom(Path(path), output_len or DEFAULT_OUTPUT_LEN, seed)
        rows.check_endpoint(is_chat=is_chat)
        return lambda material, card: rows
    if name == "trace":
        trace = read_trace(Path(path))
        return lambda material, card: TraceDataset(
            trace, material, is_chat or not material.token_ids, seed, args["trace_speed"]
        )
    return lambda material, card: _random_dataset(args, material, card, is_chat or not material.token_ids)


def _random_dataset(args: Arguments, material: Material, card: ModelCard, as_text: bool) -> RandomDataset:
    input_len, output_len = args["input_len"] or DEFAULT_INPUT_LEN, args["output_len"] or DEFAULT_OUTPUT_LEN
    room = card.max_model_len
    if room is not None:
        room -= TEMPLATE_ROOM if as_text else 0
        needed = args["prefix_len"] + (input_len.longest or 1) + (output_len.longest or 1)
        if needed > room:
            raise ConfigError(
                f"--prefix-len, --input-len and --output-len take up to {needed} tokens; {card.id} has room for {room}"
            )
    return RandomDataset(
        material=material,
        as_text=as_text,
        input_len=input_len,
        output_len=output_len,
        prefix_len=args["prefix_len"],
        num_prefixes=args["num_prefixes"],
        seed=args["seed"],
        max_model_len=room,
    )


@contextlib.contextmanager
def _server(args: Arguments) -> Iterator[tuple[str, str | None]]:
    """Yields (URL, API key) of the server to load."""
    url = server_url(args)
    if url is not None:
        validate_remote(args)
        yield url, given_api_key(args["api_key"])
        return
    if args["api_key"] is not None:
        raise ConfigError("--api-key is for a server that runs: it needs --url")
    model = engine_args(args).create_engine_config("serving").model_config
    print(f"starting quire serve with {model.name} ...", file=sys.stderr, flush=True)
    with own_server([word for word in flag_words(args) if not word.startswith("--seed=")]) as place:
        yield place


async def _measure(
    args: Arguments,
    address: ServerAddress,
    key: str | None,
    plan: LoadPlan,
    read_dataset: Callable[[Material, ModelCard], Dataset],
) -> tuple[ModelCard, ServeRun]:
    client = resolve("quire.cli.remote.client:HttpClient")(address, key)
    try:
        card = await client.find_model(args.given.get("model") if server_url(args) is not None else None)
        is_synthetic = args["dataset_name"] in ("random", "trace")
        material = await find_material(client, card.id) if is_synthetic else Material()
        dataset = read_dataset(material, card)
        sender = Sender(
            client,
            endpoint_of(args),
            card.id,
            ignore_eos=args["ignore_eos"],
            fields=args["extra_body"],
        )

        async def read_metrics() -> Metrics | None:
            try:
                return Metrics(await client.get_text("/metrics", limit_s=METRICS_LIMIT_S))
            except QuireError:  # a server need not have any
                return None

        def report(words: str) -> None:
            print(words, file=sys.stderr, flush=True)

        runner = LoadRunner(sender.send, dataset, plan, report, read_metrics)
        return card, await runner.run()
    finally:
        await client.close()


# -- the report -------------------------------------------------------------------------------------------------------


def _report(args: Arguments, address: ServerAddress, card: ModelCard, plan: LoadPlan, done: ServeRun) -> int:
    facts = _facts(args, address, card)
    heading = f"serve of {card.id} at {address}: {facts['endpoint']}, {facts['dataset']}" + (
        f", {facts['input_len']} + {facts['output_len']} tokens" if "input_len" in facts else ""
    )
    text = format_run(heading, done)
    content = to_json(facts, done, is_detailed=args["save_detailed"])
    print(json.dumps(content) if args["json"] else text)
    style = Style(sys.stderr)
    for warning in warnings(done.levels):
        print(style.paint(f"warning: {warning}", "yellow"), file=sys.stderr)
    if args["save_result"] is not None:
        write_file(args["save_result"], json.dumps(content, indent=2) + "\n", "--save-result")
    is_sweep = len(done.levels) > 1
    charts = sweep_charts(done.levels, plan.slo) if is_sweep else run_charts(done.levels[0])
    for path in args["plot"] or ():
        write_plot(Path(path), f"quire bench serve: {card.id}", text, charts)
    if done.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if done.num_failed or not done.levels[-1].result.answered else 0


def _facts(args: Arguments, address: ServerAddress, card: ModelCard) -> dict[str, Any]:
    cpu = cpu_facts()
    facts = {
        "benchmark": "serve",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quire": __version__,
        "url": str(address),
        "model": card.id,
        "endpoint": "chat" if endpoint_of(args) is Endpoint.CHAT else "completions",
        "dataset": args["dataset_name"],
        "burstiness": "inf" if math.isinf(args["burstiness"]) else args["burstiness"],
        "seed": args["seed"],
        "client_cpu": cpu["cpu"],
        "client_cores": cpu["usable_cores"],
    }
    if args["dataset_name"] == "random":
        facts["input_len"] = str(args["input_len"] or DEFAULT_INPUT_LEN)
        facts["output_len"] = str(args["output_len"] or DEFAULT_OUTPUT_LEN)
        facts["prefix_len"] = args["prefix_len"]
    return facts


def _check_result_path(path: str | None) -> None:
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"--save-result {path}: there is no directory {Path(path).parent}")


def format_run(heading: str, run: ServeRun) -> str:
    """Returns the whole report."""
    levels = run.levels
    if run.saturation is not None:
        levels = sorted(levels, key=lambda level: level.rate or math.inf)
    body = format_level(levels[0]) if len(levels) == 1 else format_sweep(levels)
    lines = [heading, *body, *_saturation(run)]
    lines += [f"  failed: {words}" for words in failure_lines(levels)]
    if run.was_interrupted:
        lines.append(f"  stopped with Ctrl-C; {run.levels[-1].result.num_unfinished} requests had not ended")
    return "\n".join(lines)


def format_level(level: Level) -> list[str]:
    """Returns the lines of one load."""
    f = level.figures
    failed = f", {f['num_failed']} failed" if f["num_failed"] else ""
    cached = f" ({f['cached_tokens']} cached)" if f["cached_tokens"] else ""
    lines = [
        f"  {level.name}: {f['num_requests']} requests{failed}, {f['prompt_tokens']} prompt{cached} + "
        f"{f['output_tokens']} output tokens in {f['wall_s']:.2f} s",
        f"  {'requests':<22}{f['requests_per_s']:>12.2f} /s   ({f['peak_in_flight']} in flight at most)",
        f"  {'output':<22}{f['output_tokens_per_s']:>12.1f} tok/s",
        f"  {'prompt + output':<22}{f['total_tokens_per_s']:>12.1f} tok/s",
    ]
    if "goodput" in f:
        goodput = f["goodput"]
        bounds = " ".join(f"{name}:{bound:g}" for name, bound in goodput["bounds_ms"].items())
        lines.append(
            f"  {'goodput':<22}{goodput['requests_per_s']:>12.2f} /s   ({goodput['share']:.1%} within {bounds})"
        )
    if "speculative_decoding" in f:
        lines += draft_lines(f["speculative_decoding"])
    lines += ["", *latency_lines(f, _ROWS)]
    lag = f["client"]["lag_ms"].get("p99", 0.0)
    lines += ["", f"  the client took {f['client']['cpu_share']:.1%} of a core, and sent {lag:.1f} ms late at p99"]
    return lines


def format_sweep(levels: Sequence[Level]) -> list[str]:
    """Returns a table with a row per load."""
    has_goodput = any("goodput" in level.figures for level in levels)
    columns = ["requests/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99", "failed"]
    columns += ["within"] if has_goodput else []
    has_drafts = any("speculative_decoding" in level.figures for level in levels)
    columns += ["accepted", "per step"] if has_drafts else []
    width = max(len("offered"), *(len(level.name) for level in levels))
    lines = [f"  {'offered':<{width}}" + "".join(f"{column:>11}" for column in columns)]
    for level in levels:
        f = level.figures
        cells = [f"{f['requests_per_s']:.2f}", f"{f['output_tokens_per_s']:.1f}"]
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            cells += [f"{f[key][q]:.1f}" if f[key] else "-" for q in ("p50", "p99")]
        cells.append(str(f["num_failed"]))
        if has_goodput:
            cells.append(f"{f['goodput']['share']:.1%}")
        if has_drafts:
            drafts = f.get("speculative_decoding") or {"num_drafts": 0}
            shown = (
                [f"{drafts['acceptance_rate']:.1%}", f"{drafts['mean_acceptance_length']:.2f}"]
                if drafts["num_drafts"]
                else ["-", "-"]
            )
            cells += shown
        lines.append(f"  {level.name:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def failure_lines(levels: Sequence[Level]) -> list[str]:
    """Returns, per kind of failure over all loads, its count and the first one's message."""
    kinds: dict[str, dict[str, Any]] = {}
    for level in levels:
        for kind, failure in level.figures["failures"].items():
            kinds.setdefault(kind, {"count": 0, "first": failure["first"]})["count"] += failure["count"]
    return [f"{failure['count']} {kind}: {failure['first']}" for kind, failure in kinds.items()]


def warnings(levels: Sequence[Level]) -> list[str]:
    """Returns what puts the figures into question."""
    found = [(level, client_warning(level.figures)) for level in levels]
    return [f"{level.name}: {words}" for level, words in found if words is not None]


def _saturation(run: ServeRun) -> list[str]:
    if run.saturation is None:
        return []
    sustained, failed = run.saturation
    if sustained is None:
        return ["", f"  no rate was sustained: {failed:g} requests/s was still too much" if failed else ""]
    above = f"; {failed:g} was too much" if failed is not None else ", the highest that was tried"
    return ["", f"  saturation: {sustained:g} requests/s was sustained{above}"]


def to_json(facts: dict[str, Any], done: ServeRun, *, is_detailed: bool) -> dict[str, Any]:
    """Returns the content of --save-result and --json."""
    loads = []
    for level in done.levels:
        load: dict[str, Any] = {"request_rate": level.rate, "max_concurrency": level.concurrency, **level.figures}
        if is_detailed:
            load["requests"] = [_request_row(o, level.result.start_s) for o in level.result.outcomes]
        loads.append(load)
    content = {**facts, "was_interrupted": done.was_interrupted, "loads": loads}
    if done.saturation is not None:
        sustained, failed = done.saturation
        content["saturation"] = {"sustained_requests_per_s": sustained, "too_much_requests_per_s": failed}
    return content


def _request_row(outcome: Outcome, start_s: float) -> dict[str, Any]:
    timing = outcome.timing

    def since_start(stamp: float | None) -> float | None:
        return None if stamp is None else round(stamp - start_s, 6)

    return {
        "intended_s": since_start(outcome.intended_s),
        "sent_s": since_start(timing.added_s),
        "first_token_s": since_start(timing.first_token_s),
        "end_s": since_start(outcome.end_s),
        "prompt_tokens": timing.num_prompt_tokens,
        "output_tokens": timing.num_output_tokens,
        "gaps_s": [round(gap, 6) for gap in timing.gaps_s],
        "failure": None if outcome.failure is None else outcome.failure.kind,
    }
