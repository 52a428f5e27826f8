"""The work and the report of `quire replay`, and the load of a recording served again by a real engine."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.cli.bench.workloads import IdRange
from quire.cli.command_line import Arguments
from quire.cli.replay import CHANGES, NOT_OURS
from quire.config.engine_args import FLAGS, EngineArgs
from quire.engine.recording.format import HASH_BYTES, IS_POOLING, RecordingReader
from quire.errors import ConfigError
from quire.replay.figures import Figures, measure
from quire.replay.fleet import check_predictable
from quire.replay.step_times import PART_NAMES, StepTimes, fit_step_times
from quire.replay.study import RecordedRequest, Study, study
from quire.replay.what_if import Changes, predict
from quire.resolve import resolve
from quire.sampling_params import RequestOutputKind, SamplingParams

EXIT_DIFFERENT = 1


def replay(args: Arguments) -> int:
    """Replays, predicts and reports."""
    changes = _changes(args)
    if args["rerun"] is None:
        _refuse_flags_of_a_rerun(args)
    if args["check"] and (changes.any or args["rerun"] is not None):
        raise ConfigError("--check only replays; drop it to ask for predictions or a rerun")
    recorded, torn_bytes = read_recording(args["file"])
    report = Report(recorded, torn_bytes)
    if changes.any or args["rerun"] is not None:
        check_predictable(recorded)
    if recorded.difference is None and not args["check"]:
        report.predict(changes)
        if args["rerun"] is not None:
            with tempfile.TemporaryDirectory(prefix="quire-replay-") as directory:
                path = Path(directory) / "rerun"
                flags = {k: v for k, v in args.given_among(FLAGS).items() if k not in (*CHANGES, *NOT_OURS)}
                Rerun(recorded, changes, args["rerun"], flags, path).run()
                report.measured = measure(read_recording(str(path))[0])
    print(json.dumps(report.as_dict()) if args["json"] else report.as_text())
    return 0 if recorded.difference is None else EXIT_DIFFERENT


def read_recording(path: str | None) -> tuple[Study, int]:
    """Returns a studied recording, and the bytes of an unfinished frame at its end. Raises ConfigError."""
    if path is None:
        raise ConfigError("which recording? quire replay FILE")
    try:
        with open(path, "rb") as file:
            reader = RecordingReader(file)
            return study(reader.header, reader.events()), reader.torn_bytes
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}") from None
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _changes(args: Arguments) -> Changes:
    return Changes(**{CHANGES[name]: value for name, value in args.given_among(CHANGES).items()})


def _refuse_flags_of_a_rerun(args: Arguments) -> None:
    """Refuses flags that only a rerun could obey. Raises ConfigError."""
    others = [name for name in args.given_among(FLAGS) if name not in CHANGES]
    if others:
        option = FLAGS[others[0]].option
        raise ConfigError(f"{option} changes nothing a recording could tell; it is for --rerun MODEL only")


class Report:
    """The report of `quire replay`."""

    def __init__(self, recorded: Study, torn_bytes: int) -> None:
        self.study = recorded
        self.torn_bytes = torn_bytes
        self.times: StepTimes | None = None
        self.predicted: Figures | None = None
        self.changed: Figures | None = None
        """The prediction with the settings that were asked for."""
        self.measured: Figures | None = None
        """The figures of the rerun."""

    def predict(self, changes: Changes) -> None:
        """Fits the step times, and serves the load again on a virtual clock."""
        if self.study.header.connector:
            return  # nothing is asked for that would need it
        self.times = fit_step_times(self.study.steps)
        if self.times is None:
            if changes.any:
                raise ConfigError(f"{len(self.study.steps)} steps are too few to learn from how long steps take")
            return
        self.predicted = predict(self.study, self.times)
        if changes.any:
            self.changed = predict(self.study, self.times, changes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for --json."""
        recorded, difference, times = self.study, self.study.difference, self.times
        return {
            "model": recorded.header.model,
            "reproduced": difference is None,
            "first_difference": None if difference is None else difference._asdict(),
            "events": recorded.num_events,
            "steps": recorded.num_steps,
            "requests": len(recorded.requests),
            "torn_bytes": self.torn_bytes,
            "connector": recorded.header.connector or None,
            "loads": dict(recorded.loads),
            "loaded_tokens": recorded.num_loaded_tokens,
            "step_times": None if times is None else {**times._asdict(), "parts": list(PART_NAMES)},
            "recorded": None if difference else msgspec.to_builtins(measure(recorded)),
            "predicted": msgspec.to_builtins(self.predicted),
            "what_if": msgspec.to_builtins(self.changed),
            "rerun": msgspec.to_builtins(self.measured),
            "prediction_error": self._errors(),
        }

    def as_text(self) -> str:
        """Returns the report as text."""
        recorded = self.study
        counts = f"{recorded.num_events} events, {recorded.num_steps} steps, {len(recorded.requests)} requests"
        lines = [f"recording of {recorded.header.model}: {counts}, {recorded.end_s:.2f} s"]
        if self.torn_bytes:
            lines.append(f"its last {self.torn_bytes} bytes are part of a frame that was not finished: left out")
        if recorded.difference is not None:
            return "\n".join([*lines, f"a decision is another one: {recorded.difference}"])
        lines.append("replayed: every decision is the same")
        if recorded.header.connector:
            loads = ", ".join(f"{outcome} {number}" for outcome, number in sorted(recorded.loads.items())) or "none"
            lines.append(
                f"{recorded.header.connector} was played back: loads {loads}; {recorded.num_loaded_tokens} tokens. "
                "Predictions are not made"
            )
        if self.times is not None:
            times = self.times
            lines.append(
                f"step times: error {times.error:.1%} a step, {times.held_out_error:.1%} of steps not fitted, "
                f"{times.bias:+.1%} in all ({times.num_steps} steps)"
            )
        columns = {"recorded": measure(recorded), "predicted": self.predicted, "what if": self.changed}
        columns["rerun"] = self.measured
        lines += ["", *_table({name: figures for name, figures in columns.items() if figures is not None})]
        errors = self._errors()
        if errors is not None:
            parts = [f"{name} {error:+.1%}" for name, error in errors.items()]
            lines += ["", f"prediction against the rerun: {', '.join(parts)}"]
        return "\n".join(lines)

    def _errors(self) -> dict[str, float] | None:
        """Returns predicted / measured - 1 by figure."""
        predicted, measured = self.changed or self.predicted, self.measured
        if predicted is None or measured is None:
            return None
        pairs = zip(_flat(predicted).items(), _flat(measured).values(), strict=False)
        return {name: one / other - 1 for (name, one), other in pairs if other}


def _flat(figures: Figures) -> dict[str, float]:
    """Returns the figures by which a prediction is judged."""
    return {
        "throughput": figures.output_tokens_per_s,
        "TTFT mean": figures.ttft_ms.get("mean", 0.0),
        "TTFT p50": figures.ttft_ms.get("p50", 0.0),
        "TTFT p99": figures.ttft_ms.get("p99", 0.0),
        "TPOT mean": figures.tpot_ms.get("mean", 0.0),
        "TPOT p50": figures.tpot_ms.get("p50", 0.0),
        "TPOT p99": figures.tpot_ms.get("p99", 0.0),
    }


def _table(columns: dict[str, Figures]) -> list[str]:
    rows: list[tuple[str, list[str]]] = [
        ("finished", [f"{f.num_finished}/{f.num_requests}" for f in columns.values()]),
        ("output tokens", [f"{f.output_tokens}" for f in columns.values()]),
        ("duration, s", [f"{f.duration_s:.3f}" for f in columns.values()]),
        ("output tokens/s", [f"{f.output_tokens_per_s:.1f}" for f in columns.values()]),
        ("steps", [f"{f.num_steps}" for f in columns.values()]),
        ("preemptions", [f"{f.num_preemptions}" for f in columns.values()]),
        ("cached prompt tokens", [f"{f.cached_tokens}" for f in columns.values()]),
    ]
    for title, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        for place in ("mean", "p50", "p90", "p99"):
            values = [getattr(f, name).get(place) for f in columns.values()]
            rows.append((f"{title} {place}, ms", ["-" if value is None else f"{value:.2f}" for value in values]))
    head = f"  {'':<22}" + "".join(f"{name:>14}" for name in columns)
    return [head, *(f"  {title:<22}" + "".join(f"{value:>14}" for value in values) for title, values in rows)]


class Rerun:
    """A recorded load served again: the same arrivals and lengths, with prefixes shared as they were.

    The run is recorded to `path` and measured from that recording, as the first one was.
    """

    def __init__(self, study: Study, changes: Changes, model: str, flags: dict[str, Any], path: Path) -> None:
        """Raises ConfigError for a load that cannot be served again."""
        if any(request.add.flags & IS_POOLING for request in study.requests):
            raise ConfigError("--rerun: the recording has pooling requests; only generation is served again")
        header = changes.apply(study.header)
        scheduler = header.scheduler
        self._requests = study.requests
        self._block_size = min(header.kv_cache.block_sizes)
        self._args = EngineArgs(
            **{
                "model": model,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_num_seqs": scheduler.max_num_seqs,
                "scheduling_policy": scheduler.scheduling_policy,
                "enable_chunked_prefill": scheduler.enable_chunked_prefill,
                "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
                "scheduler_reserve_full_isl": scheduler.scheduler_reserve_full_isl,
                "watermark": scheduler.watermark,
                "block_size": self._block_size,
                "num_gpu_blocks_override": header.kv_cache.num_blocks,
                "enable_prefix_caching": header.enable_caching,
                "max_model_len": header.max_model_len,
                "skip_tokenizer_init": True,
                "disable_log_stats": True,
                "record": str(path),
                **flags,
            }
        )

    def run(self) -> None:
        """Serves every request at its recorded time."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        config = self._args.create_engine_config("serving")
        ids = IdRange.of_vocabulary(config.model_config.hf_config.vocab_size)
        prompts = [self._make_prompt(number, ids) for number in range(len(self._requests))]
        async with resolve("quire.frontend.async_llm:AsyncLLM").from_engine_config(config) as engine:
            start = time.monotonic() - min((r.arrival_s for r in self._requests), default=0.0)
            pairs = zip(self._requests, prompts, strict=True)
            async with asyncio.TaskGroup() as tasks:
                for number, (request, prompt) in enumerate(pairs):
                    tasks.create_task(_serve(engine, str(number), request, prompt, start))

    def _make_prompt(self, number: int, ids: IdRange) -> list[int]:
        """Returns tokens that depend on the recorded block hashes; those after the last full block are its own."""
        request = self._requests[number]
        add = request.add
        if add.prompt is not None:
            return add.prompt
        tokens: list[int] = []
        for start in range(0, len(request.blocks), HASH_BYTES):
            if len(tokens) >= add.num_prompt_tokens:
                break
            tokens += _draw(request.blocks[start : start + HASH_BYTES], self._block_size, ids)
        tokens += _draw(number, max(0, add.num_prompt_tokens - len(tokens)), ids)
        return tokens[: add.num_prompt_tokens]


def _draw(seed: int | bytes, count: int, ids: IdRange) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ids.low, ids.high) for _ in range(count)]


async def _serve(engine: Any, request_id: str, request: RecordedRequest, prompt: list[int], start: float) -> None:
    await asyncio.sleep(max(0.0, start + request.arrival_s - time.monotonic()))
    num_outputs = max(1, request.num_outputs)
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        min_tokens=num_outputs,
        max_tokens=num_outputs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    stream = engine.generate({"prompt_token_ids": prompt}, params, request_id, priority=request.add.priority)
    async for _ in stream:
        pass
