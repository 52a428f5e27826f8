"""`quire bench startup`: times a start from the creation of a process to its first token. Servers for other benchmarks.

Each repetition is a `quire complete` of one token in a process of its own, as a user starts it: interpreter, imports,
engine core, weights, first step. The stamps come from the processes themselves (quire.timeline).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire import envs
from quire.cli.bench.throughput import REPORT_OPTIONS, machine_facts, report
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.option_groups import engine_args, engine_options
from quire.config.engine_args import FLAGS
from quire.errors import ConfigError, EngineDeadError
from quire.worker.packed_cache import PackedCache

TIMEOUT_S = 900
MIB = 1 << 20


def command_line() -> CommandLine:
    own = [
        Option(name="prompt", help="Text that is continued by one token.", default="Hello"),
        Option(name="num_iters", alias="reps", help="Measured starts.", parse=int, default=5),
        Option(name="num_iters_warmup", help="Starts before the measured ones.", parse=int, default=1),
        Option(name="cold", help="Drop the model's files from memory before each start, so that they are read from the "
               "disk.", is_switch=True, default=False),
        *REPORT_OPTIONS,
    ]  # fmt: skip
    return CommandLine("quire bench startup", "Time a start, from nothing to a first token.", [*own, *engine_options()])


def run(args: Arguments) -> int:
    if args["num_iters"] < 1 or args["num_iters_warmup"] < 0:
        raise ConfigError("--num-iters must be 1 or more, --num-iters-warmup 0 or more")
    config = engine_args(args).create_engine_config()
    command = [sys.executable, "-m", "quire", "complete", "--max-tokens=1", *flag_words(args), "--", args["prompt"]]
    checkpoint = sorted(config.model_config.model_dir.glob("*.safetensors"))
    for _ in range(args["num_iters_warmup"]):
        run_once(command, [])
    files = [*checkpoint, *PackedCache.default().files()] if args["cold"] else []
    runs = [run_once(command, files) for _ in range(args["num_iters"])]
    figures = {
        "benchmark": "startup",
        "model": config.model_config.name,
        **machine_facts(),
        "is_cold": args["cold"],
        **summarize(runs),
    }
    report(figures, args, format_startup)
    return 0


def flag_words(args: Arguments) -> list[str]:
    """Returns the engine flags that were given, as words of another command line."""
    words = []
    for name, value in args.given_among(FLAGS).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value if isinstance(value, str) else json.dumps(value)}")
    return words


def run_once(command: list[str], files_to_forget: list[Path]) -> dict[str, Any]:
    """Runs one start. Returns its report (frontend/tracing.py) with `spawned_s`, the time at which it was begun.

    Raises EngineDeadError if the command fails or takes longer than `TIMEOUT_S`.
    """
    forget(files_to_forget)
    with tempfile.TemporaryDirectory(prefix="quire-startup-") as directory:
        path = Path(directory, "report.json")
        environment = {**os.environ, envs.STARTUP_REPORT.name: str(path)}
        spawned_s = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EngineDeadError(f"a start took longer than {TIMEOUT_S} s and was ended") from None
        if done.returncode or not path.exists():
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it wrote no message"]
            raise EngineDeadError(f"a start ended with exit code {done.returncode}: {words[0]}")
        return {**json.loads(path.read_text()), "spawned_s": spawned_s}


def forget(files: list[Path]) -> None:
    """Has the system drop `files` from memory; data that is not on the disk yet stays."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians over the runs: per process and stamp, seconds since the command was started, and CPU seconds."""
    figures: dict[str, Any] = {
        "reps": len(runs),
        "first_token_s": round(statistics.median(map(_first_token_s, runs)), 4),
        "first_tokens_s": [round(_first_token_s(run), 4) for run in runs],
        "cpu_s": round(
            statistics.median(run["frontend"][-1][2] + sum(s[2] for s in run["core"][-1:]) for run in runs), 4
        ),
    }
    for side in ("frontend", "core"):
        figures[side] = [_median_stamp(runs, side, name) for name, _, _ in runs[0][side]]
        figures[f"{side}_peak_memory_bytes"] = max(run[f"{side}_peak_memory_bytes"] for run in runs)
    return figures


def _median_stamp(runs: list[dict[str, Any]], side: str, name: str) -> dict[str, Any]:
    found = [(time_s - run["spawned_s"], cpu_s) for run in runs for other, time_s, cpu_s in run[side] if other == name]
    times, cpu_times = zip(*found, strict=True)
    return {"name": name, "s": round(statistics.median(times), 4), "cpu_s": round(statistics.median(cpu_times), 4)}


def _first_token_s(run: dict[str, Any]) -> float:
    return float(run["frontend"][-1][1] - run["spawned_s"])


def format_startup(figures: dict[str, Any]) -> str:
    """Formats the timeline: both processes, one clock."""
    all_runs = ", ".join(f"{s:.2f}" for s in figures["first_tokens_s"])
    lines = [
        f"start of {figures['model']}: first token after {figures['first_token_s']:.2f} s, median of {figures['reps']} "
        f"({all_runs}); {figures['cpu_s']:.2f} s of CPU time",
        f"{figures['cpu']}, {figures['cores']} cores" + (", the model's files read from the disk" * figures["is_cold"]),
    ]
    for side in ("frontend", "core"):
        if figures[side]:
            memory = figures[f"{side}_peak_memory_bytes"] // MIB
            lines += ["", f"  {f'{side} ({memory} MiB at most)':<36}{'at ms':>8}{'+ ms':>8}{'CPU + ms':>10}"]
            lines += _rows(figures[side])
    return "\n".join(lines)


def _rows(stamps: list[dict[str, Any]]) -> list[str]:
    rows, last = [], {"s": 0.0, "cpu_s": 0.0}
    for stamp in stamps:
        wall, cpu = stamp["s"] - last["s"], stamp["cpu_s"] - last["cpu_s"]
        rows.append(f"    {stamp['name']:<34}{stamp['s'] * 1e3:>8.0f}{wall * 1e3:>8.0f}{cpu * 1e3:>10.0f}")
        last = stamp
    return rows


START_LIMIT_S = 1800.0
END_LIMIT_S = 15.0
_PROGRAM = """\
import sys
from quire.wire.process import die_with_parent
die_with_parent(int(sys.argv[1]))
from quire.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""A `quire` that ends with the process that started it, whatever ends that one."""
_SERVING = re.compile(r"serving .+ on (http://\S+)")


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (URL, API key) of a server with these flags and ends it with the context. Raises EngineDeadError."""
    key = secrets.token_hex(16)
    command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    environment = {**os.environ, envs.API_KEY.name: key, envs.LOGGING_LEVEL.name: "INFO"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C ends the load, and the load ends the server
    )
    log = _ServerLog(process)
    try:
        yield log.wait_for_url(), key
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


class _ServerLog:
    """Reads the log of a server, for its URL and for its last line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=20)
        self._url: str | None = None
        self._knows = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_url(self) -> str:
        """Returns the URL once the server is ready. Raises EngineDeadError."""
        if not self._knows.wait(START_LIMIT_S):
            raise EngineDeadError(f"the server has not started within {START_LIMIT_S:.0f} s")
        if self._url is None:
            words = next((line for line in reversed(self._lines) if line.strip()), "it wrote no message").strip()
            raise EngineDeadError(f"the server ended before it served: {words.removeprefix('quire: error: ')}")
        return self._url

    def close(self) -> None:
        """Releases the log after the process has ended."""
        self._thread.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            found = None if self._url else _SERVING.search(line)
            if found:
                self._url = found[1]
                self._knows.set()
        self._knows.set()
