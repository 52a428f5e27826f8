"""`quire info`: what would be loaded, and whether it fits, before loading it."""

from __future__ import annotations

import json
from typing import Any

from quire.cli.command_line import CommandLine
from quire.cli.engine_options import engine_args, engine_options
from quire.cli.model_report import make_report
from quire.cli.options import Arguments, Option, Positional
from quire.cli.terminal import human_bytes, human_count

EXIT_PROBLEM = 2


def command_line() -> CommandLine:
    """The arguments of `quire info`."""
    return CommandLine(
        "quire info",
        "Print what loading a model would mean on this machine: size, memory, blocks and limits. Loads nothing.",
        [Option(name="json", help="Print one JSON object.", is_switch=True, default=False), *engine_options()],
        Positional("model_name", "The model, as --model has it."),
        "Exit code 2 if the model could not be served as asked.",
    )


def run(args: Arguments) -> int:
    """Print the report. Returns 2 if something stands in the way."""
    named = {"model": args["model_name"]} if args["model_name"] is not None else {}
    report = make_report(engine_args(args, **named).create_engine_config())
    print(json.dumps(report, indent=2) if args["json"] else format_report(report))
    return EXIT_PROBLEM if report["problems"] else 0


def format_report(report: dict[str, Any]) -> str:
    """The report as people read it."""
    lines = []
    for section, facts in report.items():
        if isinstance(facts, dict):
            lines.append(f"{section.replace('_', ' ')}:")
            lines += [f"  {name.replace('_', ' '):<24}{_shown(name, value)}" for name, value in facts.items()]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {human_bytes(count)}" for key, count in value.items())
    if name.endswith("bytes") or name == "bytes_per_token":
        return human_bytes(value)
    if isinstance(value, int) and not name.endswith("token"):
        return human_count(value) if name.endswith("parameters") else f"{value:,}"
    return str(value)
