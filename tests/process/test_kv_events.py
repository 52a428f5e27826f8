"""KV cache events go on over the death of the core: their numbers without a gap, and first that nothing is cached."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from quire import SamplingParams

from .harness import fake_args, running


async def replay(socket: zmq.asyncio.Socket, start: int) -> list[tuple[int, list[str]]]:
    """Returns number and kinds of the batches from `start` on."""
    await socket.send_multipart([b"", start.to_bytes(8, "big")])
    batches: list[tuple[int, list[str]]] = []
    while (message := await socket.recv_multipart())[3]:
        batches.append((int.from_bytes(message[2], "big"), kinds_of(message[3])))
    return batches


def kinds_of(payload: bytes) -> list[str]:
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return [event["type"] for event in events]


def test_numbers_go_on_after_a_kill(tmp_path: Path) -> None:
    """Batches that were sent before a subscriber had found the new core are replayed."""
    endpoints = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    config: dict[str, Any] = {"enable_kv_cache_events": True, **endpoints}

    async def main() -> None:
        context = zmq.asyncio.Context()
        events, replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        events.subscribe(b"")
        events.connect(endpoints["endpoint"])
        replays.connect(endpoints["replay_endpoint"])
        try:
            async with running(fake_args(enable_prefix_caching=True, kv_events_config=config)) as engine:
                ready = engine.client.ready_response
                assert ready.kv_events is not None
                assert ready.kv_events.endpoint == endpoints["endpoint"]

                async def ask(number: int) -> None:
                    prompt = {"prompt_token_ids": list(range(1 + number, 100 + number))}
                    async for _ in engine.llm.generate(prompt, SamplingParams(max_tokens=4), str(number)):
                        pass

                number = 0
                while not await events.poll(20):  # what was sent before the core knew the subscriber is lost to it
                    await ask(number := number + 1)
                live = await events.recv_multipart()
                before = await replay(replays, 0)
                assert before[0] == (0, ["AllBlocksCleared"])
                assert (int.from_bytes(live[1], "big"), kinds_of(live[2])) in before
                engine.signal_core()
                await ask(0)
                after = await replay(replays, len(before))
            numbers = [number for number, _ in (*before, *after)]
            assert numbers == list(range(len(numbers)))
            assert after[0][1] == ["AllBlocksCleared"]
            assert "BlockStored" in {kind for _, kinds in after for kind in kinds}
        finally:
            context.destroy(0)

    asyncio.run(main())
