"""A real server of the demo model, a real headless browser, and a directory for what the browser shows.

`scripts/test -m browser` runs these tests and leaves their screenshots in build/screenshots. The browser is Chromium:
the one TESTS_BROWSER names, the system's, or Playwright's own.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.serving import ServerProcess, serving

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
KEY = "secret"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = {"width": 390, "height": 844}
FLAGS = (
    "--enable-admin",
    "--admin-port",
    "0",
    "--api-key",
    KEY,
    "--max-num-seqs",
    "8",
    "--num-gpu-blocks-override",
    "420",
)


def find_browser(own: str) -> str | None:
    """A browser's program: `own` is where Playwright's would be."""
    named = os.environ.get("TESTS_BROWSER")
    if named:
        return named
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or (own if Path(own).exists() else None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("there is no Playwright: pip install playwright (it is in the dev dependencies)")
    with sync_playwright() as playwright:
        program = find_browser(playwright.chromium.executable_path)
        if program is None:
            pytest.skip("there is no browser: apt install chromium, or name one with TESTS_BROWSER")
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser: Any) -> Iterator[ServerProcess]:
    """Started only where there is a browser to look at it."""
    with serving(*FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def slow_server(browser: Any) -> Iterator[ServerProcess]:
    """One whose steps take 20 ms: what is to be stopped has not ended by itself."""
    with serving(*FLAGS, executor="Leisurely") as running:
        yield running


@pytest.fixture(scope="session")
def small_server(browser: Any) -> Iterator[ServerProcess]:
    """One whose context is soon full."""
    with serving(*FLAGS, "--max-model-len", "512") as running:
        yield running


class Window:
    """A page of a browser that forgets everything, and what it complained of or asked from elsewhere."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._check(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "401" not in text:
            self.complaints.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith(self.url):
            self.foreign.append(url)

    def open(self, path: str, *, key: str | None = KEY) -> Any:
        """Go to a page, with a key as if it had been typed in."""
        if key is not None:
            self.context.add_init_script(f"sessionStorage.setItem('quire-api-key', '{key}')")
        self.page.goto(self.url + path)
        return self.page

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that is found out here, not in the page."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "it does not happen"
            self.page.wait_for_timeout(50)

    def keep(self, name: str, *, full_page: bool = True) -> None:
        """A picture of it all, or of what is seen."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=full_page)

    def check(self) -> None:
        assert self.complaints == []
        assert self.foreign == []


@pytest.fixture
def window(browser: Any, server: ServerProcess) -> Iterator[Window]:
    window = Window(browser, server.url)
    yield window
    window.context.close()
