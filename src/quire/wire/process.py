"""Place of a child process in the system: its name, and its end with its parent."""

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
    """Returns the most main memory this process has held at once (proc(5), VmHWM), mapped files included; 0 if unknown.

    getrusage would count what the parent held before it became this program.
    """
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def set_process_title(title: str) -> None:
    """Shows `title` in ps and top (Linux: 15 bytes of it). Does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)


def leave_terminal() -> None:
    """Begins a session of its own: Ctrl-C and a hang-up of the user's terminal then reach the parent only.

    The parent decides what becomes of this process. A signal sent to its process id still arrives.
    """
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(PermissionError):  # it leads a process group, which has the same effect
            os.setsid()


def die_with_parent(parent_pid: int) -> None:
    """Has the system kill this process (SIGKILL) when the parent's thread that started it ends (Linux, prctl(2)).

    Does nothing elsewhere: the process must notice by itself. Exits at once if the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)


def search_path() -> str:
    """Returns the PYTHONPATH with which a Python started from this one finds the same modules in any directory."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)
