from __future__ import annotations

import asyncio

import pytest

from quire.errors import GenerationError
from quire.frontend.output_handler import RequestOutputCollector
from quire.outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.sampling_params import RequestOutputKind


def output(text: str, index: int = 0, finished: bool = False, logprobs: bool = False) -> RequestOutput:
    entries = [{1: Logprob(-1.0)} for _ in text] if logprobs else None
    completion = CompletionOutput(index, text, list(range(len(text))), None, entries, "stop" if finished else None)
    return RequestOutput("r", "p", [1], None, [completion], finished)


def test_deltas_nobody_took_are_joined() -> None:
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    assert collector.get_nowait() is None
    for part in (output("ab", logprobs=True), output("c", logprobs=True), output("d", 1), output("e", finished=True)):
        collector.put(part)
    merged = collector.get_nowait()
    assert isinstance(merged, RequestOutput)
    assert merged.finished
    assert [(c.index, c.text, len(c.token_ids)) for c in merged.outputs] == [(0, "abce", 4), (1, "d", 1)]
    assert collector.get_nowait() is None


def test_the_latest_cumulative_output_counts() -> None:
    collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE)
    for text in ("a", "ab", "abc"):
        collector.put(output(text))
    taken = collector.get_nowait()
    assert isinstance(taken, RequestOutput)
    assert taken.outputs[0].text == "abc"


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_segments_of_a_session_are_not_joined(kind: RequestOutputKind) -> None:
    """Their ends have a finish reason and are not the end of the request."""

    def segment(text: str, ends: bool, finished: bool = False) -> RequestOutput:
        shown = output(text, finished=ends)
        shown.finished = finished
        return shown

    collector = RequestOutputCollector(kind)
    for shown in (segment("ab", True), segment("c", False), segment("cd", True), segment("", True, finished=True)):
        collector.put(shown)
    texts = []
    while not texts or not texts[-1][1]:
        taken = collector.get_nowait()
        assert isinstance(taken, RequestOutput)
        texts.append((taken.outputs[0].text, taken.finished))
    second = "ccd" if kind is RequestOutputKind.DELTA else "cd"
    assert texts == [("ab", False), (second, False), ("", True)]
    assert not collector.has_output


def test_a_reader_waits() -> None:
    async def run() -> list[str]:
        collector = RequestOutputCollector(RequestOutputKind.DELTA)

        async def read() -> list[str]:
            texts = []
            while True:
                taken = await collector.get()
                assert isinstance(taken, RequestOutput)
                texts.append(taken.outputs[0].text)
                if taken.finished:
                    return texts

        reader = asyncio.create_task(read())
        for text in ("a", "b", "c"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            collector.put(output(text, finished=text == "c"))
        return await reader

    assert "".join(asyncio.run(run())) == "abc"


def test_an_exception_is_final_and_costs_nothing_that_came_before() -> None:
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    collector.put(output("a"))
    assert not collector.is_final
    collector.put(GenerationError("broken"))
    collector.put(output("b"))
    taken = collector.get_nowait()
    assert isinstance(taken, RequestOutput)
    assert taken.outputs[0].text == "a"
    for _ in range(2):
        with pytest.raises(GenerationError, match="broken"):
            collector.get_nowait()


def test_nothing_comes_after_the_end() -> None:
    async def run() -> None:
        collector = RequestOutputCollector(RequestOutputKind.DELTA, "id")
        collector.put(output("a", finished=True))
        collector.put(output("b"))
        collector.put(GenerationError("late"))
        taken = await collector.get()
        assert isinstance(taken, RequestOutput)
        assert taken.outputs[0].text == "a"
        assert collector.get_nowait() is None
        with pytest.raises(RuntimeError, match="id has no output to await: its last output was taken"):
            await collector.get()

    asyncio.run(run())


def test_a_collector_has_one_reader() -> None:
    async def run() -> None:
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        reader = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another coroutine awaits it"):
            await collector.get()
        collector.put(output("a"))
        await reader

    asyncio.run(run())


def test_a_reader_that_goes_away_leaves_the_output() -> None:
    async def run() -> None:
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        reader = asyncio.create_task(collector.get())
        await asyncio.sleep(0)
        collector.put(output("a"))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        collector.put(output("b"))
        taken = await collector.get()
        assert isinstance(taken, RequestOutput)
        assert taken.outputs[0].text == "ab"
        assert collector.num_taken == 1

    asyncio.run(run())


def test_a_pooling_output_passes_through() -> None:
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY)
    pooled = PoolingRequestOutput("r", PoolingOutput([1.0]), [1], True)
    collector.put(pooled)
    assert collector.get_nowait() is pooled
