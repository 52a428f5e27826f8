"""`quire chat`: a conversation in the terminal, or one line per message from a pipe."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire import __version__
from quire.cli.chat_session import Answer, ChatModel, ChatSession, EngineChatModel
from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.generation import make_engine, timing_line
from quire.cli.option_groups import (
    SAMPLING_HELP,
    engine_args,
    engine_options,
    lora_option,
    read_assignment,
    read_lora,
    remote_options,
    sampling_options,
    validate_remote,
)
from quire.cli.remote.models import REMOTE_SERVER, RemoteChatModel
from quire.cli.terminal import Style, write_file
from quire.errors import ClientError, ConfigError, GenerationError, nearest
from quire.lora_request import LoRARequest
from quire.resolve import resolve


class LeaveChatError(Exception):
    """Raised by /exit."""


@dataclass(frozen=True)
class ChatCommand:
    """`run(session, argument)` returns a message for the user. Raises ClientError or ConfigError."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], str]


def run_chat_command(session: ChatSession, line: str) -> str:
    """Runs a line that starts with a slash. Raises ConfigError for an unknown command, LeaveChatError for /exit."""
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
    write_file(path, json.dumps(session.to_json(), ensure_ascii=False, indent=2) + "\n", "/save")
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


_FENCE = '"""'


def command_line() -> CommandLine:
    own = [
        Option(name="system", help="The system prompt."),
        lora_option("A LoRA adapter that the answers are made with; its directory, or a name and it."),
    ]
    sampling = [option for option in sampling_options() if option.name not in ("n", "logprobs")]
    return CommandLine(
        "quire chat",
        "Talk to a model. Type /help inside for its commands. From a pipe, each line is one message.",
        [*own, *remote_options("Talk to the model of a server."), *sampling, *engine_options(without=SAMPLING_HELP)],
        Positional("model_name", "The model, as in --model.", nargs="?"),
    )


def run(args: Arguments) -> int:
    """Chats until the input ends."""
    lora = read_lora(args)
    if args["url"] is not None:
        validate_remote(args)
        with resolve(REMOTE_SERVER).of(args) as server:
            card = server.find_model(args["model_name"] or args.given.get("model"))
            return _chat(args, RemoteChatModel(server, card), f" at {server.address}")
    return _chat(args, _load_model(args, lora))


def _load_model(args: Arguments, lora: LoRARequest | None) -> EngineChatModel:
    named = {"model": args["model_name"]} if args["model_name"] is not None else {}
    flags = engine_args(args, disable_log_stats=True, enable_lora=lora is not None, **named)
    model = flags.create_engine_config().model_config
    engine = make_engine(flags)
    tokenizer = engine.get_tokenizer()
    if not tokenizer.chat_templates:
        raise ConfigError(f"{model.name} has no chat template; pass --chat-template FILE, or use quire complete")
    name = model.name if lora is None else f"{model.name} with {lora.lora_name}"
    max_model_len = engine.input_processor.max_model_len
    return EngineChatModel(engine, tokenizer, max_model_len, model.sampling_defaults, name, lora)


def _chat(args: Arguments, model: ChatModel, where: str = "") -> int:
    session = ChatSession(model, args.given_among(SAMPLING_HELP), args["system"])
    if sys.stdin.isatty():
        room = f", {model.max_model_len} tokens of context" if model.max_model_len is not None else ""
        print(
            f"quire {__version__}, {model.name}{where}{room}. "
            "/help lists commands; Ctrl-C stops an answer; Ctrl-D leaves."
        )
    ChatLoop(session).run()
    return 0


class ChatLoop:
    """Reads messages and commands, prints answers to stdout and everything else to stderr."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._out = Style(sys.stdout)
        self._err = Style(sys.stderr)
        self._is_interactive = sys.stdin.isatty()
        self._read_line = make_line_reader(self._is_interactive)

    def run(self) -> None:
        """Runs until the end of the input or /exit."""
        for message in self._messages():
            try:
                self._handle(message)
            except LeaveChatError:
                return
            except (ClientError, ConfigError, GenerationError) as e:
                print(self._err.paint(f"error: {e}", "red"), file=sys.stderr)

    def _messages(self) -> Iterator[str]:
        while True:
            try:
                message = read_message(self._read_line)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
                continue
            if message is None:
                if self._is_interactive:
                    print()
                return
            if message.strip():
                yield message

    def _handle(self, message: str) -> None:
        if message.startswith("/") and not message.startswith("//"):
            self._note(run_chat_command(self._session, message))
            return
        answer = self._session.answer(message.removeprefix("/") if message.startswith("//") else message, self._write)
        print(flush=True)
        self._note_answer(answer)

    def _write(self, text: str) -> None:
        print(self._out.printable(text), end="", flush=True)

    def _note_answer(self, answer: Answer) -> None:
        if answer.num_dropped:
            self._note(f"the context was full: the {answer.num_dropped} oldest messages were left out")
        if answer.was_stopped:
            self._note("stopped")
        elif answer.finish_reason == "length":
            self._note("the answer reached its longest length (max_tokens or the context)")

    def _note(self, text: str) -> None:
        print(self._err.paint(text, "dim"), file=sys.stderr, flush=True)


LineReader = Callable[[str], str]
"""Shows a prompt and reads a line without its newline. Raises EOFError at the end."""


def read_message(read_line: LineReader) -> str | None:
    """Returns the next message, which may span lines (a trailing backslash, triple quotes); None at the end."""
    try:
        line = read_line("> ")
    except EOFError:
        return None
    if line.lstrip().startswith(_FENCE):
        return _read_fenced(line.lstrip().removeprefix(_FENCE), read_line)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(". "))
        except EOFError:
            break
    return "\n".join(lines)


def _read_fenced(first: str, read_line: LineReader) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(_FENCE):
        try:
            lines.append(read_line(". "))
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
    return "\n".join(lines).strip("\n")


def make_line_reader(is_interactive: bool) -> LineReader:
    """Returns `input` with history for a terminal; for a pipe, a reader without prompts."""
    if not is_interactive:
        return _read_piped_line
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() line editing and history, for this session only
    return input


def _read_piped_line(prompt: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as e:
        raise ConfigError(f"stdin is not UTF-8 text: {e}") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")
