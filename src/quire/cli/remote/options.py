"""The flags by which a command is told to talk to a server instead of running a model."""

from __future__ import annotations

from quire.cli.options import Arguments, Option
from quire.config.engine_args import FLAGS
from quire.errors import ConfigError

GROUP = "Server"
_SHARED = ("model", "seed")
"""An engine's flags by name that mean something to a request, too."""


def remote_options(help_text: str) -> list[Option]:
    """--url and --api-key. `help_text` says what --url is to the command."""
    return [
        Option(
            name="url",
            alias="base_url",
            help=f"{help_text} http://HOST:PORT or https://..., with or without /v1.",
            metavar="URL",
            group=GROUP,
        ),
        Option(
            name="api_key",
            help="Shown to that server. QUIRE_API_KEY or OPENAI_API_KEY keep it off the command line.",
            group=GROUP,
            metavar="KEY",
        ),
    ]


def validate_remote(args: Arguments) -> None:
    """Refuse flags of an engine beside --url. Raises ConfigError."""
    for name in args.given_among(FLAGS):
        if name not in _SHARED:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model that runs here; with --url the server has its own flags")
