from __future__ import annotations

import asyncio

import pytest

from quire.errors import GenerationError
from quire.frontend.output_collector import RequestOutputCollector, merge_outputs
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


def test_logprobs_are_joined_and_prompt_logprobs_kept() -> None:
    first, second = output("a", logprobs=True), output("b", logprobs=True)
    first.prompt_logprobs = [None]
    merged = merge_outputs(first, second, True)
    assert merged.outputs[0].logprobs is not None
    assert len(merged.outputs[0].logprobs) == 2
    assert merged.prompt_logprobs == [None]
    second.prompt_logprobs = [None, None]
    assert merge_outputs(first, second, True).prompt_logprobs == [None, None]


def test_the_latest_cumulative_output_counts() -> None:
    collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE)
    for text in ("a", "ab", "abc"):
        collector.put(output(text))
    taken = collector.get_nowait()
    assert isinstance(taken, RequestOutput)
    assert taken.outputs[0].text == "abc"


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


def test_an_exception_is_final() -> None:
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    collector.put(output("a"))
    collector.put(GenerationError("broken"))
    collector.put(output("b"))
    for _ in range(2):
        with pytest.raises(GenerationError, match="broken"):
            collector.get_nowait()


def test_a_pooling_output_passes_through() -> None:
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY)
    pooled = PoolingRequestOutput("r", PoolingOutput([1.0]), [1], True)
    collector.put(pooled)
    assert collector.get_nowait() is pooled
