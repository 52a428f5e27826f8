"""Writes docs/http_fields.md: `python -m tools.http_fields`, with src on the path."""

from __future__ import annotations

from pathlib import Path

from quire.config.server import ServerConfig
from quire.frontend.http.openapi import make_fields_page
from quire.frontend.openai.app import endpoints_of


def main() -> None:
    """Overwrite the page."""
    config = ServerConfig(enable_admin=True, admin_port=8000, port=8000, enable_tokenizer_info_endpoint=True)
    page = Path(__file__).resolve().parents[1] / "docs" / "http_fields.md"
    page.write_text(make_fields_page(endpoints_of(config, is_admin=False)), encoding="utf-8")


if __name__ == "__main__":
    main()
