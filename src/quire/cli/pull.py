"""`quire pull`, `quire list` and `quire rm`: models in the hub's cache, from which later starts need no network."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.terminal import human_bytes
from quire.config.hub import cached_models, delete_model, fetch_model, format_suggestions, is_hub_id
from quire.errors import ConfigError

SUGGESTIONS = "Small models to begin with (parameters; memory with a cache of 4096 tokens):"
_DIRECTORY = Option(name="download_dir", help="Directory of the cache, if it is not the hub's own.", metavar="DIR")


def command_line() -> CommandLine:
    return CommandLine(
        "quire pull",
        "Download a model's safetensors, configuration and tokenizer into the cache of huggingface_hub.",
        [
            Option(name="revision", help="Branch, tag or commit; the default branch without it."),
            Option(
                name="hf_token", help="Token for the hub; HF_TOKEN does the same, and no ps shows it.", metavar="TOKEN"
            ),
            _DIRECTORY,
        ],
        Positional("model", "The model: owner/name. Without it, small models to begin with are listed."),
        "A lost connection is resumed; a file that Ctrl-C stopped is fetched again. Pickled weights (*.bin) and code\n"
        "(*.py) are never fetched.\n\n"
        f"{SUGGESTIONS}\n{format_suggestions()}",
    )


def run(args: Arguments) -> int:
    """Downloads the model and prints its directory; without a model, prints some. Raises ConfigError."""
    model, revision, directory = args["model"], args["revision"], args["download_dir"]
    if model is None:
        more = "quire pull OWNER/NAME downloads one; quire info OWNER/NAME tells more of it before"
        print(f"{SUGGESTIONS}\n{format_suggestions()}\n{more}")
        return 0
    if not is_hub_id(model) or Path(model).exists():
        raise ConfigError(f"quire pull takes a hub id, which looks like owner/name; got {model!r}")
    print(fetch_model(model, revision, directory, args["hf_token"]))
    return 0


def list_command_line() -> CommandLine:
    options = [Option(name="json", help="Print one JSON array.", is_switch=True, default=False), _DIRECTORY]
    return CommandLine("quire list", "List the models that have been downloaded from the hub.", options)


def list_run(args: Arguments) -> int:
    """Prints the models, the one used last first."""
    found = [
        {
            "model": model.name,
            "bytes": model.num_bytes,
            "used_time": model.used_time,
            "path": str(model.path),
            "has_weights": model.has_weights,
        }
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
        + ("" if row["has_weights"] else f"  weights are missing: quire pull {row['model']}")
        for row in found
    )


def rm_command_line() -> CommandLine:
    return CommandLine(
        "quire rm",
        "Delete a model that was downloaded from the hub, all of its revisions.",
        [_DIRECTORY],
        Positional("model", "The model: owner/name."),
    )


def rm_run(args: Arguments) -> int:
    """Deletes the model and prints the space that is free again. Raises ConfigError."""
    if args["model"] is None:
        raise ConfigError("quire rm needs the name of a model, as in quire rm OWNER/NAME; quire list shows them")
    freed = delete_model(args["model"], args["download_dir"])
    print(f"deleted {args['model']}, {human_bytes(freed)}")
    return 0
