"""The page docs/recipes/add_a_tool_parser.md is true: its code, as printed there, makes a working parser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.frontend.openai.parsers import tools as registry

from ..reading import count_work, read, split

PAGE = Path(__file__).resolve().parents[5] / "docs" / "recipes" / "add_a_tool_parser.md"


def test_the_parser_of_the_recipe_reads_calls() -> None:
    rows = dict(registry.TOOL_PARSERS)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    page: dict[str, Any] = {**vars(registry), "TOOL_PARSERS": rows}
    exec(compile(code, str(PAGE), "exec"), page)
    program = rows["function_tags"].program
    text = 'So: <function=f>{"a": {}}</function>\n<function=g>{}</function> <function=h>x <function=i>{"a": <'
    for size in (1, 3, 1000):
        assert read(program, split(text, size)) == [
            ("content", "So: "), ("call", "f"), ("arguments", '{"a": {}}'), ("call", "g"), ("arguments", "{}"),
            ("content", " <function=h>x "), ("call", "i"), ("arguments", '{"a": '), ("content", "<"),
        ]  # fmt: skip
    small, large = (count_work(program, split("<function=f>{" * n, 3)) for n in (50, 100))
    assert large <= 2.2 * small
    assert rows["function_tags"].recognizes("<function=f></function>")
