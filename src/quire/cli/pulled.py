"""`quire list`: the models in the hub's cache."""

from __future__ import annotations

import json
import time
from typing import Any

from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.pull import hub_options
from quire.cli.terminal import human_bytes
from quire.config.hub import cached_models


def command_line() -> CommandLine:
    own = [Option(name="json", help="Print one JSON array.", is_switch=True, default=False)]
    options = [option for option in hub_options() if option.name == "download_dir"]
    return CommandLine("quire list", "List the models that have been downloaded from the hub.", [*own, *options])


def run(args: Arguments) -> int:
    """Prints the models, the one used last first."""
    found = [
        {"model": model.name, "bytes": model.num_bytes, "used_time": model.used_time, "path": str(model.path)}
        for model in cached_models(args["download_dir"])
    ]
    print(json.dumps(found, indent=2) if args["json"] else format_models(found))
    return 0


def format_models(found: list[dict[str, Any]]) -> str:
    """Formats the models as a table."""
    if not found:
        return "no models; quire pull OWNER/NAME downloads one"
    width = max(len(row["model"]) for row in found)
    return "\n".join(
        f"{row['model']:<{width}}  {human_bytes(row['bytes']):>10}  "
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(row['used_time']))}"
        for row in found
    )
