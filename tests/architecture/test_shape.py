"""The measures of DESIGN.md §6 as limits: lengths, widths, and the lines of every folder."""

from __future__ import annotations

import ast
import shutil
import subprocess

import pytest
from tools.measures import attributes_of, length_of

from .budgets import BUDGETS, over_budget
from .sources import CHECKOUT, PACKAGE, ROOT

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_ATTRIBUTES = 16
FORBIDDEN_FILES = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py"}
FOLDERS = {".ci", ".github", "benchmarks", "csrc", "deploy", "docs", "examples", "scripts", "src", "tests", "tools"}
MAX_SOURCE_BYTES = 1 << 20


def test_files_are_small_and_named_after_what_they_hold() -> None:
    large = [f"{s.module} has {len(s.lines)} lines" for s in CHECKOUT.sources if len(s.lines) > MAX_FILE_LINES]
    assert not large, "\n".join(large)
    assert not [s.module for s in CHECKOUT.sources if s.path.name in FORBIDDEN_FILES]


def test_modules_are_documented() -> None:
    assert not [s.module for s in CHECKOUT.sources if s.text and not ast.get_docstring(s.tree)]


def test_functions_are_short() -> None:
    long = [
        f"{source.module}.{function.name} has {length_of(function)} lines"
        for source, function in CHECKOUT.functions
        if length_of(function) > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_classes_are_narrow() -> None:
    wide = [
        f"{source.module}.{node.name} has {count} attributes"
        for source, node in CHECKOUT.classes
        if (count := len(attributes_of(node))) > BUDGETS["attributes"].get(node.name, MAX_ATTRIBUTES)
    ]
    assert not wide, "\n".join(wide)


def test_folders_stay_in_their_budgets() -> None:
    assert not over_budget(CHECKOUT)


def test_a_budget_can_be_exceeded() -> None:
    """A check that cannot fail proves nothing."""
    small = {name: dict.fromkeys(rows, 1) for name, rows in BUDGETS.items() if name != "attributes"}
    broken = over_budget(CHECKOUT, small)
    assert len(broken) == sum(len(rows) for rows in small.values())
    del small["lines"]["engine"]
    assert "engine has no budget" in "\n".join(over_budget(CHECKOUT, small))


def test_assets_are_shipped() -> None:
    """A wheel holds what the repository does: git must not ignore a file of the assets."""
    assets = [str(path.relative_to(ROOT)) for path in (PACKAGE / "assets").rglob("*") if path.is_file()]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    tracked = subprocess.run(["git", "ls-files", "--", *assets], cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = subprocess.run(["git", "check-ignore", "--", *assets], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""
    assert {name for name in tracked.stdout.splitlines() if "/ui/" in name}


def test_what_a_run_leaves_behind_is_not_committed() -> None:
    """The root holds pages and settings, folders of it hold source: what a command wrote there comes from a mistake."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = listed.stdout.split("\0")
    assert {name for name in names if "/" not in name and name.endswith((".json", ".npz", ".kvx", ".log"))} == set()
    assert {name.split("/")[0] for name in names if "/" in name} <= FOLDERS
    large = [n for n in names if n and (ROOT / n).is_file() and (ROOT / n).stat().st_size > MAX_SOURCE_BYTES]
    assert [name for name in large if "/assets/" not in name] == []


def test_assets_are_the_only_data() -> None:
    data = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".typed") and p.name]
    strays = [p for p in data if "assets" not in p.parts and "__pycache__" not in p.parts and p.name != "py.typed"]
    others = {"libquire_kernels.so", "quire_kernels.h"}  # built, not committed; and source, of C++ and of Python
    assert not [p for p in strays if p.name not in others], strays
