"""`quire complete`: prompts in, text out as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from quire.cli.command_line import CommandLine
from quire.cli.complete_printers import JsonPrinter, Printer, TextPrinter
from quire.cli.engine_options import engine_args, engine_options
from quire.cli.form_options import form_options, make_form
from quire.cli.generation import Engine, RequestTiming, make_engine, timing_line
from quire.cli.options import Arguments, Option, Positional
from quire.cli.remote.completion import RemoteCompletions
from quire.cli.remote.options import remote_options, validate_remote
from quire.cli.remote.requests import RemoteServer
from quire.cli.sampling_options import SAMPLING_HELP, make_sampling_params, sampling_options
from quire.errors import ConfigError, GenerationError
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

DEFAULT_MAX_TOKENS = 256
"""Of --max-tokens where neither the command line nor the model says: a base model may never end by itself."""


def command_line() -> CommandLine:
    """The arguments of `quire complete`."""
    own = [
        Option(name="json", help="Print one JSON object per prompt, when it is done.", is_switch=True, default=False),
        Option(name="echo", help="Print the prompt before its continuation.", is_switch=True, default=False),
        Option(name="stats", help="Print counts and times on stderr.", is_switch=True, default=False),
    ]
    return CommandLine(
        "quire complete",
        "Continue prompts. Text streams to stdout as it comes; several prompts run at once and are printed in order.",
        [
            *own,
            *remote_options("Ask the model of a server."),
            *sampling_options(),
            *form_options(),
            *engine_options(without=SAMPLING_HELP),
        ],
        Positional("prompt", "Text to continue. None, or -, reads one prompt from stdin.", nargs="*"),
    )


def run(args: Arguments) -> int:
    """Generate and print."""
    prompts = _read_prompts(args["prompt"])
    if args["url"] is not None:
        return _run_on_server(args, prompts)
    flags = engine_args(args, disable_log_stats=True)
    params = _sampling_params(args, flags.create_engine_config().model_config.sampling_defaults)
    engine = make_engine(flags)
    timings = _add_requests(engine, prompts, params)
    return _print(args, prompts, params.n, timings, _outputs(engine, timings))


def _run_on_server(args: Arguments, prompts: list[str]) -> int:
    validate_remote(args)
    params = _sampling_params(args, {})
    fields = {"max_tokens": params.max_tokens, **args.given_among(SAMPLING_HELP)}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = params.structured_outputs
    with RemoteServer.of(args) as server:
        card = server.find_model(args.given.get("model"))
        completions = RemoteCompletions(server, card, fields)
        timings = completions.start(prompts)
        return _print(args, prompts, params.n, timings, completions.outputs())


def _sampling_params(args: Arguments, model_defaults: Mapping[str, Any]) -> SamplingParams:
    return make_sampling_params(
        args.given_among(SAMPLING_HELP),
        {"max_tokens": DEFAULT_MAX_TOKENS, **model_defaults},
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=make_form(args),
    )


def _print(
    args: Arguments, prompts: list[str], n: int, timings: list[RequestTiming], outputs: Iterator[RequestOutput]
) -> int:
    """Print `outputs` as they come. Raises GenerationError in the end if one of them has failed."""
    printer: Printer = JsonPrinter(prompts, timings) if args["json"] else TextPrinter(prompts, n, args["echo"])
    failures: list[str] = []
    try:
        for output in outputs:
            printer.add(output)
            failures += [o.error_message or "the engine failed" for o in output.outputs if o.finish_reason == "error"]
    except KeyboardInterrupt:
        printer.interrupt()
        raise
    if failures:
        raise GenerationError(failures[0])
    if args["stats"]:
        print(timing_line(timings), file=sys.stderr)
    return 0


def _read_prompts(words: list[str]) -> list[str]:
    prompts = words or ["-"]
    if prompts.count("-") > 1:
        raise ConfigError("- (stdin) is named twice; it can be read once")
    if not words and sys.stdin.isatty():
        print("Reading the prompt from the terminal; end it with Ctrl-D.", file=sys.stderr)
    return [_read_stdin() if prompt == "-" else prompt for prompt in prompts]


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise ConfigError(f"stdin is not UTF-8 text: {e}") from None


def _add_requests(engine: Engine, prompts: list[str], params: SamplingParams) -> list[RequestTiming]:
    timings = []
    for i, prompt in enumerate(prompts):
        timings.append(RequestTiming(added_s=time.perf_counter()))
        engine.add_request(str(i), prompt, params)
    return timings


def _outputs(engine: Engine, timings: list[RequestTiming]) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timings[int(output.request_id)].record(output, now)
            yield output
