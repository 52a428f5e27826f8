"""An engine with its core in a process, many readers, and kills of the core. Every 50 ms its metrics are checked
against the conservation laws (promise P12)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from quire import EngineArgs, RequestOutputKind, SamplingParams
from quire.errors import GenerationError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.mp import AsyncMPClient
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History, StreamKey
from quire.testing.metrics_audit import audited

FAKE_MODEL_LEN = 1024
DEADLINE_S = 900.0
"""For a whole test: a limit, not a time."""


def fake_args(executor: str = "Steady", **fields: Any) -> EngineArgs:
    """An engine on a fake model, with restarts enough and a prefix cache small enough to be reused."""
    defaults: dict[str, Any] = {
        "max_model_len": FAKE_MODEL_LEN,
        "hf_overrides": {"max_position_embeddings": 8192},
        "num_gpu_blocks_override": 2000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "core_restart_limit": 10_000,
        "core_restart_window_s": 1.0,
    }
    return EngineArgs(
        model="demo", distributed_executor_backend=f"tests.process.executors:{executor}", **{**defaults, **fields}
    )


class Engine:
    """An AsyncLLM and a view of what is behind it."""

    def __init__(self, llm: AsyncLLM, client: AsyncMPClient) -> None:
        self.llm = llm
        self.client = client

    @property
    def core_pid(self) -> int | None:
        """Process id of the core that lives now."""
        return self.client.core_pid

    @property
    def counts(self) -> Counter[str]:
        """Returns what the link has counted."""
        return self.client.counts

    def signal_core(self, signum: int = signal.SIGKILL) -> int | None:
        """Send the core a signal: its pid; None if there is none now."""
        pid = self.core_pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return pid


@contextlib.asynccontextmanager
async def running(args: EngineArgs, **client_fields: Any) -> AsyncIterator[Engine]:
    """A started engine, or several. At the end the cores are gone and the directory removed."""
    config = args.create_engine_config("serving")
    make = DPLBAsyncMPClient if config.parallel_config.data_parallel_size > 1 else AsyncMPClient
    client = await asyncio.to_thread(make, config, log_stats=True, **client_fields)
    directory, pids = client.resources.directory, set()
    async with asyncio.timeout(DEADLINE_S), AsyncLLM(config, client=client) as llm:
        engine = Engine(llm, client)
        metrics = llm.pipeline.stats.metrics
        assert metrics is not None
        async with audited(metrics):
            yield engine
        pids |= {supervisor.core_pid for supervisor in client.resources.supervisors.values()}
    assert directory is not None
    assert not directory.path.exists()
    for pid in pids - {None}:
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- readers -------------------------------------------------------------------------------------------------------


async def check_free(engine: Engine) -> None:
    """No request is anywhere. The call to the core comes back after aborts before it have been sent."""
    assert await engine.llm.reset_prefix_cache(), "blocks are still held"
    assert engine.llm.get_num_unfinished_requests() == 0
    assert engine.client.num_live_requests == 0


async def read(
    engine: Engine,
    history: History,
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Read a request to its end."""
    history.begin(request_id)
    try:
        async for output in engine.llm.generate(prompt, params, request_id):
            history.record(output)
            on_progress()
    except GenerationError as e:
        history.record_error(request_id, e)


class FakeLoad:
    """Requests for the fake model and what must come of them. A part of the prompts begin alike, so that resumed
    requests meet a warm prefix cache and one another."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_made = 0
        self._stems = [[rng.randrange(256) for _ in range(48)] for _ in range(4)]
        self.expected: dict[StreamKey, list[int]] = {}

    def make(self) -> tuple[str, list[int], SamplingParams]:
        """The next request: id, prompt, parameters."""
        rng = self._rng
        request_id = f"r{self._num_made}"
        self._num_made += 1
        stem = rng.choice(self._stems)[: rng.randrange(49)] if rng.random() < 0.5 else []
        prompt = stem + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 250),
            ignore_eos=True,
            stop_token_ids=[rng.randrange(256)] if rng.random() < 0.2 else None,
            output_kind=rng.choice((RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)),
        )
        wanted = expected_output(FakeModel(), prompt, params, FAKE_MODEL_LEN)
        self.expected[request_id, 0] = list(wanted.token_ids)
        return request_id, prompt, params


# -- the killer ----------------------------------------------------------------------------------------------------


class Assassin:
    """Kills the core again and again: after a random number of tokens, or while it is starting."""

    def __init__(self, engine: Engine, history: History, rng: random.Random, num_kills: int, max_gap: int) -> None:
        self._engine, self._history, self._rng = engine, history, rng
        self._max_gap = max_gap
        self._next = rng.randint(1, max_gap)
        self._victim: int | None = None
        self.num_left = num_kills
        self._early: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """True once no core will be killed any more."""
        return self.num_left == 0 and (self._early is None or self._early.done())

    def on_progress(self) -> None:
        """A reader has been given something."""
        if self.num_left and self._history.num_tokens >= self._next and (self._early is None or self._early.done()):
            self._strike()

    def _strike(self) -> None:
        """Kill the core that lives now, unless it is the one killed last, whose outputs are still arriving."""
        pid = self._engine.core_pid
        if pid is None or pid == self._victim:
            return
        self._engine.signal_core()
        self._victim = pid
        self.num_left -= 1
        self._next = self._history.num_tokens + self._rng.randint(1, self._max_gap)
        if self.num_left and self._rng.random() < 0.2:
            self._early = asyncio.create_task(self._strike_early(self._rng.uniform(0.0, 0.3)))

    async def _strike_early(self, delay_s: float) -> None:
        """Kill the next core so long after its start: before it is ready, or while requests are sent again."""
        while self._engine.core_pid in (None, self._victim):
            await asyncio.sleep(0.002)
        await asyncio.sleep(delay_s)
        self._strike()
