"""The OpenAPI document and the page of request fields, both derived from the table of routes and its bodies.

An operation has its `Access` in `x-access`, and a field in `x-support` whether it is *refused* or has *no effect*.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import msgspec

from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import RequestBody
from quire.frontend.http.endpoint import Endpoint
from quire.sampling_params import SamplingParams
from quire.version import __version__

REF = "#/components/schemas/{name}"
TAGS: Mapping[str, tuple[str, ...]] = {
    "Generation": ("chat", "completions", "responses", "messages", "ollama", "batch", "invocations"),
    "Embeddings, classes and scores": ("pooling",),
    "Tokens and prompts": ("tokens", "render"),
    "The server": ("server", "pages"),
    "Administration": ("admin", "adapters", "engines"),
}
"""Groups of files of `routes/`. Routes from other places are under OTHER_TAG."""
OTHER_TAG = "Further routes"
ROUTES_PACKAGE = "quire.frontend.openai.routes"
REFUSED = "refused"
NO_EFFECT = "no effect"
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is at fault."},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}


def make_openapi(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Returns the document. Bodies are described by the structs that read them."""
    endpoints = list(endpoints)
    kinds = list(dict.fromkeys(endpoint.body.kind for endpoint in endpoints if endpoint.body is not None))
    schemas, components = _describe(kinds)
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        for method in endpoint.methods:
            operation = _operation(endpoint, path, method, by_kind)
            if operation["operationId"] in names:  # one handler under several paths
                operation["operationId"] = re.sub(r"\W+", "_", f"{path}_{method.lower()}").strip("_")
            names.add(operation["operationId"])
            paths.setdefault(path, {})[method.lower()] = operation
    found = {operation["tags"][0] for operations in paths.values() for operation in operations.values()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "tags": [{"name": tag} for tag in (*TAGS, OTHER_TAG) if tag in found],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(kinds: Sequence[type[RequestBody]]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Returns (the schemas of the structs, those of the structs they hold), with a note for each field that has one."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    for kind in structs_of(kinds):
        properties = components[kind.__name__]["properties"]
        for name, note in field_notes(kind).items():
            properties[name]["description"] = note
        if issubclass(kind, RequestBody):
            for name in kind.NEUTRAL:
                properties[name]["x-support"] = REFUSED
            for name, why in kind.WITHOUT_EFFECT.items():
                properties[name] |= {"x-support": NO_EFFECT, "description": f"{why[:1].upper()}{why[1:]}."}
    return schemas, components


def tag_of(endpoint: Endpoint) -> str:
    """Returns the group of a route."""
    package, _, name = endpoint.handler.__module__.rpartition(".")
    own = package == ROUTES_PACKAGE
    return next((tag for tag, files in TAGS.items() if own and name in files), OTHER_TAG)


def _operation(endpoint: Endpoint, path: str, method: str, schemas: Mapping[type, Any]) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}}
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.handler.__name__}_{method.lower()}",
        "summary": " ".join((endpoint.handler.__doc__ or "").split()),
        "tags": [tag_of(endpoint)],
        "x-access": endpoint.access.value,
        "responses": {
            "200": {"description": _good_answer(endpoint)},
            "4XX": {"description": "The request is at fault.", **error},
            "5XX": {"description": "The server is at fault.", **error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": one.name, "in": "query", "schema": one.schema, "description": one.description}
        for one in endpoint.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.access is not Access.OPEN:
        operation["security"] = [{"key": []}, {}]
    if endpoint.body is not None:
        content = {"schema": schemas[endpoint.body.kind], "example": endpoint.body.kind.EXAMPLE}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation


def _good_answer(endpoint: Endpoint) -> str:
    kind = endpoint.body.kind if endpoint.body is not None else RequestBody
    if "stream" in kind.__struct_fields__ and "stream" not in kind.NEUTRAL:
        return "The answer; with `stream` server-sent events."
    return "The answer."


# -- the page ---------------------------------------------------------------------------------------------------------


def make_fields_page(endpoints: Iterable[Endpoint]) -> str:
    """Returns docs/http_fields.md: every field of every body, with its bounds."""
    lines = [
        "# Fields of HTTP requests",
        "",
        "Derived from the structs that read the bodies (`make_fields_page` in openapi.py); a test compares",
        "the two. **Bold** fields are required. A range holds for numbers, a length for texts and lists. Fields marked",
        "*refused* exist in vLLM and not here: they are accepted only with a value that asks for nothing. Those marked",
        "*no effect* are accepted, and the log tells of their first use. Fields that are not listed are ignored.",
        "Numbers and booleans may also be written in a form that loses nothing, in bodies of up to 1 MiB: `5.0` or",
        '`"5"` for 5, `"true"` or `1` for true.',
    ]
    first_of: dict[type, str] = {}
    for endpoint in endpoints:
        if endpoint.body is None:
            continue
        kind = endpoint.body.kind
        title = f"{endpoint.methods[0]} {endpoint.path}"
        lines += ["", f"## {title}", ""]
        if first_of.setdefault(kind, title) != title:
            lines.append(f"As {first_of[kind]}.")
            continue
        schema = _describe([kind])[1][kind.__name__]
        lines += ["| field | type and bounds | default | |", "|---|---|---|---|"]
        for name, described in schema["properties"].items():
            required = name in schema["required"]
            support = f" *{described['x-support']}*" if "x-support" in described else ""
            default = "" if required else f"`{msgspec.json.encode(described.get('default')).decode()}`"
            shown = f"**{name}**" if required else name
            note = described.get("description", "").replace("|", "\\|")
            cells = (shown + support, _words(described), default, note)
            lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines) + "\n"


def _words(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_words(option) for option in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(f"`{value}`" if value is not None else "null" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        items = _words(schema["items"]) if schema.get("items") else "any"
        return f"[{items}]{_length(schema, 'maxItems')}"
    if kind == "object":
        return f"object{_length(schema, 'maxProperties')}"
    if kind == "string":
        return f"string{_length(schema, 'maxLength')}"
    return f"{kind}{_range(schema)}"


def _length(schema: Mapping[str, Any], key: str) -> str:
    return f" (≤ {schema[key]:,})" if key in schema else ""


def _range(schema: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤"}
    bounds = ", ".join(f"{sign} {_number(schema[key])}" for key, sign in signs.items() if key in schema)
    return f" ({bounds})" if bounds else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def structs_of(kinds: Sequence[type]) -> list[type[msgspec.Struct]]:
    """Returns these structs and all structs that their fields hold."""
    return list(dict.fromkeys(found for info in msgspec.inspect.multi_type_info(kinds) for found in _structs_in(info)))


def _structs_in(value: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(value, msgspec.inspect.StructType):
        yield value.cls
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _structs_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _structs_in(item)


@cache
def field_notes(kind: type) -> Mapping[str, str]:
    """Returns the docstring of each field that has one, by its name. Sampling fields have those of `SamplingParams`."""
    notes = {} if kind is SamplingParams else {**field_notes(SamplingParams)}
    for ancestor in reversed(kind.__mro__[:-1]):
        notes.update(_notes_in(sys.modules[ancestor.__module__]).get(ancestor.__qualname__, {}))
    return {name: note for name, note in notes.items() if name in getattr(kind, "__struct_fields__", ())}


@cache
def _notes_in(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """Returns the notes of each class of a module; none where Python was installed without sources."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:
        return {}
    return {node.name: dict(_notes_of(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _notes_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, note in zip(node.body, node.body[1:], strict=False):
        match field, note:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())
