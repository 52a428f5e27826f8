"""The door for control verbs: only what is in the table, with arguments of the types it says."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from quire.engine import lifecycle as utility
from quire.engine.core import EngineCore
from quire.engine.executor.abstract import Executor
from quire.engine.lifecycle import Lifecycle, answer_utility, run_utility
from quire.engine.lora.manager import AdapterManager
from quire.engine.sched.interface import SchedulerInterface
from quire.errors import ValidationError
from quire.lora_request import LoRARequest
from quire.wire.engine_core import UtilityOutput
from quire.wire.utility import UtilitySpec

from . import driver

TABLE = dict(utility.UTILITIES)
OWNERS = {
    "": EngineCore,
    "lifecycle": Lifecycle,
    "executor": Executor,
    "scheduler": SchedulerInterface,
    "adapters": AdapterManager,
}


class Core:
    """A core with a verb per way of answering."""

    def __init__(self) -> None:
        self.inner = self
        self.later: Future[Any] = Future()

    def echo(self, value: Any = "nothing") -> Any:
        return value

    def fail(self) -> None:
        raise RuntimeError("no luck")

    def wait(self) -> Future[Any]:
        return self.later

    def secret(self) -> str:
        return "must not be called"


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "echo": UtilitySpec("inner.echo", (LoRARequest,)),
        "any": UtilitySpec("echo", (Any,)),
        "fail": UtilitySpec("fail"),
        "wait": UtilitySpec("wait"),
    }
    monkeypatch.setattr(utility, "UTILITIES", rows)


def test_calls_for_the_workers_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility, "UTILITIES", TABLE)
    engine = driver.Core()
    assert run_utility(engine.core, "collective_rpc", ["ping", 1.5, [1], {"b": 2}]) == ["pong"]
    assert engine.executor.rpcs == [("ping", 1.5, (1,), {"b": 2})]
    assert run_utility(engine.core, "get_supported_tasks", []) == ("generate",)
    run_utility(engine.core, "profile", [True, "p", 3, 4])
    run_utility(engine.core, "execute_dummy_batch", [])
    assert engine.executor.calls[-2:] == ["profile(True, p, 3, 4)", "execute_dummy_batch"]


def answers(name: str, *args: Any, core: Core | None = None) -> list[UtilityOutput]:
    sent: list[UtilityOutput] = []
    answer_utility(core or Core(), 7, name, args, sent.append)
    return sent


@pytest.mark.parametrize("name", TABLE)
def test_the_table_says_what_the_methods_say(name: str) -> None:
    owner, _, method = TABLE[name].method.rpartition(".")
    function = getattr(OWNERS[owner], method)
    hints = get_type_hints(function)
    hints |= {"method": str} if name == "collective_rpc" else {}  # functions are for callers in this process
    parameters = list(inspect.signature(function).parameters)[1:]
    assert tuple(hints[parameter] for parameter in parameters) == TABLE[name].arguments
    result = hints["return"]
    if get_origin(result) is UnionType:  # a Future: the verb ends later
        (result,) = (kind for kind in get_args(result) if get_origin(kind) is not Future)
    if get_origin(result) is Future:
        (result,) = get_args(result)
    assert TABLE[name].result == (None if result is type(None) else result)


@pytest.mark.parametrize("given", [["a", 1, "/a"], LoRARequest("a", 1, "/a")])
def test_arguments_become_what_the_verb_wants(given: Any) -> None:
    assert run_utility(Core(), "echo", [given]) == LoRARequest("a", 1, "/a")


def test_arguments_left_out_take_their_defaults() -> None:
    assert run_utility(Core(), "echo", []) == "nothing"


@pytest.mark.parametrize("name", ["secret", "__class__", "inner.echo", "later.cancel", ""])
def test_only_the_table_can_be_called(name: str) -> None:
    with pytest.raises(ValidationError, match="no control verb"):
        run_utility(Core(), name, [])


def test_a_verb_that_is_misspelt_is_guessed() -> None:
    with pytest.raises(ValidationError, match="did you mean echo"):
        run_utility(Core(), "ecco", [])


@pytest.mark.parametrize(
    ("args", "words"), [([[1]], r"echo: argument 1 \(\[1\]\)"), ([["a", 1], 2], "takes 1 arguments, 2 were given")]
)
def test_wrong_arguments_are_named(args: list[Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        run_utility(Core(), "echo", args)


def test_answers_of_a_verb() -> None:
    assert answers("any", 5) == [UtilityOutput(7, None, 5)]
    assert answers("fail") == [UtilityOutput(7, "Call to fail method failed: no luck")]
    (unknown,) = answers("nonsense")
    assert unknown.failure_message is not None
    assert unknown.failure_message.startswith("Call to nonsense method failed: the engine has no control verb")


@pytest.mark.parametrize("nested", [False, True])
def test_a_verb_that_ends_later_is_answered_then(nested: bool) -> None:
    core, inner = Core(), Future[Any]()
    sent = answers("wait", core=core)
    assert sent == []
    core.later.set_result(inner if nested else "done")
    if nested:
        assert sent == []
        inner.set_result("done")
    assert sent == [UtilityOutput(7, None, "done")]


def test_a_verb_that_fails_later_says_so() -> None:
    core = Core()
    sent = answers("wait", core=core)
    core.later.set_exception(RuntimeError("no luck"))
    assert sent == [UtilityOutput(7, "Call to wait method failed: no luck")]
