"""`quire chat` on a scripted engine: conversation, commands, Ctrl-C, a context that is too short."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.chat import CHAT_COMMANDS, read_message
from quire.cli.chat_session import ChatSession, EngineChatModel
from quire.cli.main import main
from quire.errors import PromptTooLongError
from quire.sampling_params import SamplingParams

from .scripted_engine import ScriptedEngine

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def chat(
    model_dir: Path, use_engine: Callable[[ScriptedEngine], ScriptedEngine], stdin: Callable[[str], None]
) -> Callable[..., int]:
    """Run a chat on `engine` with `lines` as its input."""

    def run(engine: ScriptedEngine, lines: str, *argv: str) -> int:
        use_engine(engine)
        stdin(lines)
        return main(["chat", str(model_dir), *argv])

    return run


def conversations(engine: ScriptedEngine) -> list[list[str]]:
    """Returns what each answer was rendered from, as "role:content"."""
    return [[f"{m['role']}:{m['content']}" for m in messages] for messages in engine.get_tokenizer().rendered]


def test_answers_go_to_stdout_and_history_grows(chat: Callable[..., int], capsys: Capture) -> None:
    engine = ScriptedEngine()
    assert chat(engine, "one\n\ntwo\n", "--system", "Be brief.") == 0
    assert capsys.readouterr() == ("Hello there\nHello there\n", "")
    assert conversations(engine) == [
        ["system:Be brief.", "user:one"],
        ["system:Be brief.", "user:one", "assistant:Hello there", "user:two"],
    ]


def test_an_adapter_answers(chat: Callable[..., int]) -> None:
    engine = ScriptedEngine()
    assert chat(engine, "one\ntwo\n", "--lora", "sql=/a") == 0
    assert [lora and (lora.lora_name, lora.lora_path) for lora in engine.loras_seen] == [("sql", "/a")] * 2


def test_parameters_change_from_turn_to_turn(chat: Callable[..., int], capsys: Capture) -> None:
    engine = ScriptedEngine()
    lines = "a\n/params temperature=0 stop='a b' ignore_eos=true\nb\n/params\n/params top_p=7\nc\n/params xyzzy=1\n"
    assert chat(engine, lines, "--top-k", "5") == 0
    a, b, c = engine.params_seen
    assert (a.temperature, a.top_p, a.top_k, a.max_tokens) == (0.6, 0.9, 5, None)  # the model's, then the flag
    assert (b.temperature, b.stop, b.ignore_eos) == (0.0, ["a b"], True)
    assert c.stop == b.stop
    err = capsys.readouterr().err
    assert "top_k=5, temperature=0.0, stop=['a b'], ignore_eos=True" in err
    assert "error: top_p must be in (0, 1], got 7.0" in err
    assert "'xyzzy=1' is not one of" in err


def test_reset_undo_system(chat: Callable[..., int]) -> None:
    engine = ScriptedEngine()
    lines = "a\nb\n/undo\nc\n/reset\n/system You sing.\nd\n/system\n/undo\n/undo\ne\n"
    assert chat(engine, lines) == 0
    hello = "assistant:Hello there"
    assert conversations(engine)[2:] == [
        ["user:a", hello, "user:c"],
        ["system:You sing.", "user:d"],
        ["user:e"],
    ]


def test_save_and_load(chat: Callable[..., int], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "talk.json"
    assert chat(ScriptedEngine(), f"Grüße\n/save {path}\n", "--system", "S") == 0
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    engine = ScriptedEngine()
    assert chat(engine, f"/load {path}\nb\n") == 0
    assert conversations(engine) == [["system:S", "user:Grüße", "assistant:Hello there", "user:b"]]
    capsys.readouterr()
    path.write_text('[{"role": "user"}]')
    missing = tmp_path / "none.json"
    assert chat(ScriptedEngine(), f"/load {path}\n/load {missing}\n/load\n/save {tmp_path}\n") == 0
    err = capsys.readouterr().err.splitlines()
    assert "no list of messages" in err[0]
    assert "No such file" in err[1]
    assert "needs a file name" in err[2]
    assert "directory" in err[3]


def test_stats_help_and_unknown_commands(chat: Callable[..., int], capsys: Capture) -> None:
    assert chat(ScriptedEngine(), "/stats\nhi you\n/stats\n/help\n/sats\n//usr is a path\n/exit\nnever\n") == 0
    out, err = capsys.readouterr()
    assert out == "Hello there\n" * 2
    assert "0 of 64 tokens of context used\n" in err
    assert "3 prompt tokens (1 cached), 2 generated; TTFT" in err  # two words and the generation prompt
    assert "5 of 64 tokens" in err
    assert all(f"/{name}" in err for name in CHAT_COMMANDS)
    assert "unknown command /sats; did you mean /stats?" in err


def test_a_double_slash_is_text(chat: Callable[..., int]) -> None:
    engine = ScriptedEngine()
    assert chat(engine, "//usr is a path\n") == 0
    assert conversations(engine) == [["user:/usr is a path"]]


def test_interrupt_ends_the_answer_not_the_chat(chat: Callable[..., int], capsys: Capture) -> None:
    engine = ScriptedEngine(lambda p, _: ["a", "b", "c"], interrupt_at_step=2)
    assert chat(engine, "x\ny\n") == 0
    assert capsys.readouterr() == ("ab\nabc\n", "stopped\n")
    assert engine.aborted == ["chat-0"]
    assert conversations(engine)[1] == ["user:x", "assistant:ab", "user:y"]


def test_interrupt_before_any_text_forgets_the_question(chat: Callable[..., int]) -> None:
    engine = ScriptedEngine(interrupt_at_step=0)
    assert chat(engine, "x\ny\n") == 0
    assert conversations(engine)[1] == ["user:y"]


def test_errors_do_not_end_the_chat(chat: Callable[..., int], capsys: Capture) -> None:
    engine = ScriptedEngine(lambda p, _: ["ERROR"] if len(p["prompt_token_ids"]) == 4 else ["ok"])
    assert chat(engine, "REFUSE\nfails with three\nfine\n") == 0
    out, err = capsys.readouterr()
    assert "error: the template refused" in err
    assert "error: the engine failed to answer" in err
    assert out.endswith("ok\n")
    assert conversations(engine)[-1] == ["user:fine"]


def test_longest_answer_is_said(chat: Callable[..., int], capsys: Capture) -> None:
    engine = ScriptedEngine(lambda p, params: ["a"] * 9)
    assert chat(engine, "x\n", "--max-tokens", "2") == 0
    out, err = capsys.readouterr()
    assert out == "aa\n"
    assert "longest length" in err


# -- a context that is too short ----------------------------------------------------------------------------------


def make_session(engine: ScriptedEngine, **params: Any) -> ChatSession:
    return ChatSession(EngineChatModel(engine, engine.get_tokenizer(), engine.max_model_len, {}), params)


def words(count: int) -> str:
    return " ".join(["w"] * count)


def test_oldest_messages_are_dropped_and_counted() -> None:
    engine = ScriptedEngine(lambda p, params: ["a "] * 5, max_model_len=40)
    session = make_session(engine, max_tokens=5)
    session.system = "s s"
    dropped = [session.answer(words(10), lambda text: None).num_dropped for _ in range(5)]
    # system 2 + n * (10 + 5) + the new 10 + 1 must leave 5 of 40: one earlier exchange fits, and no second one.
    assert dropped == [0, 0, 2, 2, 2]
    assert len(session.messages) == 10
    assert all(messages[0]["role"] == "system" for messages in engine.get_tokenizer().rendered)
    assert [len(p["prompt_token_ids"]) for p in engine.prompts_seen] == [13, 28, 28, 28, 28]


def test_a_message_that_never_fits_changes_nothing() -> None:
    engine = ScriptedEngine(max_model_len=20)
    session = make_session(engine)
    session.answer(words(3), lambda text: None)
    with pytest.raises(PromptTooLongError, match="takes 31 tokens; the context holds 20"):
        session.answer(words(30), lambda text: None)
    assert len(session.messages) == 2
    session.answer(words(2), lambda text: None)
    assert len(engine.prompts_seen[-1]["prompt_token_ids"]) == 3 + 2 + 2 + 1  # the first exchange is still there


def test_a_long_message_alone_is_answered_in_what_room_there_is() -> None:
    engine = ScriptedEngine(max_model_len=20)
    answer = make_session(engine).answer(words(18), lambda text: None)
    assert answer.text == "Hello there"


def test_undo_after_a_drop() -> None:
    engine = ScriptedEngine(lambda p, params: ["a "] * 5, max_model_len=40)
    session = make_session(engine, max_tokens=5)
    for _ in range(4):
        session.answer(words(12), lambda text: None)
    while session.undo():
        pass
    assert session.messages == []
    session.answer("x", lambda text: None)
    assert engine.prompts_seen[-1] == {"prompt_token_ids": [1, 0]}


def test_answers_are_single_and_streamed_by_delta() -> None:
    seen: list[SamplingParams] = []
    engine = ScriptedEngine(lambda p, params: seen.append(params) or ["x"])  # type: ignore[func-returns-value]
    make_session(engine, n=3).answer("q", lambda text: None)
    assert seen[0].n == 1


# -- reading messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (['"""', "a", "b", '"""', "c"], ["a\nb", "c"]),
        (['"""a', 'b"""', "c"], ["a\nb", "c"]),
        (['"""one line"""'], ["one line"]),
        (['"""', "never closed"], ["never closed"]),
        (["ends in the middle\\"], ["ends in the middle"]),
    ],
)
def test_messages_of_several_lines(lines: list[str], messages: list[str]) -> None:
    source: Iterator[str] = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    got = []
    while (message := read_message(read_line)) is not None:
        got.append(message)
    assert got == messages


def test_a_model_without_a_template_says_what_to_do(chat: Callable[..., int], capsys: Capture) -> None:
    engine = ScriptedEngine()
    engine.get_tokenizer().chat_templates = {}
    assert chat(engine, "x\n") == 2
    assert "has no chat template; pass --chat-template FILE, or use quire complete" in capsys.readouterr().err


# -- in a terminal --------------------------------------------------------------------------------------------------


class TerminalInput(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal(
    model_dir: Path,
    use_engine: Callable[[ScriptedEngine], ScriptedEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """A greeting, a prompt per message, Ctrl-C at the prompt, Ctrl-D at the end."""
    typed: list[str | type[BaseException]] = ["hello", KeyboardInterrupt, "again", EOFError]
    prompts: list[str] = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        item = typed.pop(0)
        if isinstance(item, str):
            return item
        raise item

    engine = use_engine(ScriptedEngine())
    monkeypatch.setattr(sys, "stdin", TerminalInput())
    monkeypatch.setattr(builtins, "input", read)
    assert main(["chat", str(model_dir)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("quire 0.")
    assert "64 tokens of context" in out
    assert out.endswith("Hello there\nHello there\n\n")
    assert err == "\n(Ctrl-D or /exit leaves)\n"
    assert prompts == ["> "] * 4
    assert len(engine.prompts_seen) == 2


def test_a_pipe_that_is_not_text(
    model_dir: Path,
    use_engine: Callable[[ScriptedEngine], ScriptedEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    for command in (["chat", str(model_dir)], ["complete", "--model", str(model_dir)]):
        use_engine(ScriptedEngine())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
        assert main(command) == 2
        assert "stdin is not UTF-8 text" in capsys.readouterr().err
