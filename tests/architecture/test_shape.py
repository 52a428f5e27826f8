"""The measures of DESIGN.md §6 as ceilings."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from .imports import PACKAGE, module_name, source_files

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_ATTRIBUTES = 30
"""An alarm, not a goal: about 16 is the goal."""
FORBIDDEN_FILES = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py"}

ROOT = PACKAGE.parents[1]
FILES = source_files()
IDS = [module_name(f) for f in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_file_is_small_and_named_after_what_it_holds(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    assert path.name not in FORBIDDEN_FILES


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_functions_are_short_and_modules_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.stat().st_size:
        assert ast.get_docstring(tree), "the module says nothing about itself"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_classes_are_narrow(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            names = {
                target.attr
                for sub in ast.walk(node)
                if isinstance(sub, ast.Assign | ast.AnnAssign)
                for target in (sub.targets if isinstance(sub, ast.Assign) else [sub.target])
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            assert len(names) <= MAX_ATTRIBUTES, f"{node.name} has {len(names)} attributes"


def test_assets_are_shipped() -> None:
    """A wheel holds what the repository does: git must not ignore a file of the assets."""
    assets = [str(path.relative_to(ROOT)) for path in (PACKAGE / "assets").rglob("*") if path.is_file()]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    tracked = subprocess.run(["git", "ls-files", "--", *assets], cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = subprocess.run(["git", "check-ignore", "--", *assets], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""
    assert {name for name in tracked.stdout.splitlines() if "/ui/" in name}


def test_assets_are_the_only_data() -> None:
    data = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".typed") and p.name]
    strays = [p for p in data if "assets" not in p.parts and "__pycache__" not in p.parts and p.name != "py.typed"]
    assert not [p for p in strays if p.name != "libquire_kernels.so"], strays  # built, not committed
