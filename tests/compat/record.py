"""Records the public surface: exported names and signatures, flags, environment variables, routes, metrics, wire.

`python -m tests.compat.record` prints the surface as JSON. `surface.json` beside this file is the surface at commit
ad14480, before the packages were rearranged; `test_record.py` compares the two. A feature that adds to the surface
adds to the file; nothing may disappear from it without an entry in CHANGELOG.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
from tools.compat.verdicts import all_endpoints, everything

import quire
import quire.wire
from quire import envs
from quire.cli.command_line import CommandLine
from quire.cli.main import COMMANDS
from quire.frontend.metrics.catalog.quire_rows import INFOS, METRICS
from quire.frontend.metrics.catalog.spec import FAMILIES, MetricSpec
from quire.frontend.openai.app import endpoints_of
from quire.resolve import resolve

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "wire" / "golden.txt"


def make_surface() -> dict[str, Any]:
    """Returns every part of the public surface, as values that JSON can hold."""
    return {
        "names": {name: describe(getattr(quire, name)) for name in sorted(quire.__all__) if name != "__version__"},
        "environment": {row.name: row.default for row in vars(envs).values() if isinstance(row, envs.EnvVar)},
        "flags": {command.name: flags_of(command.entry) for command in COMMANDS},
        "routes": sorted({f"{' '.join(sorted(e.methods))} {e.path}" for e in all_endpoints()}),
        "admin_routes": sorted(
            {f"{' '.join(sorted(e.methods))} {e.path}" for e in endpoints_of(everything(), is_admin=True)}
        ),
        "metrics": {row.full_name: describe_metric(row) for row in (*METRICS, *INFOS)},
        "wire": wire_structs(),
        "golden": hashlib.sha256(GOLDEN.read_bytes()).hexdigest(),
    }


def describe(value: Any) -> dict[str, Any]:
    """Returns the parameters of a class's constructor and of its public methods."""
    methods = {
        name: signature(member)
        for name, member in inspect.getmembers(value, callable)
        if not name.startswith("_") and not isinstance(member, type)
    }
    properties = sorted(name for name, member in inspect.getmembers(value) if isinstance(member, property))
    return {"call": signature(value), "methods": methods, "properties": properties}


def signature(value: Any) -> list[str]:
    """Returns a callable's parameters as `name`, `name=default`, with their kind where it matters to a caller."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    mark = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "kw:", "POSITIONAL_ONLY": "pos:"}
    return [mark.get(p.kind.name, "") + p.name + default_of(p) for p in parameters]


def default_of(parameter: inspect.Parameter) -> str:
    """Returns `=default`, or nothing where there is none; objects without a stable text by their type."""
    if parameter.default is inspect.Parameter.empty:
        return ""
    text = repr(parameter.default)
    return f"={type(parameter.default).__name__}" if " at 0x" in text or "<" in text else f"={text}"


def flags_of(entry: str) -> dict[str, list[Any]]:
    """Returns each flag of a command: default, choices, alias, kind."""
    line: CommandLine = resolve(f"{entry}command_line")()
    return {
        " ".join(option.spellings): [
            repr(option.default) if dataclasses.is_dataclass(option.default) else option.default,
            list(option.choices),
            option.is_switch,
            option.is_repeatable,
            option.takes_many,
        ]
        for option in line.options
    }


def describe_metric(row: Any) -> list[Any]:
    """Returns kind, labels, known label values and buckets of a metric."""
    if not isinstance(row, MetricSpec):
        return ["info"]
    buckets = [repr(b) for b in FAMILIES.get(row.family, (row.family,))]
    return [row.kind, [*row.base_labels, *row.labels], [list(k) for k in row.known], buckets, row.condition]


def wire_structs() -> dict[str, list[str]]:
    """Returns the fields of every struct that crosses a process boundary, in their order on the wire."""
    found: dict[str, list[str]] = {}
    for info in pkgutil.walk_packages(quire.wire.__path__, "quire.wire."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == info.name:
                found[name] = list(value.__struct_encode_fields__)
    return dict(sorted(found.items()))


def as_text(surface: dict[str, Any]) -> str:
    """Returns the surface as JSON with one line for each entry, so that a change shows as a line of a diff."""
    parts = []
    for part, value in surface.items():
        entries = (
            value.items()
            if isinstance(value, dict)
            else [(None, item) for item in value]
            if isinstance(value, list)
            else []
        )
        lines = [
            f" {json.dumps(k) + ': ' if k else ''}{json.dumps(v, default=repr, ensure_ascii=False)}" for k, v in entries
        ]
        opening, closing = ("[", "]") if isinstance(value, list) else ("{", "}")
        body = json.dumps(value) if isinstance(value, str) else f"{opening}\n" + ",\n".join(lines) + f"\n{closing}"
        parts.append(f"{json.dumps(part)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}"


if __name__ == "__main__":
    print(as_text(make_surface()))
