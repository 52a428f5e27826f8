"""The table of clients and its programs; `python -m tests.clients` runs them."""

from __future__ import annotations

from .table import CLIENTS, PROGRAMS


def test_every_row_has_its_program_and_every_program_its_row() -> None:
    assert sorted(client.program for client in CLIENTS) == sorted(PROGRAMS.glob("*_client.py"))


def test_every_requirement_has_a_lower_bound() -> None:
    assert [r for client in CLIENTS for r in client.requirements if ">=" not in r and "==" not in r] == []
