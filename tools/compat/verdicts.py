"""Verdicts on compatibility: read from the code, explained by the tables."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.cli.command_line import Option
from quire.cli.serve import command_line
from quire.config.flags import flags_of
from quire.config.server import ServerConfig
from quire.config.vllm_flags import VllmFlag, vllm_flags
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint
from quire.frontend.openai.app import endpoints_of
from quire.resolve import resolve

HERE = Path(__file__).resolve().parent
OPENAI = HERE.parents[1] / "src" / "quire" / "frontend" / "openai"
_SWITCHES = [spec.field_name for spec in flags_of(ServerConfig) if spec.is_switch and spec.name.startswith("enable_")]


class Verdict(NamedTuple):
    """One row of the page."""

    name: str
    word: str
    """ "yes", "different" or "not"."""
    note: str = ""


def _verdict(name: str, differences: Iterable[str | None]) -> Verdict:
    notes = [note for note in differences if note]
    return Verdict(name, "different" if notes else "yes", "; ".join(notes))


@cache
def http_table() -> dict[str, Any]:
    """http.toml."""
    return tomllib.loads((HERE / "http.toml").read_text(encoding="utf-8"))


# -- routes -----------------------------------------------------------------------------------------------------------


def everything() -> ServerConfig:
    """The configuration of a server with every route there is, on one listener."""
    return dataclasses.replace(ServerConfig(port=8000, admin_port=8000), **dict.fromkeys(_SWITCHES, True))


def all_endpoints() -> list[Endpoint]:
    """Every endpoint; a path may have several, each for methods of its own."""
    return endpoints_of(everything(), is_admin=False)


def endpoints() -> dict[str, Endpoint]:
    """The first endpoint of every path, as OpenAPI writes it."""
    return {_path(endpoint): endpoint for endpoint in reversed(all_endpoints())}


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.replace(":path", "")


def route_verdict(row: Mapping[str, Any]) -> Verdict:
    """Returns the verdict on one `[[route]]`."""
    name = f"{' '.join(row['methods'])} {row['path']}"
    endpoint = endpoints().get(row["path"])
    if endpoint is None:
        return Verdict(name, "not", row.get("why", "not there yet"))
    served = {method for other in all_endpoints() if _path(other) == row["path"] for method in other.methods}
    missing = [method for method in row["methods"] if method not in served]
    needs = _needs(endpoint)
    return _verdict(
        name,
        [
            f"no {' '.join(missing)}" if missing else None,
            needs if needs and needs != row.get("needs") else None,
            row.get("different"),
        ],
    )


def _needs(endpoint: Endpoint) -> str:
    """The flag that it takes, "" for none."""
    if endpoint.access is Access.ADMIN:
        return "--enable-admin, on a port of its own"
    config = everything()
    for switch in _SWITCHES:
        if not endpoint.is_enabled(dataclasses.replace(config, **{switch: False})):
            return "--" + switch.replace("_", "-")
    return ""


# -- fields -----------------------------------------------------------------------------------------------------------


def field_verdicts(name: str) -> list[Verdict]:
    """Returns the verdicts on the fields of one `[request.NAME]`."""
    row = http_table()["request"][name]
    return [_field_verdict(row, field) for field in row["fields"]]


def _field_verdict(row: Mapping[str, Any], field: str) -> Verdict:
    struct = _struct(row)
    if not _is_read(row, struct, field):
        return Verdict(field, "not", row.get("why", {}).get(field, "ignored"))
    if field in getattr(struct, "NEUTRAL", {}):
        return Verdict(field, "not", row.get("why", {}).get(field, "refused where it asks for something"))
    why = getattr(struct, "WITHOUT_EFFECT", {}).get(field)
    return _verdict(field, [f"no effect: {why}" if why else None, row.get("different", {}).get(field)])


def _struct(row: Mapping[str, Any]) -> type[msgspec.Struct] | None:
    """Returns the struct that decodes a request: the body of its route, or a struct inside one."""
    if "struct" in row:
        found: type[msgspec.Struct] = resolve(row["struct"])
        return found
    endpoint = endpoints().get(row.get("route", ""))
    return None if endpoint is None or endpoint.body is None else endpoint.body.kind


def _is_read(row: Mapping[str, Any], struct: type[msgspec.Struct] | None, field: str) -> bool:
    if "read_by" in row:
        return field in _words(row["read_by"])
    return "passed" in row or (struct is not None and field in struct.__struct_encode_fields__)


@cache
def _words(pattern: str) -> frozenset[str]:
    """The texts, attributes and declared names in files of `frontend/openai`: what a reader of free-form JSON uses."""
    nodes = [
        node for path in sorted(OPENAI.glob(pattern)) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return frozenset(texts | names)


# -- flags ------------------------------------------------------------------------------------------------------------


@cache
def own_options() -> dict[str, Option]:
    """The flags of `quire serve`, by spelling."""
    return {spelling: option for option in command_line().options for spelling in option.spellings}


def flag_verdict(flag: VllmFlag) -> Verdict:
    """Returns the verdict on one flag."""
    option = own_options().get(flag.option)
    if option is not None:
        return _verdict(flag.option, [_other_default(flag, option), _other_choices(flag, option)])
    if flag.refused:
        return Verdict(flag.option, "not", flag.refused)
    return Verdict(flag.option, "different", f"no effect: {flag.ignored}")


def _other_default(flag: VllmFlag, option: Option) -> str | None:
    if option.name in ("model", "reasoning_parser") or (flag.default in (None, [], {}) and not option.default):
        return None
    if flag.default == option.default or (flag.default is None and option.default in ("auto", True)):
        return None
    if option.is_switch:
        return f"default: {'on' if option.default else 'off'}"
    return f"default: `{option.default}`"


def _other_choices(flag: VllmFlag, option: Option) -> str | None:
    missing = [choice for choice in flag.choices if option.choices and choice not in option.choices]
    return f"not {', '.join(missing)}" if missing else None


def flag_verdicts() -> dict[str, list[Verdict]]:
    """Returns the verdicts on all flags, by vLLM's group."""
    groups: dict[str, list[Verdict]] = {}
    for flag in vllm_flags().values():
        groups.setdefault(flag.group, []).append(flag_verdict(flag))
    return groups
