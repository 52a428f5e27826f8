"""The table of planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
MUTANTS: dict[str, Mutant] = {}
FRONTEND_MUTANTS: dict[str, Mutant] = {}
"""Mutants that no answer and no check inside the engine shows: the metrics must."""
TIER_MUTANTS: dict[str, Mutant] = {}
"""Mutants that only a store outside the engine shows."""


def tier_mutant(function: Mutant) -> Mutant:
    """Enter it into the table of those that need a store."""
    TIER_MUTANTS[function.__name__] = function
    return function


def mutant(function: Mutant) -> Mutant:
    """Enter it into the table."""
    MUTANTS[function.__name__] = function
    return function


def frontend_mutant(function: Mutant) -> Mutant:
    """Enter it into the table of the frontend's."""
    FRONTEND_MUTANTS[function.__name__] = function
    return function


def wrap(patch: Patch, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method by `replacement(original, self, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
