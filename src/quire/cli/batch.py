"""`quire batch`: a file of OpenAI batch requests in, a file of results out; a rerun goes on where it stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.cli.batch_files import STANDARD, InputRow, ResultFile, open_input, read_rows
from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.generation import make_engine
from quire.cli.option_groups import engine_args, engine_options, flag_option, lora_option
from quire.config.flags import flags_of
from quire.config.server import ServerConfig
from quire.errors import ConfigError, ServerError, ValidationError
from quire.resolve import resolve

ASYNC_LLM = "quire.frontend.async_llm:AsyncLLM"
ROW_SERVER = "quire.cli.batch_rows:RowServer"
"""Resolved by name, because the server's routes take a while to load."""
_SERVER_FLAGS = (
    "default_chat_template_kwargs", "chat_template_content_format", "tool_call_parser",
    "exclude_tools_when_tool_choice_none", "reasoning_parser", "enable_reasoning_content", "response_role",
    "return_tokens_as_token_ids",
)  # fmt: skip
"""Flags of `quire serve` that change answers."""
_RERUN = "run the same command again to go on"


def command_line() -> CommandLine:
    own = [
        Option(
            name="input_file",
            short="-i",
            help="The requests (instead of INPUT). - is stdin.",
            metavar="FILE.jsonl",
        ),
        Option(
            name="output_file",
            short="-o",
            help="The results; those that it already holds are kept. - is stdout.",
            metavar="FILE.jsonl",
        ),
        lora_option("A LoRA adapter that rows may name as their model. May be repeated.", is_repeatable=True),
    ]
    return CommandLine(
        "quire batch",
        "Run every request of a JSONL file in OpenAI's batch format, as the routes of quire serve answer it: "
        "conversations, completions, responses; with a pooling model embeddings, scores and rankings.",
        [
            *own,
            *(flag_option(spec) for spec in flags_of(ServerConfig) if spec.name in _SERVER_FLAGS),
            *engine_options(),
        ],
        Positional("input", "The requests, one JSON object per line. - is stdin."),
        "A request that fails gives an error row and does not stop the others; the exit code is then 1. Results are\n"
        "written as they finish, in another order than the input: match them by custom_id.",
    )


def run(args: Arguments) -> int:
    """Runs the batch. Returns 1 if any row of the output file is an error."""
    name, target = _paths(args)
    with open_input(name) as source:
        return _run(args, source, target)


def _run(args: Arguments, source: Path, target: Path) -> int:
    results = ResultFile(target)
    try:
        num_rows = sum(1 for _ in _unfinished(source, results))
        if num_rows:
            _run_rows(args, source, results, num_rows)
    except (KeyboardInterrupt, ServerError):
        advice = f"; {_RERUN}" if results.can_resume else ""
        print(f"\nstopped with {len(results.done)} results in {results.name}{advice}", file=sys.stderr)
        raise
    finally:
        results.close()
    failed = sum(results.done.values())
    print(f"{len(results.done)} results in {results.name}, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def _paths(args: Arguments) -> tuple[str, Path]:
    source, target = args["input_file"] or args["input"], args["output_file"]
    if source is None or target is None:
        raise ConfigError("give the requests and the results: quire batch in.jsonl -o out.jsonl")
    if source != STANDARD and Path(source).resolve() == Path(target).resolve():
        raise ConfigError(f"-o {target} is the input file; results go into another file")
    return source, Path(target)


def _unfinished(source: Path, results: ResultFile) -> Iterator[InputRow]:
    """Yields the rows without a result. A second row with the same custom_id, which would be ambiguous, is an error."""
    seen: set[str] = set()
    for row in read_rows(source):
        if row.key in seen:
            error = ValidationError(f"custom_id {row.key!r} is used twice; line {row.line_number} is skipped")
            row = InputRow(row.line_number, {}, error)
        seen.add(row.key)
        if row.key not in results.done:
            yield row


def _run_rows(args: Arguments, source: Path, results: ResultFile, num_rows: int) -> None:
    adapters = tuple(args["lora"] or ())
    flags = engine_args(args, disable_log_stats=True, slow_client_timeout_s=0.0, enable_lora=bool(adapters))
    for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_reserved_tokens"):
        setattr(flags, name, None)  # rows wait here
    config = flags.create_engine_config()
    # Enough in flight that the scheduler never runs dry, few enough that a file of any length fits in memory.
    window = min(num_rows, 2 * (config.scheduler_config.max_num_seqs or 1))
    engine = make_engine(flags, ASYNC_LLM)
    try:
        server = resolve(ROW_SERVER)(engine, lora_modules=adapters, **args.given_among(_SERVER_FLAGS))
        with tqdm(total=num_rows, desc="batch", unit="req", disable=None) as bar:

            def write(key: str, row: dict[str, Any]) -> None:
                results.write(key, row)
                bar.update()

            with asyncio.Runner(loop_factory=resolve("uvloop:new_event_loop")) as runner:
                runner.run(server.run(_unfinished(source, results), window, write))
    finally:
        engine.shutdown()
