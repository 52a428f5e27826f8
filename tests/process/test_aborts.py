"""Promise P6: a request that is aborted has given back all its blocks within a step, at whatever point of its life.

The point is held open by a failpoint that sleeps there. Right after the abort the core is asked to reset its prefix
cache, which it can only do while no request holds a block; the call takes its place behind the abort.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from quire import RequestOutputKind, SamplingParams
from quire.failpoints import FAILPOINTS
from quire.testing.failpoints import injected
from quire.testing.history import History

from .harness import Engine, check_free, fake_args, read, running

HOLD_S = 0.03
"""Time for which the core stays at the failpoint."""
MAX_MODEL_LEN = 8192
"""A stream of that length lasts much longer than it takes to abort it."""
VARIANTS = [(kind, n) for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY) for n in (1, 4)]
"""Streaming or not, one output or four."""
DIAGONALS = [VARIANTS[0], VARIANTS[3]], [VARIANTS[1], VARIANTS[2]]
"""Each holds every value: enough where a variant costs a core."""
ELSEWHERE = ("core.start", "core.ready", "core.shutdown", "core.step.draft")
IN_CORE = [f for f in FAILPOINTS if f.startswith("core.") and f not in ELSEWHERE]
IN_CLIENT = ["client.add.journaled", "client.output.received"]
AT_RESTART = ["core.start", "core.ready", "client.resume"]


async def _poll(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.001)


async def _abort_one(engine: Engine, name: str, kind: RequestOutputKind, n: int, is_there: Callable[[], bool]) -> None:
    """Start a request, and abort it when `is_there`."""
    history = History(kind)
    params = SamplingParams(max_tokens=8000, n=n, temperature=1.0, ignore_eos=True, output_kind=kind)
    reader = asyncio.create_task(read(engine, history, name, {"prompt_token_ids": [1, 2, 3] * 20}, params))
    await _poll(is_there)
    if n == 1:  # one way to leave, and the other
        await engine.llm.abort(name)
        await reader
        assert {s.finish_reason for s in history.streams.values()} <= {"abort"}
    else:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def test_every_failpoint_is_among_them() -> None:
    # no moment in the life of a request without speculation, adapters and workers of their own
    elsewhere = ["core.shutdown", "kernels.trial", "frontend.stats.record", "core.step.draft"]
    elsewhere += ["kv.evict", "kv.read", "kv.seal", "kv.write"]
    elsewhere += ["kv.peer.answer", "kv.peer.message", "kv.peer.put", "kv.peer.receive", "kv.peer.send"]
    elsewhere += ["lora.install", "lora.pack", "lora.read", "lora.remove"]
    elsewhere += ["worker.barrier", "worker.experts", "worker.load", "worker.stage", "worker.standby", "worker.step"]
    elsewhere += ["group.switch"]
    assert sorted([*IN_CORE, *IN_CLIENT, *AT_RESTART, *elsewhere]) == sorted(FAILPOINTS)


def test_aborted_in_the_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One place after the other holds up the core, while there is its file."""
    armed, tallies = ({place: tmp_path / f"{what} {place}" for place in IN_CORE} for what in ("armed", "tally"))
    faults = (f"{place}=sleep({HOLD_S}),after={armed[place]},tally={tallies[place]}" for place in IN_CORE)
    monkeypatch.setenv("QUIRE_FAILPOINTS", ";".join(faults))

    async def run() -> None:
        async with running(fake_args(max_model_len=MAX_MODEL_LEN)) as engine:
            for place in IN_CORE:
                armed[place].touch()
                for number, (kind, n) in enumerate(VARIANTS):
                    before = _size(tallies[place])
                    await _abort_one(engine, f"{place}-{number}", kind, n, partial(_has_grown, tallies[place], before))
                    await check_free(engine)
                armed[place].unlink()

    asyncio.run(run())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _has_grown(path: Path, size: int) -> bool:
    return _size(path) > size


def test_aborted_in_the_frontend() -> None:
    hits: list[str] = []

    async def run() -> None:
        async with running(fake_args(max_model_len=MAX_MODEL_LEN)) as engine:
            for place in IN_CLIENT:
                with injected(place, lambda name, _: hits.append(name)):
                    for number, (kind, n) in enumerate(VARIANTS):
                        hits.clear()
                        await _abort_one(engine, f"{place}-{number}", kind, n, lambda: bool(hits))
                        await check_free(engine)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("place", "variants"),
    [
        pytest.param(place, variants, marks=() if i % 2 == j else pytest.mark.slow)
        for i, place in enumerate(AT_RESTART)
        for j, variants in enumerate(DIAGONALS)
    ],
)
def test_aborted_while_the_core_is_being_replaced(
    place: str, variants: list[tuple[RequestOutputKind, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The request is not sent to the next core, or withdrawn from it."""
    tally, deaths = tmp_path / "tally", tmp_path / "deaths"
    if place.startswith("core."):
        monkeypatch.setenv("QUIRE_FAILPOINTS", f"{place}=sleep({5 * HOLD_S}),after={deaths},tally={tally}")

    async def run() -> None:
        async with running(fake_args(max_model_len=MAX_MODEL_LEN)) as engine:
            for number, (kind, n) in enumerate(variants):
                before = _size(tally)

                def is_there(before: int = before, n: int = n) -> bool:
                    if not deaths.exists() and engine.client.num_live_requests == n:
                        deaths.touch()
                        engine.signal_core()
                    return _has_grown(tally, before)

                await _abort_one(engine, f"r{number}", kind, n, is_there)
                deaths.unlink()
                await check_free(engine)

    with injected("client.resume", lambda *_: deaths.exists() and place == "client.resume" and _add_byte(tally)):
        asyncio.run(run())


def _add_byte(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b".")


@pytest.mark.parametrize("variants", [DIAGONALS[0], pytest.param(DIAGONALS[1], marks=pytest.mark.slow)])
def test_aborted_while_the_core_drains(variants: list[tuple[RequestOutputKind, int]]) -> None:
    """A core that another process has asked to stop waits for its last request no longer."""

    async def run() -> None:
        async with running(fake_args(max_model_len=MAX_MODEL_LEN, shutdown_timeout=60.0)) as engine:
            for number, (kind, n) in enumerate(variants):
                drained = engine.core_pid

                def is_there(n: int = n) -> bool:
                    if engine.client.num_live_requests < n:
                        return False
                    engine.signal_core(signal.SIGTERM)
                    return True

                await _abort_one(engine, f"r{number}", kind, n, is_there)
                await _poll(lambda drained=drained: engine.core_pid not in (None, drained) and engine.llm.is_ready)
                await check_free(engine)

    asyncio.run(run())


def test_the_check_can_fail() -> None:
    """With a live request the cache is not reset, so what is read above says something."""

    async def run() -> None:
        async with running(fake_args(max_model_len=MAX_MODEL_LEN)) as engine:
            stream = engine.llm.generate(
                {"prompt_token_ids": [1]}, SamplingParams(max_tokens=8000, ignore_eos=True), "r"
            )
            await anext(stream)
            assert not await engine.llm.reset_prefix_cache()
            await stream.aclose()
            await check_free(engine)

    asyncio.run(run())
