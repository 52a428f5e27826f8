"""`quire plan`: predicts from a recording how many engines a load needs, under which policy, and what a death costs."""

from __future__ import annotations

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.option_groups import engine_options
from quire.cli.replay import CHANGES
from quire.config.engine_args import FLAGS
from quire.errors import ConfigError
from quire.resolve import resolve

MAX_ENGINES = 64


def _read_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r}: give numbers of engines, like 1,2,4") from None
    if not sizes or min(sizes) < 1 or max(sizes) > MAX_ENGINES:
        raise ConfigError(f"{text!r}: a plan has 1 to {MAX_ENGINES} engines")
    return sizes


def _read_outage(text: str) -> tuple[int, float]:
    engine, at, seconds = text.partition("@")
    try:
        outage = int(engine), float(seconds if at else "")
    except ValueError:
        raise ConfigError(f"{text!r}: give an engine and a time, like 0@30 (seconds)") from None
    if outage[0] < 0 or not 0 <= outage[1] < float("inf"):
        raise ConfigError(f"{text!r}: engines count from 0, and times from the first arrival")
    return outage


def _option(name: str, help: str, default: float | None, most: float | None = None) -> Option:
    """Returns an option whose value is a number above 0."""
    flag = "--" + name.replace("_", "-")

    def check(value: float) -> None:
        if not 0 < value < float("inf") or (most is not None and value > most):
            raise ConfigError(f"{flag} {value:g} must be above 0" + (f", and {most:g} at most" if most else ""))

    return Option(name=name, help=help, parse=float, default=default, metavar="X", validate=check)


def command_line() -> CommandLine:
    own = [
        Option(name="engines", help="Numbers of engines. Default: with an SLO the fewest that keep it are searched "
               "for, otherwise 1,2,4.", parse=_read_sizes, metavar="N,N"),
        _option("rate", "Requests per second, as a multiple of the recorded ones.", 1.0),
        Option(name="routing_policy", help="Policy that chooses the engine of a request.",
               choices=FLAGS["routing_policy"].choices, default=FLAGS["routing_policy"].default),
        _option("slo_ttft_ms", "Longest time to a first token.", None),
        _option("slo_tpot_ms", "Longest mean time per further token.", None),
        _option("slo_share", "Share of the requests that must keep to these.", 0.99, most=1.0),
        Option(name="outage", help="Kill ENGINE so many seconds after the first arrival; its requests go on at "
               "others. May be repeated.", parse=_read_outage, metavar="ENGINE@SECONDS", is_repeatable=True,
               default=[]),
        _option("restart_s", "Seconds until a killed engine is ready again.", 2.0),
        Option(name="json", help="Print one JSON object.", is_switch=True, default=False),
    ]  # fmt: skip
    return CommandLine(
        "quire plan",
        "Serve a recorded load (--record FILE) on several engines, on a virtual clock: real schedulers, KV caches and "
        "routing, no model. Each engine has a machine like the recorded one.",
        [*own, *engine_options(without=FLAGS.keys() - CHANGES.keys())],
        Positional("file", "The recording of one engine."),
        epilog="Exit code 1: the load needs more engines than were tried, or the recording cannot be replayed.",
    )


def run(args: Arguments) -> int:
    """Runs `plan_report.plan`, named by a string so that --help loads no engine."""
    code: int = resolve("quire.cli.plan_report:plan")(args)
    return code
