"""Finds docstrings and comments that are not plain English: `python -m tools.prose_lint [PATHS]`.

| command | does |
|---|---|
| `python -m tools.prose_lint` | prints each offender with file, line and a hint; fails if there is one |
| `python -m tools.prose_lint src/quire/engine` | the same below a path |
| `python -m tools.prose_lint --summary` | prints the number of offenders per folder, by rule |

Without paths it checks the package, its tests, benchmarks and examples. The rules are those of CONTRIBUTING.md, "Plain
English". No comment switches the lint off: rephrase the sentence.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.measures import parse

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "quire"
ENFORCED = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")
"""Folders in which no file may break a rule."""

OPENINGS = (
    "Of",
    "That",
    "Those",
    "By",
    "Until",
    "It",
    "Who",
    "Whom",
    "Whose",
    "What",
    "Whether",
    "How",
    "Whoever",
    "Whatever",
)
OPENING = re.compile(rf"(?:{'|'.join(OPENINGS)})\b(?!\()")
"""A docstring that begins like this is half a sentence. A name with a bracket behind it is code."""
VERB_OPENING = re.compile(r"(?:Say|Says|Tell|Tells|Hear|Hears)\b")
REFERENCE_ONLY = re.compile(r"(?:See|As) [^\n]*$")
PRONOUN = re.compile(r"\b(?:whoever|whomever|somebody|nobody|whom)\b", re.IGNORECASE)
PEOPLE = (
    "those|people|person|persons|user|users|client|clients|caller|callers|operator|operators|reader|readers|someone|anyone|everyone|"
    "developer|developers|contributor|contributors|attacker|administrator|stranger|strangers|scripts?"
)
WHO = re.compile(r"(?<!-)\b(?<!\")who\b(?!\s+(?:may|is allowed to) (?:call|use|see|read))", re.IGNORECASE)
AFTER_PEOPLE = re.compile(rf"\b(?:{PEOPLE}),?\s*$", re.IGNORECASE)
TELLING = re.compile(r"\b(?:tell|tells|told|hear|hears|heard)\b(?! apart)", re.IGNORECASE)
METAPHOR = re.compile(
    r"\b(?:shelf|shelves|inquest|pulse|token of nobody|step of nobody|keeps? (?:its|their|one's) word)\b", re.IGNORECASE
)
METAPHOR_NAME = re.compile(r"(?:^|_)(?:shelf|inquest|pulse)(?:$|_)|Shelf|Inquest|Pulse(?![a-z])|^Turns$")

CHECKLIST = re.compile(r"\bS\d-[A-Z]+-\d+")

HINTS = {
    "opening": "begin with a verb (Returns, Aborts, Yields) or, for a field or class, with the noun that it is",
    "verb": "return, raise, report, send or log",
    "reference": "drop it; @override says that the base class documents it",
    "pronoun": "name the part of the program: which request, which process, any caller",
    "who": "code is `that` or `which`; name the person if it is one",
    "telling": "return, raise, report, send, log",
    "metaphor": "use the field's word: response store, crash attribution, heartbeat, dummy step",
    "checklist": "docs/coverage.md has the rows of the checklist and their code",
    "name": "use the field's word: response store, crash attribution, heartbeat, rotary embedding",
}


@dataclass(frozen=True, order=True)
class Offence:
    """One place that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.rule}: {self.text!r}. Hint: {HINTS[self.rule]}."


def check_prose(text: str, is_docstring: bool = True) -> Iterator[tuple[str, str]]:
    """Yields (rule, excerpt) for each rule that a docstring or a comment breaks."""
    stripped = text.strip()
    first_line = stripped.split("\n", 1)[0]
    if is_docstring:
        if OPENING.match(stripped):
            yield "opening", _excerpt(first_line, 0)
        if VERB_OPENING.match(stripped):
            yield "verb", _excerpt(first_line, 0)
        if REFERENCE_ONLY.fullmatch(stripped):
            yield "reference", _excerpt(first_line, 0)
    for rule, pattern in (("pronoun", PRONOUN), ("telling", TELLING), ("metaphor", METAPHOR), ("checklist", CHECKLIST)):
        for match in pattern.finditer(stripped):
            yield rule, _excerpt(stripped, match.start())
    for match in WHO.finditer(stripped):
        if not AFTER_PEOPLE.search(stripped[: match.start()]):
            yield "who", _excerpt(stripped, match.start())


def check_source(source: str, path: Path) -> list[Offence]:
    """Returns the offences of one module: docstrings, strings under fields, comments, and names that are metaphors."""
    nodes = list(statements(parse(source)))
    offences = [
        Offence(path, line, rule, text) for line, prose in docstrings(nodes) for rule, text in check_prose(prose)
    ]
    offences += [
        Offence(path, line, rule, text)
        for line, prose in comments(source)
        for rule, text in check_prose(prose, is_docstring=False)
    ]
    if METAPHOR_NAME.search(path.stem):
        offences.append(Offence(path, 1, "name", path.stem))
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and METAPHOR_NAME.search(node.name):
            offences.append(Offence(path, node.lineno, "name", node.name))
    return sorted(offences)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields a module and its statements, those inside others included: expressions hold no docstring and no
    definition, and are ten times as many."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                left += inner


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each docstring of a module, class or function, and of each string under an assignment."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for index, statement in enumerate(body):
            if not (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                continue
            follows_field = index > 0 and isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
            if (index == 0 and is_documented) or follows_field:
                yield statement.lineno, statement.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each comment of a module in which any could break a rule: to find them takes longest."""
    ends = "\n".join(line.partition("#")[2] for line in source.splitlines() if "#" in line)
    if not any(rule.search(ends) for rule in (PRONOUN, TELLING, METAPHOR, CHECKLIST, WHO)):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def folder_of(path: Path) -> str:
    """Returns the folder that a file is counted in: the first one of the package ("." for its top), or of the
    project."""
    parts = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).parts
    return parts[0] if len(parts) > 1 else "."


def check_files(paths: Iterable[Path]) -> list[Offence]:
    """Returns the offences of all Python files among, and below, the paths."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [offence for file in files for offence in check_source(file.read_text(encoding="utf-8"), file)]


def _excerpt(text: str, start: int) -> str:
    begin = max(0, start - 25)
    return " ".join(text[begin : start + 45].split())


def _summarize(offences: list[Offence]) -> None:
    rules = list(HINTS)
    print(f"{'folder':<24}" + "".join(f"{rule:>11}" for rule in rules) + f"{'all':>7}")
    for folder in sorted({folder_of(offence.path) for offence in offences}):
        by_rule = Counter(offence.rule for offence in offences if folder_of(offence.path) == folder)
        print(f"{folder:<24}" + "".join(f"{by_rule[rule]:>11}" for rule in rules) + f"{by_rule.total():>7}")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.prose_lint", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=ENFORCED, help="files or folders; default: ENFORCED")
    parser.add_argument("--summary", action="store_true", help="print numbers per folder and rule")
    arguments = parser.parse_args()
    offences = check_files(path.resolve() for path in arguments.paths)
    if arguments.summary:
        _summarize(offences)
        return 0
    for offence in offences:
        print(offence)
    print(f"{len(offences)} offences", file=sys.stderr)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
