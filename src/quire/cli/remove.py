"""`quire rm`: deletes a model from the hub's cache."""

from __future__ import annotations

from quire.cli.command_line import Arguments, CommandLine, Positional
from quire.cli.pull import hub_options
from quire.cli.terminal import human_bytes
from quire.config.hub import delete_model


def command_line() -> CommandLine:
    return CommandLine(
        "quire rm",
        "Delete a model that was downloaded from the hub, all of its revisions.",
        [option for option in hub_options() if option.name == "download_dir"],
        Positional("model", "The model: owner/name."),
    )


def run(args: Arguments) -> int:
    """Deletes the model and prints the space that is free again. Raises ConfigError."""
    freed = delete_model(str(args["model"]), args["download_dir"])
    print(f"deleted {args['model']}, {human_bytes(freed)}")
    return 0
