"""What every test has: a cache directory of its own run, so that nothing is found of, or left in, the user's.

Properties are tried on the same examples in every run, and a slow machine fails none of them:
`--hypothesis-profile=explore` tries others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

_UNTIMED = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _UNTIMED)
settings.register_profile("same", _UNTIMED, derandomize=True, database=None)
settings.load_profile("same")


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


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard() -> Iterator[None]:
    """By the tests and by what they start: a shell that runs them in the background has made it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def _small_heap() -> Iterator[None]:
    """An engine core walks the whole heap once, when it starts, and freezes it.

    In a process of its own that is little; that of a test session is large, and hundreds of cores start in it: walking
    it was most of what many tests did. Tests of the freezing put the real `gc` back.
    """
    heap = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.core.gc", heap)
        yield
