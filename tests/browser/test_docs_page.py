"""/docs in a real browser: every operation, the search, the keyboard, and commands that work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.serving import ServerProcess, serving

from .conftest import KEY, Window

pytestmark = pytest.mark.browser

ALL_SHOWN = "() => / operations\\.$/.test(document.getElementById('found').textContent)"
NUM_SHOWN = "document.querySelectorAll('.operation:not([hidden])').length"


@pytest.fixture(scope="module")
def open_server(browser: Any) -> Iterator[ServerProcess]:
    """One without a key, under a path, and without the other pages."""
    with serving("--root-path", "/models", "--disable-ui") as running:
        yield running


def open_docs(window: Window, path: str = "/docs") -> Any:
    page = window.open(path)
    page.wait_for_function(ALL_SHOWN)
    return page


def operation(page: Any, name: str) -> Any:
    found = page.locator(f"#{name}")
    found.locator("> summary").click()
    found.locator("> .inside").wait_for()
    return found


def test_it_shows_what_the_server_can_be_asked(browser: Any, server: ServerProcess) -> None:
    window = Window(browser, server.url, color_scheme="light")
    page = open_docs(window)
    document = page.evaluate(
        "key => fetch('openapi.json', {headers: {authorization: `Bearer ${key}`}}).then((r) => r.json())", KEY
    )
    wanted = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    shown = page.evaluate(
        "[...document.querySelectorAll('.operation')].map((o) => o.querySelector('.method').textContent + ' '"
        " + o.querySelector('code').textContent)"
    )
    assert sorted(shown) == sorted(wanted)
    assert page.inner_text("#found") == f"{len(wanted)} operations."
    assert page.locator("section h2").all_inner_texts() == [tag["name"] for tag in document["tags"]]
    assert "demo" in page.inner_text("#version")

    chat = operation(page, "create_chat_completion_post")
    text = chat.inner_text()
    assert "Needs an API key" in text
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    names = chat.locator(".inside > ul > li > .field > .field-name").all_inner_texts()
    assert set(fields) <= set(names)
    assert names[0] == "messages", "what is required comes first"
    temperature = chat.locator("li", has=page.locator("code", has_text="temperature")).first.inner_text()
    assert "number (≥ 0, ≤ 2)" in temperature
    assert "0 means greedy." in temperature
    tools = chat.locator("summary", has_text="Tool").first
    tools.click()
    inner = chat.locator("summary", has_text="FunctionDefinition").first
    inner.click()
    chat.get_by_text("JSON schema of the arguments.").wait_for()
    window.keep("docs-light")
    assert operation(page, "health_get").inner_text().count("Open to all, without a key.") == 1
    assert "after" in operation(page, "debug_state_get").inner_text()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 26)'")
    window.keep("docs-dark")
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    window.keep("docs-narrow")
    window.check()
    window.context.close()


def test_a_search_shows_the_operations_that_match(window: Window) -> None:
    page = open_docs(window)
    all_shown = page.evaluate(NUM_SHOWN)
    page.fill("#search", "embed_dtype")
    assert page.locator(".operation:not([hidden]) code").all_inner_texts()[:2] == ["/v1/embeddings", "/pooling"]
    assert page.locator("section:not([hidden]) h2").all_inner_texts() == ["Embeddings, classes and scores"]
    assert page.inner_text("#found") == f"2 of {all_shown} operations."
    page.fill("#search", "HEALTH  live")
    assert page.evaluate(NUM_SHOWN) == 1
    page.fill("#search", "<b>nothing</b>")
    assert page.evaluate(NUM_SHOWN) == 0
    page.keyboard.press("Escape")
    assert page.input_value("#search") == ""
    assert page.evaluate(NUM_SHOWN) == all_shown
    window.check()


def test_the_keyboard_is_enough(window: Window) -> None:
    page = open_docs(window)
    here = "document.activeElement.id || document.activeElement.parentElement.id"
    page.keyboard.press("/")
    assert page.evaluate(here) == "search"
    page.keyboard.type("/v1/completions continue")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(here) == "create_completion_post"
    page.keyboard.press("Enter")
    page.wait_for_selector("#create_completion_post[open] .example")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(here) == "search"
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    first_two = page.evaluate("[...document.querySelectorAll('.operation')].slice(0, 2).map((o) => o.id)")
    assert page.evaluate(here) == first_two[1]
    page.keyboard.press("ArrowUp")
    assert page.evaluate(here) == first_two[0]
    page.focus("#create_completion_post > summary")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.slice(0, 4)"))
    assert {"Copy", "curl"} <= reached
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, a')].filter((node) => !node.hidden && !(node.labels?.length ||"
        " node.textContent.trim())).map((node) => node.outerHTML)"
    )
    assert nameless == []
    window.check()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_work(window: Window) -> None:
    page = open_docs(window)
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for name, key in (
        ("create_chat_completion_post", "choices"), ("create_message_post", "content"), ("list_models_get", "data"),
        ("tokenize_post", "tokens"),
    ):  # fmt: skip
        one = operation(page, name)
        one.get_by_role("button", name="Copy").click()
        one.get_by_text("Copied.").wait_for()
        command = page.evaluate("navigator.clipboard.readText()")
        assert KEY not in command
        assert command == one.locator(".example").inner_text()
        environment = {"PATH": os.environ["PATH"], "QUIRE_API_KEY": KEY}
        done = subprocess.run(
            ["bash", "-c", f"{command} --silent --fail-with-body"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert key in json.loads(done.stdout)
    window.check()


def test_a_key_that_is_typed_in_stays_in_memory(window: Window) -> None:
    page = window.open("/docs", key=None)
    page.wait_for_selector("#notice:not([hidden])")
    assert page.inner_text("#notice") == "The server asks for a key."
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("wrong")
    page.wait_for_function("() => document.getElementById('notice').textContent.includes('does not accept')")
    page.fill("#key", KEY)
    page.wait_for_function(ALL_SHOWN)
    assert page.is_hidden("#notice")
    assert page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]") == [
        "{}", "{}", "",
    ]  # fmt: skip
    assert not re.search(rf"\b{KEY}\b", page.content())
    assert "$QUIRE_API_KEY" in operation(page, "list_models_get").inner_text()


def test_without_a_key_and_under_a_path(browser: Any, open_server: ServerProcess) -> None:
    window = Window(browser, open_server.url)
    page = window.open("/models/redoc#create_completion_post", key=None)
    page.wait_for_selector("#create_completion_post[open] .example")
    assert page.url.startswith(f"{open_server.url}/models/docs")
    command = page.inner_text("#create_completion_post .example")
    assert f"curl '{open_server.url}/models/v1/completions'" in command
    assert "Authorization" not in command
    assert page.locator("nav a:not([hidden])").all_inner_texts() == ["API"], "the other pages are switched off"
    window.check()
    window.context.close()


def test_the_other_pages_lead_here(window: Window) -> None:
    for path in ("/ui", "/ui/dashboard"):
        page = window.open(path)
        page.get_by_role("link", name="API").click()
        page.wait_for_function(ALL_SHOWN)
        assert page.locator("nav a:not([hidden])").all_inner_texts() == ["Chat", "Dashboard", "API"]
    window.check()


def test_what_a_document_says_is_text(window: Window) -> None:
    """And types, bounds and commands come out right, whatever stands in the names."""
    page = open_docs(window)
    found = page.evaluate(
        """async () => {
            const o = await import('/docs/openapi.js');
            const document = {components: {schemas: {
                Tree: {properties: {left: {anyOf: [{$ref: '#/components/schemas/Tree'}, {type: 'null'}]}}},
                Word: {enum: ['a', null]}}}};
            const one = {path: '/x/{the_id}', method: 'DELETE', operation: {'x-access': 'admin'}};
            const said = {path: '/say', method: 'POST', operation: {'x-access': 'open'}};
            said.example = {model: 'm', text: "it's"};
            const base = 'http://h/', tree = {$ref: '#/components/schemas/Tree'};
            return {
                types: [{type: 'integer', minimum: 1, maximum: 9e18}, {type: 'number', exclusiveMinimum: 0, maximum: 1},
                    {type: 'array', items: {type: 'string', maxLength: 4096}, maxItems: 2}, {enum: ['a', null]}, {},
                    {anyOf: [tree, {type: 'null'}]}, {type: ['string', 'null']},
                    {type: 'object', maxProperties: 3}].map(o.typeInWords),
                parts: [{type: 'array', items: tree}, {$ref: '#/components/schemas/Word'}, {}]
                    .map((schema) => [...o.partsOf(document, schema).keys()]),
                commands: [o.curlOf(one, {base, needsKey: true}), o.curlOf(said, {base, model: 'n'})],
                matches: [o.matches('get /health', 'HEALTH get'), o.matches('get /health', 'post'), o.matches('x', '')],
            };
        }"""
    )
    assert found == {
        "types": [
            "integer (≥ 1)", "number (> 0, ≤ 1)", "list (≤ 2) of string (≤ 4,096)", '"a", null', "anything",
            "Tree or null", "string or null", "object (≤ 3)",
        ],
        "parts": [["Tree"], [], []],
        "commands": [
            "curl 'http://h/x/THE_ID' \\\n  -X DELETE \\\n  -H \"Authorization: Bearer $QUIRE_API_KEY\"",
            "curl 'http://h/say' \\\n  -H 'Content-Type: application/json' \\\n  "
            "-d '{\"model\":\"n\",\"text\":\"it'\\''s\"}'",
        ],
        "matches": [True, False, True],
    }  # fmt: skip
