"""`quire complete`: continues prompts and prints text as it arrives, or JSON when a prompt is done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.generation import Engine, RequestTiming, make_engine, timing_line
from quire.cli.option_groups import (
    SAMPLING_HELP,
    engine_args,
    engine_options,
    form_options,
    lora_option,
    make_form,
    make_sampling_params,
    name_form_flags,
    read_lora,
    remote_options,
    sampling_options,
    validate_remote,
)
from quire.cli.remote.models import REMOTE_SERVER, RemoteCompletions
from quire.cli.terminal import Style
from quire.errors import ConfigError, GenerationError, QuireError, make_error
from quire.outputs import CompletionOutput, RequestOutput
from quire.resolve import resolve
from quire.sampling_params import RequestOutputKind, SamplingParams

DEFAULT_MAX_TOKENS = 256
"""Default of --max-tokens where the model has none: a base model may never end by itself."""


def command_line() -> CommandLine:
    own = [
        Option(name="json", help="Print one JSON object per prompt, when it is done.", is_switch=True, default=False),
        Option(name="echo", help="Print the prompt before its continuation.", is_switch=True, default=False),
        Option(name="stats", help="Print counts and times on stderr.", is_switch=True, default=False),
        lora_option("A LoRA adapter that the answers are made with; its directory, or a name and it."),
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
    prompts, lora = _read_prompts(args["prompt"]), read_lora(args)
    if args["url"] is not None:
        return _run_on_server(args, prompts)
    flags = engine_args(args, disable_log_stats=True, enable_lora=lora is not None)
    params = _sampling_params(args, flags.create_engine_config().model_config.sampling_defaults)
    engine = make_engine(flags)
    timings = _add_requests(engine, prompts, params, {} if lora is None else {"lora_request": lora})
    return _print(args, prompts, params.n, timings, _outputs(engine, timings))


def _run_on_server(args: Arguments, prompts: list[str]) -> int:
    validate_remote(args)
    params = _sampling_params(args, {})
    fields = {"max_tokens": params.max_tokens, **args.given_among(SAMPLING_HELP)}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = params.structured_outputs
    with resolve(REMOTE_SERVER).of(args) as server:
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
    """Prints `outputs` as they arrive. Raises the first failure in the end."""
    printer: Printer = JsonPrinter(prompts, timings) if args["json"] else TextPrinter(prompts, n, args["echo"])
    failures: list[QuireError] = []
    try:
        for output in outputs:
            printer.add(output)
            failures += [_failure(o) for o in output.outputs if o.finish_reason == "error"]
    except KeyboardInterrupt:
        printer.interrupt()
        raise
    if failures:
        raise failures[0]
    if args["stats"]:
        print(timing_line(timings), file=sys.stderr)
    return 0


def _failure(output: CompletionOutput) -> QuireError:
    message = name_form_flags(output.error_message or "the engine failed")
    return make_error(output.error_type, message, GenerationError)


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


def _add_requests(
    engine: Engine, prompts: list[str], params: SamplingParams, options: Mapping[str, Any]
) -> list[RequestTiming]:
    timings = []
    for i, prompt in enumerate(prompts):
        timings.append(RequestTiming(added_s=time.perf_counter()))
        engine.add_request(str(i), prompt, params, **options)
    return timings


def _outputs(engine: Engine, timings: list[RequestTiming]) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timings[int(output.request_id)].record(output, now)
            yield output


class Printer(Protocol):
    """Prints updates."""

    def add(self, output: RequestOutput) -> None:
        """Takes an update of kind DELTA."""

    def interrupt(self) -> None:
        """Ends the output after Ctrl-C."""


class TextPrinter:
    """Streams the first unfinished sequence; text of later ones is held until it is their turn."""

    def __init__(self, prompts: list[str], n: int, echo: bool) -> None:
        self._style = Style(sys.stdout)
        self._n = n
        self._prompts = prompts
        self._echo = echo
        self._held: list[list[str]] = [[] for _ in range(len(prompts) * n)]
        self._done = [False] * len(self._held)
        self._turn = 0
        self._begin()

    def add(self, output: RequestOutput) -> None:
        for o in output.outputs:
            slot = int(output.request_id) * self._n + o.index
            self._held[slot].append(o.text)
            self._done[slot] = self._done[slot] or o.finished()
        self._advance()

    def interrupt(self) -> None:
        print(flush=True)

    def _advance(self) -> None:
        while self._turn < len(self._held):
            print(self._style.printable("".join(self._held[self._turn])), end="", flush=True)
            self._held[self._turn].clear()
            if not self._done[self._turn]:
                return
            print(flush=True)
            self._turn += 1
            self._begin()

    def _begin(self) -> None:
        if self._turn >= len(self._held):
            return
        prompt = self._prompts[self._turn // self._n]
        if len(self._held) > 1:
            title = " ".join(prompt.split())
            number = f" [{self._turn % self._n + 1}/{self._n}]" if self._n > 1 else ""
            blank = "\n" if self._turn else ""
            print(blank + self._style.paint(f"==> {title[:70]}{'...' if title[70:] else ''}{number} <==", "bold"))
        if self._echo:
            print(self._style.paint(prompt, "dim"), end="", flush=True)


class JsonPrinter:
    """Prints one JSON line per finished prompt, in the order they finish, with the counts of its `timings`."""

    def __init__(self, prompts: Sequence[str], timings: Sequence[RequestTiming]) -> None:
        self._prompts = prompts
        self._timings = timings
        self._parts: dict[tuple[str, int], list[CompletionOutput]] = {}
        self._indices: dict[str, set[int]] = {}

    def add(self, output: RequestOutput) -> None:
        for o in output.outputs:
            self._parts.setdefault((output.request_id, o.index), []).append(o)
            self._indices.setdefault(output.request_id, set()).add(o.index)
        if output.finished:
            choices = [self._choice(output.request_id, i) for i in sorted(self._indices.pop(output.request_id))]
            print(json.dumps(self._row(int(output.request_id), choices), ensure_ascii=False), flush=True)

    def interrupt(self) -> None:
        pass

    def _choice(self, request_id: str, index: int) -> dict[str, Any]:
        parts = self._parts.pop((request_id, index))
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(p.text for p in parts),
            "token_ids": [t for p in parts for t in p.token_ids],
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }
        logprobs = [position for p in parts for position in p.logprobs or ()]
        if logprobs:
            choice["logprobs"] = [
                {str(t): {"logprob": x.logprob, "rank": x.rank, "token": x.decoded_token} for t, x in position.items()}
                for position in logprobs
            ]
        return choice

    def _row(self, number: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        timing = self._timings[number]
        return {
            "prompt_index": number,
            "prompt": self._prompts[number],
            "outputs": choices,
            "usage": {
                "prompt_tokens": timing.num_prompt_tokens,
                "cached_tokens": timing.num_cached_tokens,
                "completion_tokens": timing.num_output_tokens,
            },
        }
