"""A server's handling of its API processes: it restarts them, passes calls on, ends them."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.errors import ConfigError, NotFoundError, OverloadedError, ServerError
from quire.frontend.fleet import parent
from quire.frontend.fleet.parent import ApiProcesses
from quire.frontend.http.errors import UnavailableError
from quire.wire.peers import EVERYBODY, LENGTH, ApiLaunch

from .fakes import FakeProcess

NEVER_S = 3600.0
"""A time that no test waits for."""


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "made", [], raising=False)
    monkeypatch.setattr(parent, "ApiProcess", FakeProcess)
    monkeypatch.setattr(parent, "SAME_SIGNAL_GRACE_S", 0.0)


class Fleet:
    """`ApiProcesses` that run, and their fake processes."""

    def __init__(self, num_processes: int) -> None:
        self.deaths: list[int] = []
        self.processes = ApiProcesses(num_processes, _make_launch, self.deaths.append)
        self.processes.start()
        self._num_seen = num_processes
        self.running = asyncio.create_task(self.processes.run())

    @property
    def made(self) -> list[FakeProcess]:
        """Every process so far."""
        return FakeProcess.made

    async def another(self) -> FakeProcess:
        """The next one that is started, or was already."""
        while len(self.made) == self._num_seen:
            assert not self.running.done(), self.running.exception()
            await asyncio.sleep(0)
        self._num_seen += 1
        return self.made[self._num_seen - 1]

    async def end(self) -> None:
        """In good order."""
        self.processes.stop()
        for process in self.made:
            process.end(0)
        await self.running


def _make_launch(index: int) -> ApiLaunch:
    return cast("ApiLaunch", SimpleNamespace(index=index))


@asynccontextmanager
async def serving(num_processes: int = 2) -> AsyncIterator[Fleet]:
    """A fleet that serves; it is ended afterwards unless it has ended."""
    fleet = Fleet(num_processes)
    for process in list(fleet.made):
        await process.serve()
    assert fleet.processes.are_ready.is_set()
    yield fleet
    if not fleet.running.done():
        await fleet.end()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine, within a minute."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    return run


async def result_of(wait: Awaitable[Any]) -> Any:
    """Returns the result or the error."""
    (result,) = await asyncio.gather(wait, return_exceptions=True)
    return result


# -- their lives --------------------------------------------------------------------------------------------------


@in_loop
async def test_the_server_is_ready_when_all_are() -> None:
    fleet = Fleet(2)
    first, second = fleet.made
    await first.serve()
    await second.join()
    assert not fleet.processes.are_ready.is_set()
    assert second.link is not None
    second.link.notify("ready")
    await fleet.processes.are_ready.wait()
    await fleet.end()
    assert fleet.deaths == [1, 2]


@in_loop
async def test_one_that_dies_is_started_again_and_what_it_had_taken_is_free() -> None:
    async with serving() as fleet:
        fleet.made[0].end(-signal.SIGKILL)
        again = await fleet.another()
        assert again.index == 1
        assert fleet.deaths == [1]
        await again.serve()
        assert len(fleet.made) == 3
        assert not fleet.made[1].calls


@in_loop
async def test_the_server_ends_when_one_dies_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "RESTART_LIMIT", 2)
    async with serving() as fleet:
        victim = fleet.made[0]
        for _ in range(2):
            victim.end(3)
            victim = await fleet.another()
            await victim.serve()
        victim.end(3)
        other = fleet.made[1]
        while ("stop", (False,)) not in other.calls:
            await asyncio.sleep(0)
        assert not fleet.running.done(), "the others end first"
        other.end(0)
        with pytest.raises(
            ServerError, match=r"API process 1 exited with code 3, and its budget of 2 restarts in 60 s"
        ):
            await fleet.running
        assert len(fleet.made) == 4


@in_loop
async def test_others_that_do_not_end_with_it_are_hurried_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "RESTART_LIMIT", 0)
    monkeypatch.setattr(parent, "END_MARGIN_S", 0.01)
    async with serving() as fleet:
        fleet.made[0].end(3)
        with pytest.raises(ServerError, match="used up"):
            await fleet.running
        assert [args for method, args in fleet.made[1].calls if method == "stop"] == [(False,), (True,)]
        fleet.processes.kill()
        assert fleet.made[1].signals == [signal.SIGKILL]


@in_loop
async def test_what_keeps_one_from_serving_ends_the_server_in_its_words() -> None:
    fleet = Fleet(2)
    first, second = fleet.made
    link = await first.join()
    link.notify("failed", "ConfigError", "--middleware is none")
    await link.call("join")
    first.end(1)
    with pytest.raises(ConfigError, match="--middleware is none"):
        await fleet.running
    assert second.signals == [signal.SIGTERM], "it has not joined: there is nobody to be told"
    assert len(fleet.made) == 2


@in_loop
async def test_the_same_fault_of_all_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers: list[Any] = []

    async def keep(processes: Any, index: int) -> None:
        keepers.append(asyncio.current_task())
        if index == 2:  # it has failed, too, before the other's error has ended the server
            await processes._stopping.wait()
        raise ConfigError(f"no such middleware {index}")

    monkeypatch.setattr(ApiProcesses, "_keep", keep)
    fleet = Fleet(2)
    with pytest.raises(ConfigError, match="no such middleware 1"):
        await fleet.running
    for process in fleet.made:
        process.connection.close()
        process.end(2)
    assert len(keepers) == 2
    assert not any(keeper._log_traceback for keeper in keepers), "the error of the other is logged with a traceback"


@in_loop
async def test_one_that_dies_over_its_start_without_a_word() -> None:
    fleet = Fleet(1)
    fleet.made[0].end(-signal.SIGSEGV)
    with pytest.raises(ServerError, match="API process 1 was killed by SIGSEGV before it served"):
        await fleet.running


@in_loop
async def test_what_keeps_it_from_serving_again_is_said_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "RESTART_LIMIT", 1)
    async with serving(1) as fleet:
        fleet.made[0].end(3)
        again = await fleet.another()
        link = await again.join()
        link.notify("failed", "ServerError", "no room for the counts")
        await link.call("join")
        again.end(1)
        with pytest.raises(ServerError, match=r"exited with code 1 \(no room for the counts\), and its budget"):
            await fleet.running


@pytest.mark.parametrize("data", [LENGTH.pack(1 << 31), LENGTH.pack(2) + b"\xc1\xc1"], ids=["too long", "no message"])
@in_loop
async def test_a_process_that_sends_nonsense_is_killed_and_started_again(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as fleet:
        victim = fleet.made[0]
        assert victim.link is not None
        assert victim.link._writer is not None
        victim.link._writer.write(data)
        again = await fleet.another()
        assert (again.index, victim.signals) == (1, [signal.SIGKILL])
        await again.serve()
    assert "sent an invalid message" in caplog.text


# -- the end ------------------------------------------------------------------------------------------------------


@in_loop
async def test_asked_twice_they_are_told_twice_and_never_by_a_signal() -> None:
    """A signal of ours would be the second of a process that has had its own."""
    async with serving() as fleet:
        for is_hurried in (False, True, True):
            fleet.processes.stop()
            for process in fleet.made:
                while not process.calls:
                    await asyncio.sleep(0)
                assert process.calls.pop() == ("stop", (is_hurried,))
                assert process.signals == []
        await fleet.end()
        assert len(fleet.made) == 2


@in_loop
async def test_one_that_joins_late_is_told_to_end() -> None:
    fleet = Fleet(2)
    fleet.made[0].link = cast("Any", SimpleNamespace(close=fleet.made[0].theirs.close))  # signals do not end it
    fleet.processes.stop()
    assert [process.signals for process in fleet.made] == [[signal.SIGTERM]] * 2
    await fleet.made[0].join()
    while not fleet.made[0].calls:
        await asyncio.sleep(0)
    assert fleet.made[0].calls == [("stop", (False,))]
    fleet.made[0].end(0)
    await fleet.running
    assert len(fleet.made) == 2


@pytest.mark.parametrize("code", [0, -signal.SIGTERM, -signal.SIGINT])
@in_loop
async def test_one_that_was_asked_to_end_just_before_us_is_not_started_again(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to a group of processes reaches the parent, too."""
    monkeypatch.setattr(parent, "SAME_SIGNAL_GRACE_S", NEVER_S)
    async with serving() as fleet:
        fleet.made[0].end(code)
        while not fleet.deaths:
            await asyncio.sleep(0)
        await fleet.end()
        assert len(fleet.made) == 2


@in_loop
async def test_one_that_is_asked_to_end_over_its_start_is_no_failure_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "SAME_SIGNAL_GRACE_S", NEVER_S)
    fleet = Fleet(2)
    fleet.made[0].signal(signal.SIGTERM)
    while not fleet.deaths:
        await asyncio.sleep(0)
    await fleet.end()


@in_loop
async def test_one_that_was_asked_to_end_alone_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as fleet:
        fleet.made[1].end(0)
        again = await fleet.another()
        assert again.index == 2
        await again.serve()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@in_loop
async def test_the_wait_before_a_restart_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1) as fleet:
        monkeypatch.setattr(parent.RestartBudget, "take", lambda self, now: NEVER_S)
        fleet.made[0].end(3)
        while not fleet.deaths:
            await asyncio.sleep(0)
        await fleet.end()
        assert len(fleet.made) == 1


# -- calls --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_call_of_one_process_reaches_another_and_errors_keep_their_class() -> None:
    async with serving() as fleet:
        caller, callee = fleet.made
        assert caller.link is not None
        callee.answers = {"show": [1, "two"], "lose": NotFoundError("there is none")}
        assert await caller.link.call("show", "x", 2, target=2) == [1, "two"]
        assert callee.calls == [("show", ("x", 2))]
        with pytest.raises(NotFoundError, match="there is none"):
            await caller.link.call("lose", target=2)
        for nobody in (3, -7):
            with pytest.raises(NotFoundError, match=f"no process {nobody}"):
                await caller.link.call("show", target=nobody)


@in_loop
async def test_whom_the_callee_dies_on_is_told_so() -> None:
    async with serving() as fleet:
        caller, callee = fleet.made
        assert caller.link is not None
        callee.answers = {"wait": asyncio.Event()}
        calling = asyncio.create_task(caller.link.call("wait", target=2))
        while not callee.calls:
            await asyncio.sleep(0)
        callee.end(-signal.SIGKILL)
        assert isinstance(await result_of(calling), OverloadedError)
        again = await fleet.another()
        with pytest.raises(OverloadedError, match="being started again"):
            await caller.link.call("wait", target=2)  # it has not joined: it would not answer before it has loaded
        await again.serve()
        assert await caller.link.call("wait", target=2) is None


@in_loop
async def test_a_caller_that_dies_leaves_the_callee_alone() -> None:
    async with serving() as fleet:
        caller, callee = fleet.made
        assert caller.link is not None
        callee.answers = {"wait": (release := asyncio.Event())}
        calling = asyncio.create_task(caller.link.call("wait", target=2))
        while not callee.calls:
            await asyncio.sleep(0)
        caller.end(-signal.SIGKILL)
        assert isinstance(await result_of(calling), UnavailableError)
        release.set()
        again = await (await fleet.another()).serve()
        assert await again.call("show", target=2) is None


@in_loop
async def test_everybody_is_all_others_that_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parent, "ANSWER_TIMEOUT_S", 0.05)
    async with serving(6) as fleet:
        caller, good, gone, failing, stopped, starting = fleet.made
        assert caller.link is not None
        gone.answers = {"watch": asyncio.Event()}
        failing.answers = {"watch": KeyError("surprise")}
        stopped.answers = {"watch": asyncio.Event()}
        good.answers = {"watch": "all is well"}
        starting.end(3)
        starting = await fleet.another()
        calling = asyncio.create_task(caller.link.call("watch", target=EVERYBODY))
        while not gone.calls:
            await asyncio.sleep(0)
        gone.end(-signal.SIGKILL)
        assert await calling == ["all is well"]
        assert not caller.calls
        assert await fleet.processes.ask_all("watch", 1) == {1: None, 2: "all is well"}
        await starting.serve()
    assert "API process 4 is left out of watch: 'surprise'" in caplog.text
    assert "API process 5 is left out of watch: no answer within 0.05 s" in caplog.text
    assert "process 3 is left out" not in caplog.text


@in_loop
async def test_calls_for_the_parent() -> None:
    async with serving(1) as fleet:
        (caller,) = fleet.made
        assert caller.link is not None

        async def call_core(method: str, *args: Any) -> Any:
            if method == "fail":
                raise ConfigError("not like this")
            return [method, *args]

        with pytest.raises(ServerError, match="the parent has no call 'control'"):
            await caller.link.call("control", "sleep", [1])
        fleet.processes.call_core = call_core
        assert await caller.link.call("control", "sleep", [1, "keep"]) == ["sleep", 1, "keep"]
        with pytest.raises(ConfigError, match="not like this"):
            await caller.link.call("control", "fail", [])
        for method, args in (("unknown", ()), ("join", (1,)), ("failed", ("x",))):
            with pytest.raises(ServerError, match=f"the parent has no call '{method}'"):
                await caller.link.call(method, *args)


@in_loop
async def test_that_the_core_is_gone_is_told_to_all_and_to_those_that_join_later() -> None:
    async with serving() as fleet:
        fleet.processes.note_core_gone("the budget is used up")
        for process in fleet.made:
            while not process.calls:
                await asyncio.sleep(0)
            assert process.calls == [("core_gone", ("the budget is used up", None))]
        fleet.made[0].end(3)
        again = await fleet.another()
        await again.serve()
        assert again.calls == [("core_gone", ("the budget is used up", None))]
