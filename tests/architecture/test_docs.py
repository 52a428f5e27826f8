"""The documents against the code: every link resolves, every row of docs/coverage.md names things that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tools.compat.page import make_page

from .sources import CHECKOUT, ROOT

PAGES = {str(path.relative_to(ROOT)): path for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")
ROW = re.compile(r"^\| ((?:S\d|FH)-[A-Z]+-\d+[^|]*?) \| ([^|]*) \| ([^|]*) \|$")


def test_links_resolve() -> None:
    broken = [
        f"{name}: {target}"
        for name, page in PAGES.items()
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not target.startswith(("http:", "https:", "mailto:")) and not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_every_page_is_in_the_table_of_contents() -> None:
    """docs/README.md is also the table of contents of the site (tools/docs_site.py)."""
    listed = set(LINK.findall(PAGES["docs/README.md"].read_text(encoding="utf-8")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} == {
        name for name in listed if "/" not in name
    }


def test_named_commands_exist() -> None:
    missing = [
        f"{name}: scripts/{script}"
        for name, page in PAGES.items()
        for script in re.findall(r"\bscripts/(\w+)", page.read_text(encoding="utf-8"))
        if not (ROOT / "scripts" / script).exists()
    ]
    assert not missing, "\n".join(missing)


def _body(path: Path) -> list[ast.stmt]:
    parsed = next((source.tree for source in CHECKOUT.sources if source.path == path), None)
    return (parsed or ast.parse(path.read_text(encoding="utf-8"))).body


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

    walk(_body(path), "")
    return names


def _resolve(reference: str) -> Path | None:
    for base in (ROOT / "src" / "quire", ROOT / "src", ROOT):
        if (base / reference).is_file():
            return base / reference
    return None


def test_named_code_exists() -> None:
    """`path/file.py:Symbol` in a page names a file and something it defines."""
    missing = []
    for name, page in PAGES.items():
        for file, symbol in REFERENCE.findall(page.read_text(encoding="utf-8")):
            if "/" in file and symbol:
                path = _resolve(file)
                if path is None or symbol not in _symbols(path):
                    missing.append(f"{name}: {file}:{symbol}")
    assert not missing, "\n".join(missing)


FILES_A_READER_WRITES = {"frontend/openai/routes/count.py", "src/quire/worker/spec_decode/echo.py"}
"""New files of the recipes, which the repository does not have."""


def test_named_files_exist() -> None:
    missing = [
        f"{name}: {file}"
        for name, page in PAGES.items()
        for file, _ in REFERENCE.findall(page.read_text(encoding="utf-8"))
        if "/" in file and _resolve(file) is None and file not in FILES_A_READER_WRITES
    ]
    assert not missing, "\n".join(missing)


def test_named_classes_exist() -> None:
    """Pages about the inside name classes: each CamelCase word in backticks occurs in the package."""
    words = set(re.findall(r"\w+", "\n".join(source.path.read_text(encoding="utf-8") for source in CHECKOUT.sources)))
    missing = [
        f"{name}: {word}"
        for name, page in PAGES.items()
        if name.startswith(("docs/architecture/", "docs/ARCHITECTURE", "docs/tour", "docs/glossary"))
        for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
        for word in re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", code)
        if word not in words
    ]
    assert not missing, "\n".join(missing)


def test_named_tests_exist() -> None:
    missing = [
        f"{name}: {path}"
        for name, page in PAGES.items()
        for path in re.findall(r"`(tests/[\w/]+(?:\.py)?)[`:]", page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing, "\n".join(missing)


def test_lines_that_a_page_changes_exist() -> None:
    """A ```diff block names a file in its first line; each line that it takes away stands there exactly once."""
    missing = [
        f"{name}: {file}: {line.strip()}"
        for name, page in PAGES.items()
        for file, body in re.findall(r"^```diff\n# (\S+)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^-(.+)$", body, re.MULTILINE)
        if (ROOT / file).read_text(encoding="utf-8").splitlines().count(line) != 1
    ]
    assert not missing, "\n".join(missing)


GENERATED = {"docs/compat.md", "docs/http_fields.md"}


def test_lines_are_short() -> None:
    """120 characters; rows of tables may be longer, because they cannot be broken."""
    long = [
        f"{name}:{number}: {len(line)}"
        for name, page in PAGES.items()
        if name not in GENERATED
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and not line.lstrip().startswith("|")
    ]
    assert not long, "\n".join(long)


def test_the_figures_of_the_readme_are_results() -> None:
    """Each number in README.md's table of peers stands in the table that `benchmarks.versus` wrote."""
    results = PAGES["docs/performance.md"].read_text(encoding="utf-8").partition("<!-- versus: end -->")[0]
    rows = re.findall(r"^\| `.*\|$", PAGES["README.md"].read_text(encoding="utf-8"), re.MULTILINE)
    figures = [figure for row in rows for figure in re.findall(r"(?<![\w.])\d[\d.,]*×?", row.split("|", 2)[2])]
    assert len(figures) > 25
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d×])", results)] == []


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
