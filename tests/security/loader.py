"""Loads every repository under a directory, and reports on itself: `python [-O] -m tests.security.loader DIRECTORY`.

Each is loaded as `quire serve` would: configuration, tokenizer, a chat rendered, weights. A line of JSON says how it
ended, and what Python's audit hook has seen that no loading of data needs: code of the repository compiled or run,
modules imported from it, files outside opened, sockets, processes, pickles. With --self-check it does all of that, to
show that the hook would notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from quire import __version__
from quire.config.engine_args import EngineArgs
from quire.errors import QuireError
from quire.frontend.input_processor import InputProcessor
from quire.frontend.request_pipeline import load_tokenizer
from quire.worker.loader import Placement, load_model

FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pickle.",
    "pty.",
    "webbrowser.",
)
"""Events of no honest loading, by how they begin."""
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "shutil.",
)
CHAT = [{"role": "user", "content": "hello"}]


class Auditor:
    """Python's audit hook, which cannot be taken out again; it looks while it `is_on`."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._outside = str(root / "outside")
        self._inside = str(root / "repositories")
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        self.is_on = False  # what is done here is no concern of ours
        try:
            if self._is_wrong(event, args):
                self.seen.append(f"{event} {args!r}"[:300])
        finally:
            self.is_on = True

    def _is_wrong(self, event: str, args: tuple[Any, ...]) -> bool:
        if event.startswith(FORBIDDEN):
            return True
        if event.startswith(CHANGES):
            return any(self._is_theirs(arg) for arg in args)
        match event, args:
            case "exec", (CodeType() as code, *_):
                return self._is_theirs(code.co_filename)
            case "compile", (_, filename):
                return self._is_theirs(filename)
            case "import", (_, filename, path, *_):
                return self._is_theirs(filename) or any(self._is_theirs(entry) for entry in path or ())
            case "open", (path, mode, flags):
                writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) if isinstance(flags, int) else "w" in str(mode)
                return self._is_planted(path) or (writes and self._is_theirs(path))
            case "ctypes.dlopen", (name, *_):
                return self._is_theirs(name)
        return False

    def _is_theirs(self, path: Any) -> bool:
        """Returns True if it lies where the repositories are."""
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return text.startswith(self._root) or os.path.realpath(text).startswith(self._root)

    def _is_planted(self, path: Any) -> bool:
        """Returns True if it is a file beside the repositories, which only a repository has named."""
        text = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        return text.startswith((self._outside, "/etc/passwd", "/dev/zero"))


def load(directory: Path) -> str:
    """All that a server reads of a repository."""
    config = EngineArgs(str(directory)).create_engine_config("serving")
    tokenizer = load_tokenizer(config.model_config)
    assert tokenizer is not None
    processor = InputProcessor(config.model_config, tokenizer, 64, ("generate",))
    processor.get_default_sampling_params()
    processor.read_prompt("hello there", {})
    if tokenizer.chat_template is not None:
        tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    with torch.no_grad():
        load_model(config.model_config, config.load_config, Placement(torch.device("cpu"), torch.float32))
    return "loaded"


def report(name: str, work: Callable[[], str], auditor: Auditor) -> None:
    """Do it, and say how it went."""
    auditor.seen.clear()
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    auditor.is_on = True
    try:
        outcome = work()
    except QuireError as e:
        outcome = f"{type(e).__name__}: {e}"
    except BaseException as e:
        outcome = f"UNPLANNED {type(e).__name__}: {e}"
    auditor.is_on = False
    line = {
        "name": name,
        "outcome": outcome[:2000],
        "seen": auditor.seen,
        "cpu_s": time.process_time() - start,
        "grown_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "is_optimized": not __debug__,
    }
    print(json.dumps(line), flush=True)


def misdeeds(root: Path) -> dict[str, Callable[[], Any]]:
    """Everything the auditor is there for."""
    code = root / "repositories" / "modeling.py"
    code.write_text("x = 1")

    def import_it() -> None:
        sys.path.insert(0, str(code.parent))
        try:
            __import__("modeling")
        finally:
            sys.path.pop(0)

    def connect() -> None:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.connect(("127.0.0.1", 9))

    return {
        "compile": lambda: compile("1", str(code), "eval"),
        "exec": lambda: exec(compile("1", str(code), "exec")),
        "import": import_it,
        "open outside": lambda: (root / "outside" / "secret.json").read_bytes(),
        "open through a link": lambda: (root / "repositories" / "link.json").read_bytes(),
        "write": lambda: (root / "repositories" / "new").write_text("x"),
        "remove": lambda: code.unlink(),
        "connect": connect,
        "look up": lambda: contextlib.suppress(OSError) and socket.gethostbyname("localhost"),
        "process": lambda: subprocess.run(["true"], check=True),
        "shell": lambda: os.system("true"),
        "pickle": lambda: pickle.load(io.BytesIO(b"cbuiltins\nprint\n.")),
        "library": lambda: contextlib.suppress(OSError) and _open_library(root / "repositories" / "x.so"),
    }


def _open_library(path: Path) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(path))


def _done(work: Callable[[], Any]) -> str:
    work()
    return "done"


def main(argv: list[str]) -> None:
    root = Path(argv[0]).resolve()
    auditor = Auditor(root)
    print(__version__, torch.__version__, file=sys.stderr)
    for directory in sorted(path for path in (root / "repositories").iterdir() if path.is_dir()):
        report(directory.name, lambda directory=directory: load(directory), auditor)  # type: ignore[misc]
    for name, work in misdeeds(root).items():
        report(name, lambda work=work: _done(work), auditor)  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1:])
