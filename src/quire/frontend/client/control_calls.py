"""Control calls to a core that may die before it answers, and the state they have led to.

A restarted core is brought into the same state by making the calls again that changed it:

=========================================  =========================================  =============================
verb                                       answer lost in a restart                   effect after a restart
=========================================  =========================================  =============================
pause_scheduler, resume_scheduler, sleep,  called again                               paused, asleep as before
release_kv_cache_memory, wake_up
update_weights                             called again                               loaded again, same version
add_lora, remove_lora, pin_lora            called again                               registered again, by one
                                                                                      call of register_loras
reset_*_cache                              called again                               a new core has empty caches
is_*, get_*, list_*                        called again                               nothing to restore
collective_rpc, profile, every other       EngineDeadError: it may or may not have    lost; the caller of a worker
                                           been carried out                           method must call it again
=========================================  =========================================  =============================

A call that was sent to two cores that died is not sent a third time: it may be what kills the core.
"""

from __future__ import annotations

import copy
import itertools
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from quire.errors import EngineDeadError
from quire.frontend.supervision.quarantine import CoreDeath
from quire.lora_request import LoRARequest
from quire.wire.engine_core import UtilityOutput
from quire.wire.lora import AdapterInfo, RegisteredAdapter
from quire.wire.utility import UTILITIES, convert_result

UtilityCall = tuple[str, tuple[Any, ...]]
"""A control verb and its arguments."""

MAX_ATTEMPTS = 2
"""Maximum number of cores that a call is sent to."""
REPEATABLE_VERBS = frozenset(name for name, spec in UTILITIES.items() if spec.is_repeatable)
REMEMBERED_VERBS = frozenset(name for name, spec in UTILITIES.items() if spec.is_remembered)


class ControlState:
    """Built from calls that succeeded; `calls` bring a new core into the same state, in that order."""

    def __init__(self) -> None:
        self._weights: UtilityCall | None = None
        self._adapters: dict[int, RegisteredAdapter] = {}
        self._pause: UtilityCall | None = None
        self._sleep: list[UtilityCall] = []

    def calls(self) -> list[UtilityCall]:
        """Returns the calls: weights first, then adapters, then pause and sleep."""
        calls = [] if self._weights is None else [self._weights]
        if self._adapters:
            calls.append(("register_loras", (list(self._adapters.values()),)))
        calls += [] if self._pause is None else [self._pause]
        return calls + self._sleep

    def copy(self) -> ControlState:
        """Returns an independent state that the same calls have led to."""
        return copy.deepcopy(self)

    def note_success(self, method: str, args: tuple[Any, ...], result: Any) -> None:
        """Records a call that was carried out."""
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
        elif method == "add_lora":
            self._note_adapter(msgspec.convert(args[0], LoRARequest), convert_result(method, result))
        elif method == "remove_lora":
            self._adapters.pop(args[0], None)
        elif method == "pin_lora" and args[0] in self._adapters:
            self._adapters[args[0]].is_pinned = True

    def _note_adapter(self, lora: LoRARequest, info: AdapterInfo) -> None:
        known = self._adapters.get(lora.lora_int_id)
        is_pinned = known is not None and known.is_pinned
        self._adapters[lora.lora_int_id] = RegisteredAdapter(lora, info.revision, info.digest, is_pinned)


def _mode_on_empty_core(args: tuple[Any, ...], position: int) -> str:
    """Returns the pause mode that leaves a core without requests as the mode among `args` left one that had some."""
    return "keep" if args[position : position + 1] == ("keep",) else "abort"


MAX_PROBES = 8
"""Maximum number of probes in flight: a flood of garbage must not become one of probes, and an answer may be garbage,
too."""


class Answer(NamedTuple):
    """Result of a control call, or why there will be none."""

    call_id: int
    output: UtilityOutput | EngineDeadError


class Purpose(Enum):
    """Purpose of a call."""

    CALLER = "somebody waits for it"
    RESTORE = "it brings a new core into the state of the last one"
    PROBE = "its answer carries the number of the core's last message"
    ADMISSION = "it lets the other clients of a shared core begin"


class _PendingCall:
    """A call without an answer."""

    __slots__ = ("args", "method", "num_attempts", "purpose")

    def __init__(self, method: str, args: tuple[Any, ...], purpose: Purpose) -> None:
        self.method, self.args, self.purpose = method, args, purpose
        self.num_attempts = 0


class ControlCalls:
    """The calls of one client, by id, and the state they have led to."""

    def __init__(self, client_index: int) -> None:
        self._client_index = client_index
        self._state = ControlState()
        self._pending: dict[int, _PendingCall] = {}
        self._ids = itertools.count(1)

    @property
    def is_restored(self) -> bool:
        """True once the core is in the state of the one before it."""
        return not self._count(Purpose.RESTORE)

    def inherit(self, other: ControlCalls) -> None:
        """Takes over the state that the calls of another have led to: a new core is brought into it."""
        self._state = other._state.copy()

    def _count(self, purpose: Purpose) -> int:
        return sum(call.purpose is purpose for call in self._pending.values())

    def begin(self, method: str, args: tuple[Any, ...], purpose: Purpose = Purpose.CALLER) -> int:
        """Registers a call to be made. Returns its id."""
        call_id = next(self._ids)
        self._pending[call_id] = _PendingCall(method, args, purpose)
        return call_id

    def begin_probe(self) -> int | None:
        """Registers a call without effect, whose answer shows the number of the core's next message. Returns its id;
        None if enough are on their way."""
        is_enough = self._count(Purpose.PROBE) >= MAX_PROBES
        return None if is_enough else self.begin("get_supported_tasks", (), Purpose.PROBE)

    def begin_restoring(self) -> list[int]:
        """Registers the calls that bring a new core into the state of the last one. Returns their ids."""
        return [self.begin(method, args, Purpose.RESTORE) for method, args in self._state.calls()]

    def begin_admission(self) -> int:
        """Returns the id of a call that makes a restored core admit its other clients."""
        return self.begin("admit_clients", (), Purpose.ADMISSION)

    def ids(self) -> list[int]:
        """Returns the ids of the calls without an answer, oldest first."""
        return list(self._pending)

    def make_payload(self, call_id: int) -> tuple[int, int, str, tuple[Any, ...]]:
        """Returns what is sent for a call, for the first time or again."""
        call = self._pending[call_id]
        call.num_attempts += 1
        return self._client_index, call_id, call.method, call.args

    def take_answer(self, output: UtilityOutput) -> Answer | None:
        """Takes in an answer of the core. Returns None if no caller waits for it.

        Raises KeyError for a call that is not pending, EngineDeadError if the core cannot be brought into its state.
        """
        call = self._pending.pop(output.call_id)
        if call.purpose is Purpose.RESTORE and output.failure_message is not None:
            raise EngineDeadError(
                f"the engine core was restarted, but not into its former state: {output.failure_message}"
            )
        if call.purpose is not Purpose.CALLER:
            return None
        if output.failure_message is None:
            self._state.note_success(call.method, call.args, output.result)
        return Answer(output.call_id, output)

    def end_unrepeatable(self, death: CoreDeath) -> list[Answer]:
        """Returns the answers of the calls that are not made again after the death of a core."""
        answers = []
        for call_id, call in list(self._pending.items()):
            if call.purpose is not Purpose.CALLER:
                del self._pending[call_id]
            elif call.num_attempts and (call.method not in REPEATABLE_VERBS or call.num_attempts >= MAX_ATTEMPTS):
                del self._pending[call_id]
                answers.append(Answer(call_id, _unanswered(call, death)))
        return answers

    def end_all(self, reason: str) -> list[Answer]:
        """Ends all calls: there will be no core any more."""
        pending, self._pending = self._pending, {}
        waited_for = [call_id for call_id, call in pending.items() if call.purpose is Purpose.CALLER]
        return [Answer(call_id, EngineDeadError(reason)) for call_id in waited_for]


def _unanswered(call: _PendingCall, death: CoreDeath) -> EngineDeadError:
    if call.method in REPEATABLE_VERBS:
        return EngineDeadError(f"{call.method} was called {call.num_attempts} times; each time the engine core died")
    return EngineDeadError(
        f"the engine core {death.description} before it answered {call.method}, which may or may not have been carried "
        "out; the engine is being restarted: call it again if it can be done twice"
    )
