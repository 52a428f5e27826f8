"""The table of advisories in SECURITY.md names tests that exist, and that run by default."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ADVISORY = re.compile(r"CVE-\d{4}-\d{4,7}|GHSA(?:-[23456789cfghjmpqrvwx]{4}){3}")
TEST = re.compile(r"`(tests/[\w/]+\.py):(\w+)`")


def rows() -> list[tuple[str, list[str], list[tuple[str, str]]]]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text[text.index("## Published advisories") : text.index("## Reporting")]
    found = [(what, ADVISORY.findall(ids), TEST.findall(tests)) for what, ids, tests in ROW.findall(table)]
    return [row for row in found if row[1]]


def test_every_kind_of_advisory_has_tests() -> None:
    assert len(rows()) >= 15
    assert all(tests for _, _, tests in rows())
    ids = [advisory for _, advisories, _ in rows() for advisory in advisories]
    assert len(ids) > 80
    assert len(ids) == len(set(ids)), "each stands once"


def test_the_tests_exist_and_are_not_slow() -> None:
    missing = []
    for file, name in {test for _, _, tests in rows() for test in tests}:
        path = ROOT / file
        functions = {
            node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
            for node in (ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else [])
            if isinstance(node, ast.FunctionDef)
        }
        if name not in functions or any(decorator == "pytest.mark.slow" for decorator in functions.get(name, [])):
            missing.append(f"{file}:{name}")
    assert not missing
