"""The OpenAPI document and the page of request fields, both derived from the table of routes and its bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from quire.frontend.openai.auth import Access
from quire.frontend.openai.endpoint import Endpoint
from quire.version import __version__

REF = "#/components/schemas/{name}"
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
    """The document. Bodies are described by the structs that read them."""
    endpoints = list(endpoints)
    kinds = list(dict.fromkeys(endpoint.body.kind for endpoint in endpoints if endpoint.body is not None))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
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
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, path: str, method: str, schemas: Mapping[type, Any]) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}}
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.handler.__name__}_{method.lower()}",
        "summary": (endpoint.handler.__doc__ or "").strip(),
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "The request is at fault.", **error},
            "5XX": {"description": "The server is at fault.", **error},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.access is not Access.OPEN:
        operation["security"] = [{"key": []}, {}]
    if endpoint.body is not None:
        schema = schemas[endpoint.body.kind]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


# -- the page ---------------------------------------------------------------------------------------------------------


def make_fields_page(endpoints: Iterable[Endpoint]) -> str:
    """docs/http_fields.md: every field of every body, with its bounds."""
    lines = [
        "# Fields of HTTP requests",
        "",
        "Derived from the structs that read the bodies (`make_fields_page` in openapi.py); a test compares",
        "the two. **Bold** fields are required. A range holds for numbers, a length for texts and lists. Fields marked",
        "*refused* exist in vLLM and not here: they are accepted only with a value that asks for nothing. Those marked",
        "*no effect* are accepted, and the log tells of their first use. Fields that are not listed are ignored.",
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
        _, components = msgspec.json.schema_components([kind], ref_template=REF)
        schema = components[kind.__name__]
        lines += [
            "| field | type and bounds | default |",
            "|---|---|---|",
        ]
        for name, described in schema["properties"].items():
            required = name in schema["required"]
            note = " *refused*" if name in kind.NEUTRAL else " *no effect*" if name in kind.WITHOUT_EFFECT else ""
            default = "" if required else f"`{msgspec.json.encode(described.get('default')).decode()}`"
            shown = f"**{name}**" if required else name
            lines.append(f"| {shown}{note} | {_words(described)} | {default} |")
    return "\n".join(lines) + "\n"


def _words(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
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
