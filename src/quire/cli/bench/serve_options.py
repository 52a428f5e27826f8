"""The flags of `quire bench serve`, and the plan that they make together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quire.cli.bench.load import Endpoint
from quire.cli.bench.outcomes import ServiceLevel
from quire.cli.bench.serve_run import LoadPlan
from quire.cli.bench.workloads import Lengths
from quire.cli.command_line import Arguments, Option
from quire.cli.option_groups import SERVER_GROUP, remote_options
from quire.config.flags import parse_json_object
from quire.errors import ConfigError

DEFAULT_INPUT_LEN = Lengths.parse("256")
DEFAULT_OUTPUT_LEN = Lengths.parse("128")
DEFAULT_PROBE_S = 20.0
_ENDPOINTS = {
    "completions": Endpoint.COMPLETIONS,
    "chat": Endpoint.CHAT,
    Endpoint.COMPLETIONS.value: Endpoint.COMPLETIONS,
    Endpoint.CHAT.value: Endpoint.CHAT,
}
_BACKENDS = {"openai": Endpoint.COMPLETIONS, "vllm": Endpoint.COMPLETIONS, "openai-chat": Endpoint.CHAT}


def serve_options() -> list[Option]:
    """Returns all flags except the engine's."""
    what, when, report = "What is sent", "When", "Report"
    return [
        *remote_options("The server to load; without it one of --model is started, with the engine flags below."),
        Option(name="host", help="With --port: the same as --url http://HOST:PORT, as in vLLM.", group=SERVER_GROUP),
        Option(name="port", help="See --host. (default: 8000)", parse=int, group=SERVER_GROUP),
        Option(name="backend", help="The same as --endpoint, as in vLLM.", choices=tuple(_BACKENDS), group=what),
        Option(name="endpoint", help="Route of the requests (also by path).", choices=tuple(_ENDPOINTS),
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
               "their own ones.", parse=int, default=0, validate=_at_least(0, "--prefix-len"), group=what),
        Option(name="num_prefixes", help="Number of such prefixes.", parse=int, default=1,
               validate=_at_least(1, "--num-prefixes"), group=what),
        Option(name="ignore_eos", help="Outputs have their full length.", is_switch=True, default=True, group=what),
        Option(name="extra_body", help="Fields for every request's body.", parse=parse_json_object, metavar="JSON",
               group=what),
        Option(name="num_prompts", help="Requests of a load. (default: the file's, or 100)", parse=int,
               validate=_at_least(1, "--num-prompts"), group=when),
        Option(name="duration", help="Instead: seconds of requests; needs a rate.", parse=float,
               validate=_positive("--duration"), group=when),
        Option(name="request_rate", help="Requests per second; inf: all at once. (default: inf)", parse=float,
               validate=_positive("--request-rate", allows_inf=True), group=when),
        Option(name="burstiness", help="1: Poisson arrivals; below: bursts (gamma); above: more even; inf: equal gaps.",
               parse=float, default=1.0, validate=_positive("--burstiness", allows_inf=True), group=when),
        Option(name="max_concurrency", help="Largest number of open requests; without a rate, a closed loop.",
               parse=int, validate=_at_least(1, "--max-concurrency"), group=when),
        Option(name="trace_speed", help="Factor by which a trace is played faster.", parse=float, default=1.0,
               validate=_positive("--trace-speed"), group=when),
        Option(name="sweep_concurrency", help="A load for each: 1,2,4,8.", parse=_parse_counts, group=when),
        Option(name="sweep_rate", help="A load for each: 1,2,4,8.", parse=_parse_rates, group=when),
        Option(name="find_saturation", help="Search the highest rate at which --saturation-share of the requests meet "
               "--goodput; without --goodput, at which answers end as fast as requests come.", is_switch=True,
               default=False, group=when),
        Option(name="saturation_share", help="See --find-saturation.", parse=float, default=0.9,
               validate=_share, group=when),
        Option(name="saturation_tolerance", help="Relative width of the bracket at which the search ends.", parse=float,
               default=0.1, validate=_positive("--saturation-tolerance"), group=when),
        Option(name="num_warmups", help="Requests before the first load, which are not counted.", parse=int, default=4,
               validate=_at_least(0, "--num-warmups"), group=when),
        Option(name="seed", help="Seed of arrivals, lengths and tokens.", parse=int, default=0, group=when),
        Option(name="client_timeout_s", help="Longest wait for an answer.", parse=float, default=600.0,
               validate=_positive("--client-timeout-s"), group=when),
        Option(name="goodput", help="Bounds in ms that a good answer meets: ttft:200 tpot:50 e2e:3000.",
               takes_many=True, is_repeatable=True, metavar="METRIC:MS", group=report),
        Option(name="save_result", help="Also write the figures to this file.", metavar="FILE.json", group=report),
        Option(name="save_detailed", help="Include every request's times in it.", is_switch=True, default=False,
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


def load_plan(args: Arguments) -> LoadPlan:
    """Returns the plan that the flags describe. Raises ConfigError where they contradict one another."""
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


def server_url(args: Arguments) -> str | None:
    """Returns the URL of the running server; None where one is to be started. Raises ConfigError."""
    if args["host"] is None and args["port"] is None:
        url: str | None = args["url"]
        return url
    if args["url"] is not None:
        raise ConfigError("--url and --host or --port both name a server; give one")
    host = args["host"] or "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{8000 if args['port'] is None else args['port']}"


def endpoint_of(args: Arguments) -> Endpoint:
    """Returns --endpoint, or the endpoint of --backend. Raises ConfigError where they contradict one another."""
    if args["backend"] is None:
        return _ENDPOINTS[args["endpoint"]]
    endpoint = _BACKENDS[args["backend"]]
    if "endpoint" in args.given and _ENDPOINTS[args["endpoint"]] is not endpoint:
        raise ConfigError(f"--backend {args['backend']} and --endpoint {args['endpoint']} contradict one another")
    return endpoint
