"""`quire pull`: downloads a model from the hub into its cache, so that later starts need no network."""

from __future__ import annotations

from pathlib import Path

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.config.hub import check_room
from quire.config.model import is_hub_id, resolve_model_dir
from quire.errors import ConfigError


def command_line() -> CommandLine:
    return CommandLine(
        "quire pull",
        "Download a model's safetensors, configuration and tokenizer into the cache of huggingface_hub.",
        hub_options(),
        Positional("model", "The model: owner/name."),
        "A download that broke off is resumed. Pickled weights (*.bin) and code (*.py) are never fetched.",
    )


def hub_options() -> list[Option]:
    """Returns the flags of commands that use the hub's cache."""
    return [
        Option(name="revision", help="Branch, tag or commit; the default branch without it."),
        Option(name="hf_token", help="Token for the hub; HF_TOKEN does the same, and no ps shows it.", metavar="TOKEN"),
        Option(name="download_dir", help="Directory of the cache, if it is not the hub's own.", metavar="DIR"),
    ]


def run(args: Arguments) -> int:
    """Downloads the model and prints its directory. Raises ConfigError."""
    model, revision, directory = args["model"], args["revision"], args["download_dir"]
    if model is None or not is_hub_id(model) or Path(model).exists():
        raise ConfigError(f"quire pull takes a hub id, which looks like owner/name; got {model!r}")
    check_room(model, revision, args["hf_token"], directory)
    print(resolve_model_dir(model, revision, directory, token=args["hf_token"]))
    return 0
