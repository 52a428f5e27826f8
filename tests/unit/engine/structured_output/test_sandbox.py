"""The compiler process: what goes beyond its share, or kills it, costs one request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from quire.engine.structured_output import sandbox
from quire.engine.structured_output.compiler import CompileAnswer, CompilerSetup, serve
from quire.engine.structured_output.sandbox import CompilerProcess
from quire.errors import GenerationError, ValidationError
from quire.structured_outputs import StructuredOutputsParams

from .conftest import SETUP

EASY = StructuredOutputsParams(regex="[ab]+")


@pytest.fixture
def process() -> Iterator[CompilerProcess]:
    process = CompilerProcess(SETUP)
    yield process
    process.kill()


def pid_of(process: CompilerProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_one_child_for_many_grammars_until_it_is_killed(process: CompilerProcess) -> None:
    assert process.check(EASY) == process.check(EASY)
    first = pid_of(process)
    process.check(EASY)
    assert pid_of(process) == first
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    process.check(EASY)
    assert pid_of(process) != first
    process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid_of(process), 0)


def test_a_child_that_is_stopped_is_given_up_in_time(process: CompilerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.check(EASY)
    os.kill(pid_of(process), signal.SIGSTOP)
    os.waitid(os.P_PID, pid_of(process), os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(sandbox, "WALL_PER_CPU", 0.05)
    with pytest.raises(ValidationError, match="takes more than 3 s of CPU time or 512 MiB"):
        process.check(EASY)
    monkeypatch.undo()
    process.check(EASY)


@pytest.mark.parametrize("what", ["cpu", "memory", "stack"])
def test_who_takes_too_much_dies_and_nobody_else(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "COMPILER_MODULE", f"{__package__}.hungry_compiler")
    process = CompilerProcess(msgspec.structs.replace(SETUP, cpu_s=0.1))
    try:
        assert process.check(EASY)
        first = pid_of(process)
        with pytest.raises(ValidationError, match="simplify it"):
            process.check(StructuredOutputsParams(regex=what))
        assert process.check(EASY)
        assert pid_of(process) != first
    finally:
        process.kill()


def test_no_child_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    process = CompilerProcess(msgspec.structs.replace(SETUP, tokenizer_file="/nowhere"))
    with pytest.raises(GenerationError, match="did not start"):
        process.check(EASY)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(GenerationError, match="cannot be started"):
        CompilerProcess(SETUP).check(EASY)


def test_what_the_child_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body, in this process."""
    monkeypatch.setattr("quire.engine.structured_output.compiler._limit", lambda setup: None)
    jobs = [msgspec.msgpack.encode([p]) for p in (EASY, StructuredOutputsParams(regex="("))]
    answers: list[bytes] = []
    serve(SETUP, iter([*jobs, b""]).__next__, answers.append)
    ready, good, bad = (msgspec.msgpack.decode(a, type=CompileAnswer) for a in answers)
    assert ready == CompileAnswer()
    assert good.text
    assert not good.error
    assert "unclosed group" in bad.error


def test_the_setup_crosses() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SETUP), type=CompilerSetup) == SETUP
