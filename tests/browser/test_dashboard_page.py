"""/ui/dashboard while the engine works: it says what /debug/state and /metrics say, and can end a request."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.process.serving import ServerProcess, serving

from .conftest import FLAGS, KEY, PHONE, Window

pytestmark = pytest.mark.browser

HOSTILE = "<img/src=x/onerror=window.hacked=1>"
HEADERS = {"authorization": f"Bearer {KEY}"}


@contextmanager
def load_on(url: str, *, at_once: int = 14) -> Iterator[None]:
    """So many requests at any time, of prompts with common beginnings, as `quire bench serve` would send."""
    over = threading.Event()
    rng = random.Random(7)
    beginnings = [[rng.randrange(100, 2000) for _ in range(160)] for _ in range(3)]

    async def ask(client: httpx2.AsyncClient, number: int) -> None:
        while not over.is_set():
            prompt = [*rng.choice(beginnings), *(rng.randrange(100, 2000) for _ in range(rng.choice((20, 60, 120))))]
            body = {"prompt": prompt, "max_tokens": rng.choice((60, 150, 300)), "ignore_eos": True, "stream": True}
            name = HOSTILE if number == 0 else f"visitor-{number}"
            async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as response:
                async for _ in response.aiter_lines():
                    if over.is_set():
                        return

    async def run() -> None:
        limits = httpx2.Limits(max_connections=at_once)
        async with httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=120, limits=limits) as client:
            await asyncio.gather(*(ask(client, number) for number in range(at_once)))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_finger_points_too(browser: Any, server: ServerProcess) -> None:
    """A tap chooses a block, or a point of a chart, until something else is tapped."""
    window = Window(browser, server.url, viewport=PHONE, has_touch=True, is_mobile=True)
    page = window.open("/ui/dashboard")
    with load_on(server.url, at_once=2):
        wait_for_tile(page, "running", "^[12]of 8")
    for canvas, detail, words in (("#map", "#map-detail", "^Block "), ("#charts canvas", "#charts .hint", "ago")):
        box = page.locator(canvas).first
        assert not re.search(words, page.locator(detail).first.inner_text())
        box.tap(position={"x": box.bounding_box()["width"] - 9 if "charts" in canvas else 25, "y": 8})
        page.wait_for_function(
            "([at, words]) => new RegExp(words).test(document.querySelector(at).textContent)", arg=[detail, words]
        )
        page.locator("h2").first.tap()
        page.wait_for_function(
            "([at, words]) => !new RegExp(words).test(document.querySelector(at).textContent)", arg=[detail, words]
        )
    window.context.close()


LOADING = {"error": {"message": "the server is loading demo; come again"}}


def wait_for_tile(page: Any, name: str, pattern: str) -> None:
    page.wait_for_function(
        "([name, pattern]) => new RegExp(pattern).test("
        "document.querySelector(`[data-tile=${name}] .value`).textContent)",
        arg=[name, pattern],
    )


def test_a_newcomer_sees_what_the_engine_does(browser: Any, server: ServerProcess) -> None:
    assert server.admin_url is not None
    window = Window(browser, server.admin_url, color_scheme="light")
    page = window.open("/ui/dashboard")
    page.wait_for_function("() => document.getElementById('words').textContent.includes('idle')")
    window.keep("dashboard-idle")
    with load_on(server.url):
        for name, pattern in (
            ("written", r"^\d"), ("running", "^[1-8]of 8"), ("waiting", "^[1-9]"), ("cache", r"^[1-9]\d* %"),
            ("hits", r"^[1-9]\d* %"), ("ttft", "ms|s$"), ("itl", "ms|s$"),
        ):  # fmt: skip
            wait_for_tile(page, name, pattern)
        page.wait_for_function(
            "() => /answers \\d requests.*tokens per second/.test(document.getElementById('words').textContent)"
        )
        page.wait_for_function("() => document.querySelectorAll('#ended tbody tr').length > 3", polling=500)
        for _ in range(12):  # so that the picture has a past
            page.wait_for_timeout(1000)
        window.keep("dashboard-light")
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        page.wait_for_function("() => getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 26)'")
        window.keep("dashboard-dark")
        assert page.evaluate("getComputedStyle(document.getElementById('pulse')).animationName") == "none"

        page.focus("#map")
        page.keyboard.press("Home")
        assert page.inner_text("#map-detail").startswith("Block 0: the null block")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#map-detail").startswith("Block 1: ")
        page.focus("#timeline")
        page.keyboard.press("ArrowLeft")
        assert re.search(r"waited \d", page.inner_text("#line-detail"))
        chart = page.get_by_role("img", name=re.compile("Throughput: written"))
        chart.focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(
            "name => document.getElementById('requests').innerText.includes(name)", arg=HOSTILE
        )  # between two of its requests it is not there
        assert page.evaluate("window.hacked") is None
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        window.keep("dashboard-narrow")
    window.check()
    window.context.close()


def test_the_abort_button_ends_the_request_on_the_admin_listener_only(browser: Any, slow_server: ServerProcess) -> None:
    """On the admin listener the button ends the request; on the other one there is none."""
    assert slow_server.admin_url is not None
    ends: list[str] = []

    def ask() -> None:
        body = {"prompt": [50, 51], "max_tokens": 2000, "ignore_eos": True}
        headers = {**HEADERS, "x-request-id": "endless"}
        answer = httpx2.post(f"{slow_server.url}/v1/completions", json=body, headers=headers, timeout=120)
        ends.append(answer.json()["choices"][0]["finish_reason"])

    plain = Window(browser, slow_server.url)
    window = Window(browser, slow_server.admin_url)
    shown, page = plain.open("/ui/dashboard"), window.open("/ui/dashboard")
    thread = threading.Thread(target=ask)
    thread.start()
    button = page.get_by_role("button", name="Abort cmpl-endless")
    button.focus()
    page.keyboard.press("Enter")
    thread.join()
    assert ends == ["abort"]
    page.wait_for_function("() => document.querySelectorAll('#requests tbody tr').length === 0")
    shown.wait_for_function("() => document.getElementById('abort-note').textContent.includes('admin listener')")
    assert shown.get_by_role("button", name=re.compile("^Abort")).count() == 0
    for one in (plain, window):
        one.check()
        one.context.close()


def test_without_a_key_it_asks_for_one(window: Window) -> None:
    page = window.open("/ui/dashboard", key=None)
    page.wait_for_selector("dialog:modal")
    page.keyboard.press("Escape")
    assert "key" in page.inner_text("#words")
    page.get_by_role("button", name="API key").click()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use it").click()
    wait_for_tile(page, "running", "^0of 8")


def test_everything_can_be_reached_and_has_a_name(window: Window) -> None:
    for path in ("/ui", "/ui/dashboard"):
        page = window.open(path)
        page.wait_for_function("() => document.getElementById('model').textContent.includes('demo')")
        if path == "/ui":
            page.click("#settings-button")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, canvas, a')]
                .filter((node) => !node.closest('[aria-hidden=true]') && !node.hidden)
                .filter((node) => !(node.labels?.length || node.getAttribute('aria-label') || node.textContent.trim()))
                .map((node) => node.outerHTML)"""
        )
        assert nameless == []
        page.evaluate("document.activeElement.blur()")
        reached: list[str] = []
        for _ in range(80):
            page.keyboard.press("Tab")
            here = page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
            if here in reached:
                break
            reached.append(here)
        wanted = {
            "/ui": {"system", "knob-temperature", "logprobs", "prompt", "send"},
            "/ui/dashboard": {"map", "timeline"},
        }
        assert wanted[path] | {"theme-button", "key-button"} <= set(reached), reached
        page.click("#theme-button")
        page.click("#theme-button")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        page.click("#theme-button")
    window.check()


# -- what the scripts compute ------------------------------------------------------------------------------------------

TEXT = """\
# HELP vllm:x_seconds Something.
# TYPE vllm:x_seconds histogram
vllm:x_seconds_bucket{engine="0",le="0.1",model_name="a\\"b"} 1.0
vllm:x_seconds_bucket{engine="0",le="1.0",model_name="a\\"b"} 3.0
vllm:x_seconds_bucket{engine="0",le="+Inf",model_name="a\\"b"} 4.0
vllm:x_seconds_bucket{engine="1",le="0.1",model_name="a\\"b"} 1.0
vllm:x_seconds_bucket{engine="1",le="1.0",model_name="a\\"b"} 1.0
vllm:x_seconds_bucket{engine="1",le="+Inf",model_name="a\\"b"} 1.0
vllm:y_total{engine="0"} 1e3
vllm:y_total{engine="1"} 5
"""


def test_readings_of_metrics(window: Window) -> None:
    page = window.open("/ui")
    found = page.evaluate(
        """async (text) => {
            const m = await import('/ui/metrics.js');
            const metrics = m.parse(text), all = m.buckets(metrics, 'vllm:x_seconds');
            const readings = new m.Readings();
            for (const [time, value] of [[0, 10], [1, 30], [2, 70], [3, 5]]) {
                readings.add(time, m.parse(`vllm:y_total ${value}\\nvllm:generation_tokens_total ${value}`));
                if (time === 2) {
                    var rate = readings.rate('vllm:y_total', 1), growth = readings.growth('vllm:y_total', 9);
                }
            }
            return {
                label: metrics.get('vllm:x_seconds_bucket')[0].labels.model_name,
                total: m.total(metrics, 'vllm:y_total'),
                bounds: all.map(([bound, count]) => [String(bound), count]),
                quantiles: [0.2, 0.4, 0.6, 0.99].map((q) => m.quantile(all, q)), none: m.quantile([], 0.5),
                missing: m.total(metrics, 'vllm:z'), rate, growth, restarted: readings.rate('vllm:y_total', 5),
            };
        }""",
        TEXT,
    )
    assert found == {
        "label": 'a"b', "total": 1005, "bounds": [["0.1", 2], ["1", 4], ["Infinity", 5]],
        "quantiles": pytest.approx([0.05, 0.1, 0.55, 1.0]), "none": None, "missing": None, "rate": 40, "growth": 60,
        "restarted": None,
    }  # fmt: skip


def test_figures_of_a_server_that_is_gone_are_dimmed(browser: Any) -> None:
    with serving(*FLAGS) as server:
        window = Window(browser, server.url)
        page = window.open("/ui/dashboard")
        wait_for_tile(page, "running", "^0of 8")
        page.wait_for_selector("main:not(.stale)")
    page.wait_for_selector("main.stale")
    page.wait_for_function("() => document.getElementById('words').textContent.includes('does not answer')")
    age = r"figures below are ([3-9]|\d\d) s old"
    page.wait_for_function("age => new RegExp(age).test(document.getElementById('age').textContent)", arg=age)
    page.route("**/debug/state*", lambda route: route.fulfill(status=503, json=LOADING))
    page.get_by_text("the server is loading demo").wait_for()
    assert page.locator("main.stale").count() == 1
    opacity = "selector => getComputedStyle(document.querySelector(selector)).opacity"
    assert float(page.evaluate(opacity, "#tiles")) < 0.6
    assert float(page.evaluate(opacity, ".words")) == 1
    window.keep("dashboard-gone")
    window.context.close()


def test_a_restart_of_the_core_is_told(browser: Any, tmp_path: Path) -> None:
    """The second core takes four seconds longer: the page, which asks once a second, must see that there is none."""
    killed = tmp_path / "killed"
    with serving(*FLAGS, env={"QUIRE_FAILPOINTS": f"core.start=sleep(4),after={killed}"}) as server:
        window = Window(browser, server.url)
        page = window.open("/ui/dashboard")
        wait_for_tile(page, "running", "^0of 8")
        killed.touch()
        os.kill(server.core_pid(), signal.SIGKILL)
        page.get_by_text(
            re.compile("The engine core is gone since .* being started again; it loads its model")
        ).wait_for()
        assert page.locator("main.stale").count() == 1
        event = page.locator("#events li")
        event.get_by_text(re.compile(r"the engine core was killed. It is back since [\d:]+, \d+ s later")).wait_for()
        page.wait_for_function(
            "() => /engine core was killed and was started again/.test(document.getElementById('words').textContent)"
        )
        page.wait_for_selector("main:not(.stale)")
        page.locator("#age").wait_for(state="hidden")
        window.keep("dashboard-restart")
        page.reload()
        event.get_by_text(
            "Before this page was opened the engine core was started again 1 time: it was killed."
        ).wait_for()
        window.context.close()


def read_metrics(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Returns the samples of /metrics by name, read by another parser than the page's."""
    text = httpx2.get(f"{url}/metrics", headers=HEADERS).text
    families = text_string_to_metric_families(text)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value_of(url: str, name: str) -> float:
    return sum(value for _, value in read_metrics(url)[name])


def counts_of_requests(url: str) -> tuple[float, float]:
    """Returns the numbers of running and of waiting requests."""
    return value_of(url, "vllm:num_requests_running"), value_of(url, "vllm:num_requests_waiting")


def quartiles_of_growth(before: dict[str, Any], after: dict[str, Any], name: str) -> tuple[float, float]:
    """Returns the lower bound of the bucket of the first quartile of what was added to a histogram, and the upper bound
    of the bucket of the third."""
    old = {labels["le"]: value for labels, value in before[f"{name}_bucket"]}
    grown = [(float(labels["le"]), value - old[labels["le"]]) for labels, value in after[f"{name}_bucket"]]
    total = grown[-1][1]
    below = max((bound for bound, value in grown if value < 0.25 * total), default=0.0)
    return below, next(bound for bound, value in grown if value >= 0.75 * total)


def tile(page: Any, name: str) -> str:
    return str(page.locator(f"[data-tile={name}] .value").inner_text())


def test_tiles_equal_the_metrics(browser: Any, slow_server: ServerProcess) -> None:
    """With ten requests at eight places, and after them."""
    url = slow_server.url
    window = Window(browser, url)
    window.wait_until(lambda: counts_of_requests(url) == (0, 0))  # what other tests have left has ended
    page = window.open("/ui/dashboard")
    wait_for_tile(page, "running", "^0of 8")
    before = read_metrics(url)
    with load_on(url, at_once=10):
        wait_for_tile(page, "waiting", "^2$")
        wait_for_tile(page, "running", "^8of 8")
        window.wait_until(lambda: counts_of_requests(url) == (8, 2))  # not where one has just ended

        def shows_the_cache() -> bool:
            lower = value_of(url, "vllm:kv_cache_usage_perc")
            page.wait_for_timeout(1200)
            shown = float(tile(page, "cache").removesuffix(" %")) / 100
            return lower - 0.006 <= shown <= value_of(url, "vllm:kv_cache_usage_perc") + 0.006

        window.wait_until(shows_the_cache)  # not where a request ends meanwhile
    window.wait_until(lambda: counts_of_requests(url) == (0, 0))
    after = read_metrics(url)
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, queries = (after[name][0][1] - before[name][0][1] for name in names)
    wait_for_tile(page, "running", "^0of 8")
    wait_for_tile(page, "hits", f"^{100 * hits / queries:.0f} %$")
    wait_for_tile(page, "cache", "^0 %$")
    assert value_of(url, "vllm:kv_cache_usage_perc") == 0
    low, high = quartiles_of_growth(before, after, "vllm:inter_token_latency_seconds")
    assert low <= float(tile(page, "itl").removesuffix(" ms")) / 1000 <= high, "a median in its bucket"
    window.check()
    window.context.close()


def test_speculation_has_a_chart_where_there_is_some(browser: Any, server: ServerProcess) -> None:
    window = Window(browser, server.url)
    page = window.open("/ui/dashboard")
    wait_for_tile(page, "written", r"^\d")
    assert page.locator("#chart-speculation").count() == 0
    window.context.close()
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}'
    with serving(*FLAGS, "-sc", drafts) as speculating:
        window = Window(browser, speculating.url)
        page = window.open("/ui/dashboard")
        page.wait_for_selector("#chart-speculation")
        with load_on(speculating.url, at_once=2):
            page.wait_for_function("() => /guessed in the last minute \\d+ % were/.test(words.textContent)")
        window.keep("dashboard-speculation")
        window.check()
        window.context.close()


def test_words_and_tiles_say_the_same(browser: Any, server: ServerProcess) -> None:
    window = Window(browser, server.url)
    page = window.open("/ui/dashboard")
    both = """() => [document.querySelector('[data-tile=written] .value').textContent,
        /writes ([\\d.,]+) tokens per second/.exec(document.getElementById('words').textContent)?.[1] ?? null]"""
    with load_on(server.url, at_once=4):
        page.wait_for_function(f"() => ({both})()[1] !== null")
        seen = set()

        def have_changed() -> bool:
            tile, words = page.evaluate(both)
            if words is not None:  # else nothing ran at that moment
                assert tile == words
                seen.add(tile)
            return len(seen) > 2

        window.wait_until(have_changed)
    window.check()
    window.context.close()
