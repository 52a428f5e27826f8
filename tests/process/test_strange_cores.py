"""A real client and a core that does what no core should: played by `FakeEngine`, or a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import ConfigError, EngineDeadError
from quire.frontend.client.mp import ClientAddresses, SyncMPClient
from quire.frontend.supervision import launch
from quire.sampling_params import SamplingParams
from quire.testing.fake_engine import READY, FakeEngine
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from quire.wire.handshake import EngineZmqAddresses
from quire.wire.sockets import SocketDirectory

from .harness import fake_args


class Pair:
    """A client and the core it is connected to."""

    def __init__(self, directory: SocketDirectory) -> None:
        self._addresses = EngineZmqAddresses(*([directory.endpoint(f"{name}-0")] for name in ("input", "output")))
        with ThreadPoolExecutor(1) as thread:
            addresses = ClientAddresses(0, self._addresses.inputs[0], self._addresses.outputs[0])
            config = fake_args().create_engine_config("serving")
            starting = thread.submit(SyncMPClient, config, log_stats=False, client_addresses=addresses)
            self.engine = FakeEngine(self._addresses)
            self.client = starting.result(timeout=60)

    def add(self, request_id: str = "r", prompt: tuple[int, ...] = (1, 2)) -> None:
        """Send a request, and see it arrive."""
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        self.client.add_request(EngineCoreRequest(request_id, list(prompt), params, None, 0.0))
        message = self.engine.receive()
        assert message.type is EngineCoreRequestType.ADD
        assert (message.payload.request_id, message.payload.prompt_token_ids) == (request_id, list(prompt))

    def restart(self, incarnation: int) -> None:
        """The core dies without a word, and another one comes."""
        self.engine.close()
        self.engine = FakeEngine(self._addresses, incarnation=incarnation)

    def outputs(self) -> list[tuple[str, list[int], FinishReason | None]]:
        """The next ones that are handed on."""
        return [(o.request_id, o.new_token_ids, o.finish_reason) for o in self.client.get_output().outputs]

    def close(self) -> None:
        self.engine.close()
        self.client.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    directory = SocketDirectory()
    pair = Pair(directory)
    yield pair
    pair.close()
    directory.remove()


def test_what_the_core_says_is_handed_on(pair: Pair) -> None:
    pair.add()
    pair.engine.send_tokens("r", [5])
    pair.engine.send_tokens("r", [6, 7], finish_reason=FinishReason.LENGTH)
    assert pair.outputs() == [("r", [5], None)]
    assert pair.outputs() == [("r", [6, 7], FinishReason.LENGTH)]
    assert pair.client.ready_response.num_gpu_blocks == READY.num_gpu_blocks


def test_corrupt_repeated_stale_and_unknown_outputs_are_not_handed_on(pair: Pair) -> None:
    pair.add()
    pair.engine.send_tokens("r", [5])
    pair.engine.repeat()
    for frames in ([b""], [b"\xc1", b"\x00"], [b"\x90" * 3]):
        pair.engine.send_frames(frames)
    pair.engine.incarnation = 7
    pair.engine.send_tokens("r", [9])
    pair.engine.incarnation, pair.engine.sequence[0] = 0, 1
    pair.engine.send_tokens("somebody else", [9], finish_reason=FinishReason.STOP)
    pair.engine.send_tokens("r", [6], finish_reason=FinishReason.LENGTH)
    assert pair.outputs() == [("r", [5], None)]
    assert pair.outputs() == [("r", [6], FinishReason.LENGTH)]
    counts = pair.client.counts
    assert {name: counts[name] for name in ("corrupt", "repeated", "stale", "unknown")} == {
        "corrupt": 3,
        "repeated": 1,
        "stale": 1,
        "unknown": 1,
    }


def test_after_a_lost_message_requests_are_asked_for_again(pair: Pair) -> None:
    """Tokens are missing: the core is given what the user has, and goes on from there."""
    pair.add()
    pair.engine.send_tokens("r", [5])
    pair.engine.sequence[0] += 1
    pair.engine.send_tokens("r", [7])
    kinds = [pair.engine.receive() for _ in range(2)]
    assert [message.type for message in kinds] == [EngineCoreRequestType.ABORT, EngineCoreRequestType.ADD]
    again = kinds[1].payload
    assert again.output_token_ids == [5]
    pair.engine.send_tokens("r", [8])  # still of the first time
    pair.engine.send_tokens(again.request_id, [6], finish_reason=FinishReason.LENGTH)
    assert pair.outputs() == [("r", [5], None)]
    assert pair.outputs() == [("r", [6], FinishReason.LENGTH)]
    assert pair.client.counts["lost"] == 1


def test_another_core_is_given_what_the_first_one_left(pair: Pair) -> None:
    pair.add("a")
    pair.add("b", (3,))
    pair.engine.send_tokens("a", [5, 6])
    assert pair.outputs() == [("a", [5, 6], None)]
    pair.restart(incarnation=1)
    requests = {m.payload.request_id: m.payload for m in (pair.engine.receive(), pair.engine.receive())}
    assert {name: request.output_token_ids for name, request in requests.items()} == {"a": [5, 6], "b": []}
    pair.engine.send_tokens("a", [7], finish_reason=FinishReason.STOP)
    assert pair.outputs() == [("a", [7], FinishReason.STOP)]


def test_a_core_that_forgets_its_incarnation_is_not_listened_to(pair: Pair) -> None:
    """One that was given up and comes back as it was."""
    pair.add()
    pair.restart(incarnation=2)
    assert pair.engine.receive().type is EngineCoreRequestType.ADD
    pair.engine.incarnation = 1
    pair.engine.send_ready()
    pair.engine.send_tokens("r", [1])
    pair.engine.incarnation, pair.engine.sequence[0] = 2, 0
    pair.engine.send_tokens("r", [5])
    assert pair.outputs() == [("r", [5], None)]
    pair.engine.send_ready()  # behind the one of a former core, and known by its request being sent again
    assert pair.engine.receive().payload.output_token_ids == [5]
    pair.engine.send_tokens("r", [6], finish_reason=FinishReason.LENGTH)
    assert pair.outputs() == [("r", [6], FinishReason.LENGTH)]
    assert pair.client.counts["stale"] == 2


def test_a_token_that_is_none_fails_its_request_alone(pair: Pair) -> None:
    pair.add("a")
    pair.add("b")
    wrong = EngineCoreOutput("a", [2**40])
    pair.engine.send(EngineCoreOutputs(outputs=[wrong, EngineCoreOutput("b", [5])]))
    outputs = pair.client.get_output().outputs
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [("a", []), ("b", [5])]
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert "32 bits" in (outputs[0].error_message or "")


# -- processes that are no core ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("old", ConfigError, "the engine core speaks protocol version 2, this process speaks 3.*same version of Quire"),
        ("mute", EngineDeadError, "not ready within 0.5 s"),
        ("shy", EngineDeadError, "not ready within 0.5 s"),
        ("noise", EngineDeadError, "not ready within 0.5 s"),
    ],
)
def test_a_process_that_is_no_core_is_given_up(
    how: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CORE_MODULE", "tests.process.strange_core")
    monkeypatch.setenv("STRANGE", how)
    monkeypatch.setenv("QUIRE_ENGINE_READY_TIMEOUT_S", "0.5" if how != "old" else "30")
    config = fake_args().create_engine_config("serving")
    with pytest.raises(error, match=words):
        SyncMPClient(config, log_stats=False)
