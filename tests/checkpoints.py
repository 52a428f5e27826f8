"""Tiny checkpoints, each made once per run and shared by its workers."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.testing.tiny_models import make_tiny_checkpoint

MakeCheckpoint = Callable[..., Path]


def shared_checkpoints(root: Path) -> MakeCheckpoint:
    """Returns `make(family, **overrides)`: the directory of a tiny checkpoint below `root`, made on first use by
    whichever process comes first. Nothing may be written into it."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = _make(root / f"{family}-{hashlib.sha256(key.encode()).hexdigest()[:16]}", family, overrides)
        return made[key]

    return make


def _make(path: Path, family: str, overrides: dict[str, Any]) -> Path:
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        make_tiny_checkpoint(unfinished, family, **overrides)
        try:
            unfinished.rename(path)
        except OSError:  # another process was quicker
            shutil.rmtree(unfinished)
    return path
