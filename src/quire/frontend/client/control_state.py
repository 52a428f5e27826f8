"""What control calls have changed about a core, so that the next one can be brought into the same state.

=========================================  =========================================  =============================
verb                                       answer lost in a restart                   effect after a restart
=========================================  =========================================  =============================
pause_scheduler, resume_scheduler, sleep,  called again                               paused, asleep as before
release_kv_cache_memory, wake_up
update_weights                             called again                               loaded again, same version
add_lora, remove_lora, pin_lora            called again                               loaded again
reset_*_cache                              called again                               a new core has empty caches
is_*, get_*, list_*                        called again                               nothing to restore
collective_rpc, profile, every other       EngineDeadError: nobody knows whether      lost; a worker method must be
                                           it was carried out                         called again by its caller
=========================================  =========================================  =============================

A call that was on its way in two deaths is not made a third time: it may be what kills the core.
"""

from __future__ import annotations

from typing import Any

UtilityCall = tuple[str, tuple[Any, ...]]
"""A control verb and its arguments."""

MAX_ATTEMPTS = 2
"""How often a call may be sent to a core."""
REPEATABLE_VERBS = frozenset(
    {
        "pause_scheduler",
        "resume_scheduler",
        "is_scheduler_paused",
        "sleep",
        "release_kv_cache_memory",
        "wake_up",
        "is_sleeping",
        "reset_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "update_weights",
        "get_weight_version",
        "add_lora",
        "remove_lora",
        "pin_lora",
        "list_loras",
        "get_supported_tasks",
        "get_dropped_messages",
        "admit_clients",
        "get_trace",
        "get_snapshot",
    }
)
"""Calling one of these once more leads to the same state as calling it once."""

REMEMBERED_VERBS = frozenset(
    {
        "pause_scheduler",
        "resume_scheduler",
        "sleep",
        "release_kv_cache_memory",
        "wake_up",
        "update_weights",
    }
)
"""Those that change the state a restarted core is brought into, adapters left out: no route of a server loads one."""


class ControlState:
    """Built from calls that succeeded; `calls` bring a new core into the same state, in that order."""

    def __init__(self) -> None:
        self._weights: UtilityCall | None = None
        self._loras: dict[int, list[UtilityCall]] = {}
        self._pause: UtilityCall | None = None
        self._sleep: list[UtilityCall] = []

    def calls(self) -> list[UtilityCall]:
        """Weights first, then adapters, then what puts the core to rest."""
        calls = [] if self._weights is None else [self._weights]
        for lora_calls in self._loras.values():
            calls += lora_calls
        calls += [] if self._pause is None else [self._pause]
        return calls + self._sleep

    def note_success(self, method: str, args: tuple[Any, ...], result: Any) -> None:
        """A call was carried out."""
        if method == "update_weights":
            self._weights = method, (args[0], result)  # the version it was given, were it not named
        elif method == "pause_scheduler":
            self._pause = method, (_mode_on_empty_core(args, 0), False)
        elif method == "sleep":
            self._sleep.append((method, (args[0] if args else 1, _mode_on_empty_core(args, 1))))
        elif method == "release_kv_cache_memory":
            self._sleep.append((method, (_mode_on_empty_core(args, 0),)))
        elif method == "resume_scheduler" or (method == "wake_up" and result):
            self._pause, self._sleep = None, []
        elif method == "wake_up":
            self._sleep.append((method, args))
        elif method in ("add_lora", "pin_lora", "remove_lora"):
            self._note_lora(method, args)

    def _note_lora(self, method: str, args: tuple[Any, ...]) -> None:
        if method == "remove_lora":
            self._loras.pop(args[0], None)
        elif method == "add_lora":
            self._loras[args[0].lora_int_id] = [(method, args)]
        else:
            self._loras.setdefault(args[0], []).append((method, args))


def _mode_on_empty_core(args: tuple[Any, ...], position: int) -> str:
    """The pause mode that leaves a core without requests as the mode among `args` left one that had some."""
    return "keep" if args[position : position + 1] == ("keep",) else "abort"
