"""The measures of a checkout, by which versions of Quire are compared: `scripts/measures [CHECKOUT]`.

Uses only the standard library and executes nothing of the checkout: every number is read from the syntax trees of
`src/quire` and from the lines of `tests`. The architecture tests use the same functions for their limits.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "quire"
CORE_RING = ("engine", "worker", "wire", "frontend")
OUTSIDE_THE_CORE_RING = ("frontend/http", "frontend/openai", "frontend/fleet", "frontend/metrics")
"""Folders of the frontend that are not part of the core ring: HTTP, the fleet of processes, metrics."""
LONG_FILE, LONG_FUNCTION, MANY_PARAMETERS = 300, 60, 6
SMALL_FILE = 120
"""Lines from which a file needs no second importer."""
DOORS = ("parsers", "routes", "executor", "quantization")
"""Names of folders whose files are doors: each file is a row of a table. A file is a door, too, where a string names it
("quire.cli.serve:main")."""
DOTTED = re.compile(r"quire(?:\.\w+)+")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One import of a module. `in_function`: inside a function. `typing_only`: for type checkers only."""

    importer: str
    imported: str
    line: int
    in_function: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"

    @property
    def package(self) -> str:
        """The top-level package that is imported."""
        return self.imported.split(".")[0]


def parse(text: str) -> ast.Module:
    """Returns the syntax tree of a module. It has no garbage; to look for some takes three quarters of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()


class Source:
    """One file of the package, read and parsed once."""

    def __init__(self, path: Path, src: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = parse(self.text)
        parts = path.relative_to(src).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.folder = "/".join(parts[1:-1])
        """Folder under the package: "engine/sched"; "" for the package itself."""
        self.is_init = parts[-1] == "__init__"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class, nested ones included."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @property
    def num_code_lines(self) -> int:
        """Number of lines that hold code: no blank lines, no comments, no docstrings."""
        lines: set[int] = set()
        ignored = (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        )
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in ignored:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(lines)


def length_of(function: Function) -> int:
    """Lines from `def` to the end of the body."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names that the methods of a class assign on `self`."""
    return {
        sub.attr
        for sub in ast.walk(node)
        if isinstance(sub, ast.Attribute) and isinstance(sub.ctx, ast.Store)
        if isinstance(sub.value, ast.Name) and sub.value.id == "self"
    }


def parameters_of(function: Function) -> list[ast.arg]:
    """Every named parameter but `self` and `cls`."""
    spec = function.args
    return [arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if arg.arg not in ("self", "cls")]


def is_annotated(function: Function) -> bool:
    """Returns True if every parameter and the result have a type."""
    spec = function.args
    starred = [arg for arg in (spec.vararg, spec.kwarg) if arg]
    return function.returns is not None and all(arg.annotation for arg in (*parameters_of(function), *starred))


class Checkout:
    """The sources of a checkout of Quire."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.src = root / "src"
        self.package = self.src / PACKAGE

    @cached_property
    def sources(self) -> list[Source]:
        """Every Python file of the package, by path."""
        return [Source(path, self.src) for path in sorted(self.package.rglob("*.py"))]

    @cached_property
    def modules(self) -> dict[str, Source]:
        """Dotted name -> file."""
        return {source.module: source for source in self.sources}

    @cached_property
    def functions(self) -> list[tuple[Source, Function]]:
        """Every function of the package."""
        return [(source, function) for source in self.sources for function in source.functions]

    @cached_property
    def classes(self) -> list[tuple[Source, ast.ClassDef]]:
        """Every class of the package."""
        return [(source, node) for source in self.sources for node in source.classes]

    @cached_property
    def all_imports(self) -> list[Import]:
        """Every import by a module of the package. `from a import b` imports a.b where that is a module, else a."""
        return [found for source in self.sources for found in self._walk(source, source.tree, False, False)]

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of a module of the package by a module of the package."""
        return [found for found in self.all_imports if found.imported in self.modules]

    def _walk(self, source: Source, node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            inside = in_function or isinstance(child, Function)
            typing = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            for name in self._imported(child):
                yield Import(source.module, name, child.lineno, inside, typing)  # type: ignore[attr-defined]
            yield from self._walk(source, child, inside, typing)

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield name if name in self.modules else module

    def cycles(self, *, typing_too: bool = False) -> list[list[str]]:
        """Groups of modules that import one another, each group sorted."""
        graph: dict[str, set[str]] = {module: set() for module in self.modules}
        for found in self.imports:
            if (typing_too or not found.typing_only) and found.imported != found.importer:
                graph[found.importer].add(found.imported)
        return [sorted(group) for group in _strong_components(graph) if len(group) > 1]

    def unearned(self) -> list[Source]:
        """Files without two importers, 120 lines, or a door: a table that names them, or a folder of doors."""
        importers: dict[str, set[str]] = {module: set() for module in self.modules}
        for found in self.imports:
            importers[found.imported].add(found.importer)
        named = {
            match.group()
            for source in self.sources
            for node in source.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if (match := DOTTED.match(node.value))
        }
        doors = named | {name.rpartition(".")[0] for name in named}
        return [
            source
            for source in self.sources
            if not source.is_init
            and source.path.name not in ("__main__.py", "registry.py")
            and len(source.lines) < SMALL_FILE
            and len(importers[source.module]) < 2
            and source.folder.rpartition("/")[2] not in DOORS
            and source.module not in doors
        ]

    def lines_per_folder(self) -> dict[str, tuple[int, int]]:
        """Folder under the package -> (lines, files), subfolders apart."""
        lines: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for source in self.sources:
            lines[source.folder] += len(source.lines)
            files[source.folder] += 1
        return {folder: (lines[folder], files[folder]) for folder in sorted(lines)}

    def core_ring(self) -> tuple[int, int]:
        """(lines, files) of engine, worker, wire, and the frontend without HTTP, fleet and metrics."""
        inside = [
            source
            for source in self.sources
            if source.folder.split("/")[0] in CORE_RING
            and not any((source.folder + "/").startswith(out + "/") for out in OUTSIDE_THE_CORE_RING)
        ]
        return sum(len(source.lines) for source in inside), len(inside)


def _strong_components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    components = []
    for root in graph:
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []

        def enter(node: str, work: list[tuple[str, Iterator[str]]] = work) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            on_stack.add(node)
            work.append((node, iter(graph[node])))

        enter(root)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    enter(other)
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                        if component[-1] == node:
                            break
                    components.append(component)
    return components


def _percentile(values: Iterable[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} % ({part:,} of {whole:,})" if whole else "-"


def _name(source: Source) -> str:
    return str(source.path.relative_to(source.path.parents[len(source.module.split(".")) - source.is_init]))


def _has_docstring(node: ast.ClassDef | Function) -> bool:
    return ast.get_docstring(node) is not None


def _public(function: Function) -> bool:
    is_override = any(ast.unparse(d) in ("override", "typing.override") for d in function.decorator_list)
    return not function.name.startswith("_") and not is_override


def file_rows(checkout: Checkout) -> Iterator[tuple[str, str]]:
    """Measures of the files: (measure, value)."""
    sources = checkout.sources
    lengths = [len(source.lines) for source in sources]
    longest = max(sources, key=lambda source: len(source.lines))
    yield "lines (code lines)", f"{sum(lengths):,} ({sum(source.num_code_lines for source in sources):,})"
    ring, files = checkout.core_ring()
    yield "core ring: lines; files", f"{ring:,}; {files}"
    yield (
        "modules; median / mean lines",
        f"{len(sources)}; {statistics.median(lengths):.0f} / {statistics.mean(lengths):.0f}",
    )
    yield "longest file", f"{len(longest.lines)} ({longest.module})"
    yield f"files > {LONG_FILE} lines", str(sum(n > LONG_FILE for n in lengths))
    unearned = checkout.unearned()
    yield (
        "files without two importers, 120 lines or a door",
        f"{len(unearned)} ({sum(len(s.lines) for s in unearned):,} lines)",
    )


def function_rows(checkout: Checkout) -> Iterator[tuple[str, str]]:
    """Measures of the functions and classes: (measure, value)."""
    functions = [function for _, function in checkout.functions]
    lengths = [length_of(function) for function in functions]
    source, longest = max(checkout.functions, key=lambda pair: length_of(pair[1]))
    yield "longest function", f"{length_of(longest)} ({source.module}.{longest.name})"
    yield f"functions > {LONG_FUNCTION} lines", str(sum(n > LONG_FUNCTION for n in lengths))
    yield "function lines, median / p95", f"{statistics.median(lengths):.0f} / {_percentile(lengths, 0.95)}"
    widest = sorted(((len(attributes_of(node)), node.name) for _, node in checkout.classes), reverse=True)[:6]
    yield "most attributes in a class", ", ".join(f"{count} {name}" for count, name in widest)
    yield "annotated functions", _share(sum(map(is_annotated, functions)), len(functions))
    classes = [node for _, node in checkout.classes]
    yield "classes with a docstring", _share(sum(map(_has_docstring, classes)), len(classes))
    public = [function for function in functions if _public(function)]
    yield "public functions with a docstring", _share(sum(map(_has_docstring, public)), len(public))
    wide = sorted(((len(parameters_of(f)), f"{s.module}.{f.name}") for s, f in checkout.functions), reverse=True)
    yield "most parameters", f"{wide[0][0]} ({wide[0][1]})"
    yield f"functions with > {MANY_PARAMETERS} parameters", str(sum(count > MANY_PARAMETERS for count, _ in wide))


def other_rows(checkout: Checkout) -> Iterator[tuple[str, str]]:
    """Measures of the whole: (measure, value)."""
    tests = sorted((checkout.root / "tests").rglob("*.py"))
    num_test_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests)
    num_lines = sum(len(source.lines) for source in checkout.sources)
    yield "tests / code", f"{num_test_lines / num_lines:.2f} ({num_test_lines:,} lines, {len(tests)} files)"
    yield (
        "import cycles; with imports for type checkers",
        f"{len(checkout.cycles())}; {len(checkout.cycles(typing_too=True))}",
    )
    yield "imports inside functions", str(sum(found.in_function for found in checkout.imports))
    counts = Counter(type(node) for source in checkout.sources for node in source.nodes)
    yield "asserts : raises", f"{counts[ast.Assert]} : {counts[ast.Raise]}"


def main(argv: list[str] | None = None) -> None:
    """Prints the measures of a checkout."""
    parser = argparse.ArgumentParser(prog="scripts/measures", description="Print the measures of a checkout of Quire.")
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkout", nargs="?", type=Path, default=here, help="its directory; this one by default")
    parser.add_argument("--unearned", action="store_true", help="list the files that fail the rule for files")
    options = parser.parse_args(argv)
    checkout = Checkout(options.checkout.resolve())
    if not checkout.sources:
        parser.error(f"{checkout.package} holds no Python files")
    rows = [*file_rows(checkout), *function_rows(checkout), *other_rows(checkout)]
    width = max(len(measure) for measure, _ in rows)
    for measure, value in rows:
        print(f"{measure:<{width}}  {value}")
    print(f"\n{'folder':<36}{'lines':>8}{'files':>7}")
    for folder, (lines, files) in sorted(checkout.lines_per_folder().items(), key=lambda item: -item[1][0]):
        print(f"{folder or '(vocabulary)':<36}{lines:>8,}{files:>7}")
    if options.unearned:
        print("\nfiles without two importers, 120 lines or a door:")
        for source in checkout.unearned():
            print(f"  {len(source.lines):>4}  {source.module}")


if __name__ == "__main__":
    main()
