"""The page, from the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tools.compat.verdicts import Verdict, field_verdicts, flag_verdicts, http_table, route_verdict

from quire.envs import ENV_VARS
from quire.vllm_names import MODULES

HEAD = """# Beside vLLM

    PYTHONPATH=src python -m tools.compat        # writes this page from the code; a test compares the two

Every route, request field and `serve` flag of vLLM 0.32, and whether Quire has it.

| word | a route | a field | a flag |
|---|---|---|---|
| **yes** | the same name and meaning | the same | the same |
| **different** | the note has the difference | the same | the same |
| **not** | answered with 404 | refused if its value asks for something, else ignored | ends the start with a message |

Every flag is known, so `vllm serve` becomes `quire serve` by changing the program's name. A flag at vLLM's default is
accepted without a message. A flag that only tunes something that Quire does not have is accepted with a warning ("no
effect"). A flag that would change what the server does is refused. The same holds for the keyword arguments of
`LLM`, `EngineArgs` and `AsyncEngineArgs`, whose attributes may be set, too; None is a flag's default. The same holds
for fields: the first use of a field without effect is logged."""


IMPORTS = """## Imports

A program written for vLLM imports the same names from `quire`: `from vllm import LLM` becomes `from quire import LLM`.
These modules have vLLM's names, too; `python -m quire.entrypoints.openai.api_server` is `quire serve`.

    sed -i -E 's/^( *(from|import) )vllm\\b/\\1quire/' my_program.py        # all of its imports

[Programs written for vLLM](../examples/from_vllm/README.md) has examples of the Python API and of clients, which CI
runs after exactly this change."""

VARIABLES = """## Environment variables

Quire's own begin with `QUIRE_`. Where one of these is not set, vLLM's is read. Other `VLLM_` variables have no
effect."""


def _imports() -> str:
    rows = [f"| `{module}` | {', '.join(f'`{name}`' for name in names)} |" for module, names in MODULES.items()]
    return "\n".join(["| module | names |", "|---|---|", *rows])


def _variables() -> str:
    rows = [f"| `{variable.vllm_name}` | `{variable.name}` |" for variable in ENV_VARS if variable.vllm_name]
    return "\n".join(["| vLLM's | here |", "|---|---|", *rows])


def make_page() -> str:
    """docs/compat.md."""
    table = http_table()
    routes = [route_verdict(row) for row in table["route"]]
    fields = {name: field_verdicts(name) for name in table["request"]}
    flags = flag_verdicts()
    parts = [HEAD, _summary(routes, fields.values(), flags.values())]
    parts += [IMPORTS, _imports(), VARIABLES, _variables(), "## Routes", _rows("route", routes)]
    parts.append("## Request fields")
    for name, verdicts in fields.items():
        parts += [f"### {name}", _where(table["request"][name]), _fields(verdicts)]
    parts.append("## Flags")
    for group, verdicts in flags.items():
        parts += [f"### {group}", _rows("flag", verdicts)]
    return "\n\n".join(parts) + "\n"


def _summary(routes: Iterable[Verdict], fields: Iterable[list[Verdict]], flags: Iterable[list[Verdict]]) -> str:
    lines = ["| | yes | different | not |", "|---|---|---|---|"]
    groups = {"routes": [routes], "fields": fields, "flags": flags}
    for name, verdicts in groups.items():
        count = Counter(v.word for part in verdicts for v in part)
        lines.append(f"| {name} | {count['yes']} | {count['different']} | {count['not']} |")
    return "\n".join(lines)


def _rows(title: str, verdicts: Iterable[Verdict]) -> str:
    lines = [f"| {title} | here | note |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{v.name}` | {v.word} | {v.note} |" for v in verdicts)])


def _where(row: dict[str, str]) -> str:
    if "route" in row:
        return f"Body of `{row['route']}`."
    return f"Part of a body: {row['passed']}." if "passed" in row else "Part of a body."


def _fields(verdicts: list[Verdict]) -> str:
    """The many that are the same in one line, the others in a table."""
    same = [f"`{v.name}`" for v in verdicts if v.word == "yes"]
    others = [v for v in verdicts if v.word != "yes"]
    absent = {v.note for v in others} == {"ignored"} and not same
    parts = [f"**yes**: {', '.join(same)}"] if same else []
    if absent:
        parts.append(f"**not**: {', '.join(f'`{v.name}`' for v in others)}")
    elif others:
        parts.append(_rows("field", others))
    return "\n\n".join(parts)
