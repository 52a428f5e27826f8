"""Control calls on their way to a core that may die before it answers.

What becomes of each verb is in the table of `control_state.py`.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any, NamedTuple

from quire.errors import EngineDeadError
from quire.frontend.client.control_state import MAX_ATTEMPTS, REPEATABLE_VERBS, ControlState
from quire.frontend.supervision.core_death import CoreDeath
from quire.wire.engine_core import UtilityOutput

MAX_PROBES = 8
"""On their way at once: a flood of garbage must not become one of probes, and an answer may be garbage, too."""


class Answer(NamedTuple):
    """Of a control call: what the core said, or why it never will."""

    call_id: int
    output: UtilityOutput | EngineDeadError


class Purpose(Enum):
    """Why a call is made."""

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
        """Whether the core is in the state of the one before it."""
        return not self._count(Purpose.RESTORE)

    def _count(self, purpose: Purpose) -> int:
        return sum(call.purpose is purpose for call in self._pending.values())

    def begin(self, method: str, args: tuple[Any, ...], purpose: Purpose = Purpose.CALLER) -> int:
        """A call to be made; its id."""
        call_id = next(self._ids)
        self._pending[call_id] = _PendingCall(method, args, purpose)
        return call_id

    def begin_probe(self) -> int | None:
        """A call without effect, to see the number of the core's next message; None if enough are on their way."""
        is_enough = self._count(Purpose.PROBE) >= MAX_PROBES
        return None if is_enough else self.begin("get_supported_tasks", (), Purpose.PROBE)

    def begin_restoring(self) -> list[int]:
        """The calls that bring a new core into the state of the last one."""
        return [self.begin(method, args, Purpose.RESTORE) for method, args in self._state.calls()]

    def begin_admission(self) -> int:
        """The call that tells a core in its state to let its other clients begin."""
        return self.begin("admit_clients", (), Purpose.ADMISSION)

    def ids(self) -> list[int]:
        """Of the calls without an answer, oldest first."""
        return list(self._pending)

    def make_payload(self, call_id: int) -> tuple[int, int, str, tuple[Any, ...]]:
        """What is sent, once more perhaps (S2-CL-027)."""
        call = self._pending[call_id]
        call.num_attempts += 1
        return self._client_index, call_id, call.method, call.args

    def take_answer(self, output: UtilityOutput) -> Answer | None:
        """The core has answered; None if nobody waits for it.

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
        """The core is dead: the answers of the calls that are not made again."""
        answers = []
        for call_id, call in list(self._pending.items()):
            if call.purpose is not Purpose.CALLER:
                del self._pending[call_id]
            elif call.num_attempts and (call.method not in REPEATABLE_VERBS or call.num_attempts >= MAX_ATTEMPTS):
                del self._pending[call_id]
                answers.append(Answer(call_id, _unanswered(call, death)))
        return answers

    def end_all(self, reason: str) -> list[Answer]:
        """There will be no core any more."""
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
