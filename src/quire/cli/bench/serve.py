"""`quire bench serve`: load on a server, ours or another's, from outside (docs/benchmarking.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli.bench.datasets import Dataset, RandomDataset, TraceDataset, read_custom, read_sharegpt, read_trace
from quire.cli.bench.lengths import Lengths
from quire.cli.bench.outcomes import Outcome, ServiceLevel
from quire.cli.bench.own_server import own_server
from quire.cli.bench.plots import check_plot_path, write_plot
from quire.cli.bench.sending import Endpoint, Sender
from quire.cli.bench.serve_charts import run_charts, sweep_charts
from quire.cli.bench.serve_report import format_run, warnings
from quire.cli.bench.serve_run import LoadPlan, LoadRunner, ServeRun
from quire.cli.bench.startup import flag_words
from quire.cli.bench.words import Material, find_material
from quire.cli.command_line import CommandLine
from quire.cli.engine_options import engine_args, engine_options
from quire.cli.machine import cpu_facts
from quire.cli.options import Arguments, Option
from quire.cli.remote.address import ServerAddress
from quire.cli.remote.client import HttpClient, ModelCard, given_api_key
from quire.cli.remote.options import remote_options, validate_remote
from quire.cli.terminal import Style
from quire.config.flags import parse_json_object
from quire.errors import ConfigError
from quire.resolve import resolve

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
DEFAULT_INPUT_LEN = Lengths.parse("256")
DEFAULT_OUTPUT_LEN = Lengths.parse("128")
DEFAULT_PROBE_S = 20.0
TEMPLATE_ROOM = 64
"""Tokens that a chat template may add to a prompt."""
_ENDPOINTS = {
    "completions": Endpoint.COMPLETIONS,
    "chat": Endpoint.CHAT,
    Endpoint.COMPLETIONS.value: Endpoint.COMPLETIONS,
    Endpoint.CHAT.value: Endpoint.CHAT,
}


def command_line() -> CommandLine:
    """The arguments of `quire bench serve`."""
    return CommandLine(
        "quire bench serve",
        "Load a running server (--url), or one that is started for the purpose and ended after it, with requests that "
        "come when a schedule says, and measure what its users would see.",
        [*_own_options(), *engine_options(without=("seed",))],
        epilog="Exit code 1: some request failed. Ctrl-C ends the load and reports what there is.",
    )


def _own_options() -> list[Option]:
    what, when, report = "What is asked", "When", "Report"
    return [
        *remote_options("The server to load; without it one of --model is started, with the engine flags below."),
        Option(name="endpoint", help="Where requests go (also by path).", choices=tuple(_ENDPOINTS),
               default="completions", group=what),
        Option(name="dataset_name", alias="dataset", help="random: drawn lengths; sharegpt: conversations; custom: a "
               "JSON object per line; trace: lengths and times.", choices=("random", "sharegpt", "custom", "trace"),
               default="random", group=what),
        Option(name="dataset_path", help="The file of a dataset other than random.", metavar="FILE", group=what),
        Option(name="input_len", alias="random_input_len", help="Prompt tokens: 256, 100-500, normal:MEAN:SD, "
               "lognormal:MEAN:SIGMA, exponential:MEAN. (default: 256)", parse=Lengths.parse, group=what),
        Option(name="output_len", alias="random_output_len", help="Output tokens, in the same forms. (default: the "
               "file's, or 128)", parse=Lengths.parse, group=what),
        Option(name="prefix_len", alias="random_prefix_len", help="Tokens that random prompts have in common, before "
               "their own.", parse=int, default=0, validate=_at_least(0, "--prefix-len"), group=what),
        Option(name="num_prefixes", help="How many such prefixes there are.", parse=int, default=1,
               validate=_at_least(1, "--num-prefixes"), group=what),
        Option(name="ignore_eos", help="Outputs have their full length.", is_switch=True, default=True, group=what),
        Option(name="extra_body", help="Fields for every request's body.", parse=parse_json_object, metavar="JSON",
               group=what),
        Option(name="num_prompts", help="Requests of a load. (default: the file's, or 100)", parse=int,
               validate=_at_least(1, "--num-prompts"), group=when),
        Option(name="duration", help="Instead: requests of so many seconds; needs a rate.", parse=float,
               validate=_positive("--duration"), group=when),
        Option(name="request_rate", help="Requests per second; inf: all at once. (default: inf)", parse=float,
               validate=_positive("--request-rate", allows_inf=True), group=when),
        Option(name="burstiness", help="1: Poisson arrivals; below: bursts (gamma); above: more even; inf: equal gaps.",
               parse=float, default=1.0, validate=_positive("--burstiness", allows_inf=True), group=when),
        Option(name="max_concurrency", help="Most requests under way; without a rate, a closed loop.", parse=int,
               validate=_at_least(1, "--max-concurrency"), group=when),
        Option(name="trace_speed", help="Play a trace so many times faster.", parse=float, default=1.0,
               validate=_positive("--trace-speed"), group=when),
        Option(name="sweep_concurrency", help="A load for each: 1,2,4,8.", parse=_parse_counts, group=when),
        Option(name="sweep_rate", help="A load for each: 1,2,4,8.", parse=_parse_rates, group=when),
        Option(name="find_saturation", help="Search the highest rate at which --saturation-share of the requests meet "
               "--goodput; without --goodput, at which answers end as fast as requests come.", is_switch=True,
               default=False, group=when),
        Option(name="saturation_share", help="See --find-saturation.", parse=float, default=0.9,
               validate=_share, group=when),
        Option(name="saturation_tolerance", help="How near, relatively.", parse=float, default=0.1,
               validate=_positive("--saturation-tolerance"), group=when),
        Option(name="num_warmups", help="Requests before the first load, which are not counted.", parse=int, default=4,
               validate=_at_least(0, "--num-warmups"), group=when),
        Option(name="seed", help="Of arrivals, lengths and tokens.", parse=int, default=0, group=when),
        Option(name="client_timeout_s", help="Longest wait for an answer.", parse=float, default=600.0,
               validate=_positive("--client-timeout-s"), group=when),
        Option(name="goodput", help="Bounds in ms that a good answer meets: ttft:200 tpot:50 e2e:3000.",
               takes_many=True, is_repeatable=True, metavar="METRIC:MS", group=report),
        Option(name="save_result", help="Also write the figures to this file.", metavar="FILE.json", group=report),
        Option(name="save_detailed", help="With every request's times in it.", is_switch=True, default=False,
               group=report),
        Option(name="plot", help="Draw the figures. May be repeated.", metavar="FILE.html|.png", is_repeatable=True,
               group=report),
        Option(name="json", help="Print one JSON object instead of tables.", is_switch=True, default=False,
               group=report),
    ]  # fmt: skip


def _at_least(least: int, flag: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value < least:
            raise ConfigError(f"{flag} {value} is below {least}")

    return check


def _positive(flag: str, *, allows_inf: bool = False) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not value > 0 or (math.isinf(value) and not allows_inf):
            raise ConfigError(f"{flag} {value:g} is not a number above 0")

    return check


def _share(value: Any) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"--saturation-share {value:g} is not in (0, 1]")


def _parse_counts(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 1:
        raise ConfigError(f"{text}: the numbers must be 1 or more")
    return counts


def _parse_rates(text: str) -> list[float]:
    rates = [float(word) for word in text.split(",")]
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"{text}: the rates must be numbers above 0")
    return rates


def run(args: Arguments) -> int:
    """Load, measure and report."""
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


def load_plan(args: Arguments) -> LoadPlan:
    """What the flags say of when. Raises ConfigError where they contradict one another."""
    slo = ServiceLevel.parse(args["goodput"] or ())
    sweeps = [name for name in ("sweep_concurrency", "sweep_rate", "find_saturation") if args[name]]
    if len(sweeps) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in sweeps)
        raise ConfigError(f"{flags} cannot be combined: run one after the other")
    is_trace = args["dataset_name"] == "trace"
    if is_trace and (sweeps or args["request_rate"] is not None or args["duration"] is not None):
        raise ConfigError("a trace has its own times: --trace-speed changes them; no rate, sweep or duration")
    if args["find_saturation"] and (args["request_rate"] is not None or args["max_concurrency"] is not None):
        raise ConfigError("--find-saturation chooses the rates itself: no --request-rate, no --max-concurrency")
    if args["sweep_rate"] and args["request_rate"] is not None:
        raise ConfigError("--sweep-rate has the rates: no --request-rate beside it")
    if args["sweep_concurrency"] and args["max_concurrency"] is not None:
        raise ConfigError("--sweep-concurrency has the limits: no --max-concurrency beside it")
    rate = math.inf if args["request_rate"] is None else args["request_rate"]
    rates = args["sweep_rate"] or [rate]
    if args["duration"] is not None and not args["find_saturation"] and math.inf in rates:
        raise ConfigError("--duration needs --request-rate or --sweep-rate; all at once has --num-prompts")
    if args["duration"] is not None and args["num_prompts"] is not None:
        raise ConfigError("--duration and --num-prompts both say how many requests there are; give one")
    duration = args["duration"]
    if args["find_saturation"] and duration is None and args["num_prompts"] is None:
        duration = DEFAULT_PROBE_S
    return LoadPlan(
        rates=rates,
        concurrencies=args["sweep_concurrency"] or [args["max_concurrency"]],
        num_prompts=args["num_prompts"],
        duration_s=duration,
        burstiness=args["burstiness"],
        finds_saturation=args["find_saturation"],
        saturation_share=args["saturation_share"],
        saturation_tolerance=args["saturation_tolerance"],
        num_warmups=args["num_warmups"],
        seed=args["seed"],
        slo=slo,
        request_limit_s=args["client_timeout_s"],
    )


def dataset_reader(args: Arguments) -> Callable[[Material, ModelCard], Dataset]:
    """Reads the file, if there is one, at once; the dataset is made when the server's words are known."""
    name, path = args["dataset_name"], args["dataset_path"]
    if (path is None) != (name == "random"):
        raise ConfigError(f"--dataset-name {name} needs {'no ' if path else ''}--dataset-path")
    is_chat = _ENDPOINTS[args["endpoint"]] is Endpoint.CHAT
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
    """(URL, API key) of the server to load."""
    if args["url"] is not None:
        validate_remote(args)
        yield args["url"], given_api_key(args["api_key"])
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
    client = HttpClient(address, key)
    try:
        card = await client.find_model(args.given.get("model") if args["url"] is not None else None)
        is_synthetic = args["dataset_name"] in ("random", "trace")
        material = await find_material(client, card.id) if is_synthetic else Material()
        dataset = read_dataset(material, card)
        sender = Sender(
            client,
            _ENDPOINTS[args["endpoint"]],
            card.id,
            ignore_eos=args["ignore_eos"],
            fields=args["extra_body"],
        )
        runner = LoadRunner(sender.send, dataset, plan, lambda words: print(words, file=sys.stderr, flush=True))
        return card, await runner.run()
    finally:
        client.close()


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
        _write(Path(args["save_result"]), json.dumps(content, indent=2) + "\n", "--save-result")
    is_sweep = len(done.levels) > 1
    charts = sweep_charts(done.levels, plan.slo) if is_sweep else run_charts(done.levels[0])
    for path in args["plot"] or ():
        write_plot(Path(path), f"quire bench serve: {card.id}", text, charts)
    if done.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if done.num_failed or not done.levels[-1].result.answered else 0


def to_json(facts: dict[str, Any], done: ServeRun, *, is_detailed: bool) -> dict[str, Any]:
    """What --save-result and --json have."""
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


def _facts(args: Arguments, address: ServerAddress, card: ModelCard) -> dict[str, Any]:
    cpu = cpu_facts()
    facts = {
        "benchmark": "serve",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quire": __version__,
        "url": str(address),
        "model": card.id,
        "endpoint": "chat" if _ENDPOINTS[args["endpoint"]] is Endpoint.CHAT else "completions",
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


def _write(path: Path, text: str, flag: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror or e}") from None
