"""Control calls of a client with several engines: each engine is called, and their answers become one.

`SetCalls` knows which engines have been called and have not answered. A verb of `wire/utility.py: UTILITIES` says how
its answers are joined.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from quire.errors import EngineDeadError
from quire.frontend.client.control_calls import Answer
from quire.wire.engine_core import UtilityOutput
from quire.wire.stats import join_snapshots
from quire.wire.utility import UTILITIES, convert_result


class SetCall:
    """One call: the engines that have to answer, and the answers of the others."""

    def __init__(self, call_id: int, method: str, args: tuple[Any, ...]) -> None:
        self.call_id, self.method, self.args = call_id, method, args
        self.is_remembered = (spec := UTILITIES.get(method)) is not None and spec.is_remembered
        self._joining = "first" if spec is None else spec.joining
        self.waits_for: dict[int, int] = {}
        """Id of the call at each engine that has not answered."""
        self._outputs: dict[int, UtilityOutput | EngineDeadError] = {}

    def note_answer(self, engine: int, output: UtilityOutput | EngineDeadError) -> None:
        """Takes the answer of an engine."""
        self.waits_for.pop(engine, None)
        self._outputs[engine] = output

    @property
    def is_done(self) -> bool:
        """True once there is a joint answer."""
        return not self.waits_for

    def make_answer(self) -> UtilityOutput | EngineDeadError:
        """Returns the joint answer. The failure of one engine is the failure of the call."""
        outputs = dict(sorted(self._outputs.items()))
        failed = {engine: output for engine, output in outputs.items() if _why(output) is not None}
        if not outputs:
            return EngineDeadError(f"the engines that were to answer {self.method} are gone")
        if failed:
            return self._explain(failed, [engine for engine in outputs if engine not in failed])
        given = [output.result for output in outputs.values() if isinstance(output, UtilityOutput)]
        if len(given) == 1 or self._joining == "first":
            return UtilityOutput(self.call_id, result=given[0])
        try:
            results = [convert_result(self.method, result) for result in given]
        except msgspec.ValidationError as e:
            return UtilityOutput(self.call_id, f"an answer to {self.method} has another type: {e}")
        match self._joining:
            case "all":
                return UtilityOutput(self.call_id, result=all(results))
            case "sum":
                return UtilityOutput(self.call_id, result=dict(sum(map(Counter, results), Counter())))
            case "snapshot":
                return UtilityOutput(
                    self.call_id, result=msgspec.to_builtins(join_snapshots(results), builtin_types=(bytes,))
                )
            case "concatenation":
                return UtilityOutput(self.call_id, result=[item for result in results for item in result])
            case "equal" if any(result != results[0] for result in results):
                pairs = zip(outputs, results, strict=True)
                named = "; ".join(f"engine {engine}: {result!r}"[:200] for engine, result in pairs)
                why = f"the engines have answered {self.method} differently: {named}"
                return UtilityOutput(self.call_id, why, error_type="ServerError")
        return UtilityOutput(self.call_id, result=given[0])

    def _explain(
        self, failed: dict[int, UtilityOutput | EngineDeadError], succeeded: list[int]
    ) -> UtilityOutput | EngineDeadError:
        engine, first = next(iter(failed.items()))
        if not succeeded and all(_why(output) == _why(first) for output in failed.values()):
            return first
        why = f"engine {engine}: {_why(first)}"
        if succeeded and self.is_remembered:
            why += f" (carried out by engine {', '.join(map(str, succeeded))})"
        if isinstance(first, EngineDeadError):
            return EngineDeadError(why)
        return UtilityOutput(self.call_id, why, error_type=first.error_type)


def _why(output: UtilityOutput | EngineDeadError) -> str | None:
    return str(output) if isinstance(output, EngineDeadError) else output.failure_message


class SetCalls:
    """All calls without a joint answer."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, SetCall] = {}
        self._by_engine: dict[tuple[int, int], SetCall] = {}

    def begin(self, method: str, args: tuple[Any, ...]) -> SetCall:
        """Registers a call. Every engine that is called is then noted with `note_sent`."""
        call = SetCall(next(self._ids), method, args)
        self._calls[call.call_id] = call
        return call

    def note_sent(self, call: SetCall, engine: int, call_id: int) -> None:
        """Records that an engine was called, and the id of that call there."""
        call.waits_for[engine] = call_id
        self._by_engine[engine, call_id] = call

    def get_remembered(self) -> list[SetCall]:
        """Returns the calls under way that change the state of every engine."""
        return [call for call in self._calls.values() if call.is_remembered]

    def take_answers(self, engine: int, answers: Iterable[Answer]) -> Iterator[Answer]:
        """Takes answers of an engine. Yields the joint answers that are complete now."""
        for answer in answers:
            call = self._by_engine.pop((engine, answer.call_id), None)
            if call is not None and call.call_id in self._calls:
                call.note_answer(engine, answer.output)
                yield from self._end_if_done(call)

    def forget_engine(self, engine: int) -> Iterator[Answer]:
        """Gives up the answers of an engine. Yields the joint answers that are complete without them."""
        for key in [key for key in self._by_engine if key[0] == engine]:
            call = self._by_engine.pop(key)
            call.waits_for.pop(engine, None)
            yield from self._end_if_done(call)

    def end_if_done(self, call: SetCall) -> Iterator[Answer]:
        """Yields the answer of a call that no engine has to answer."""
        yield from self._end_if_done(call)

    def _end_if_done(self, call: SetCall) -> Iterator[Answer]:
        if call.is_done and self._calls.pop(call.call_id, None) is not None:
            output = call.make_answer()
            if isinstance(output, UtilityOutput):
                output.call_id = call.call_id
            yield Answer(call.call_id, output)
