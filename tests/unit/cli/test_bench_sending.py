"""What counts as output: the same of a server that sends a chunk per token and of one that sends what can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import cast

import pytest

from quire.cli.bench.load import Endpoint, LoadRequest, Sender
from quire.cli.generation import RequestTiming
from quire.cli.remote.client import HttpClient
from quire.cli.remote.protocol import Choice, Chunk, Usage


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
