"""The queue between the loop that makes outputs and a coroutine that awaits them."""

from __future__ import annotations

import asyncio
import dataclasses

from quire.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from quire.sampling_params import RequestOutputKind

Output = RequestOutput | PoolingRequestOutput


class RequestOutputCollector:
    """Holds at most one output of a request: a reader that is slow gets one merged output, never a backlog.

    Deltas are joined; of cumulative outputs the latest counts. An exception put in is raised to the reader once, after
    which it is final. Single-threaded: `put` and `get` belong to one event loop.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._is_delta = output_kind is RequestOutputKind.DELTA
        self._output: Output | Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: Output | Exception) -> None:
        """Make an output available; merges it with one nobody has taken yet."""
        held = self._output
        if isinstance(held, Exception):
            return
        if isinstance(held, RequestOutput) and isinstance(output, RequestOutput):
            output = merge_outputs(held, output, self._is_delta)
        self._output = output
        self._ready.set()

    async def get(self) -> Output:
        """The next output, when there is one. Raises the exception that was put in."""
        while self._output is None:
            await self._ready.wait()
        return self._take(self._output)

    def get_nowait(self) -> Output | None:
        """The next output, None if there is none yet. Raises the exception that was put in."""
        return None if self._output is None else self._take(self._output)

    def _take(self, output: Output | Exception) -> Output:
        if isinstance(output, Exception):
            raise output
        self._output = None
        self._ready.clear()
        return output


def merge_outputs(held: RequestOutput, new: RequestOutput, is_delta: bool) -> RequestOutput:
    """One output that says what `held` and then `new` say. The n outputs of a prompt are merged by index."""
    by_index = {completion.index: completion for completion in held.outputs}
    for completion in new.outputs:
        before = by_index.get(completion.index)
        by_index[completion.index] = completion if before is None else _merge(before, completion, is_delta)
    return dataclasses.replace(
        new,
        outputs=[by_index[index] for index in sorted(by_index)],
        prompt_logprobs=held.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs,
    )


def _merge(held: CompletionOutput, new: CompletionOutput, is_delta: bool) -> CompletionOutput:
    if not is_delta:
        return new
    return dataclasses.replace(
        new,
        text=held.text + new.text,
        token_ids=[*held.token_ids, *new.token_ids],
        logprobs=None if new.logprobs is None else [*(held.logprobs or ()), *new.logprobs],
    )
