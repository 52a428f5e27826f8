"""What every test has: a cache directory of its own run, so that nothing is found of, or left in, the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """QUIRE_CACHE_ROOT, for the processes that tests start, too."""
    root = tmp_path_factory.mktemp("cache")
    before = os.environ.get("QUIRE_CACHE_ROOT")
    os.environ["QUIRE_CACHE_ROOT"] = str(root)
    yield root
    if before is None:
        del os.environ["QUIRE_CACHE_ROOT"]
    else:
        os.environ["QUIRE_CACHE_ROOT"] = before
