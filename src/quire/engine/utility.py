"""Calls the control verbs of `wire/utility.py: UTILITIES` on an engine core.

The in-process client and the engine core's process both go through `run_utility`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any

import msgspec

from quire.errors import ValidationError, error_name
from quire.wire.engine_core import UtilityOutput
from quire.wire.utility import UTILITIES


def run_utility(core: Any, name: str, args: Sequence[Any]) -> Any:
    """Call a verb on `core` with arguments as they came off the wire, or as Python objects.

    Lists and maps become the Structs and tuples the verb wants. The result may be a Future: the verb then ends later.
    Raises ValidationError for a name or an argument that is not in the table, and what the verb raises.
    """
    spec = UTILITIES.get(name)
    if spec is None:
        near = difflib.get_close_matches(str(name), UTILITIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(UTILITIES)}"
        raise ValidationError(f"the engine has no control verb {name!r}; {hint}", param="method", value=name)
    if len(args) > len(spec.arguments):
        raise ValidationError(f"{name} takes {len(spec.arguments)} arguments, {len(args)} were given", param="args")
    converted = [_convert(name, index, arg, spec.arguments[index]) for index, arg in enumerate(args)]
    return attrgetter(spec.method)(core)(*converted)


def answer_utility(
    core: Any, call_id: int, name: str, args: Sequence[Any], send: Callable[[UtilityOutput], None]
) -> None:
    """The same for a caller in another process: `send` its answer, now or when the verb ends.

    Raises nothing that the verb raises: that becomes the answer's `failure_message` (checklist S3-EP-034, S3-EP-035).
    """
    _answer(lambda: run_utility(core, name, args), call_id, name, send)


def _answer(call: Callable[[], Any], call_id: int, name: str, send: Callable[[UtilityOutput], None]) -> None:
    try:
        result = call()
    except Exception as e:
        error_type = error_name(e) or ("ValidationError" if isinstance(e, ValueError | TypeError) else "")
        send(UtilityOutput(call_id, failure_message=f"Call to {name} method failed: {e}", error_type=error_type))
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda future: _answer(future.result, call_id, name, send))
    else:
        send(UtilityOutput(call_id, result=result))


def _convert(name: str, index: int, arg: Any, wanted: Any) -> Any:
    try:
        return msgspec.convert(arg, wanted)
    except msgspec.ValidationError as e:
        raise ValidationError(f"{name}: argument {index + 1} ({arg!r}): {e}", param="args", value=arg) from None
