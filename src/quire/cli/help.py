"""The text of --help, and its search: --help=all, --help=GROUP, --help=FLAG or any word."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.cli.command_line import CommandLine, Option, nearest
from quire.config.flags import parse_human_int
from quire.errors import ConfigError

_COLUMN = 30
_METAVARS: dict[Callable[[str], Any], str] = {int: "N", parse_human_int: "N", float: "X"}


def find_help_topic(argv: Sequence[str]) -> str | None:
    """The topic that `argv` asks help on: "" for plain --help or -h, None when help is not asked for."""
    for word in argv:
        if word == "--":
            return None
        if word in ("--help", "-h"):
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def format_help(line: CommandLine, topic: str) -> str:
    """Help of one command. Raises ConfigError when nothing matches `topic`."""
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
