"""/ui as a person uses it: the key, an answer as it comes, its probabilities, a form, a tool, the stop button."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.process.serving import ServerProcess

from .conftest import KEY, PHONE, Window

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script>"


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_answer(page: Any, count: int = 1) -> Any:
    """The last of `count` answers, when it is complete."""
    page.wait_for_function(
        "count => document.querySelectorAll('.message.assistant').length === count"
        " && document.getElementById('stop').hidden",
        arg=count,
    )
    return page.locator(".message.assistant").last


def text_of(answer: Any) -> str:
    """Returns the text of an answer, without its reasoning and figures."""
    return str(answer.locator("> .markdown, > .text").inner_text())


def retry(page: Any) -> None:
    page.locator(".message:last-child .again").last.click()


def open_settings(page: Any) -> None:
    page.click("#settings-button")
    page.wait_for_selector("#settings[open]")


def open_all(page: Any) -> None:
    open_settings(page)
    while (closed := page.locator("#settings details:not([open]) > summary")).count():
        closed.first.click()


def load_of(server: ServerProcess) -> int:
    return int(httpx2.get(f"{server.url}/load", headers={"x-api-key": KEY}).json()["server_load"])


def test_a_first_conversation(window: Window, server: ServerProcess) -> None:
    page = window.open("/ui", key=None)
    page.wait_for_selector("dialog:modal")  # the server asks for a key
    window.keep("chat-key")
    page.fill("#key-input", KEY)
    page.press("#key-input", "Enter")
    page.wait_for_function("() => document.getElementById('model').textContent.includes('demo')")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    window.keep("chat-empty")
    ask(page, "What is prefix caching?")
    answer = wait_for_answer(page)
    assert len(text_of(answer)) > 10
    answer.get_by_text("tokens/s").wait_for()
    assert "TTFT" in answer.locator(".stats").inner_text()
    ask(page, "And paging?")
    wait_for_answer(page, 2)
    retry(page)
    wait_for_answer(page, 2)
    window.keep("chat")
    page.click("#new")
    page.wait_for_selector(".empty")
    assert page.locator(".message").count() == 0
    window.check()


def test_probabilities_by_pointer_and_by_keyboard(window: Window) -> None:
    page = window.open("/ui")
    open_settings(page)
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
    answer.locator("> .text[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.chosen").count() == 1
    page.keyboard.press("Escape")
    assert not card.is_visible()
    window.check()


def test_probabilities_by_touch(browser: Any, server: ServerProcess) -> None:
    """A tap shows the alternatives until the next one, somewhere else."""
    window = Window(browser, server.url, viewport=PHONE, has_touch=True, is_mobile=True)
    page = window.open("/ui")
    page.tap("#settings-button")
    page.locator("#logprobs").tap()
    page.locator("#settings .close").tap()
    page.fill("#prompt", "What is a quire?")
    page.tap("#send")
    wait_for_answer(page).locator(".token").nth(2).tap()
    card = page.locator("#token-card")
    card.locator("tr").nth(4).wait_for()
    page.locator(".message.user .text").tap()
    card.wait_for(state="hidden")
    window.check()
    window.context.close()


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
    assert json.loads(text_of(answer)) == {"a": HOSTILE}
    assert page.locator(".message.user .text").inner_text() == HOSTILE
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


def test_the_stop_button_ends_the_answer(browser: Any, slow_server: ServerProcess) -> None:
    window = Window(browser, slow_server.url)
    page = window.open("/ui")
    open_all(page)
    page.fill("#schema", json.dumps({"type": "string", "minLength": 5000}))
    page.fill("#knob-max_tokens", "1800")
    ask(page, "Never stop.")
    page.wait_for_function("() => document.querySelector('.message.assistant > .text')?.textContent.length > 20")
    page.keyboard.press("Escape")
    answer = wait_for_answer(page)
    assert "stopped" in answer.locator(".stats").inner_text()
    while load_of(slow_server):
        page.wait_for_timeout(20)  # the server notices that the page does not read
    window.check()
    window.context.close()


def test_a_tool_that_the_user_plays(window: Window) -> None:
    page = window.open("/ui")
    open_all(page)
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    page.fill("#tools", json.dumps([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]))
    page.select_option("#tool-choice", "required")
    ask(page, "How is the weather?")
    call = wait_for_answer(page).locator(".call")
    assert "The model calls weather" in call.inner_text()
    assert json.loads(call.locator("pre").inner_text())["city"] in ("Rome", "Oslo")
    call.get_by_label("Its result").fill("sunny")
    window.keep("chat-tool")
    page.select_option("#tool-choice", "none")
    page.get_by_role("button", name="Give the results to the model").click()
    answer = wait_for_answer(page, 2)
    assert "TTFT" in answer.locator(".stats").inner_text()
    window.check()


def test_what_the_server_refuses_is_said(window: Window) -> None:
    page = window.open("/ui")
    open_settings(page)
    page.fill("#knob-temperature", "9")
    ask(page, "Hi")
    answer = wait_for_answer(page)
    assert "temperature" in answer.locator(".error").inner_text()
    window.complaints.clear()  # the browser notes the 400
    page.fill("#knob-temperature", "")
    retry(page)
    assert "TTFT" in wait_for_answer(page).locator(".stats").inner_text()
    assert window.foreign == []


def test_on_a_phone_the_answer_is_followed_and_the_buttons_stay_in_sight(browser: Any, server: ServerProcess) -> None:
    window = Window(browser, server.url, viewport=PHONE)
    page = window.open("/ui")
    for count in range(1, 5):
        ask(page, "Explain paging in three sentences.")
        wait_for_answer(page, count)
    assert page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [
        PHONE["width"],
        PHONE["height"],
    ], "the page itself does not scroll"
    for name in ("#send", "#prompt", "#history-button", "#settings-button"):
        assert is_in_sight(page, name), name
    assert is_in_sight(page, ".message.assistant:last-child .stats")
    assert not is_in_sight(page, ".message.user")
    window.keep("chat-phone")
    page.click("#settings-button")
    assert is_in_sight(page, "#system")
    page.fill("#system", "Answer briefly.")
    window.keep("chat-phone-settings")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "settings-button", (
        "the sheet is closed, and gives the focus back"
    )
    ask(page, "And now?")
    wait_for_answer(page, 5)
    assert is_in_sight(page, ".message.assistant:last-child .stats"), "the answer is followed"
    window.check()
    window.context.close()


def is_in_sight(page: Any, selector: str) -> bool:
    """Returns True if the first such element is inside the window, and nothing covers its middle."""
    return bool(
        page.evaluate(
            """(selector) => {
                const node = document.querySelector(selector), box = node.getBoundingClientRect();
                if (!box.width || box.left < 0 || box.right > innerWidth) return false;
                if (box.top < 0 || box.bottom > innerHeight) return false;
                const top = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
                return node === top || node.contains(top);
            }""",
            selector,
        )
    )


def sent_by(page: Any) -> list[list[str]]:
    """The contents of the messages of every chat request from now on."""
    sent: list[list[str]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append([message["content"] for message in json.loads(request.post_data)["messages"]])

    page.on("request", note)
    return sent


def test_a_full_context_leaves_out_the_oldest_and_refuses_only_what_never_fits(
    browser: Any, small_server: ServerProcess
) -> None:
    window = Window(browser, small_server.url)
    page = window.open("/ui")
    sent = sent_by(page)
    for count in range(1, 11):
        ask(page, f"Number {count}: " + "explain paging in three sentences, please. " * 3)
        assert "TTFT" in wait_for_answer(page, count).locator(".stats").inner_text()
    assert page.get_by_text("The context is full").count() > 0
    assert sent[-1][0] != sent[0][0], "the first question is not sent any more"
    assert sent[-1][-1].startswith("Number 10")
    window.keep("chat-full")

    endless = "hi there " * 600
    ask(page, endless)
    assert "prompt" in wait_for_answer(page, 11).locator(".error").inner_text()
    assert page.input_value("#prompt") == endless.strip(), "to be shortened"
    page.fill("#prompt", "")
    ask(page, "And paging?")
    assert "TTFT" in wait_for_answer(page, 12).locator(".stats").inner_text()
    assert endless.strip() not in sent[-1], "the refused message is no part of the conversation"
    assert page.locator(".message.dropped").count() == 2
    retry(page)
    assert "TTFT" in wait_for_answer(page, 12).locator(".stats").inner_text()
    assert window.foreign == []
    window.context.close()


def test_a_wrong_key_is_called_wrong(window: Window) -> None:
    page = window.open("/ui", key="guess")
    page.wait_for_selector("dialog:modal")
    assert "does not accept this key" in page.inner_text("dialog:modal")
    page.fill("#key-input", KEY)
    page.press("#key-input", "Enter")
    page.wait_for_function("() => document.getElementById('model').textContent.includes('demo')")
    page = window.open("/ui/dashboard", key="guess")
    page.wait_for_selector("dialog:modal")
    assert "does not accept this key" in page.inner_text("#words")


def test_the_speed_is_the_engines(browser: Any, slow_server: ServerProcess) -> None:
    """Its steps take 20 ms, so 50 tokens per second are the most, however the chunks arrive."""
    window = Window(browser, slow_server.url)
    page = window.open("/ui")
    open_settings(page)
    page.fill("#knob-max_tokens", "20")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(response=route.fetch()))  # all chunks at once
    ask(page, "What is a quire?")
    answer = wait_for_answer(page)
    answer.get_by_text("tokens/s").wait_for()
    shown = float(answer.locator(".stats").inner_text().split(" tokens/s")[0].split(" · ")[-1])
    headers = {"authorization": f"Bearer {KEY}"}
    ended = httpx2.get(f"{slow_server.url}/debug/state", headers=headers).json()["ended"][-1]
    assert shown == pytest.approx((ended["output_tokens"] - 1) / ended["decode_s"], rel=0.01)
    assert shown < 51
    window.context.close()


def test_probabilities_show_the_text_and_no_markers(window: Window) -> None:
    page = window.open("/ui")
    open_settings(page)
    page.fill("#knob-temperature", "0")
    ask(page, "What is prefix caching?")
    text = text_of(wait_for_answer(page))
    page.check("#logprobs")
    retry(page)
    answer = wait_for_answer(page)
    assert answer.locator(".token").count() > 3
    assert text_of(answer) == text
    window.check()


def test_tokens_are_found_by_their_bytes(window: Window) -> None:
    """A character of two tokens, markers, a text that ends inside a token, and tokens of reasoning."""
    page = window.open("/ui")
    found = page.evaluate(
        """async () => {
            const { Answer } = await import("/ui/answer.js");
            const bytes = (text) => [...new TextEncoder().encode(text)];
            const entry = (token, own = bytes(token)) => ({ token, bytes: own, logprob: 0 });
            const chunk = (delta, ...content) => ({ choices: [{ delta, logprobs: { content } }] });
            const answer = new Answer("m");
            answer.take(chunk({ reasoning: "The" }, entry("The")));
            answer.take(chunk({ content: "" }, entry("<mark>")));
            answer.take(chunk({ content: "The " }, entry("The"), entry(" ")));
            answer.take(chunk({}, entry("\ufffd", [0xc3])));
            answer.take(chunk({ content: "é, so" }, entry("\ufffd", [0xa9]), entry(","), entry(" solong")));
            answer.take(chunk({}, entry("<end>")));
            answer.close();
            return [answer.textNode.textContent, answer.tokens.map((token) => token.node.textContent)];
        }"""
    )
    assert found == ["The é, so", ["The", " ", "", "é", ","]]


def test_a_pooling_model_offers_no_chat(window: Window) -> None:
    window.page.route("**/server_info", lambda route: route.fulfill(json={"supported_tasks": ["embed", "score"]}))
    page = window.open("/ui")
    page.get_by_text("It is served for: embed, score.").wait_for()
    assert page.locator("#prompt").is_disabled()
    assert page.locator("#send").is_disabled()
    assert page.locator(".empty button:enabled").count() == 0
    page.evaluate("location.hash = 'another'")
    page.get_by_text("This conversation is not in this browser.").wait_for()
    assert page.locator(".empty button:enabled").count() == 0
    window.check()


@pytest.mark.parametrize("viewport", [PHONE, {"width": 1360, "height": 900}], ids=["phone", "desktop"])
def test_a_long_model_name_does_not_fill_the_header(
    browser: Any, server: ServerProcess, viewport: dict[str, int]
) -> None:
    window = Window(browser, server.url, viewport=viewport)
    name = "/a/very/long/path/of/models" * 12
    card = {"id": name, "max_model_len": 4096}
    window.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    page = window.open("/ui")
    page.wait_for_function("() => document.getElementById('model').textContent.includes('very/long')")
    assert page.locator("header").bounding_box()["height"] < 100
    assert page.get_attribute("#model", "title").startswith(name)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    window.context.close()
