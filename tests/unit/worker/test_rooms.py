"""The rooms of the worker: no two of its packages and modules import each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import quire.worker

ROOT = Path(quire.worker.__file__).parent


def imports_of(path: Path) -> set[str]:
    """Rooms of the worker that a file imports: the first part of each name below quire.worker."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "quire.worker":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.worker."):
            found.add((node.module or "").split(".")[2])
    return found


def test_no_two_rooms_import_each_other() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        arrows[room] |= imports_of(path) - {room}
    assert {"kernels", "layers", "attention"} < set(arrows)
    assert "kernels" in arrows["layers"]
    assert not [(a, b) for a in arrows for b in arrows[a] if a in arrows.get(b, set())]
