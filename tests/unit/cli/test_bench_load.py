"""The open loop, in virtual time, where delays are exact; and which chunks of an answer count as output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.bench.load import Endpoint, LoadRequest, LoadRun, Sender
from quire.cli.bench.outcomes import LoadResult, Outcome
from quire.cli.bench.workloads import EVENLY, arrival_times
from quire.cli.generation import RequestTiming
from quire.cli.remote.client import HttpClient
from quire.cli.remote.protocol import Choice, Chunk, RefusedError, RemoteError, Usage

from .virtual_time import run_virtually, virtual_now

Send = Callable[[LoadRequest, RequestTiming], Awaitable[None]]


def requests(count: int) -> list[LoadRequest]:
    return [LoadRequest([i], 3) for i in range(count)]


def load(send: Send, count: int, arrivals: list[float] | None, **options: Any) -> LoadResult:
    async def main() -> LoadResult:
        return await LoadRun(send, clock=virtual_now, **options).run(requests(count), arrivals)

    result = run_virtually(main())
    result.outcomes.sort(key=lambda o: (o.intended_s, o.timing.added_s))
    return result


async def three_tokens(request: LoadRequest, timing: RequestTiming) -> None:
    """The first after 0.5 s, two more 0.25 s apart."""
    for delay in (0.5, 0.25, 0.25):
        await asyncio.sleep(delay)
        timing.stamp(virtual_now())
    timing.num_output_tokens = 3


def test_each_request_goes_at_its_time_whatever_became_of_those_before() -> None:
    result = load(three_tokens, 4, [0.0, 0.1, 0.1, 5.0])
    assert [o.intended_s for o in result.outcomes] == [0.0, 0.1, 0.1, 5.0]
    assert [o.timing.added_s for o in result.outcomes] == [0.0, 0.1, 0.1, 5.0]
    assert [o.ttft_s for o in result.outcomes] == pytest.approx([0.5] * 4)
    assert [o.e2e_s for o in result.outcomes] == pytest.approx([1.0] * 4)
    assert [o.tpot_s for o in result.outcomes] == pytest.approx([0.25] * 4)
    assert result.wall_s == pytest.approx(6.0)
    assert not result.was_interrupted


def test_a_stall_is_seen_by_every_request_that_was_due_in_it() -> None:
    """Coordinated omission: a client that waits for the first answer would have measured one slow request in twenty."""
    stalled = asyncio.Event()

    async def send(request: LoadRequest, timing: RequestTiming) -> None:
        if request.prompt == [0]:
            await asyncio.sleep(10.0)
            stalled.set()
        await stalled.wait()
        timing.stamp(virtual_now())

    result = load(send, 20, arrival_times(1.0, 20, 0, EVENLY))
    # due at 1, 2, ... 20; the stall ends at 11
    assert [o.ttft_s for o in result.outcomes] == pytest.approx([max(0.0, 11.0 - i) for i in range(1, 21)])


def test_a_limit_delays_the_sending_but_not_the_counting() -> None:
    result = load(three_tokens, 3, [0.0, 0.0, 0.1], max_concurrency=1)
    assert [o.timing.added_s for o in result.outcomes] == pytest.approx([0.0, 1.0, 2.0])
    assert [o.e2e_s for o in result.outcomes] == pytest.approx([1.0, 2.0, 2.9])
    assert [o.timing.ttft_s for o in result.outcomes] == pytest.approx([0.5] * 3)
    assert [o.lag_s for o in result.outcomes] == pytest.approx([0.0] * 3)  # that was not the client's doing


def test_a_closed_loop_is_due_when_there_is_room() -> None:
    result = load(three_tokens, 5, None, max_concurrency=2)
    assert [o.intended_s for o in result.outcomes] == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0])
    assert [o.e2e_s for o in result.outcomes] == pytest.approx([1.0] * 5)


@settings(derandomize=True)
@given(st.integers(1, 6), st.lists(st.floats(0.0, 3.0), min_size=1, max_size=25), st.booleans())
def test_the_limit_holds(limit: int, arrivals: list[float], is_closed: bool) -> None:
    running = peak = 0

    async def send(request: LoadRequest, timing: RequestTiming) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await three_tokens(request, timing)
        running -= 1

    result = load(send, len(arrivals), None if is_closed else sorted(arrivals), max_concurrency=limit)
    assert len(result.outcomes) == len(arrivals)
    assert peak <= limit
    assert not is_closed or peak == min(limit, len(arrivals))
    assert all(o.intended_s <= o.timing.added_s and o.lag_s >= 0 for o in result.outcomes)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RefusedError("too long", 400), "HTTP 400"),
        (RemoteError("full", "HTTP 503", 503), "HTTP 503"),
        (OSError("out of sockets"), "OSError"),
    ],
)
def test_a_failure_is_counted_by_kind_and_ends_nothing_else(error: Exception, kind: str) -> None:
    ended: list[Outcome] = []

    async def send(request: LoadRequest, timing: RequestTiming) -> None:
        if request.prompt == [1]:
            raise error
        await three_tokens(request, timing)

    result = load(send, 3, [0.0] * 3, max_concurrency=1, on_end=ended.append)
    assert [o.failure and o.failure.kind for o in ended] == [None, kind, None]
    assert (len(result.answered), len(result.failed), result.num_unfinished) == (2, 1, 0)


def test_a_request_without_an_end_is_given_up() -> None:
    async def send(request: LoadRequest, timing: RequestTiming) -> None:
        await asyncio.sleep(1e6)

    (outcome,) = load(send, 1, [0.0], request_limit_s=30.0).outcomes
    assert outcome.failure is not None
    assert outcome.failure.kind == "timeout"
    assert outcome.e2e_s == pytest.approx(30.0)


@pytest.mark.parametrize("arrivals", [[0.0, 1.0, 2.0, 3.0, 4.0], None])
def test_cancelled_it_gives_what_has_ended(arrivals: list[float] | None) -> None:
    num_hung_up = 0

    async def send(request: LoadRequest, timing: RequestTiming) -> None:
        nonlocal num_hung_up
        try:
            await three_tokens(request, timing)
        except asyncio.CancelledError:
            num_hung_up += 1
            raise

    async def main() -> LoadResult:
        run = LoadRun(send, clock=virtual_now, max_concurrency=1 if arrivals is None else None)
        task = asyncio.ensure_future(run.run(requests(5), arrivals))
        await asyncio.sleep(2.6)
        task.cancel()
        return await task

    result = run_virtually(main())
    assert result.was_interrupted
    assert (len(result.outcomes), result.num_unfinished, num_hung_up) == (2, 3, 1)
    assert result.wall_s == pytest.approx(2.0)


class ScriptedClient:
    """Answers with these chunks."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices

    async def stream(self, path: str, body: bytes, on_chunk: Callable[[Chunk], None]) -> None:
        for choice in self._choices:
            on_chunk(Chunk(choices=[choice]))
        on_chunk(Chunk(usage=Usage(prompt_tokens=1, completion_tokens=4)))


def stamps(choices: Sequence[Choice]) -> list[float]:
    """Numbers of the chunks that were taken for output."""
    ticks = count()
    client = cast(HttpClient, ScriptedClient(choices))
    timing = RequestTiming(0.0)
    sender = Sender(client, Endpoint.COMPLETIONS, "m", clock=lambda: float(next(ticks)))
    asyncio.run(sender.send(LoadRequest([1], 4), timing))
    assert timing.first_token_s is not None
    return [timing.first_token_s, *timing.gaps_s]


END = Choice(text="", finish_reason="length")


@pytest.mark.parametrize(
    "choices",
    [
        [Choice(text=""), Choice(text=""), Choice(text="ab"), Choice(text="c"), END],  # a chunk per token
        [Choice(text="ab"), Choice(text="c"), END],  # what can be read
        [Choice(text="", token_ids=[1]), Choice(text="", token_ids=[2]), END],  # ids were asked for
    ],
)
def test_a_chunk_without_text_is_no_output(choices: Sequence[Choice]) -> None:
    assert stamps(choices) == [0.0, 1.0]


def test_an_answer_of_no_text_ends_in_its_first_output() -> None:
    assert stamps([Choice(text=""), END]) == [0.0]
