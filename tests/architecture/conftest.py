"""Prints the budgets after the tests of this folder, where the command names it: counting them takes seconds."""

from __future__ import annotations

import pytest

from .budgets import table
from .sources import CHECKOUT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not any("architecture" in argument for argument in config.args):
        return
    terminalreporter.section("budgets (tests/architecture/budgets.toml)")
    terminalreporter.write_line(table(CHECKOUT))
