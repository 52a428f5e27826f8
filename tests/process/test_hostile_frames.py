"""Promise P18 on real sockets: what is corrupt, truncated, replayed or foreign is dropped and counted, nothing dies,
and a stream that runs meanwhile is not touched."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from quire.wire.handshake import ENGINE_CORE_DEAD
from quire.wire.serial import MsgpackDecoder, MsgpackEncoder, WireError
from tests.seeds import FRESH, seed_of
from tests.wire import golden
from tests.wire.mutate import mutate

from .harness import Engine, fake_args, read, running
from .pace import Pace
from .peer import ABORT, ADD, UTILITY, Peer, make_config

NUM_MESSAGES = 50_000 if FRESH else 3_000
"""Per direction."""
PROMPT = [5, 6, 7]
MAX_MODEL_LEN = 8192
"""A stream of that length lasts minutes."""
RECORDED = {name: frames for name, frames in golden.read().items() if name != "PROTOCOL_VERSION"}
ALL_FRAMES = [frame for frames in RECORDED.values() for frame in frames]


def _samples(name: str) -> list[list[bytes]]:
    return [frames for sample, frames in RECORDED.items() if sample.split(".")[0] == name]


def _is_right(decoder: MsgpackDecoder[Any], frames: list[bytes]) -> bool:
    try:
        decoder.decode(frames)
    except WireError:
        return False
    return True


# -- to the core ---------------------------------------------------------------------------------------------------

TO_CORE: list[tuple[bytes, str, Any]] = [
    (ADD, "EngineCoreRequest", EngineCoreRequest),
    (ABORT, "ABORT", list[str]),
    (UTILITY, "UTILITY", tuple[int, int, str, tuple[Any, ...]]),
]


def _wrong_messages_to_the_core(rng: random.Random, count: int) -> Iterator[list[bytes]]:
    """Each one to be dropped: mutations that came out right are left out."""
    decoders = {kind: MsgpackDecoder(declared) for kind, _, declared in TO_CORE}
    while count:
        kind, name, _ = rng.choice(TO_CORE)
        frames = mutate(rng, rng.choice(_samples(name)), ALL_FRAMES)
        if rng.random() < 0.05:
            kind = rng.choice((b"", b"\x02", b"\x04", b"\x05", b"\x06", b"\xff", b"\x00\x00", b"ADD"))
        if kind not in decoders or not _is_right(decoders[kind], frames):
            count -= 1
            yield [kind, *frames] if rng.random() < 0.99 else [b""]


@pytest.mark.fresh
def test_wrong_messages_to_the_core(tmp_path: Path, pace: Pace) -> None:
    rng = random.Random(seed_of(1))
    with Peer(tmp_path) as peer:
        peer.start(make_config("Leisurely"))
        client = peer.client
        client.add("canary", prompt=PROMPT, max_tokens=4000)
        client.wait_for(lambda: len(client.tokens("canary")) > 10)
        for number, frames in enumerate(_wrong_messages_to_the_core(rng, NUM_MESSAGES)):
            client.send_frames(*frames)
            if number % 1000 == 0:  # an ADD again, for a request that lives
                client.add("canary", prompt=[1], max_tokens=1)
                client.receive(0)
        _, failure, dropped, *_ = client.call("get_dropped_messages")
        assert failure is None
        assert client.finish_reason("canary") is None, "it ended too soon to be a canary"
        pace.hurry()
        assert dropped["corrupt"] + dropped["unknown type"] == NUM_MESSAGES
        assert dropped["replayed"] == NUM_MESSAGES // 1000
        client.wait_finished("canary")
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        assert client.tokens("canary") == expected_output(FakeModel(), PROMPT, params, 4096).token_ids
        client.add("after", max_tokens=3)
        client.wait_finished("after")


# -- to the frontend -----------------------------------------------------------------------------------------------


def _wrong_messages_to_the_frontend(rng: random.Random, count: int) -> Iterator[list[bytes]]:
    """Corrupt ones, and right ones of a core that is not connected; none that could be the connected core's own."""
    decoder = MsgpackDecoder(EngineCoreOutputs)
    names = [name for name in ("EngineCoreOutputs", "EngineCoreOutput", "EngineCoreRequest") for _ in _samples(name)]
    while count:
        frames = mutate(rng, rng.choice(_samples(rng.choice(names))), ALL_FRAMES)
        if frames and not (_is_right(decoder, frames) and decoder.decode(frames).incarnation == 0):
            count -= 1
            yield frames


def _replays(canary: str) -> list[list[bytes]]:
    """Returns messages about the canary: sent before by the connected core, by a former core, or by no core at all."""
    messages = []
    for incarnation, sequence in ((0, 1), (0, 2), (7, 3), (7, 10_000)):
        for reason in (None, FinishReason.STOP, FinishReason.ERROR):
            output = EngineCoreOutput(canary, [1, 2, 3], finish_reason=reason)
            outputs = EngineCoreOutputs(outputs=[output], incarnation=incarnation, sequence=sequence, timestamp=1.0)
            messages.append([bytes(frame) for frame in MsgpackEncoder().encode(outputs)])
    return messages


class Intruder:
    """A process of the same user that has found the sockets."""

    def __init__(self, engine: Engine) -> None:
        directory = engine.client.resources.directory
        assert directory is not None
        self._context: zmq.Context[Any] = zmq.Context()
        self.output = self._context.socket(zmq.PUSH)
        self.output.connect(directory.endpoint("output-0"))
        self.input, self.handshake = self._context.socket(zmq.DEALER), self._context.socket(zmq.DEALER)
        for socket, name in ((self.input, "input-0"), (self.handshake, "handshake")):
            socket.setsockopt(zmq.IDENTITY, b"intruder")
            socket.connect(directory.endpoint(name))

    def close(self) -> None:
        for socket in (self.output, self.input, self.handshake):
            socket.close(linger=0)
        self._context.term()


async def _intrude(engine: Engine, canary: str) -> int:
    """Send it all; how many messages."""
    rng, intruder, num_sent = random.Random(seed_of(2)), Intruder(engine), 0
    ready = msgspec.msgpack.encode(EngineCoreReadyResponse(1, 1, 1, 1, 1.0, ("generate",), incarnation=5))
    replays = _replays(canary)
    try:
        for frames in _wrong_messages_to_the_frontend(rng, NUM_MESSAGES - 2000):
            intruder.output.send_multipart(frames)
            num_sent += 1
            if num_sent % 100 == 0:
                await asyncio.sleep(0)
        for number in range(1000):
            intruder.output.send_multipart(replays[number % len(replays)])
            intruder.input.send_multipart([ready] if number % 2 else mutate(rng, [ready], ALL_FRAMES) or [b""])
            intruder.handshake.send_multipart(mutate(rng, _samples("EngineStatus")[0], ALL_FRAMES) or [b""])
            num_sent += 2
            await asyncio.sleep(0)
        async with asyncio.timeout(180):
            while _num_dropped(engine) < num_sent:
                await asyncio.sleep(0.01)
    finally:
        intruder.close()
    return num_sent


def _num_dropped(engine: Engine) -> int:
    return sum(engine.counts[reason] for reason in ("corrupt", "stale", "repeated", "unknown"))


@pytest.mark.fresh
def test_wrong_messages_to_the_frontend() -> None:
    history = History()
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - len(PROMPT), ignore_eos=True)

    async def run() -> None:
        async with running(fake_args("Leisurely", max_model_len=MAX_MODEL_LEN)) as engine:
            canary = asyncio.create_task(read(engine, history, "canary", {"prompt_token_ids": PROMPT}, params))
            while history.num_tokens < 10:
                await asyncio.sleep(0.01)
            (internal,) = engine.llm.pipeline.output_processor.request_states
            num_sent = await _intrude(engine, internal)
            assert not canary.done(), "it ended too soon to be a canary"
            assert _num_dropped(engine) == num_sent
            for reason in ("corrupt", "stale", "repeated"):
                assert engine.counts[reason] > 100
            num_tokens = history.num_tokens
            while history.num_tokens < num_tokens + 20:
                await asyncio.sleep(0.01)
            await engine.llm.abort("canary")
            await canary
            assert engine.counts["deaths"] == engine.counts["lost"] == engine.counts["resumed_requests"] == 0
            short = SamplingParams(max_tokens=20, ignore_eos=True)
            await read(engine, history, "after", {"prompt_token_ids": PROMPT}, short)

    asyncio.run(run())
    assert history.problems() == []
    tokens = expected_output(FakeModel(), PROMPT, params, MAX_MODEL_LEN).token_ids
    assert history.token_differences({("canary", 0): tokens, ("after", 0): tokens[:20]}) == []


def test_a_forged_farewell_is_not_believed() -> None:
    """ENGINE_CORE_DEAD from another process: whether the core lives is known from the process itself."""
    history = History()
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with running(fake_args()) as engine:
            intruder = Intruder(engine)
            for _ in range(100):
                intruder.output.send(ENGINE_CORE_DEAD)
            await read(engine, history, "canary", {"prompt_token_ids": PROMPT}, params)
            assert engine.counts["deaths"] == 0
            intruder.close()

    asyncio.run(run())
    assert history.problems() == []
