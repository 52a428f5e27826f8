"""Prints the budgets after the tests of this folder."""

from __future__ import annotations

import pytest

from .budgets import table
from .sources import CHECKOUT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("budgets (tests/architecture/budgets.toml)")
    terminalreporter.write_line(table(CHECKOUT))
