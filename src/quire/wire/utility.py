"""Control verbs: what a client may call on an engine core besides adding and aborting requests.

The table is the only door. A name that is not in it cannot be called. Adding a verb is adding a row
(`docs/recipes/add_a_control_verb.md`): `engine/lifecycle.py` finds the method by it, clients convert the result by it,
and a restarted core is brought into the state of the one before it by it (`frontend/client/control_calls.py`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from quire.lora_request import LoRARequest
from quire.wire.elastic import ReconfigureDistributedRequest
from quire.wire.engine_core import PauseMode
from quire.wire.lora import AdapterInfo, RegisteredAdapter
from quire.wire.stats import EngineSnapshot
from quire.wire.trace import TraceWindow

Joining = Literal["equal", "first", "all", "sum", "concatenation", "snapshot"]
"""Rule by which the answers of several engines to one call become one: they must be equal; that of the first engine
counts; True if all are; counts are added; lists are joined; snapshots become one."""


class UtilitySpec(NamedTuple):
    """One verb. Arguments are positional; those a caller leaves out take the method's defaults."""

    method: str
    """A path from the EngineCore."""
    arguments: tuple[Any, ...] = ()
    """Types, in order."""
    result: Any = None
    """Type of the result."""
    is_repeatable: bool = False
    """A second call leads to the same state as one: it is made again if the core dies before it answers."""
    is_remembered: bool = False
    """A call changes the state that a restarted core is brought into."""
    joining: Joining = "equal"
    """Rule by which the answers of several engines become one."""


def _get(method: str, result: Any, arguments: tuple[Any, ...] = (), joining: Joining = "equal") -> UtilitySpec:
    """A verb that changes nothing."""
    return UtilitySpec(method, arguments, result, is_repeatable=True, joining=joining)


def _set(method: str, arguments: tuple[Any, ...] = (), result: Any = None) -> UtilitySpec:
    """A verb whose effect outlives the core."""
    return UtilitySpec(method, arguments, result, is_repeatable=True, is_remembered=True)


UTILITIES: dict[str, UtilitySpec] = {
    "pause_scheduler": _set("lifecycle.pause_scheduler", (PauseMode, bool)),
    "resume_scheduler": _set("lifecycle.resume_scheduler"),
    "is_scheduler_paused": _get("lifecycle.is_scheduler_paused", bool),
    "sleep": _set("lifecycle.sleep", (int, PauseMode)),
    "wake_up": _set("lifecycle.wake_up", (list[str] | None,), bool),
    "is_sleeping": _get("lifecycle.is_sleeping", bool),
    "release_kv_cache_memory": _set("lifecycle.release_kv_cache_memory", (PauseMode,)),
    "reset_prefix_cache": UtilitySpec(
        "lifecycle.reset_prefix_cache", (bool, bool), bool, is_repeatable=True, joining="all"
    ),
    "update_weights": _set("lifecycle.update_weights", (str, str | None), str),
    "get_weight_version": _get("lifecycle.get_weight_version", str),
    "add_lora": _set("adapters.add_lora", (LoRARequest,), AdapterInfo),
    "remove_lora": _set("adapters.remove_lora", (int,), bool),
    "pin_lora": _set("adapters.pin_lora", (int,), bool),
    "list_loras": _get("adapters.list_loras", set[int]),
    "register_loras": UtilitySpec("adapters.register_loras", (list[RegisteredAdapter],), is_repeatable=True),
    "get_supported_tasks": _get("executor.get_supported_tasks", tuple[str, ...]),
    "collective_rpc": UtilitySpec(
        "executor.collective_rpc",
        (str, float | None, tuple[Any, ...], dict[str, Any] | None),
        list[Any],
        joining="concatenation",
    ),
    "profile": UtilitySpec("executor.profile", (bool, str | None, int | None, int | None)),
    "execute_dummy_batch": UtilitySpec("executor.execute_dummy_batch"),
    "reinitialize_distributed": UtilitySpec(
        "reinitialize_distributed", (ReconfigureDistributedRequest,), str, joining="first"
    ),
    "commit_prepared_elastic_ep": UtilitySpec("commit_prepared_elastic_ep"),
    "discard_prepared_elastic_ep": UtilitySpec("discard_prepared_elastic_ep"),
    "get_dropped_messages": _get("get_dropped_messages", dict[str, int], joining="sum"),
    "admit_clients": UtilitySpec("admit_clients", is_repeatable=True),
    "get_trace": _get("get_trace", TraceWindow, (float,), joining="first"),
    "get_snapshot": _get("scheduler.make_snapshot", EngineSnapshot, joining="snapshot"),
}


def convert_result(name: str, result: Any) -> Any:
    """Returns the result of a verb, as it came off the wire, as the type its row names."""
    spec = UTILITIES.get(name)
    return result if spec is None else msgspec.convert(result, spec.result)
