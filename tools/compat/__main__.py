"""Writes docs/compat.md: `python -m tools.compat`, with src on the path."""

from __future__ import annotations

from pathlib import Path

from tools.compat.page import make_page


def main() -> None:
    """Overwrite the page."""
    page = Path(__file__).resolve().parents[2] / "docs" / "compat.md"
    page.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
