"""The /commands of a terminal chat: a table of name, help and function."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.cli.chat_session import ChatSession
from quire.cli.generation import timing_line
from quire.cli.options import nearest
from quire.cli.sampling_options import read_assignment
from quire.errors import ConfigError


class LeaveChatError(Exception):
    """/exit was typed."""


@dataclass(frozen=True)
class ChatCommand:
    """`run(session, argument)` returns what to tell the user. Raises ClientError or ConfigError."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], str]


def run_chat_command(session: ChatSession, line: str) -> str:
    """Run a line that starts with a slash. Raises ConfigError for an unknown command, LeaveChatError for /exit."""
    name, _, argument = line[1:].partition(" ")
    command = CHAT_COMMANDS.get(name.lower())
    if command is None:
        known = [f"/{n}" for n in CHAT_COMMANDS]
        raise ConfigError(f"unknown command /{name}; {nearest(f'/{name}', known, '/help lists them')}")
    return command.run(session, argument.strip())


def _help(session: ChatSession, argument: str) -> str:
    rows = [f"  {command.usage:<22}{command.help}" for command in CHAT_COMMANDS.values()]
    return "\n".join(
        [
            *rows,
            '  A line that ends in \\ goes on in the next one; """ begins and ends a text of several lines.',
            "  // at the start sends a message that begins with a slash.",
            "  Ctrl-C stops an answer; Ctrl-D leaves.",
        ]
    )


def _reset(session: ChatSession, argument: str) -> str:
    session.reset()
    return "the conversation is empty"


def _undo(session: ChatSession, argument: str) -> str:
    return "the last exchange is forgotten" if session.undo() else "there is nothing to undo"


def _system(session: ChatSession, argument: str) -> str:
    session.system = argument or None
    return "the system prompt is set" if argument else "there is no system prompt now"


def _save(session: ChatSession, argument: str) -> str:
    path = _path(argument, "/save")
    try:
        path.write_text(json.dumps(session.to_json(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"/save {path}: {e.strerror or e}") from None
    return f"saved {len(session.messages)} messages to {path}"


def _load(session: ChatSession, argument: str) -> str:
    path = _path(argument, "/load")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"/load {path}: {e.strerror or e}") from None
    except ValueError as e:
        raise ConfigError(f"/load {path} is not JSON: {e}") from None
    session.load_json(content)
    return f"loaded {len(session.messages)} messages from {path}"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise ConfigError(f"{command} needs a file name")
    return Path(argument).expanduser()


def _params(session: ChatSession, argument: str) -> str:
    try:
        words = shlex.split(argument)
    except ValueError as e:
        raise ConfigError(f"/params {argument}: {e}") from None
    before = dict(session.params)
    session.params.update(read_assignment(word) for word in words)
    try:
        session.check_params()
    except ValueError:
        session.params = before
        raise
    shown = ", ".join(f"{name}={value!r}" for name, value in session.params.items())
    return shown or "the model's own parameters; /params temperature=0.7 max_tokens=100 sets some"


def _stats(session: ChatSession, argument: str) -> str:
    line = session.context_line()
    return line if session.last_answer is None else f"{timing_line([session.last_answer.timing])}; {line}"


def _exit(session: ChatSession, argument: str) -> str:
    raise LeaveChatError


CHAT_COMMANDS: dict[str, ChatCommand] = {
    "help": ChatCommand("/help", "This list.", _help),
    "reset": ChatCommand("/reset", "Forget the conversation.", _reset),
    "undo": ChatCommand("/undo", "Forget the last question and its answer.", _undo),
    "system": ChatCommand("/system TEXT", "Set the system prompt; without a text, remove it.", _system),
    "save": ChatCommand("/save FILE", "Write the conversation to a JSON file.", _save),
    "load": ChatCommand("/load FILE", "Read it back.", _load),
    "params": ChatCommand("/params KEY=VALUE ...", "Set sampling parameters; without any, show them.", _params),
    "stats": ChatCommand("/stats", "Times and counts of the last answer.", _stats),
    "exit": ChatCommand("/exit", "Leave.", _exit),
}
