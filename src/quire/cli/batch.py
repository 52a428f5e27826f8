"""`quire batch`: a file of OpenAI batch requests in, a file of results out; a rerun goes on where it stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from quire.cli.batch_files import STANDARD, InputRow, ResultFile, error_row, open_input, read_rows, row_id
from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.generation import Engine, make_engine
from quire.cli.option_groups import engine_args, engine_options
from quire.config.engine_args import EngineArgs
from quire.errors import ClientError, ConfigError, GenerationError, QuireError, ServerError, ValidationError
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.resolve import resolve

if TYPE_CHECKING:
    from quire.cli.batch_pooling import PoolingReader, PoolingRequest
    from quire.cli.batch_requests import BatchRequest, RequestReader

REQUEST_READER = "quire.cli.batch_requests:RequestReader"
"""Resolved by name, because its protocol classes take a while to load."""
POOLING_READER = "quire.cli.batch_pooling:PoolingReader"
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
    ]
    return CommandLine(
        "quire batch",
        "Run every request of a JSONL file in OpenAI's batch format: conversations and completions, or with a pooling "
        "model embeddings, scores and rankings.",
        [*own, *engine_options()],
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
            _run_rows(engine_args(args, disable_log_stats=True), source, results, num_rows)
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


def _run_rows(flags: EngineArgs, source: Path, results: ResultFile, num_rows: int) -> None:
    config = flags.create_engine_config()
    engine = make_engine(flags)
    model = config.model_config
    names = list(dict.fromkeys([model.name, model.model]))
    reader = (
        resolve(REQUEST_READER)(names, model.sampling_defaults, model.seed, engine.get_tokenizer().apply_chat_template)
        if model.pooling is None
        else resolve(POOLING_READER)(names, engine)
    )
    # Enough in flight that the scheduler never runs dry, few enough that a file of any length fits in memory.
    window = 2 * (config.scheduler_config.max_num_seqs or 1)
    with tqdm(total=num_rows, desc="batch", unit="req", disable=None) as bar:
        _BatchRun(engine, reader, results, bar).run(_unfinished(source, results), window)


@dataclass
class _RowState:
    """A row in the engine: its prompts run as separate requests and are put together when all are done."""

    row: InputRow
    request: BatchRequest | PoolingRequest
    outputs: dict[int, RequestOutput | PoolingRequestOutput] = field(default_factory=dict)


class _BatchRun:
    """Keeps a window of rows in the engine and writes each as it finishes."""

    def __init__(self, engine: Engine, reader: RequestReader | PoolingReader, results: ResultFile, bar: Any) -> None:
        self._engine = engine
        self._reader = reader
        self._results = results
        self._bar = bar
        self._running: dict[int, _RowState] = {}

    def run(self, waiting: Iterator[InputRow], window: int) -> None:
        """Runs until every row has a result."""
        while True:
            while len(self._running) < window and (row := next(waiting, None)) is not None:
                self._start(row)
            if not self._running:
                return
            for output in self._engine.step():
                self._collect(output)

    def _start(self, row: InputRow) -> None:
        added = []
        try:
            state = _RowState(row, self._reader.read(row))
            request = state.request
            for position, (prompt, params) in enumerate(request.work):
                request_id = f"{row.line_number}/{position}"
                self._engine.add_request(request_id, prompt, params, priority=request.priority, **request.options)
                added.append(request_id)
        except ClientError as e:
            self._engine.abort_request(added)
            self._write_error(row, e)
            return
        self._running[row.line_number] = state

    def _collect(self, output: RequestOutput | PoolingRequestOutput) -> None:
        line, _, position = output.request_id.partition("/")
        state = self._running.get(int(line))
        if state is None or not output.finished:
            return
        state.outputs[int(position)] = output
        if len(state.outputs) < len(state.request.work):
            return
        del self._running[int(line)]
        outputs: list[Any] = [state.outputs[i] for i in range(len(state.outputs))]
        sequences = [
            o for output in outputs for o in (output.outputs if isinstance(output, RequestOutput) else [output])
        ]
        failed = [o for o in sequences if o.finish_reason == "error"]
        if failed:
            message = failed[0].error_message or "the engine failed this request; run it again"
            self._write_error(state.row, GenerationError(message))
            return
        self._write(state.row.key, self._reader.result_row(state.row.key, state.request, outputs))  # type: ignore[arg-type]  # the reader made it

    def _write_error(self, row: InputRow, error: QuireError) -> None:
        custom_id = row.content.get("custom_id")
        is_named = isinstance(custom_id, str)
        name = None if is_named else row_id(row.line_number)
        self._write(row.key, error_row(name, custom_id if is_named else None, error))

    def _write(self, key: str, row: dict[str, Any]) -> None:
        self._results.write(key, row)
        self._bar.update()
