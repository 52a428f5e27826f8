"""The compiler process: `python -m quire.engine.structured_output.compiler` compiles each grammar first.

A schema or a regular expression is a program from a client. llguidance bounds most of what one can cost (fuel for its
lexer, symbols of a grammar, items per step), but not all: not the translation of a schema, nor the depth of a stack. So
every grammar is compiled here before the engine compiles it, with limits on CPU time and memory; if this process dies
or is killed, one request fails. Compiling is deterministic: a grammar that passed here costs the engine the same.

Messages are msgpack with a length before it: a `CompilerSetup` on standard input, then a `CompileJob` and its
`CompileAnswer` on standard output, one after the other. The end of standard input is the end of the process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.errors import ValidationError
from quire.resolve import resolve
from quire.structured_outputs import StructuredOutputsParams
from quire.wire.process import die_with_parent, set_process_title

MAX_MESSAGE_BYTES = 1 << 26
CHECKS = {
    "guidance": "quire.engine.structured_output.guidance:make_check",
    "xgrammar": "quire.engine.structured_output.xgrammar_backend:make_check",
}
"""Ways to compile, by `CompilerSetup.library`; imported by the compiler process only."""
HEADER = struct.Struct(">I")
"""Number of bytes of a message; sent before it."""
_STACK_BYTES = 4 << 20
"""Less than the stack of the engine's threads: a grammar that fits here fits there."""


class CompilerSetup(msgspec.Struct, array_like=True):
    """The setting for all grammars."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]
    cpu_s: float
    """Seconds of CPU time for one grammar."""
    memory_bytes: int
    """Bytes of memory for one grammar."""
    library: str = "guidance"
    """ "guidance" or "xgrammar"."""


class CompileJob(msgspec.Struct, array_like=True):
    """A grammar to be compiled."""

    params: StructuredOutputsParams


class CompileAnswer(msgspec.Struct, array_like=True):
    """The grammar as the library reads it, or the reason why it is wrong."""

    text: str = ""
    error: str = ""


def serve(setup: CompilerSetup, read: Callable[[], bytes], write: Callable[[bytes], None]) -> None:
    """Answers jobs until `read` returns an empty message."""
    make_check: Callable[[CompilerSetup], Check] = resolve(CHECKS[setup.library])
    check = make_check(setup)
    write(msgspec.msgpack.encode(CompileAnswer()))  # ready
    while data := read():
        job = msgspec.msgpack.decode(data, type=CompileJob)
        _limit(setup)
        write(msgspec.msgpack.encode(_answer(check, job.params)))


Check = Callable[[StructuredOutputsParams], str]
"""Compiles a grammar. Returns the text for the engine. Raises ValidationError."""


def _answer(check: Check, params: StructuredOutputsParams) -> CompileAnswer:
    try:
        text = check(params)
    except ValidationError as e:
        return CompileAnswer(error=str(e))
    except MemoryError:
        os._exit(1)  # like an allocation that fails outside Python
    return CompileAnswer(text=text)


def _limit(setup: CompilerSetup) -> None:
    """Limits the CPU time and memory of this process.

    Beyond the first the system ends the process; beyond the second an allocation fails, which ends it, too. (Memory is
    limited where the system can: not on macOS.)
    """
    cpu_s = int(time.process_time() + setup.cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError, ValueError):
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + setup.memory_bytes, resource.RLIM_INFINITY))


def _read() -> bytes:
    header = _read_exactly(HEADER.size)
    if not header:
        return b""
    size = HEADER.unpack(header)[0]
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return _read_exactly(size)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            return b""
        data += more
    return data


def _write(message: bytes) -> None:
    data = HEADER.pack(len(message)) + message
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Runs the process."""
    die_with_parent(int(sys.argv[1]))
    set_process_title("GrammarCompiler")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = msgspec.msgpack.decode(_read(), type=CompilerSetup)
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=serve, args=(setup, _read, _write))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
