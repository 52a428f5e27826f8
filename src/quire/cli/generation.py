"""The parts that generating commands share: an engine, and a stopwatch per request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.cli.remote.protocol import Usage
from quire.config.engine_args import EngineArgs
from quire.outputs import RequestOutput
from quire.resolve import resolve


class Engine(Protocol):
    """The part of `LLMEngine` that the command line steps by hand."""

    def add_request(self, request_id: str, prompt: Any, params: Any, *, priority: int = 0, **options: Any) -> Any:
        """Queues a prompt (text, or a dict with prompt or prompt_token_ids) with its SamplingParams or PoolingParams.

        Raises ValidationError.
        """

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns its outputs. Ctrl-C leaves the engine usable."""

    def abort_request(self, request_ids: list[str]) -> None:
        """Aborts these requests."""

    def has_unfinished_requests(self) -> bool:
        """Returns True while another step has something to do."""


def make_engine(args: EngineArgs, engine_class: str = "quire.frontend.llm_engine:LLMEngine") -> Any:
    """Returns the engine of `args`, with a note on a terminal while it loads.

    Its class is named by a string so that --help loads neither tokenizers nor torch.
    """
    is_watched = sys.stderr.isatty()
    if is_watched:
        print(f"loading {args.model} ...", end="", file=sys.stderr, flush=True)
    try:
        return resolve(engine_class).from_engine_args(args, usage_context="offline")
    finally:
        if is_watched:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@dataclass
class RequestTiming:
    """The stopwatch of one request. Stamps are of time.perf_counter(); `gaps_s` are between successive updates."""

    added_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)

    def record(self, output: RequestOutput, now: float) -> None:
        """Counts an update of kind DELTA that arrived at `now`."""
        self.num_prompt_tokens = len(output.prompt_token_ids or ())
        self.num_cached_tokens = output.num_cached_tokens or 0
        new_tokens = sum(len(o.token_ids) for o in output.outputs)
        if new_tokens:
            self.num_output_tokens += new_tokens
            self.stamp(now)

    def take_usage(self, usage: Usage | None) -> None:
        """Takes over the counts of a server, where it has sent some."""
        if usage is not None:
            self.num_prompt_tokens = usage.prompt_tokens or 0
            self.num_cached_tokens = usage.cached_tokens
            self.num_output_tokens = usage.completion_tokens or self.num_output_tokens

    def stamp(self, now: float) -> None:
        """Records that tokens arrived at `now`."""
        if self.last_token_s is None:
            self.first_token_s = now
        else:
            self.gaps_s.append(now - self.last_token_s)
        self.last_token_s = now

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.added_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


def timing_line(timings: Sequence[RequestTiming]) -> str:
    """Returns the line of --stats and /stats."""
    started = [t for t in timings if t.first_token_s is not None and t.last_token_s is not None]
    prompt, cached = sum(t.num_prompt_tokens for t in timings), sum(t.num_cached_tokens for t in timings)
    output = sum(t.num_output_tokens for t in timings)
    text = f"{prompt} prompt tokens ({cached} cached), {output} generated"
    if not started:
        return text
    first = min(t.first_token_s - t.added_s for t in started if t.first_token_s is not None)
    wall = max(t.last_token_s or 0.0 for t in started) - min(t.added_s for t in started)
    rate = f", {output / wall:.1f} tok/s" if wall > 0 else ""
    return f"{text}; TTFT {first * 1e3:.1f} ms{rate}, {wall:.2f} s"
