"""/ui as a person uses it: the key, an answer as it comes, its probabilities, a form, a tool, the stop button."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest

from tests.process.serving import ServerProcess

from .conftest import KEY, Window

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script>"


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_answer(page: Any, count: int = 1) -> Any:
    """The last of `count` answers, when it is complete."""
    page.wait_for_function(
        "count => document.querySelectorAll('.message.assistant').length === count"
        " && document.getElementById('stop').disabled",
        arg=count,
    )
    return page.locator(".message.assistant").last


def open_all(page: Any) -> None:
    while (closed := page.locator("#settings details:not([open]) > summary")).count():
        closed.first.click()


def load_of(server: ServerProcess) -> int:
    return int(httpx2.get(f"{server.url}/load", headers={"x-api-key": KEY}).json()["server_load"])


def test_a_first_conversation(window: Window, server: ServerProcess) -> None:
    page = window.open("/ui", key=None)
    page.wait_for_selector("dialog[open]")  # the server asks for a key
    window.keep("chat-key")
    page.fill("#key-input", KEY)
    page.press("#key-input", "Enter")
    page.wait_for_function("() => document.getElementById('model').textContent.includes('demo')")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    window.keep("chat-empty")
    ask(page, "What is prefix caching?")
    answer = wait_for_answer(page)
    assert len(answer.locator(".text").last.inner_text()) > 10
    stats = answer.locator(".stats").inner_text()
    assert "TTFT" in stats
    assert re.search("tokens/s|came all at once", stats)
    ask(page, "And paging?")
    wait_for_answer(page, 2)
    page.click("#retry")
    wait_for_answer(page, 2)
    window.keep("chat")
    page.click("#clear")
    assert page.locator(".message").count() == 0
    window.check()


def test_probabilities_by_pointer_and_by_keyboard(window: Window) -> None:
    page = window.open("/ui")
    page.check("#logprobs")
    ask(page, "What is a quire?")
    answer = wait_for_answer(page)
    tokens = answer.locator(".token")
    assert tokens.count() > 3
    tokens.nth(2).hover()
    card = page.locator("#token-card")
    assert card.is_visible()
    assert card.locator("tr").count() >= 5
    assert "%" in card.inner_text()
    window.keep("chat-probabilities")
    page.mouse.move(0, 0)
    answer.locator(".text[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.chosen").count() == 1
    page.keyboard.press("Escape")
    assert not card.is_visible()
    window.check()


def test_text_is_never_markup(window: Window) -> None:
    """The model is made to write a script; the user writes one, too."""
    page = window.open("/ui")
    open_all(page)
    schema = {
        "type": "object",
        "properties": {"a": {"const": HOSTILE}},
        "required": ["a"],
        "additionalProperties": False,
    }
    page.fill("#schema", "{")
    assert page.get_attribute("#schema", "aria-invalid") == "true"
    page.fill("#schema", json.dumps(schema))
    ask(page, HOSTILE)
    answer = wait_for_answer(page)
    assert json.loads(answer.locator(".text").last.inner_text()) == {"a": HOSTILE}
    assert page.locator(".message.user").inner_text() == HOSTILE
    page.check("#logprobs")
    ask(page, HOSTILE)
    wait_for_answer(page, 2).locator(".token").nth(3).hover()
    assert page.locator(".message img, .message script, .token-card img").count() == 0
    assert page.evaluate("window.hacked") is None
    window.check()


def test_the_page_cannot_make_markup_of_text_even_if_it_tried(window: Window) -> None:
    page = window.open("/ui")
    refused = page.evaluate("() => { try { document.body.innerHTML = 'x'; return false } catch { return true } }")
    assert refused


def test_stop(window: Window, server: ServerProcess) -> None:
    page = window.open("/ui")
    open_all(page)
    page.fill("#schema", json.dumps({"type": "string", "minLength": 5000}))
    page.fill("#knob-max_tokens", "1800")
    ask(page, "Never stop.")
    page.wait_for_function("() => document.querySelector('.message.assistant > .text')?.textContent.length > 20")
    page.keyboard.press("Escape")
    answer = wait_for_answer(page)
    assert "stopped" in answer.locator(".stats").inner_text()
    while load_of(server):
        page.wait_for_timeout(20)  # the server notices that nobody reads
    window.check()


def test_a_tool_that_the_user_plays(window: Window) -> None:
    page = window.open("/ui")
    open_all(page)
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    page.fill("#tools", json.dumps([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]))
    page.select_option("#tool-choice", "required")
    ask(page, "How is the weather?")
    call = wait_for_answer(page).locator(".call")
    assert "weather(" in call.locator("code").inner_text()
    call.get_by_label("Its result").fill("sunny")
    window.keep("chat-tool")
    page.select_option("#tool-choice", "none")
    page.get_by_role("button", name="Give the results to the model").click()
    answer = wait_for_answer(page, 2)
    assert "TTFT" in answer.locator(".stats").inner_text()
    window.check()


def test_what_the_server_refuses_is_said(window: Window) -> None:
    page = window.open("/ui")
    page.fill("#knob-temperature", "9")
    ask(page, "Hi")
    answer = wait_for_answer(page)
    assert "temperature" in answer.locator(".error").inner_text()
    window.complaints.clear()  # the browser notes the 400
    page.fill("#knob-temperature", "")
    page.click("#retry")
    assert "TTFT" in wait_for_answer(page).locator(".stats").inner_text()
    assert window.foreign == []
