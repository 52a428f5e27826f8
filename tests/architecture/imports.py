"""Reads the package's import statements as text (ast): nothing is executed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = SRC / "quire"


@dataclass(frozen=True)
class Import:
    """One imported module. `in_function`: inside a function body. `typing_only`: under `if TYPE_CHECKING`."""

    importer: str
    imported: str
    line: int
    in_function: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def all_modules() -> set[str]:
    """Every module of the package."""
    return {module_name(path) for path in source_files()}


def imports_of(path: Path, modules: set[str]) -> Iterator[Import]:
    """The imports of one file. `from a import b` names a.b where that is a module, else a."""
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), module_name(path), modules, False, False)


def _walk(node: ast.AST, importer: str, modules: set[str], in_function: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        for name in _imported(child, modules):
            yield Import(importer, name, child.lineno, inside, typing)  # type: ignore[attr-defined]
        yield from _walk(child, importer, modules, inside, typing)


def _imported(node: ast.AST, modules: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import at line {node.lineno}"
        assert node.module is not None
        return [
            f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module
            for alias in node.names
        ]
    return []


def all_imports() -> list[Import]:
    """Every import of the package."""
    modules = all_modules()
    return [found for path in source_files() for found in imports_of(path, modules)]


def is_standard(name: str) -> bool:
    """Whether a top-level module belongs to Python itself."""
    return name.split(".")[0] in sys.stdlib_module_names
