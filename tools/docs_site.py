"""Builds the documentation as a static site: `scripts/docs`, or `python -m tools.docs_site [--output DIR]`.

The pages are the Markdown files of the repository as they are, so that every link also works there. They are copied
into a folder of their own, in which their relative links stay right, and built by Sphinx with MyST and Furo: no
network, no fonts or scripts from elsewhere. Warnings are errors: a link to a missing page or heading, or a page that
no table of contents lists, fails the build.

docs/README.md is the table of contents: each of its sections is one of the site's. Pages of a folder with a page of its
own (SECTIONS) hang below that page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE_DOCS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "deploy/README.md",
    "examples/README.md",
    "examples/from_vllm/README.md",
    "tools/demo_model/README.md",
)
SECTIONS = {
    "docs/ARCHITECTURE.md": "docs/architecture",
    "docs/recipes/README.md": "docs/recipes",
    "docs/notes/README.md": "docs/notes",
    "docs/performance.md": "docs/notes/README.md",
    "docs/GUARANTEES.md": "docs/guarantee_details.md",
}
"""Page → the folder, or the page, that its table of contents holds."""
PROJECT = (
    "CONTRIBUTING",
    "CHANGELOG",
    "SECURITY",
    "examples/README",
    "examples/from_vllm/README",
    "benchmarks/README",
    "deploy/README",
    "tools/demo_model/README",
)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| \[[^]]+\]\(([^)#]+)\.md\)", re.MULTILINE)

CONFIG = """\
project = "Quire"
copyright = "the Quire authors, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "index"
html_theme = "furo"
html_title = "Quire"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#8ab8f0", "color-brand-content": "#8ab8f0"},
}
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = []
highlight_language = "none"
"""
STYLE = "@media (min-width: 94em) { .content { width: 54em; } .sidebar-drawer { width: calc(50% - 30em); } }\n"
STYLE += "article table { font-size: 0.86em; } td code { overflow-wrap: anywhere; }\n"


def stage(folder: Path) -> None:
    """Copies the pages, and writes the configuration and the tables of contents."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in OUTSIDE_DOCS:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    for page, holds in SECTIONS.items():
        below = (
            [holds] if holds.endswith(".md") else sorted(str(p.relative_to(folder)) for p in (folder / holds).iterdir())
        )
        _append(folder / page, contents([f"/{name[:-3]}" for name in below if name != page]))
    _append(folder / "README.md", "")
    (folder / "index.md").write_text(make_index((ROOT / "docs" / "README.md").read_text("utf-8")), encoding="utf-8")
    (folder / "conf.py").write_text(CONFIG, encoding="utf-8")
    (folder / "_static").mkdir()
    (folder / "_static" / "wide.css").write_text(STYLE, encoding="utf-8")


def make_index(contents_page: str) -> str:
    """Returns the first page: the README, and one table of contents per section of docs/README.md."""
    sections = [(title, [f"docs/{row}" for row in ROW.findall(body)]) for title, body in SECTION.findall(contents_page)]
    tables = [contents(pages, caption=title) for title, pages in sections if pages]
    return "\n".join(
        [
            "```{include} README.md\n```\n",
            contents(["docs/README"], caption="Start"),
            *tables,
            contents(list(PROJECT), caption="Project"),
        ]
    )


def contents(pages: list[str], caption: str = "") -> str:
    """Returns a hidden table of contents in MyST's notation."""
    lines = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *lines, "", *pages, "```", ""])


def _append(page: Path, text: str) -> None:
    page.write_text(page.read_text(encoding="utf-8") + text, encoding="utf-8")


def main() -> int:
    """Builds the site; returns the exit code of Sphinx, which is not 0 after any warning."""
    from sphinx.cmd.build import build_main

    parser = argparse.ArgumentParser(prog="scripts/docs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "docs", help="folder of the site; default: build/docs"
    )
    output = parser.parse_args().output.resolve()
    source = output.parent / f"{output.name}_source"
    stage(source)
    code = build_main(["-b", "html", "-W", "--keep-going", "-q", "-j", "2", "-E", str(source), str(output)])
    if code == 0:
        print(f"{output / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
