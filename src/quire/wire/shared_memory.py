"""Files without a name that processes share by inheriting their descriptors, and the abort word of workers."""

from __future__ import annotations

import os
import sys
import tempfile


def make_shared_file(num_bytes: int) -> int:
    """Returns the descriptor of a new file of zeroes. The system takes memory for a page when it is first written.
    Raises OSError."""
    if sys.platform == "linux":
        fd = os.memfd_create("quire", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, num_bytes)
    return fd


WORKERS_FILE_BYTES = 1 << 40
"""Size of the file that the workers of an engine share: address space, not memory."""


def set_abort_word(fd: int) -> None:
    """Makes every barrier of the workers that share the file fail, because one of them has."""
    os.pwrite(fd, (1).to_bytes(4, sys.byteorder), 0)
