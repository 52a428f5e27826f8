"""`quire batch`: a file of OpenAI batch requests in, a file of results out; a rerun goes on where it stopped."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from quire.cli.batch_files import InputRow, ResultFile, error_body, read_rows, row_id
from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.generation import Engine, make_engine
from quire.cli.option_groups import engine_args, engine_options
from quire.config.engine_args import EngineArgs
from quire.errors import ClientError, ConfigError, GenerationError, QuireError, ServerError, ValidationError
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.resolve import resolve

if TYPE_CHECKING:
    from quire.cli.batch_requests import BatchRequest, RequestReader

REQUEST_READER = "quire.cli.batch_requests:RequestReader"
"""Resolved by name, because its protocol classes take a while to load."""
_RERUN = "run the same command again to go on"


def command_line() -> CommandLine:
    own = [
        Option(name="input_file", short="-i", help="The requests (instead of INPUT).", metavar="FILE.jsonl"),
        Option(
            name="output_file",
            short="-o",
            help="The results; those that it already holds are kept. - is stdout.",
            metavar="FILE.jsonl",
        ),
    ]
    return CommandLine(
        "quire batch",
        "Run every request of a JSONL file in OpenAI's batch format (/v1/chat/completions and /v1/completions).",
        [*own, *engine_options()],
        Positional("input", "The requests, one JSON object per line."),
        "A request that fails gives an error row and does not stop the others; the exit code is then 1. Results are\n"
        "written as they finish, in another order than the input: match them by custom_id.",
    )


def run(args: Arguments) -> int:
    """Runs the batch. Returns 1 if any row of the output file is an error."""
    source, target = _paths(args)
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


def _paths(args: Arguments) -> tuple[Path, Path]:
    source, target = args["input_file"] or args["input"], args["output_file"]
    if source is None or target is None:
        raise ConfigError("give the requests and the results: quire batch in.jsonl -o out.jsonl")
    if Path(source).resolve() == Path(target).resolve():
        raise ConfigError(f"-o {target} is the input file; results go into another file")
    return Path(source), Path(target)


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
    reader = resolve(REQUEST_READER)(
        list(dict.fromkeys([model.name, model.model])),
        model.sampling_defaults,
        model.seed,
        engine.get_tokenizer().apply_chat_template,
    )
    # Enough in flight that the scheduler never runs dry, few enough that a file of any length fits in memory.
    window = 2 * (config.scheduler_config.max_num_seqs or 1)
    with tqdm(total=num_rows, desc="batch", unit="req", disable=None) as bar:
        _BatchRun(engine, reader, results, model.name, bar).run(_unfinished(source, results), window)


@dataclass
class _RowState:
    """A row in the engine: its prompts run as separate requests and are put together when all are done."""

    row: InputRow
    request: BatchRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class _BatchRun:
    """Keeps a window of rows in the engine and writes each as it finishes."""

    def __init__(self, engine: Engine, reader: RequestReader, results: ResultFile, model: str, bar: Any) -> None:
        self._engine = engine
        self._reader = reader
        self._results = results
        self._model = model
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
            for position, prompt in enumerate(state.request.prompts):
                request_id = f"{row.line_number}/{position}"
                self._engine.add_request(request_id, prompt, state.request.params, priority=state.request.priority)
                added.append(request_id)
        except ClientError as e:
            self._engine.abort_request(added)
            self._write_error(row, e)
            return
        self._running[row.line_number] = state

    def _collect(self, output: RequestOutput) -> None:
        line, _, position = output.request_id.partition("/")
        state = self._running.get(int(line))
        if state is None or not output.finished:
            return
        state.outputs[int(position)] = output
        if len(state.outputs) < len(state.request.prompts):
            return
        del self._running[int(line)]
        outputs = [state.outputs[i] for i in range(len(state.outputs))]
        failed = [o for output in outputs for o in output.outputs if o.finish_reason == "error"]
        if failed:
            message = failed[0].error_message or "the engine failed this request; run it again"
            self._write_error(state.row, GenerationError(message))
            return
        self._write(state.row.key, result_row(state.row.key, state.request, outputs, self._model))

    def _write_error(self, row: InputRow, error: QuireError) -> None:
        custom_id = row.content.get("custom_id")
        is_named = isinstance(custom_id, str)
        name = None if is_named else row_id(row.line_number)
        self._write(row.key, error_row(name, custom_id if is_named else None, error))

    def _write(self, key: str, row: dict[str, Any]) -> None:
        self._results.write(key, row)
        self._bar.update()


def result_row(custom_id: str, request: BatchRequest, outputs: Sequence[RequestOutput], model: str) -> dict[str, Any]:
    """Returns the row of a request that ran, in OpenAI's form; `outputs` are in the order of its prompts."""
    choices = [
        _choice(request, output, sequence, position * request.params.n + sequence.index)
        for position, output in enumerate(outputs)
        for sequence in output.outputs
    ]
    kind, prefix = ("chat.completion", "chatcmpl") if request.is_chat else ("text_completion", "cmpl")
    body = {
        "id": f"{prefix}-{uuid.uuid4().hex[:16]}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(outputs),
    }
    return _row(f"batch_req_{uuid.uuid4().hex[:16]}", custom_id, 200, body, None)


def error_row(row_id: str | None, custom_id: str | None, error: QuireError) -> dict[str, Any]:
    """Returns the row of a request that was refused or failed."""
    described = error_body(error)
    name = row_id or f"batch_req_{uuid.uuid4().hex[:16]}"
    return _row(name, custom_id, described["code"], {"error": described}, described)


def _row(row_id: str, custom_id: str | None, status: int, body: dict[str, Any], error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex[:16]}", "body": body}
    return {"id": row_id, "custom_id": custom_id, "response": response, "error": error}


def _choice(request: BatchRequest, output: RequestOutput, sequence: CompletionOutput, index: int) -> dict[str, Any]:
    ending = {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
    if request.is_chat:
        message = {"role": "assistant", "content": sequence.text}
        return {"index": index, "message": message, "logprobs": _chat_logprobs(request, sequence), **ending}
    text = (output.prompt or "") + sequence.text if request.echo else sequence.text
    return {"index": index, "text": text, "logprobs": _text_logprobs(sequence), **ending}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(o.prompt_token_ids or ()) for o in outputs)
    completion = sum(len(sequence.token_ids) for o in outputs for sequence in o.outputs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs)},
    }


def _chat_logprobs(request: BatchRequest, sequence: CompletionOutput) -> dict[str, Any] | None:
    if sequence.logprobs is None:
        return None
    content = []
    for token_id, position in zip(sequence.token_ids, sequence.logprobs, strict=True):
        # The sampled token comes first and may be among the top ones, too; `rank` decides whether it belongs to them.
        top = [x for x in position.values() if x.rank is not None and x.rank <= (request.params.logprobs or 0)]
        content.append({**_logprob(position[token_id]), "top_logprobs": [_logprob(x) for x in top]})
    return {"content": content}


def _logprob(value: Logprob) -> dict[str, Any]:
    token = value.decoded_token or ""
    return {"token": token, "logprob": value.logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


def _text_logprobs(sequence: CompletionOutput) -> dict[str, Any] | None:
    if sequence.logprobs is None:
        return None
    tokens = [
        position[t].decoded_token or "" for t, position in zip(sequence.token_ids, sequence.logprobs, strict=True)
    ]
    return {
        "text_offset": list(accumulate((len(token) for token in tokens[:-1]), initial=0)),
        "token_logprobs": [p[t].logprob for t, p in zip(sequence.token_ids, sequence.logprobs, strict=True)],
        "tokens": tokens,
        "top_logprobs": [
            {x.decoded_token or "": x.logprob for x in position.values()} for position in sequence.logprobs
        ],
    }
