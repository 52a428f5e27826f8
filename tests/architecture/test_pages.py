"""The pages' files: nothing from elsewhere, no script or style in the markup, and no text that becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from .sources import PACKAGE, ROOT

UI = PACKAGE / "assets" / "ui"
VENDOR = UI / "vendor"
FILES = sorted(path for path in UI.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
PAGES = [path for path in FILES if path.suffix == ".html"]
MAX_FILE_BYTES = 20_000
MAX_LINES = 300
MARKUP_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|createContextualFragment|srcdoc"
    r"|\beval\b|new Function|\bFunction\(|set(?:Timeout|Interval)\(\s*[\"'`]|import\(|javascript:"
    r"|localStorage\.setItem\((?!\"quire-theme\")"  # a key stays in its tab
)
ELSEWHERE = re.compile(
    r"(?:https?:)?//(?!www\.w3\.org/(?:2000/svg|1999/xhtml)[\"'])[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE
)
VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """The structure, links and ids of an HTML file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "style" or (tag == "script" and "src" not in values):
            self.problems.append(f"inline {tag}")
        self.problems += [f"{tag} {name}" for name in values if name == "style" or name.startswith("on")]
        self.references += [value for name, value in attrs if name in ("src", "href") and value]
        self.ids += [value for name, value in attrs if name == "id" and value]
        for name in ("for", "aria-labelledby", "aria-describedby"):
            self.targets += (values.get(name) or "").split()
        if tag == "img" and "alt" not in values:
            self.problems.append("img without alt")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.strip():
            self.problems.append("inline script")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_small_and_ask_for_nothing_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.suffix in (".html", ".css", ".js", ".svg")
    assert len(text) <= MAX_FILE_BYTES
    assert len(text.splitlines()) <= MAX_LINES
    assert not ELSEWHERE.findall(text)
    assert path.suffix != ".css" or not re.search(r"url\(|@import", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not MARKUP_FROM_TEXT.findall(text)
    assert text.startswith("// "), "the module says nothing about itself"
    for name in re.findall(r'from "\./([\w.]+)"', text):
        assert (UI / name).is_file() or (VENDOR / name).is_file()


def test_what_others_wrote_has_a_version_and_a_licence() -> None:
    """scripts/vendor has a row for each file, and the file is of that version."""
    rows = re.findall(r"^(\S+) (\d+\.\d+\.\d+) \S+ \S+$", (ROOT / "scripts" / "vendor").read_text(), re.MULTILINE)
    expected = {f"{name}.{kind}" for name, _ in rows for kind in ("js", "LICENSE")}
    assert {path.name for path in VENDOR.iterdir()} == expected
    for name, version in rows:
        assert f"{name} v{version}" in (VENDOR / f"{name}.js").read_text(encoding="utf-8")[:200]
        assert "Copyright" in (VENDOR / f"{name}.LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_hold_no_script_and_every_reference_leads_somewhere(path: Path) -> None:
    page = Page(path)
    assert page.problems == []
    assert page.open == []
    names = {re.sub(r"^(ui/|docs/|\.\./)", "", reference) for reference in page.references if reference[0] != "#"}
    assert names <= {file.name for file in FILES} | {"ui", "dashboard", "docs", "openapi.json"}
    assert len(page.ids) == len(set(page.ids))
    targets = {reference[1:] for reference in page.references if reference[0] == "#"} | set(page.targets)
    assert targets <= set(page.ids)


def test_scripts_name_elements_that_exist() -> None:
    ids = {name for path in PAGES for name in Page(path).ids}
    for path in SCRIPTS:
        named = set(re.findall(r'byId\("([\w-]+)"\)', path.read_text(encoding="utf-8")))
        assert named <= ids, f"{path.name} looks for {named - ids}"


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("ink", "ground", "least"),
    [
        *((ink, ground, 4.5) for ink in ("ink", "soft", "accent", "danger") for ground in ("paper", "panel", "field")),
        ("ink", "accent-pale", 4.5), ("accent-ink", "accent", 4.5), ("focus", "panel", 3), ("focus", "paper", 3),
        *((line, "panel", 3) for line in ("s1", "s2", "s3", "shared", "prompt", "writing")),
    ],
)  # fmt: skip
def test_colours_have_the_contrast_that_wcag_asks_for(theme: int, ink: str, ground: str, least: float) -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for what is drawn."""
    style = (UI / "style.css").read_text(encoding="utf-8")
    pairs = dict(re.findall(r"--([\w-]+): light-dark\((#\w+, #\w+)\)", style))
    lights = sorted(_luminance(pairs[name].split(", ")[theme]) for name in (ink, ground))
    assert (lights[1] + 0.05) / (lights[0] + 0.05) >= least


@pytest.mark.parametrize(
    "text", ["x.innerHTML = y", "eval(x)", 'setTimeout("x()", 1)', "new Function(x)", 'localStorage.setItem("key", k)']
)
def test_the_check_can_fail(text: str) -> None:
    assert MARKUP_FROM_TEXT.search(text)
    assert ELSEWHERE.search('src="https://cdn.example.com/x.js"')
