"""`quire pull`: downloads a model from the hub into its cache, so that later starts need no network."""

from __future__ import annotations

from pathlib import Path

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.config.hub import fetch_model, format_suggestions, is_hub_id
from quire.errors import ConfigError

SUGGESTIONS = "Small models to begin with (parameters; memory with a cache of 4096 tokens):"


def command_line() -> CommandLine:
    return CommandLine(
        "quire pull",
        "Download a model's safetensors, configuration and tokenizer into the cache of huggingface_hub.",
        hub_options(),
        Positional("model", "The model: owner/name. Without it, small models to begin with are listed."),
        "A download that broke off is resumed. Pickled weights (*.bin) and code (*.py) are never fetched.\n\n"
        f"{SUGGESTIONS}\n{format_suggestions()}",
    )


def hub_options() -> list[Option]:
    """Returns the flags of commands that use the hub's cache."""
    return [
        Option(name="revision", help="Branch, tag or commit; the default branch without it."),
        Option(name="hf_token", help="Token for the hub; HF_TOKEN does the same, and no ps shows it.", metavar="TOKEN"),
        Option(name="download_dir", help="Directory of the cache, if it is not the hub's own.", metavar="DIR"),
    ]


def run(args: Arguments) -> int:
    """Downloads the model and prints its directory; without a model, prints some. Raises ConfigError."""
    model, revision, directory = args["model"], args["revision"], args["download_dir"]
    if model is None:
        print(f"{SUGGESTIONS}\n{format_suggestions()}\nquire info OWNER/NAME tells more of one before it is fetched")
        return 0
    if not is_hub_id(model) or Path(model).exists():
        raise ConfigError(f"quire pull takes a hub id, which looks like owner/name; got {model!r}")
    print(fetch_model(model, revision, directory, args["hf_token"]))
    return 0
