"""Sends a load: each request at its time, whatever has become of those before it, streamed and timed.

The loop is open: arrivals come from a schedule. With a limit on concurrent requests and no schedule it is closed: a
request is due when the one before it has ended. `Send` decides how a request is sent; `Sender` does it over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from quire.cli.bench.outcomes import Failure, LoadResult, Outcome
from quire.cli.generation import RequestTiming
from quire.cli.remote.protocol import Choice, Chunk, RemoteError, kind_of
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.cli.remote.client import HttpClient

REQUEST_LIMIT_S = 600.0


@dataclass(frozen=True)
class LoadRequest:
    """A prompt (a text, token ids, or a conversation's messages) and how many tokens to generate after it."""

    prompt: str | list[int] | list[dict[str, object]]
    output_len: int
    arrival_s: float | None = None
    """Arrival time in a trace."""


Send = Callable[[LoadRequest, RequestTiming], Awaitable[None]]
"""Sends a request and stores its times. Raises QuireError, OSError or TimeoutError."""


class LoadRun:
    """One run. Tests replace `clock` and `sleep`; `on_end` is called as each request ends."""

    def __init__(
        self,
        send: Send,
        *,
        max_concurrency: int | None = None,
        request_limit_s: float = REQUEST_LIMIT_S,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._send = send
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._request_limit_s = request_limit_s
        self._on_end = on_end
        self._clock = clock
        self._sleep = sleep
        self._result = LoadResult(clock())

    async def run(self, requests: Sequence[LoadRequest], arrivals: Sequence[float] | None) -> LoadResult:
        """Sends all of `requests`, the n-th `arrivals[n]` seconds from now. None is a closed loop of the limit's size.

        When cancelled, it closes open requests and returns those that have ended.
        """
        assert arrivals is not None or self._slots is not None
        self._result = result = LoadResult(self._clock())
        cpu_s = time.process_time()
        tasks: list[asyncio.Task[None]] = []
        try:
            if arrivals is None:
                await self._send_closed(requests, tasks)
            else:
                await self._send_open(requests, arrivals, tasks)
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            result.was_interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        result.num_unfinished = len(requests) - len(result.outcomes)
        result.client_cpu_s = time.process_time() - cpu_s
        result.end_s = max((o.end_s for o in result.outcomes), default=result.start_s)
        return result

    async def _send_open(
        self, requests: Sequence[LoadRequest], arrivals: Sequence[float], tasks: list[asyncio.Task[None]]
    ) -> None:
        for request, arrival_s in zip(requests, arrivals, strict=True):
            intended_s = self._result.start_s + arrival_s
            while (delay_s := intended_s - self._clock()) > 0:  # timers are rounded, and may be early
                await self._sleep(delay_s)
            tasks.append(asyncio.create_task(self._send_in_turn(request, intended_s)))

    async def _send_closed(self, requests: Sequence[LoadRequest], tasks: list[asyncio.Task[None]]) -> None:
        assert self._slots is not None
        for request in requests:
            await self._slots.acquire()
            now = self._clock()
            tasks.append(asyncio.create_task(self._send_one(request, now, now)))

    async def _send_in_turn(self, request: LoadRequest, intended_s: float) -> None:
        ready_s = intended_s
        if self._slots is not None:
            must_wait = self._slots.locked()
            await self._slots.acquire()
            ready_s = self._clock() if must_wait else intended_s
        await self._send_one(request, intended_s, ready_s)

    async def _send_one(self, request: LoadRequest, intended_s: float, ready_s: float) -> None:
        timing = RequestTiming(self._clock())
        outcome = Outcome(intended_s, ready_s, timing, end_s=0.0)
        try:
            async with asyncio.timeout(self._request_limit_s):
                await self._send(request, timing)
        except TimeoutError:
            outcome.failure = Failure("timeout", f"no complete answer within {self._request_limit_s:g} s")
        except (QuireError, OSError) as e:
            outcome.failure = Failure(kind_of(e), str(e))
        finally:
            if self._slots is not None:
                self._slots.release()
        outcome.end_s = self._clock()
        self._result.outcomes.append(outcome)
        self._on_end(outcome)


class Endpoint(Enum):
    """Routes to which requests are sent."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Sender:
    """Sends requests to one model of a server. `fields` are added to every body, and may replace its own."""

    def __init__(
        self,
        client: HttpClient,
        endpoint: Endpoint,
        model: str,
        *,
        ignore_eos: bool = True,
        fields: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._model = model
        self._ignore_eos = ignore_eos
        self._fields = dict(fields or {})
        self._clock = clock

    async def send(self, request: LoadRequest, timing: RequestTiming) -> None:
        """Sends one streamed request. Raises RemoteError, RefusedError."""
        num_chunks = 0

        def on_chunk(chunk: Chunk) -> None:
            nonlocal num_chunks
            timing.take_usage(chunk.usage)
            if chunk.choices and _has_output(chunk.choices[0], timing):
                timing.stamp(self._clock())
                num_chunks += 1

        await self._client.stream(self._endpoint.value, msgspec.json.encode(self.body(request)), on_chunk)
        timing.num_output_tokens = timing.num_output_tokens or num_chunks  # a server that does not count
        if timing.num_output_tokens == 0:
            raise RemoteError("the answer has no tokens", "empty answer")
        if self._ignore_eos and timing.num_output_tokens < request.output_len:
            raise RemoteError(
                f"{timing.num_output_tokens} tokens arrived, not {request.output_len}; --no-ignore-eos where a server "
                "does not know ignore_eos",
                "short answer",
            )

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Returns the body of a request."""
        prompt = request.prompt
        if self._endpoint is Endpoint.CHAT:
            is_conversation = isinstance(prompt, list)
            what: dict[str, Any] = {"messages": prompt if is_conversation else [{"role": "user", "content": prompt}]}
        else:
            what = {"prompt": prompt}
        # A server sends nothing for a token without text, so special tokens must show.
        full_length = {"min_tokens": request.output_len, "ignore_eos": True, "skip_special_tokens": False}
        return {
            "model": self._model,
            **what,
            "max_tokens": request.output_len,
            **(full_length if self._ignore_eos else {}),
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }


def _has_output(choice: Choice, timing: RequestTiming) -> bool:
    """Returns True if a chunk holds output to read.

    The opening of a conversation holds none, nor do tokens whose text a server still holds back; an end counts where
    nothing came before.
    """
    if choice.finish_reason is not None and timing.first_token_s is None:
        return True
    if choice.delta is not None:
        return choice.delta.has_output
    return bool(choice.text or choice.token_ids)
