"""/debug/state: the snapshot in JSON, asked for once however many watch."""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from quire.errors import EngineDeadError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http import engine_view
from quire.frontend.http.engine_view import SnapshotSource, describe_blocks, describe_request, find_runs
from quire.frontend.http.errors import UnavailableError
from quire.wire.stats import BlockMap, EngineSnapshot, RequestSnapshot

from ..openai.serving import Server, check

EMPTY = EngineSnapshot(10.0, 1000.0, 0, 0, 0, 4, 64, BlockMap(8, 7, 0, 1, 1, b"\1", b"\0"))


@pytest.mark.parametrize("step", [0, 1])
def test_runs_are_the_values_again(step: int) -> None:
    rng = random.Random(step)
    for length in (0, 1, 2, 50):
        values = [rng.randrange(3) for _ in range(length)]
        starts, lengths = find_runs(np.array(values, int), step)
        runs = zip(starts.tolist(), lengths.tolist(), strict=True)
        assert [values[start] + step * i for start, count in runs for i in range(count)] == values


def test_blocks_are_described_as_runs() -> None:
    blocks = BlockMap(90, 20, 40, 12, 2, bytes([1, 3, 3, 0, 0, 255]), bytes([0, 1, 1, 1, 0, 1]))
    assert describe_blocks(blocks) == {
        "total": 90, "free": 20, "cached": 40, "touched": 12, "stride": 2,
        "runs": [[1, 1, 0], [2, 3, 1], [1, 0, 1], [1, 0, 0], [1, 255, 1]],
    }  # fmt: skip


def test_a_request_is_described_with_its_blocks() -> None:
    ids = array("I", [5, 6, 7, 2, 9, 10])
    request = RequestSnapshot("0_a-1", "a", "running", 5, 7, 6, -1, block_ids=ids.tobytes(), num_blocks=6)
    alone = describe_request(request, None, 990.0)
    assert alone["blocks"] == [[5, 3], [2, 1], [9, 2]]
    assert (alone["id"], alone["key"], alone["output_tokens"], alone["cached_tokens"]) == ("a", "0_a-1", 2, 0)
    assert alone["scheduled_time"] is None
    assert (alone["external_tokens"], alone["external_source"]) == (0, None)
    known = describe_request(request, (9.0, 9.5, 0.0, 0.0), 990.0)
    assert (known["queued_time"], known["scheduled_time"], known["first_token_time"]) == (999.0, 999.5, None)


class Engine:
    """Answers get_snapshot when it is let."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()

    async def get_snapshot(self) -> EngineSnapshot:
        self.num_calls += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return EMPTY


def make_source() -> tuple[Engine, SnapshotSource, list[float]]:
    engine, now = Engine(), [100.0]
    return engine, SnapshotSource(cast("AsyncLLM", engine), lambda: now[0]), now


def test_all_who_watch_share_one_call() -> None:
    async def run() -> None:
        engine, source, now = make_source()
        crowd = [asyncio.create_task(source.get()) for _ in range(50)]
        await asyncio.sleep(0)
        engine.gate.set()
        assert await asyncio.gather(*crowd) == [EMPTY] * 50
        assert engine.num_calls == 1
        now[0] += engine_view.MIN_INTERVAL_S / 2
        await source.get()
        assert engine.num_calls == 1
        now[0] += engine_view.MIN_INTERVAL_S
        await source.get()
        assert engine.num_calls == 2

    asyncio.run(run())


def test_a_core_that_does_not_answer_is_asked_once() -> None:
    async def run() -> None:
        engine, source, now = make_source()
        for _ in range(3):
            with pytest.raises(UnavailableError, match="long step"):
                await source.get(timeout_s=0)
            now[0] += 60
        assert engine.num_calls == 1
        engine.gate.set()
        assert await source.get() is EMPTY

    asyncio.run(run())


def test_an_error_is_told_and_not_kept() -> None:
    async def run() -> None:
        engine, source, _ = make_source()
        engine.gate.set()
        engine.error = EngineDeadError("gone")
        with pytest.raises(EngineDeadError):
            await source.get()
        engine.error = None
        assert await source.get() is EMPTY

    asyncio.run(run())


# -- the route ---------------------------------------------------------------------------------------------------------


def held_ids(requests: Sequence[dict[str, Any]]) -> set[int]:
    return {i for request in requests for first, length in request["blocks"] for i in range(first, first + length)}


def test_the_state_of_a_server() -> None:
    async def test(server: Server) -> None:
        idle = (await server.get("/debug/state")).json()
        assert (idle["model"], idle["running"], idle["requests"], idle["ended"]) == ("demo", 0, [], [])
        assert (idle["abort"], idle["paused"], idle["block_size"]) == ("off", "no", 16)
        assert idle["kv_cache"]["runs"] == [[1, 1, 0]]
        assert (await server.answer("/v1/completions", prompt=[50] * 40, max_tokens=4))["usage"]["prompt_tokens"] == 40
        server.state.snapshots = SnapshotSource(server.engine)
        over = (await server.get("/debug/state")).json()
        assert over["kv_cache"]["cached"] > 0
        assert over["kv_cache"]["free"] == over["kv_cache"]["total"] - 1

    check(test)


def test_a_request_under_way_is_shown() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [50] * 40, "max_tokens": 300, "ignore_eos": True, "request_id": "mine"}
        asking = asyncio.create_task(server.post("/v1/completions", body))
        while (state := (await server.get("/debug/state")).json())["running"] == 0:
            server.state.snapshots = SnapshotSource(server.engine)
        (request,) = state["requests"]
        assert request["id"].endswith("mine")
        assert (request["place"], request["prompt_tokens"], request["max_tokens"]) == ("running", 40, 300)
        assert len(held_ids(state["requests"])) == request["num_blocks"] > 0
        in_use = [cell for length, references, _ in state["kv_cache"]["runs"] for cell in [references] * length]
        assert {i for i, references in enumerate(in_use) if references} == held_ids(state["requests"]) | {0}
        await server.engine.abort(request["id"])
        assert (await asking).json()["choices"][0]["finish_reason"] == "abort"

    check(test, executor="Leisurely")


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 30, "²"])
def test_a_wrong_number_is_told_of(after: str) -> None:
    async def test(server: Server) -> None:
        response = await server.client.get("/debug/state", params={"after": after})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "after"

    check(test)


def test_the_log_has_a_line_for_every_request_but_those_that_are_polled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Server) -> None:
        for path in ("/debug/state", "/metrics", "/version", "/debug/state?after=x"):
            await server.get(path)

    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire.access")
    check(test)
    lines = [tuple(line.split()[1:3]) for line in caplog.messages if line.startswith("GET")]
    assert list(dict.fromkeys(lines)) == [("/version", "200"), ("/debug/state", "400")]
