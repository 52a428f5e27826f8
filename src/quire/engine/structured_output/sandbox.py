"""The engine's end of the compiler process (compiler.py), and backends that compile there first."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from abc import abstractmethod
from collections import OrderedDict

import msgspec

from quire.engine.structured_output.backend import Grammar, GrammarBackend
from quire.engine.structured_output.compiler import (
    HEADER,
    MAX_MESSAGE_BYTES,
    CompileAnswer,
    CompileJob,
    CompilerSetup,
)
from quire.engine.structured_output.guidance import grammar_error
from quire.errors import GenerationError, ValidationError
from quire.structured_outputs import StructuredOutputsParams
from quire.wire.process import search_path

COMPILER_MODULE = "quire.engine.structured_output.compiler"
START_S = 60.0
"""Seconds for the process to start and to read the tokenizer."""
WALL_PER_CPU = 10.0
"""Wall time allowed per CPU time, for a process that gets little CPU."""


class CompilerProcess:
    """Owns one child process, started at the first grammar and again after each one that killed it.

    All methods but `kill` belong to one thread.
    """

    def __init__(self, setup: CompilerSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, params: StructuredOutputsParams) -> str:
        """Returns the grammar as llguidance reads it, after the child has compiled it.

        Raises ValidationError if it is wrong or exceeds a limit, GenerationError if there is no child.
        """
        process = self._start()
        _send(process, msgspec.msgpack.encode(CompileJob(params)))
        answer = _receive(process, self._setup.cpu_s * WALL_PER_CPU)
        if answer is None:
            self.kill()
            self._process = None
            raise grammar_error(
                params,
                f"it takes more than {self._setup.cpu_s:g} s of CPU time or {self._setup.memory_bytes >> 20} MiB of "
                "memory (--grammar-compile-cpu-s, --grammar-compile-memory-bytes), or overflows a stack; simplify it",
            )
        if answer.error:
            raise ValidationError(answer.error, param=f"structured_outputs.{params.source.kind}")
        return answer.text

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self.kill()
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", COMPILER_MODULE, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": search_path()},
            )
        except OSError as e:
            raise GenerationError(f"the grammar compiler cannot be started: {e}") from e
        _send(process, msgspec.msgpack.encode(self._setup))
        if _receive(process, START_S) is None:
            self.kill()
            raise GenerationError(f"the grammar compiler did not start within {START_S:g} s, or died over it")
        return process

    def kill(self) -> None:
        """Ends the child, if there is one. Callable from any thread; a thread that waits for its answer gets none."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # the process is dead: no answer will come, which is handled below
        process.stdin.write(HEADER.pack(len(message)) + message)


def _receive(process: subprocess.Popen[bytes], timeout_s: float) -> CompileAnswer | None:
    """Returns an answer, or None if no complete one comes in time."""
    deadline = time.monotonic() + timeout_s
    header = _read_exactly(process, HEADER.size, deadline)
    if header is None:
        return None
    size = HEADER.unpack(header)[0]
    body = _read_exactly(process, size, deadline) if size <= MAX_MESSAGE_BYTES else None
    try:
        return None if body is None else msgspec.msgpack.decode(body, type=CompileAnswer)
    except msgspec.MsgspecError:
        return None


def _read_exactly(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes | None:
    assert process.stdout is not None
    data = b""
    try:
        while len(data) < size:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0 or not select.select([process.stdout], [], [], wait_s)[0]:
                return None
            more = os.read(process.stdout.fileno(), size - len(data))
            if not more:
                return None
            data += more
    except (OSError, ValueError):  # closed by `kill`
        return None
    return data


MAX_CACHED_GRAMMARS = 64
"""Most compiled grammars kept for later requests with the same grammar."""
MAX_CACHED_CHARS = 1 << 21
"""Most characters of those grammars together: their memory grows with their text."""


class CheckedBackend(GrammarBackend):
    """Base of backends: `_load` gets only grammars that the child has compiled."""

    def __init__(self, setup: CompilerSetup) -> None:
        self.vocab_size = setup.vocab_size
        self.eos_token_ids = setup.eos_token_ids
        self._process = CompilerProcess(setup)
        self._cached: OrderedDict[tuple[object, ...], Grammar] = OrderedDict()
        self._num_chars = 0

    @abstractmethod
    def _load(self, text: str, params: StructuredOutputsParams) -> Grammar:
        """Returns the initial state of a grammar from the child's answer. Raises ValidationError."""

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        key = _key(params)
        grammar = self._cached.get(key)
        if grammar is None:
            grammar = self._load(self._process.check(params), params)
            self._keep(key, grammar)
        else:
            self._cached.move_to_end(key)
        return grammar.copy()

    def _keep(self, key: tuple[object, ...], grammar: Grammar) -> None:
        self._cached[key] = grammar
        self._num_chars += _size(key)
        while len(self._cached) > MAX_CACHED_GRAMMARS or self._num_chars > MAX_CACHED_CHARS:
            oldest, _ = self._cached.popitem(last=False)
            self._num_chars -= _size(oldest)

    def close(self) -> None:
        self._process.kill()


def _key(params: StructuredOutputsParams) -> tuple[object, ...]:
    return (
        *params.source,
        params.disable_any_whitespace,
        params.disable_additional_properties,
        params.whitespace_pattern,
    )


def _size(key: tuple[object, ...]) -> int:
    return len(str(key[1]))
