"""Tiny checkpoints and what transformers makes of them, once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from quire.testing.tiny_models import make_tiny_checkpoint

from .oracle import Generation, generate_without_ties

Checkpoint = Callable[[str], Path]
Oracle = Callable[[str], list[Generation]]


@pytest.fixture(scope="module", autouse=True)
def _process_of_the_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cores live in the process of the tests, which is quicker, but where a module says CORE_IN_ITS_OWN_PROCESS."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not getattr(request.module, "CORE_IN_ITS_OWN_PROCESS", False):
            monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint(family)`: its directory."""
    return cache(lambda family: make_tiny_checkpoint(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def oracle(checkpoint: Checkpoint) -> Oracle:
    """`oracle(family)`: transformers' greedy continuation of 32 prompts."""
    return cache(lambda family: generate_without_ties(checkpoint(family)))
