"""Planted bugs in pausing, sleeping and replacing weights."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.lifecycle import Lifecycle
from quire.engine.sched.interface import PauseState
from tests.simulation.mutants.registry import Patch, mutant, wrap


def _keeping_prefixes(original: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(BlockPool, "reset_prefix_cache", lambda self: True)
        return original(*args)


@mutant
def prefixes_outlive_a_sleep(patch: Patch) -> None:
    """The prefix cache offers blocks whose memory was given back."""
    wrap(patch, Lifecycle, "_fall_asleep", _keeping_prefixes)


@mutant
def prefixes_outlive_the_weights(patch: Patch) -> None:
    """The prefix cache offers what other weights computed."""
    wrap(patch, Lifecycle, "update_weights", _keeping_prefixes)


@mutant
def nobody_is_computed_again(patch: Patch) -> None:
    """Requests that were kept go on with blocks that are gone."""
    patch.setattr(Lifecycle, "_reset_caches", lambda self: None)


@mutant
def sleep_with_steps_in_flight(patch: Patch) -> None:
    """The memory is given back while the device still works with it."""

    def sleep(original: Any, self: Lifecycle, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self, "_finish_steps", lambda: None)
            return original(self, *args)

    wrap(patch, Lifecycle, "sleep", sleep)


@mutant
def half_awake(patch: Patch) -> None:
    """Scheduling goes on when any part is back."""

    def wake_up(original: Any, self: Lifecycle, *args: Any) -> bool:
        original(self, *args)
        self._released.clear()
        self.resume_scheduler()
        return True

    wrap(patch, Lifecycle, "wake_up", wake_up)


@mutant
def abort_while_pausing_freezes(patch: Patch) -> None:
    """A pause by abort forgets to end those who wait."""

    def pause(original: Any, self: Lifecycle, mode: str, then: Any) -> Any:
        if mode != "abort":
            return original(self, mode, then)
        self._finish_steps()
        self._scheduler.set_pause_state(PauseState.PAUSED_NEW)
        return then()

    wrap(patch, Lifecycle, "_pause", pause)
