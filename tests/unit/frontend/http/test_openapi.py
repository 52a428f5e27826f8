"""The OpenAPI document: every operation, who may call it, what it reads, and an example that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.server import ServerConfig
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader, RequestBody
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.openapi import OTHER_TAG, TAGS, make_openapi, tag_of
from quire.frontend.openai import routes
from quire.frontend.openai.app import endpoints_of

from ..openai.serving import Server, check

EVERYTHING = ServerConfig(enable_admin=True, admin_port=8000, port=8000, enable_tokenizer_info_endpoint=True)
ENDPOINTS = endpoints_of(EVERYTHING, is_admin=False)
DOCUMENT = make_openapi(ENDPOINTS)
SCHEMAS = DOCUMENT["components"]["schemas"]
READERS: list[BodyReader[Any]] = list(dict.fromkeys(e.body for e in ENDPOINTS if e.body is not None))
ROUTES = Path(routes.__path__[0])
GENERATING = [
    e.path for e in ENDPOINTS if e.body is not None and e.access is Access.KEY and e.task in (None, "generate")
]


def operations() -> dict[tuple[str, str], dict[str, Any]]:
    return {(path, method): found for path, by in DOCUMENT["paths"].items() for method, found in by.items()}


def test_every_endpoint_is_described() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    found = operations()
    assert len(found) == sum(len(e.methods) for e in ENDPOINTS)
    assert len({operation["operationId"] for operation in found.values()}) == len(found)
    for operation in found.values():
        assert operation["summary"]
    temperature = SCHEMAS["CompletionBody"]["properties"]["temperature"]
    assert temperature["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}


def test_who_may_call_what() -> None:
    found = operations()
    for endpoint in ENDPOINTS:
        path = re.sub(r":\w+}", "}", endpoint.path)
        for method in endpoint.methods:
            operation = found[path, method.lower()]
            assert operation["x-access"] == endpoint.access.value
            assert ("security" in operation) == (endpoint.access is not Access.OPEN)
    assert found["/health", "get"]["x-access"] == "open"
    assert found["/pause", "post"]["x-access"] == "admin"


def test_every_file_of_routes_has_a_tag() -> None:
    files = {path.stem for path in ROUTES.glob("*.py")} - {"__init__"}
    assert sorted(name for names in TAGS.values() for name in names) == sorted(files)
    tags = [tag["name"] for tag in DOCUMENT["tags"]]
    assert tags == list(TAGS)
    assert {operation["tags"][0] for operation in operations().values()} == set(tags)


def test_a_route_of_elsewhere_has_its_place() -> None:
    async def chat(exchange: Exchange) -> Any:
        """Something else."""
        return json_response({})

    endpoint = Endpoint(path="/elsewhere", handler=chat, access=Access.KEY)
    assert tag_of(endpoint) == OTHER_TAG
    assert make_openapi([endpoint])["tags"] == [{"name": OTHER_TAG}]


def test_fields_say_what_they_are_for_and_whether_they_do_anything() -> None:
    chat = SCHEMAS["ChatBody"]["properties"]
    assert chat["temperature"]["description"] == "0 means greedy."
    assert chat["messages"]["description"].startswith("Objects with role and content")
    assert chat["watermarking"]["x-support"] == "refused"
    assert chat["session_id"]["x-support"] == "no effect"
    assert chat["session_id"]["description"].endswith("found by their content.")
    assert SCHEMAS["StreamOptions"]["properties"]["include_usage"]["description"]
    for reader in READERS:
        properties = SCHEMAS[reader.kind.__name__]["properties"]
        for name in (*reader.kind.NEUTRAL, *reader.kind.WITHOUT_EFFECT):
            assert "x-support" in properties[name]


def test_parameters_of_queries_are_described() -> None:
    """Each that a handler of a file reads is declared in that file, and the other way round."""
    for path in ROUTES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        read = set(re.findall(r'query_params\.get(?:list)?\(\s*"(\w+)"|query_switch\(\s*"(\w+)"', text))
        module = f"{routes.__name__}.{path.stem}"
        declared = {one.name for e in ENDPOINTS if e.handler.__module__ == module for one in e.query}
        assert {first or second for first, second in read} == declared, path.name
    parameters = operations()["/v1/responses/{response_id}", "get"]["parameters"]
    assert [(one["name"], one["in"]) for one in parameters] == [
        ("response_id", "path"), ("stream", "query"), ("starting_after", "query"),
    ]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.kind.__name__)
def test_examples_are_read(reader: BodyReader[Any]) -> None:
    kind: type[RequestBody] = reader.kind
    body = reader.read(msgspec.json.encode(kind.EXAMPLE))
    assert kind.EXAMPLE.keys() <= set(kind.__struct_fields__)
    if hasattr(body, "check_form"):
        body.check_form()


def test_examples_are_answered() -> None:
    async def test(server: Server) -> None:
        for path in GENERATING:
            body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
            response = await server.post(path, body)
            assert response.status_code == 200, (path, response.text)

    assert "/v1/chat/completions" in GENERATING
    check(test, enable_scale_out=True)


def test_the_document_is_sent_as_it_is_made() -> None:
    async def test(server: Server) -> None:
        made = msgspec.json.decode(msgspec.json.encode(make_openapi(server.app.state.endpoints)))
        for _ in range(2):
            response = await server.get("/openapi.json")
            assert response.headers["content-type"] == "application/json"
            assert response.json() == made

    check(test)
