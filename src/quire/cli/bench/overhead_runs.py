"""The runs of `quire bench overhead`: N requests on an `AsyncLLM` with a fake model, timed by phase and by thread.

Phases are measured by wrapping the functions that do them, in their process, and only for a benchmark. Times are CPU
times of threads, so a busy machine changes how long a run takes and not what is measured.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from quire.cli.bench.overhead import EDGE_TOKENS
from quire.cli.command_line import Arguments
from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.inproc import AsyncInprocClient
from quire.frontend.client.mp import AsyncMPClient
from quire.resolve import resolve
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.wire.execution import ModelRunnerOutput

Figures = dict[str, dict[str, int]]
"""Nanoseconds by phase ("phases") and by thread ("threads"), and counts ("counts")."""

CORE_PHASES = {
    "schedule": ("quire.engine.sched.scheduler:Scheduler", "schedule"),
    "update": ("quire.engine.sched.scheduler:Scheduler", "update_from_output"),
    "encode": ("quire.wire.serial:MsgpackEncoder", "encode_into"),
}
FRONTEND_PHASES = {
    "decode": ("quire.wire.serial:MsgpackDecoder", "decode"),
    "journal": ("quire.frontend.client.link:EngineLink", "on_outputs"),
    "process": ("quire.frontend.output_processor:OutputProcessor", "process_outputs"),
}
PROCESS_PARTS = {
    "statistics": ("quire.frontend.metrics.collect.events:IterationStats", "update_from_output"),
    "detokenize": ("quire.frontend.text.detokenizer:TextDetokenizer", "update"),
    "make output": ("quire.frontend.request_state:RequestState", "make_request_output"),
    "hand over": ("quire.frontend.output_handler:RequestOutputCollector", "put"),
}
"""The parts of `process`. They are called once per token, so they are timed in a separate run by a cheaper clock."""


class PhaseMeter:
    """Sums the time spent in wrapped functions. Each phase is assumed to run on one thread."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self.spent_ns: dict[str, int] = {}

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, timed as `phase`."""
        spent, clock = self.spent_ns, self._clock
        spent[phase] = 0

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[phase] += clock() - start

        return timed

    @contextmanager
    def installed(self, phases: Mapping[str, tuple[str, str]]) -> Iterator[None]:
        """Wraps the methods named, in this process, for a while."""
        originals = [(resolve(owner), method, phase) for phase, (owner, method) in phases.items()]
        saved = [(owner, method, getattr(owner, method)) for owner, method, _ in originals]
        try:
            for owner, method, phase in originals:
                setattr(owner, method, self.wrap(phase, getattr(owner, method)))
            yield
        finally:
            for owner, method, function in saved:
                setattr(owner, method, function)


def thread_times() -> dict[str, int]:
    """Returns CPU time so far in ns by thread name, and of the whole process ("process")."""
    times = {
        thread.name: time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }
    return {**times, "process": time.process_time_ns()}


class MeteredExecutor(FakeExecutor):
    """A model that costs only its own time, and a meter of the engine core it is in.

    Tokens are drawn from the whole vocabulary, so that their texts have ordinary lengths.
    """

    available_bytes: ClassVar[int] = 1 << 24

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        vars(self)["vocab_size"] = config.model_config.hf_config.vocab_size
        self._meter = PhaseMeter()
        self._counts = {"tokens": 0, "steps": 0}
        self._installed = self._meter.installed(CORE_PHASES)
        self._installed.__enter__()
        for method in ("execute_model", "sample_tokens"):
            setattr(self, method, self._meter.wrap(method, getattr(self, method)))

    def _finish(self, future: Any, num_tokens: int) -> None:
        """Ends a step."""
        if num_tokens:
            output: ModelRunnerOutput = future.output
            self._counts["steps"] += 1
            self._counts["tokens"] += sum(map(len, output.sampled_token_ids))
        super()._finish(future, num_tokens)

    def set_step_time(self, step_time_s: float) -> None:
        """Sets the time that a step sleeps from now on."""
        vars(self)["step_time_s"] = step_time_s

    def take_figures(self) -> Figures:
        """Returns everything measured so far."""
        return {"phases": dict(self._meter.spent_ns), "threads": thread_times(), "counts": dict(self._counts)}

    def shutdown(self) -> None:
        self._installed.__exit__(None, None, None)
        super().shutdown()


def difference(after: Figures, before: Figures) -> Figures:
    """Returns the difference of two readings. A thread that is new began at 0."""
    return {
        part: {name: value - before[part].get(name, 0) for name, value in values.items()}
        for part, values in after.items()
    }


PROMPT_LEN = 32
CORE_THREAD = "quire-engine-core"
CLIENTS = {"inproc": AsyncInprocClient, "zmq": AsyncMPClient}


async def measure_transport(args: Arguments, transport: str) -> list[dict[str, Any]]:
    """Returns one row of figures per concurrency asked for."""
    executor = f"{MeteredExecutor.__module__}:{MeteredExecutor.__name__}"
    flags = EngineArgs(
        args["model"], distributed_executor_backend=executor, max_num_seqs=max(args["concurrency"]), max_model_len=1024
    )
    config = flags.create_engine_config("serving")
    meter = PhaseMeter()
    with meter.installed(FRONTEND_PHASES):
        client = CLIENTS[transport](config, log_stats=True)
        async with AsyncLLM(config, client=client) as llm:
            await llm.collective_rpc("set_step_time", args=(args["step_ms"] / 1e3,))
            rows = []
            for concurrency in args["concurrency"]:
                bench = OverheadRun(llm, meter, concurrency, args["output_len"])
                await bench.measure()  # warm up
                runs = [await bench.measure() for _ in range(args["num_iters"])]
                row = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
                rows.append(
                    {"transport": transport, "concurrency": concurrency, **row, **await bench.measure_process_parts()}
                )
            return rows


class OverheadRun:
    """N requests at once, read to their end; the figures cover the time when all of them were running."""

    def __init__(self, llm: AsyncLLM, meter: PhaseMeter, concurrency: int, output_len: int) -> None:
        self._llm = llm
        self._meter = meter
        self._concurrency = concurrency
        self._output_len = output_len
        self._num_runs = 0

    async def measure(self) -> dict[str, float]:
        """Returns µs per token and per step, by part."""
        core, frontend = await self._run()
        return per_token(core, frontend, is_one_process=CORE_THREAD in frontend["threads"])

    async def measure_process_parts(self) -> dict[str, float]:
        """Returns the share of each part in `process`, from a run in which the parts are timed."""
        meter = PhaseMeter(time.perf_counter_ns)
        with meter.installed({**PROCESS_PARTS, "all": FRONTEND_PHASES["process"]}):
            await self._run()
        whole = max(meter.spent_ns.pop("all"), 1)
        return {f"share_of_process.{part}": round(ns / whole, 3) for part, ns in meter.spent_ns.items()}

    async def _run(self) -> tuple[Figures, Figures]:
        self._num_runs += 1
        self._num_read = [0] * self._concurrency
        self._num_started = 0
        self._all_running, self._one_ending = asyncio.Event(), asyncio.Event()
        readers = [asyncio.create_task(self._read(index)) for index in range(self._concurrency)]
        await self._all_running.wait()
        before = await self._take_figures()
        await self._one_ending.wait()
        after = await self._take_figures()
        await asyncio.gather(*readers)
        return difference(after[0], before[0]), difference(after[1], before[1])

    async def _read(self, index: int) -> None:
        params = SamplingParams(
            max_tokens=self._output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA, seed=index
        )
        prompt = [300 + (index * 7 + i + self._num_runs * 1000) % 2000 for i in range(PROMPT_LEN)]
        async for output in self._llm.generate(prompt, params, str(index)):
            before = self._num_read[index]
            num_read = self._num_read[index] = before + len(output.outputs[0].token_ids)
            if before < EDGE_TOKENS <= num_read:
                self._num_started += 1
                if self._num_started == self._concurrency:
                    self._all_running.set()
            if num_read >= self._output_len - EDGE_TOKENS:
                self._one_ending.set()

    async def _take_figures(self) -> tuple[Figures, Figures]:
        counts = {"tokens": sum(self._num_read)}
        frontend: Figures = {"phases": dict(self._meter.spent_ns), "threads": thread_times(), "counts": counts}
        (core,) = await self._llm.collective_rpc("take_figures")
        return core, frontend


def per_token(core: Figures, frontend: Figures, *, is_one_process: bool) -> dict[str, float]:
    """Returns µs per token by part, and µs per step; nothing of the model."""
    core_ns = _core_parts(core, is_one_process)
    frontend_ns = _frontend_parts(frontend, is_one_process)
    core_tokens, frontend_tokens = max(core["counts"]["tokens"], 1), max(frontend["counts"]["tokens"], 1)
    tokens_per_step = core_tokens / max(core["counts"]["steps"], 1)
    core_us, frontend_us = sum(core_ns.values()) / core_tokens / 1e3, sum(frontend_ns.values()) / frontend_tokens / 1e3
    return {
        "core_us_per_token": core_us,
        "frontend_us_per_token": frontend_us,
        "core_us_per_step": core_us * tokens_per_step,
        "frontend_us_per_step": frontend_us * tokens_per_step,
        **{f"core.{part}": ns / core_tokens / 1e3 for part, ns in core_ns.items()},
        **{f"frontend.{part}": ns / frontend_tokens / 1e3 for part, ns in frontend_ns.items()},
    }


def _core_parts(figures: Figures, is_one_process: bool) -> dict[str, int]:
    phases, threads = figures["phases"], figures["threads"]
    model = phases["execute_model"] + phases["sample_tokens"]
    loop = threads[CORE_THREAD if is_one_process else "MainThread"]
    parts = {"schedule": phases["schedule"], "update": phases["update"]}
    parts["loop"] = loop - model - sum(parts.values())
    if not is_one_process:
        parts["encode"] = phases["encode"]
        parts["transport"] = threads["process"] - loop - phases["encode"]
    return parts


def _frontend_parts(figures: Figures, is_one_process: bool) -> dict[str, int]:
    phases, threads = figures["phases"], figures["threads"]
    loop = threads["MainThread"]
    parts = {"process": phases["process"], "deliver": loop - phases["process"]}
    if not is_one_process:
        parts |= {"decode": phases["decode"], "journal": phases["journal"]}
        parts["transport"] = threads["process"] - loop - phases["decode"] - phases["journal"]
    return parts
