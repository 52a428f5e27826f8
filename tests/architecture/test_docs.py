"""The documents against the code: every link resolves, every row of docs/coverage.md names things that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tools.compat.page import make_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")
ROW = re.compile(r"^\| (S\d-[A-Z]+-\d+[^|]*?) \| ([^|]*) \| ([^|]*) \|$")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not target.startswith(("http:", "https:", "mailto:")) and not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_commands_exist(page: Path) -> None:
    for script in re.findall(r"\bscripts/(\w+)", page.read_text(encoding="utf-8")):
        assert (ROOT / "scripts" / script).exists(), f"scripts/{script}"


@cache
def _symbols(path: Path) -> set[str]:
    """Functions, classes, methods ("Class.method"), attributes and constants that a file defines."""
    names: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    walk(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


def _resolve(reference: str) -> Path | None:
    for base in (ROOT / "src" / "quire", ROOT):
        if (base / reference).is_file():
            return base / reference
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_code_exists(page: Path) -> None:
    """`path/file.py:Symbol` in a page names a file and something it defines."""
    missing = []
    for file, symbol in REFERENCE.findall(page.read_text(encoding="utf-8")):
        if "/" in file and symbol:
            path = _resolve(file)
            if path is None or symbol not in _symbols(path):
                missing.append(f"{file}:{symbol}")
    assert not missing


def test_the_page_beside_vllm_is_up_to_date() -> None:
    page = (ROOT / "docs" / "compat.md").read_text(encoding="utf-8")
    assert page == make_page(), "the routes, fields or flags have changed: run python -m tools.compat"


def _coverage_rows() -> list[tuple[str, str, str]]:
    lines = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8").splitlines()
    return [match.groups() for line in lines if (match := ROW.match(line))]  # type: ignore[misc]


def test_coverage_rows_name_code_and_tests_that_exist() -> None:
    rows = _coverage_rows()
    assert len(rows) > 150
    missing = []
    for row, code, test in rows:
        if code.strip().startswith("later"):
            continue
        references = REFERENCE.findall(code)
        tests = REFERENCE.findall(test)
        if not references or not tests:
            missing.append(f"{row}: no code or no test named")
        for file, symbol in [*references, *tests]:
            path = _resolve(file)
            if path is None:
                missing.append(f"{row}: {file} does not exist")
            elif symbol and symbol not in _symbols(path):
                missing.append(f"{row}: {file} has no {symbol}")
    assert not missing, "\n".join(missing)


def test_coverage_rows_are_listed_once() -> None:
    names = [row for row, _, _ in _coverage_rows()]
    assert len(names) == len(set(names))
