"""What a child process does about its place in the system: its name, and its end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def peak_memory_bytes(root: Path = Path("/")) -> int:
    """The most main memory this process has held at once (proc(5), VmHWM), mapped files included; 0 where the system
    does not say. Not getrusage, which counts what the parent held before it became this program."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def set_process_title(title: str) -> None:
    """Show `title` in ps and top (Linux: 15 bytes of it). Elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)


def leave_terminal() -> None:
    """Begin a session of one's own: Ctrl-C and a hang-up of the user's terminal then reach the parent only, which
    decides what becomes of this process. A signal sent to this process by its id still arrives."""
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(PermissionError):  # it leads a group of its own, which is as good
            os.setsid()


def die_with_parent(parent_pid: int) -> None:
    """Have the system kill this process (SIGKILL) when the parent's thread that started it ends (Linux, prctl(2)).

    Elsewhere nothing happens: the process must notice by itself. Exits at once if the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)


def search_path() -> str:
    """PYTHONPATH for a Python that is started from this one, and is to find the same modules wherever it runs."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)
