"""The `quire` command: a table of sub-commands, their help, and one place where errors become text.

Sub-commands are imported when they are used. Exit codes: 0 done, 1 the engine failed (or a batch row did), 2 the
command line, a file or a request is at fault, 130 stopped with Ctrl-C, 141 the reader of our output has closed it.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire import __version__, envs, interrupts
from quire.cli.command_line import CommandLine, Option
from quire.config.flags import parse_human_int
from quire.errors import ClientError, ConfigError, QuireError, nearest
from quire.resolve import resolve
from quire.timeline import stamp

EXIT_SERVER_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, quota or file limit."""


@dataclass(frozen=True)
class Command:
    """One sub-command. `entry` names a module, a colon, and the beginning of the names of two functions there:
    `command_line() -> CommandLine` and `run(Arguments) -> int` (the exit code)."""

    name: str
    entry: str
    help: str
    checks_environment: bool = True


COMMANDS: tuple[Command, ...] = (
    Command("serve", "quire.cli.serve:", "Serve a model: OpenAI's, Anthropic's, Ollama's API."),
    Command("complete", "quire.cli.complete:", "Continue one or more prompts."),
    Command("chat", "quire.cli.chat:", "Talk to a model in the terminal."),
    Command("batch", "quire.cli.batch:", "Run a file of OpenAI batch requests; resumable."),
    Command("replay", "quire.cli.replay:", "Replay a recording without a model; predict other settings."),
    Command("plan", "quire.cli.plan:", "Predict how many engines a recorded load needs."),
    Command("info", "quire.cli.info:", "Print what would be loaded, and whether it fits."),
    Command("pull", "quire.cli.pull:", "Download a model from the hub."),
    Command("list", "quire.cli.pull:list_", "List the models that have been downloaded."),
    Command("rm", "quire.cli.pull:rm_", "Delete a downloaded model."),
    Command("models", "quire.cli.models:", "List the architectures that run, and how."),
    Command("convert-gguf", "quire.cli.convert_gguf:", "Turn a GGUF file into a checkpoint directory."),
    Command("top", "quire.cli.top:", "Watch a server: speed, memory, requests.", checks_environment=False),
    Command("bench latency", "quire.cli.bench.throughput:latency_", "Time one request at a time."),
    Command("bench throughput", "quire.cli.bench.throughput:", "Time many requests at once."),
    Command("bench serve", "quire.cli.bench.serve:", "Load a server: latencies, goodput, saturation."),
    Command("bench startup", "quire.cli.bench.startup:", "Time a start, from nothing to a first token."),
    Command("bench overhead", "quire.cli.bench.overhead:", "Measure what the engine costs beside the model."),
    Command("fleet key", "quire.cli.fleet:key_", "Make the key of several machines.", checks_environment=False),
    Command("fleet status", "quire.cli.fleet:status_", "List the engines of a server.", checks_environment=False),
    Command("fleet restart", "quire.cli.fleet:restart_", "Restart them one by one.", checks_environment=False),
    Command("fleet scale", "quire.cli.fleet:scale_", "Change their number.", checks_environment=False),
    Command("cache", "quire.cli.cache:", "List, check or delete what is kept on disk between runs."),
    Command("kv-store", "quire.cli.kv_store:", "List, check or delete KV blocks on disk."),
    Command(
        "collect-env",
        "quire.cli.collect_env:",
        "Print versions and hardware, for a bug report.",
        checks_environment=False,
    ),
)
GROUPS = frozenset(command.name.split()[0] for command in COMMANDS if " " in command.name)
ALIASES: dict[str, str] = {"run-batch": "batch"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `argv` (default: the process's arguments) and returns the exit code. Prints errors, never raises them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show is replaced
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes stdout once more on exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as e:
        if e.errno not in _NO_ROOM:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"quire: error: {e.filename or 'the output'} cannot be written: {e.strerror}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except QuireError as e:
        if envs.LOGGING_LEVEL.get().upper() == "DEBUG":
            logging.getLogger("quire").exception("quire failed")
        print(f"quire: error: {' '.join(str(e).split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(e, ClientError | ConfigError) else EXIT_SERVER_ERROR


def _run(argv: list[str]) -> int:
    if argv in (["--version"], ["-V"]):
        print(f"quire {__version__}")
        return 0
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if argv[0] in GROUPS and (len(argv) == 1 or find_help_topic(argv[1:2]) is not None):
        print(_overview(f"{argv[0]} "))
        return 0
    command, rest = _find_command(argv)
    line: CommandLine = resolve(f"{command.entry}command_line")()
    topic = find_help_topic(rest)
    if topic is not None:
        print(format_help(line, topic))
        return 0
    args = line.parse(rest)
    _prepare(command)
    stamp("command line")
    code: int = resolve(f"{command.entry}run")(args)
    return code


def _find_command(argv: list[str]) -> tuple[Command, list[str]]:
    words = [ALIASES.get(argv[0], argv[0]), *argv[1:]]
    for command in COMMANDS:
        parts = command.name.split()
        if words[: len(parts)] == parts:
            return command, words[len(parts) :]
    names = [*(c.name for c in COMMANDS), *ALIASES]
    asked = " ".join(words[:2]) if words[0] in GROUPS else words[0]
    if asked.startswith("-"):
        raise ConfigError(f"unknown flag {asked} before a command; see quire --help")
    raise ConfigError(f"unknown command {asked!r}; {nearest(asked, names, 'see quire --help')}")


def _prepare(command: Command) -> None:
    interrupts.is_command = True
    if command.checks_environment:
        envs.check_environment()
    if not envs.LOGGING_LEVEL.is_set:  # output is for reading: below-warning lines only on request
        logging.getLogger("quire").setLevel(logging.WARNING)


def _overview(prefix: str = "") -> str:
    rows = [f"  {c.name:<18}{c.help}" for c in COMMANDS if c.name.startswith(prefix)]
    usage = f"usage: quire {prefix}COMMAND [arguments]"
    return textwrap.dedent("""\
        {usage}

        Run large language models on this machine. Without --model, the model that ships with Quire is used.

        Commands:
        {rows}

        quire COMMAND --help     what a command takes
        quire pull               small models to begin with
        quire --version          {version}""").format(usage=usage, rows="\n".join(rows), version=__version__)


_COLUMN = 30
_METAVARS: dict[Callable[[str], Any], str] = {int: "N", parse_human_int: "N", float: "X"}


def find_help_topic(argv: Sequence[str]) -> str | None:
    """Returns the topic of --help in `argv`: "" for plain --help or -h, None when help is not asked for."""
    for word in argv:
        if word == "--":
            return None
        if word in ("--help", "-h"):
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def format_help(line: CommandLine, topic: str) -> str:
    """Returns help on a topic of one command: all, a group, a flag or any word. Raises ConfigError if none matches."""
    groups = _grouped(line.options)
    if topic:
        return "\n".join(_find(groups, _grouped(line.foreign_options()), topic, line.prog))
    own = {name: options for name, options in groups.items() if not name.endswith("Config")}
    rest = {name: options for name, options in groups.items() if name not in own}
    lines = [_usage(line), "", line.summary, *_positional(line)]
    for name, options in own.items():
        lines += ["", *_section(name, options)]
    if rest:
        lines += ["", f"Engine flags by group ({line.prog} --help=GROUP, --help=WORD or --help=all):"]
        lines += [_row(name, " ".join(o.flag for o in options)) for name, options in rest.items()]
    return "\n".join([*lines, *(["", line.epilog] if line.epilog else [])])


def _find(groups: dict[str, list[Option]], foreign: dict[str, list[Option]], topic: str, prog: str) -> list[str]:
    wanted = topic.lower().lstrip("-").replace("_", "-")
    if wanted == "listgroup":
        return list(groups)
    found = {
        name: options
        for name, options in groups.items()
        if wanted == "all" or wanted in (name.lower(), name.lower().removesuffix("config"))
    }
    exact = {n: [o for o in options if wanted == o.flag[2:]] for n, options in groups.items()}
    partial = {n: [o for o in options if _matches(o, wanted)] for n, options in groups.items()}
    elsewhere = {n: [o for o in options if wanted == o.flag[2:]] for n, options in foreign.items()}
    for hits in (found, exact, elsewhere, partial):
        lines = [line for name, options in hits.items() if options for line in ["", *_section(name, options)]]
        if lines:
            return lines[1:]
    names = [o.flag[2:] for options in groups.values() for o in options] + list(groups)
    raise ConfigError(f"no flag or group matches {topic!r}; {nearest(wanted, names, f'see {prog} --help')}")


def _matches(option: Option, word: str) -> bool:
    return word in option.flag or word.replace("-", " ") in option.help.lower()


def _grouped(options: Iterable[Option]) -> dict[str, list[Option]]:
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    return groups


def _usage(line: CommandLine) -> str:
    words = [f"usage: {line.prog}"]
    if line.positional is not None:
        repeated = "..." if line.positional.nargs == "*" else ""
        words.append(f"[{line.positional.name.upper()}{repeated}]")
    return " ".join([*words, "[flags]"])


def _positional(line: CommandLine) -> list[str]:
    if line.positional is None:
        return []
    return ["", _row(line.positional.name.upper(), line.positional.help)]


def _section(name: str, options: Sequence[Option]) -> list[str]:
    return [f"{name}:", *(_row(_signature(option), _description(option)) for option in options)]


def _signature(option: Option) -> str:
    names = ", ".join(option.spellings)
    if option.is_switch:
        return f"{names}, --no-{option.flag[2:]}" if option.default else names
    if option.choices:
        return f"{names} {{{','.join(option.choices)}}}"
    return f"{names} {option.metavar or _METAVARS.get(option.parse, 'TEXT')}"


def _description(option: Option) -> str:
    if option.default in (None, [], "") or option.is_switch:
        return option.help + (" (on unless --no-...)" if option.is_switch and option.default else "")
    default = option.default if isinstance(option.default, str) else json.dumps(option.default)
    return f"{option.help} (default: {default})"


def _row(left: str, right: str) -> str:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    indent = " " * _COLUMN
    body = textwrap.wrap(right, width - _COLUMN, break_on_hyphens=False)
    first = f"  {left}"
    if len(first) < _COLUMN - 1:
        return "\n".join([first.ljust(_COLUMN) + (body[0] if body else ""), *(indent + b for b in body[1:])])
    return "\n".join([first, *(indent + b for b in body)])
