"""Conversations on /ui: growing Markdown, what the browser keeps, editing, errors, a phone, and assistive tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.chat_session import ChatSession
from tests.process.serving import ServerProcess

from .conftest import PHONE, Window
from .streams import ANSWERS, FEED, answer_with, feed, stream
from .test_chat_page import ask, is_in_sight, open_settings, retry, text_of, wait_for_answer

pytestmark = pytest.mark.browser

DESKTOP = {"width": 1280, "height": 800}
TEXT = """\
A **bold** start with `code` & a [link](https://example.org/a?b=1&c=2).

## A title

1. one
2. two *and* more

   with a paragraph
- [x] done
- [ ] to do
  - inside

```python
def f(x):
    return "<b>" + x
```

| a | b |
|---|--:|
| 1<br>2 | `3` |

> quoted
> twice

***

Last words, https://example.org and &lt;escaped&gt;.
"""
HOSTILE = """\
<script>window.hacked=1</script> <img src=x onerror="window.hacked=2"> text

[a](javascript:window.hacked=3) [b](java&#115;cript:window.hacked=4)
[c](data:text/html,<script>window.hacked=5</script>)
![d](x "onerror=window.hacked=6") ![e](javascript:window.hacked=7)
<svg/onload=window.hacked=8> <javascript:window.hacked=9>

<iframe srcdoc="<script>parent.hacked=10</script>"></iframe>

| <img src=x onerror=window.hacked=11> |
|---|
| [f](vbscript:x) [g](//evil.example/x) |

```"><img/src=x/onerror=window.hacked=12>
</code></pre><script>window.hacked=13</script>
```

[h]: javascript:window.hacked=14
[h] <a href="javascript:window.hacked=15" onclick="window.hacked=16">i</a>
&lt;img src=x onerror=window.hacked=17&gt;
"""


GROWING = [
    TEXT,
    HOSTILE,
    TEXT.replace("\n", "\r\n"),
    "a\n\n" * 30 + TEXT * 2,
    "- a\n\n- b\n\n  c\n\n1. d\n\n> - e\n>\n> f\n\ng\n---\nh",
    "[x]: https://example.org\n\na\n\nb\n\nc\n\nd [x] e",
    "a [y] b\n\nc\n\nd\n\ne\n\n[y]: https://example.org",
    "a\n\n> q  c\n---~~~\n",
    "> " * 60 + "deep",
    "```\nopen\n\n# no title\n\n",
    "a | b\n-|-\n1 | 2\n\n~~~\n```\n~~~",
]


@pytest.fixture
def phone(browser: Any, server: ServerProcess) -> Iterator[Window]:
    window = Window(browser, server.url, viewport=PHONE, has_touch=True, is_mobile=True)
    yield window
    window.context.close()


# -- Markdown --------------------------------------------------------------------------------------------------------


def test_markdown_becomes_elements(window: Window) -> None:
    page = window.open("/ui")
    answer_with(page, stream(TEXT))
    ask(page, "Everything, please.")
    answer = wait_for_answer(page)
    shape = "nodes => nodes.map((node) => node.nodeName.toLowerCase())"
    tags = answer.locator(".markdown > *").evaluate_all(shape)
    assert tags == ["p", "h4", "ol", "ul", "figure", "div", "blockquote", "hr", "p"]
    assert answer.locator("pre code").inner_text() == 'def f(x):\n    return "<b>" + x'
    assert answer.locator(".code figcaption > span").inner_text() == "python"
    links = answer.locator("a").evaluate_all("nodes => nodes.map((node) => [node.href, node.target, node.rel])")
    opener = ["_blank", "noopener noreferrer nofollow"]
    assert links == [["https://example.org/a?b=1&c=2", *opener], ["https://example.org/", *opener]]
    assert answer.locator("td").first.inner_text() == "1\n2"
    assert "☑ done" in answer.inner_text()
    assert "<escaped>" in answer.inner_text()
    window.check()


def test_what_is_finished_is_not_drawn_again(window: Window) -> None:
    """Blocks that were complete once are the same elements at the end; the open block keeps its scroll position."""
    window.context.add_init_script(FEED)
    page = window.open("/ui")
    ask(page, "Slowly, please.")
    feed(page, "First **block**.\n\n- one\n- two\n\n```js\n" + "x".ljust(400, "x") + "\n")
    page.evaluate(
        """() => {
            window.before = [...document.querySelectorAll(".markdown > *, .markdown li, .markdown pre")];
            document.querySelector(".markdown pre").scrollLeft = 70;
            getSelection().selectAllChildren(window.before[0]);
            window.changes = [];
            new MutationObserver((records) => window.changes.push(...records)).observe(
                document.querySelector(".markdown"), { childList: true, characterData: true, subtree: true });
        }"""
    )
    feed(page, "y = 1;\nz = 2;\n```\n\nThen *more*.\n\nAnd the end.")
    page.evaluate("window.finish()")
    answer = wait_for_answer(page)
    found = page.evaluate(
        """() => ({
            same: window.before.every((node) => node.isConnected), num: window.before.length,
            left: document.querySelector(".markdown pre").scrollLeft, selected: getSelection().toString(),
            early: window.changes.filter(({ target }) =>
                window.before.slice(0, 4).some((node) => node.contains(target))).length,
        })"""
    )
    assert found == {"same": True, "num": 6, "left": 70, "selected": "First block.", "early": 0}
    assert answer.locator("pre").inner_text().endswith("y = 1;\nz = 2;")
    window.check()


def test_a_growing_text_ends_as_the_whole_one(window: Window) -> None:
    """However it is cut into pieces. Only an address below its link waits for the end."""
    page = window.open("/ui")
    wrong = page.evaluate(
        """async (texts) => {
            const { Markdown } = await import("/ui/markdown.js");
            const wrong = [];
            for (const text of texts) for (const size of [1, 7]) {
                const growing = new Markdown();
                for (let end = size; end < text.length + size; end += size) growing.draw(text.slice(0, end));
                const whole = new Markdown();
                whole.draw(text);
                if (text.includes("]: ")) growing.close(); // a link, and its address far below
                if (!growing.node.isEqualNode(whole.node)) wrong.push([size, text.slice(0, 40)]);
            }
            return wrong;
        }""",
        GROWING,
    )
    assert wrong == []


def test_nothing_in_an_answer_or_a_title_is_run(window: Window) -> None:
    page = window.open("/ui")
    answer_with(page, stream(HOSTILE, reasoning=HOSTILE))
    title = "<img src=x onerror=window.hacked=20>"
    ask(page, title)
    answer = wait_for_answer(page)
    assert answer.locator("script, img, iframe, svg:not(.icon-shape)").count() == 0
    assert answer.locator("a").count() == 0
    assert answer.evaluate(
        "node => [...node.querySelectorAll('*')].every(one => !one.getAttributeNames().some(a => a.startsWith('on')))"
    )
    assert "<script>window.hacked=1</script>" in text_of(answer)
    assert page.locator("#conversations .title").inner_text() == title
    assert page.title().startswith(title)
    page.locator("#conversations li").hover()
    page.click("#conversations .icon")
    page.click("[data-action=rename]")
    page.fill("#conversations input", f"{title} again")
    page.keyboard.press("Enter")
    page.get_by_text(f"{title} again").wait_for()
    page.reload()
    wait_for_answer(page)
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    window.check()


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "without"])
def test_code_and_answers_can_be_copied(window: Window, clipboard: bool) -> None:
    """On a page that is neither https nor localhost, browsers give no clipboard; the older way works there."""
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    # A button says for 1.5 s that it has copied: here until it is read.
    window.context.add_init_script(
        "const later = window.setTimeout; window.setTimeout = (run, ms) => later(run, ms === 1500 ? 1e8 : ms)"
    )
    if not clipboard:
        window.context.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    page = window.open("/ui")
    answer_with(page, stream(TEXT))
    ask(page, "Code!")
    answer = wait_for_answer(page)
    copied = "navigator.clipboard.readText()"
    answer.get_by_role("button", name="Copy", exact=True).click()
    answer.get_by_text("Copied").wait_for()
    assert page.evaluate(copied) == 'def f(x):\n    return "<b>" + x'
    answer.get_by_role("button", name="Copy the answer").click()
    page.wait_for_function(f"async (text) => (await {copied}) === text", arg=TEXT)
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Copy the message").click()
    page.wait_for_function(f"async () => (await {copied}) === 'Code!'")
    window.check()


# -- what is kept in the browser ---------------------------------------------------------------------------------------


def act(page: Any, title: str, action: str) -> None:
    page.get_by_role("link", name=title).hover()
    page.get_by_role("button", name=f"Actions for {title}").click()
    page.get_by_role("button", name=action, exact=True).click()


def test_conversations_are_listed_kept_renamed_exported_and_deleted(window: Window, tmp_path: Path) -> None:
    page = window.open("/ui")
    page.wait_for_function("() => document.getElementById('model').textContent")
    open_settings(page)
    page.fill("#system", "Be brief.")
    page.fill("#knob-temperature", "0.5")
    answer_with(page, stream("**Paris**.", reasoning="A capital."), stream("Oslo."))
    ask(page, "France?")
    wait_for_answer(page)
    page.click("#new")
    page.wait_for_selector(".empty")
    page.click("#reset")
    ask(page, "Norway?")
    wait_for_answer(page)
    assert page.locator("#conversations .title").all_inner_texts() == ["Norway?", "France?"]

    page.get_by_role("link", name="France?").click()
    page.get_by_text("Paris").wait_for()
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("#knob-temperature") == "0.5"
    assert page.get_attribute("#settings-button", "data-count") == "2"
    page.reload()  # the address names the conversation
    answer = wait_for_answer(page)
    assert text_of(answer) == "Paris."
    assert "TTFT" in answer.locator(".stats").inner_text()
    assert answer.locator("details.reasoning").get_attribute("open") is None, "folded"

    act(page, "France?", "Rename")
    page.wait_for_function("() => document.activeElement.matches('#conversations input')")
    page.keyboard.type("Capitals")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Capitals").wait_for()
    with page.expect_download() as download:
        act(page, "Capitals", "Export as JSON")
    assert download.value.suggested_filename == "Capitals.json"
    download.value.save_as(tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "France?"},
        {"role": "assistant", "content": "**Paris**.", "reasoning": "A capital."},
    ]
    session = ChatSession(None, {})  # type: ignore[arg-type]  # no model is asked
    session.load_json(saved)  # as /load of `quire chat` does
    assert (session.system, len(session.messages)) == ("Be brief.", 2)
    with page.expect_download() as download:
        act(page, "Capitals", "Export as Markdown")
    download.value.save_as(tmp_path / "c.md")
    assert (tmp_path / "c.md").read_text().endswith("## You\n\nFrance?\n\n## Model\n\n**Paris**.\n")

    act(page, "Capitals", "Delete")
    page.wait_for_selector(".empty")
    assert page.locator("#conversations .title").all_inner_texts() == ["Norway?"]
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("link", name="Capitals").wait_for()
    act(page, "Capitals", "Delete")
    page.get_by_role("link", name="Capitals").wait_for(state="detached")
    page.reload()
    page.get_by_role("link", name="Norway?").wait_for()
    assert page.locator("#conversations li").count() == 1
    assert page.evaluate("localStorage.length") == 0
    window.check()


def test_on_a_phone_conversations_are_renamed_exported_and_deleted(phone: Window) -> None:
    """The list is a modal sheet there: nothing outside it can be tapped, and after a deletion it stays open."""
    page = phone.open("/ui")
    answer_with(page, stream("**Paris**."))
    page.fill("#prompt", "France?")
    page.tap("#send")
    wait_for_answer(page)
    page.tap("#history-button")

    def act_by_touch(title: str, action: str) -> None:
        page.get_by_role("button", name=f"Actions for {title}").tap()
        page.get_by_role("button", name=action, exact=True).tap()

    act_by_touch("France?", "Rename")
    page.wait_for_function("() => document.activeElement.matches('#conversations input')")
    page.keyboard.type("Capitals")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Capitals").wait_for()
    with page.expect_download() as download:
        act_by_touch("Capitals", "Export as Markdown")
    assert download.value.suggested_filename == "Capitals.md"
    act_by_touch("Capitals", "Delete")
    page.get_by_text("is deleted").wait_for()
    page.wait_for_selector(".empty")
    page.get_by_role("button", name="Undo").tap()
    page.get_by_role("link", name="Capitals").tap()
    assert text_of(wait_for_answer(page)) == "Paris."
    phone.check()


def test_after_a_deletion_the_focus_is_on_undo(window: Window) -> None:
    page = window.open("/ui")
    answer_with(page, stream("Oslo."))
    ask(page, "Norway?")
    wait_for_answer(page)
    act(page, "Norway?", "Delete")
    page.get_by_text("is deleted").wait_for()
    page.wait_for_selector(".empty")
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Norway?").wait_for()
    page.wait_for_function("() => document.activeElement.matches('#conversations a')")
    window.check()


def test_a_conversation_is_named_after_its_first_message(window: Window) -> None:
    """Also when that is edited, but not when the conversation was given another name."""
    page = window.open("/ui")
    answer_with(page, stream("Yes."))
    ask(page, "France?")
    wait_for_answer(page)
    for title, typed in (("Norway?", "Norway?"), ("Capitals", "Sweden?")):
        if title == "Capitals":
            act(page, "Norway?", "Rename")
            page.wait_for_function("() => document.activeElement.matches('#conversations input')")
            page.keyboard.type(title)
            page.keyboard.press("Enter")
            page.get_by_role("link", name=title).wait_for()
        page.locator(".message.user").hover()
        page.get_by_role("button", name="Edit and send again").click()
        page.locator(".editing textarea").fill(typed)
        page.keyboard.press("Enter")
        wait_for_answer(page)
        page.get_by_role("link", name=title).wait_for()
    window.check()


def test_reasoning_is_markdown_too(window: Window) -> None:
    window.context.add_init_script(FEED)
    page = window.open("/ui")
    ask(page, "Think.")
    page.wait_for_function("() => window.feed")
    page.evaluate("for (const part of ['I *th', 'ink*.\\n\\n- one\\n', '- two <b>']) window.feed({ reasoning: part })")
    page.click(".reasoning summary")
    page.evaluate("window.feed({ content: 'So.' }); window.finish()")
    answer = wait_for_answer(page)
    assert answer.locator(".reasoning em").inner_text() == "think"
    assert answer.locator(".reasoning li").all_inner_texts() == ["one", "two <b>"]
    page.reload()
    answer = wait_for_answer(page)
    assert answer.locator(".reasoning em").text_content() == "think"
    assert text_of(answer) == "So."
    window.check()


def test_an_answer_goes_on_while_another_conversation_is_shown(window: Window) -> None:
    window.context.add_init_script(FEED)
    page = window.open("/ui")
    ask(page, "First")
    feed(page, "One ")
    page.click("#new")
    page.wait_for_selector(".empty")
    assert page.locator("#send").is_visible(), "another one can be begun"
    other = window.context.new_page()
    other.goto(f"{window.url}/ui")
    other.get_by_role("link", name="First").wait_for()  # another window lists it
    other.close()
    feed(page, "two.")
    page.evaluate("window.finish()")
    page.get_by_role("link", name="First").click()
    assert text_of(wait_for_answer(page)) == "One two."
    page.reload()
    assert text_of(wait_for_answer(page)) == "One two."
    window.check()


def test_a_browser_without_storage_still_talks(window: Window) -> None:
    window.context.add_init_script("IDBFactory.prototype.open = () => { throw new Error('disabled') }")
    page = window.open("/ui")
    page.get_by_text("This browser stores nothing").wait_for()
    ask(page, "What is a quire?")
    wait_for_answer(page)
    page.get_by_role("link", name="What is a quire?").wait_for()
    window.check()


# -- editing, tools and errors -----------------------------------------------------------------------------------------


def test_a_message_is_edited_and_sent_again(window: Window) -> None:
    page = window.open("/ui")
    sent = answer_with(page, stream("A."), stream("B."), stream("C."), stream("D."))
    for count, question in enumerate(("one", "two"), 1):
        ask(page, question)
        wait_for_answer(page, count)
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit and send again").first.click()
    page.keyboard.press("Escape")
    assert page.locator(".message.user .text").all_inner_texts() == ["one", "two"], "nothing has changed"
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")  # edits the last one
    page.keyboard.press("Control+A")
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    assert text_of(wait_for_answer(page, 2)) == "C."
    assert [message["content"] for message in sent[-1]] == ["one", "A.", "three"]
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit and send again").first.click()
    page.keyboard.type("zero ")
    page.get_by_role("main").get_by_role("button", name="Send").first.click()
    assert text_of(wait_for_answer(page)) == "D."
    assert len(sent[-1]) == 1
    page.reload()
    assert text_of(wait_for_answer(page)) == "D.", "what was replaced is gone"
    window.check()


def test_tool_calls_are_shown_again(window: Window) -> None:
    page = window.open("/ui")
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    sent = answer_with(
        page, stream("", reasoning="I ask.", calls=[call]), stream("It is sunny.", reasoning="So."), stream("Yes.")
    )
    ask(page, "How is the weather?")
    wait_for_answer(page)
    page.reload()
    page.get_by_label("Its result").fill("sunny")  # the call still waits for its result
    page.get_by_role("button", name="Give the results to the model").click()
    wait_for_answer(page, 2)
    assert [message["role"] for message in sent[-1]] == ["user", "assistant", "tool"]
    assert sent[-1][1]["tool_calls"][0]["id"] == sent[-1][2]["tool_call_id"] == "c1"
    assert sent[-1][1]["reasoning"] == "I ask.", "the model goes on from there"
    page.reload()
    assert text_of(wait_for_answer(page, 2)) == "It is sunny."
    box = page.locator(".call")
    assert json.loads(box.locator("pre").inner_text()) == {"city": "Rome"}
    box.locator("summary").click()
    assert "sunny" in box.inner_text()
    assert page.get_by_role("button", name="Give the results").count() == 0
    ask(page, "Sure?")
    wait_for_answer(page, 3)
    assert ["reasoning" in message for message in sent[-1]] == [False, True, False, False, False]
    window.check()


EVENTS = "text/event-stream"
IN_THE_STREAM = 'data: {"error": {"message": "it broke", "code": 500}}\n\n'
BROKEN: list[tuple[dict[str, Any] | None, str]] = [
    ({"status": 503, "headers": {"retry-after": "7"}, "json": {"error": {"message": "full"}}}, "Try again in 7 s."),
    ({"status": 500, "body": "?"}, "the log of the server has the details"),
    ({"content_type": EVENTS, "body": stream("Half an", is_whole=False)}, "The connection ended before"),
    ({"content_type": EVENTS, "body": IN_THE_STREAM}, "it broke"),
    (None, "The terminal of quire serve says whether it still runs."),
]


def break_with(page: Any, reply: dict[str, Any] | None) -> None:
    page.unroute(ANSWERS)
    page.route(ANSWERS, lambda route: route.fulfill(**reply) if reply else route.abort())


def test_every_error_has_a_next_step(window: Window) -> None:
    page = window.open("/ui")
    for reply, words in BROKEN:
        break_with(page, reply)
        ask(page, "Well?")
        page.locator(".message:last-child .error").get_by_text(words).wait_for()
        page.wait_for_selector("#stop", state="hidden")
        answer_with(page, stream("Now it works."))
        page.get_by_role("button", name="Try again").last.click()
        page.wait_for_function(
            "() => !document.querySelector('.message:last-child .error') && document.getElementById('stop').hidden"
        )
        assert page.locator(".message:last-child .markdown").inner_text() == "Now it works."
        page.click("#new")
        page.wait_for_selector(".empty")
    assert window.foreign == []


# -- a phone, a keyboard, a screen reader ------------------------------------------------------------------------------


def test_on_a_phone_the_composer_stays_in_reach(phone: Window) -> None:
    page = phone.open("/ui")
    page.wait_for_function("() => document.getElementById('model').textContent")
    assert page.evaluate("document.activeElement.id") != "prompt", "no keyboard pops up by itself"
    answer_with(page, stream(TEXT * 2))
    page.fill("#prompt", "First line")
    page.press("#prompt", "Enter")  # on a touch screen: a new line
    page.locator("#prompt").press_sequentially("second")
    assert page.input_value("#prompt") == "First line\nsecond"
    page.tap("#send")
    wait_for_answer(page)
    page.focus("#prompt")
    page.evaluate(
        """() => { // a keyboard comes up: iOS leaves the page as high as it was, and shows less of it
            Object.defineProperty(visualViewport, "height", { get: () => 500 });
            visualViewport.dispatchEvent(new Event("resize"));
        }"""
    )
    box = page.locator("#composer").bounding_box()
    assert 380 < box["y"] < box["y"] + box["height"] <= 500, "just above the keyboard"
    assert is_in_sight(page, ".message:last-child .stats"), "the end of the answer is above it"
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], (
        "tables and code scroll by themselves"
    )
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, .conversations a")].filter((node) => node.offsetParent)
            .map((node) => [node.getAttribute("aria-label") ?? node.textContent, node.getBoundingClientRect()])
            .filter(([, box]) => box.width < 24 || box.height < 24).map(([name]) => name)"""
    )
    assert small == [], "WCAG 2.2: targets of 24 pixels"
    page.tap("#history-button")
    page.get_by_role("link", name="First line").wait_for()
    page.locator("#history .new").tap()
    page.wait_for_selector(".empty")
    assert not page.locator("#history").is_visible(), "the sheet is closed again"
    page.get_by_role("button", name="More", exact=True).tap()
    page.get_by_role("link", name="Dashboard").tap()
    page.wait_for_selector("#tiles")
    phone.check()


def test_an_empty_page_begins_at_its_top(browser: Any, server: ServerProcess) -> None:
    """Also where it is higher than the window, as on a phone that lies on its side."""
    window = Window(browser, server.url, viewport={"width": 640, "height": 360}, has_touch=True, is_mobile=True)
    page = window.open("/ui")
    page.wait_for_function("() => document.getElementById('model').textContent")
    page.wait_for_function(
        "() => document.getElementById('messages').scrollHeight > document.getElementById('messages').clientHeight"
    )
    assert is_in_sight(page, ".empty h2")
    assert page.locator("#down").is_hidden()
    window.context.close()


def test_with_the_keyboard_alone(window: Window) -> None:
    window.context.add_init_script(FEED)
    page = window.open("/ui")
    page.wait_for_function("() => document.activeElement.id === 'prompt'")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    assert page.locator(".message.user .text").inner_text() == "one\ntwo"
    feed(page, "Never ")
    page.keyboard.press("Escape")
    assert "stopped" in wait_for_answer(page).locator(".stats").inner_text()
    page.keyboard.press("Shift+Tab")  # from the box to the button before it, and on
    order = []
    for _ in range(4):
        order.append(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"))
        page.keyboard.press("Shift+Tab")
    assert order == ["Answer again", "Copy the answer", "Copy the message", "Edit and send again"]
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    page.focus("#settings-button")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.evaluate(outline) == "solid", "the focus is seen"
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings[open]")
    page.locator("#settings .close").press("Enter")
    assert page.evaluate("document.activeElement.id") == "settings-button"
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(".editing")
    page.keyboard.press("Enter")  # the message again, from a box that is gone then
    page.wait_for_function("() => document.activeElement.id === 'prompt'")
    window.check()


def test_a_screen_reader_gets_blocks_and_no_tokens(window: Window) -> None:
    window.context.add_init_script(FEED)
    page = window.open("/ui")
    ask(page, "Read to me.")
    page.evaluate(
        """() => {
            window.said = [];
            new MutationObserver((records) => records.forEach(({ target, addedNodes }) => {
                if (target.closest("[aria-live=polite], [role=status]"))
                    window.said.push(...[...addedNodes].map((node) => node.textContent));
            })).observe(document.body, { childList: true, subtree: true });
        }"""
    )
    feed(page, "One **sentence**.\n\n```py\na\nb\n```\n\nThe last", size=2)
    assert page.evaluate("window.said") == ["One sentence.", "A block of code of 2 lines."]
    page.evaluate("window.finish()")
    wait_for_answer(page)
    assert page.evaluate("window.said") == [
        "One sentence.",
        "A block of code of 2 lines.",
        "The last",
        "The answer is complete.",
    ]
    window.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_axe_finds_nothing_serious(browser: Any, server: ServerProcess, size: str, scheme: str) -> None:
    """The pages in each state, by the rules of axe-core; screenshots of each are left for people."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    options = {"viewport": DESKTOP} if size == "desktop" else {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    window = Window(browser, server.url, color_scheme=scheme, reduced_motion="reduce", **options)
    page = window.open("/ui")
    serious: list[str] = []

    def look(name: str) -> None:
        window.keep(f"{name}-{size}-{scheme}", full_page=False)
        report = axe.run(page).response
        assert len(report["passes"]) > 10, "axe has looked"
        found = [rule for rule in report["violations"] if rule["impact"] in ("serious", "critical")]
        serious.extend(f"{name}: {rule['id']}: {rule['nodes'][0]['html'][:200]}" for rule in found)

    page.wait_for_function("() => document.getElementById('model').textContent")
    look("chat-empty")
    call = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    answer_with(page, stream(TEXT, reasoning="Hm."), stream("", calls=[call]), stream("Half", is_whole=False))
    ask(page, "Everything, please.") if size == "desktop" else (page.fill("#prompt", "Everything."), page.tap("#send"))
    wait_for_answer(page)
    look("chat-answer")
    retry(page)
    page.get_by_label("Its result").fill("sunny")
    page.get_by_role("button", name="Give the results to the model").click()
    page.locator(".error").wait_for()
    look("chat-tool-error")
    page.click("#settings-button")
    look("chat-settings")
    page.click("#settings .close")
    if size == "phone":
        page.tap("#history-button")
    page.locator("#conversations .icon").click()
    look("chat-history")
    page.goto(f"{server.url}/ui/dashboard")
    page.wait_for_function("() => /^0/.test(document.querySelector('[data-tile=running] .value').textContent)")
    look("dashboard")
    assert serious == []
    window.context.close()
