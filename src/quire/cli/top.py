"""`quire top`: shows a server in a terminal, as /ui/dashboard does in a browser."""

from __future__ import annotations

import contextlib
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence

from quire import envs
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.server_watch import (
    BlocksView,
    NotReadyError,
    Reading,
    RequestView,
    ServerWatch,
    StateView,
    growth,
    quantile_between,
)
from quire.cli.terminal import Style
from quire.errors import ConfigError

MIN_INTERVAL_S = 0.2
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Switch to the terminal's second page, without a cursor and with lines cut at the edge, and back."""


def _validate_interval(value: float) -> None:
    if not MIN_INTERVAL_S <= value <= 3600:
        raise ConfigError(f"--interval {value:g} is not within {MIN_INTERVAL_S:g} to 3600 seconds")


def command_line() -> CommandLine:
    return CommandLine(
        "quire top",
        "Watch a server: speed, latency, the KV cache block by block, every request. q or Ctrl-C ends.",
        [
            Option(name="url", help="URL of the server.", default="http://127.0.0.1:8000", metavar="URL"),
            Option(name="api_key", help="The server's key, if it needs one; or set QUIRE_API_KEY.", metavar="KEY"),
            Option(
                name="interval",
                help="Seconds between two readings.",
                parse=float,
                default=1.0,
                validate=_validate_interval,
            ),
            Option(
                name="once",
                help="Read twice, print figures and requests as plain text, and end; the default in a pipe.",
                is_switch=True,
                default=False,
            ),
        ],
    )


def run(args: Arguments) -> int:
    """Shows the server until q or Ctrl-C. Raises ConfigError if no server answers to begin with."""
    watch = ServerWatch(args["url"], args["api_key"] or envs.API_KEY.get() or "")
    history = History()
    history.add(_first_reading(watch, args["interval"]))
    if args["once"] or not sys.stdout.isatty():
        return _once(watch, history, args["interval"])
    with contextlib.suppress(KeyboardInterrupt), _terminal():
        _live(watch, history, args["interval"])
    return 0


def _first_reading(watch: ServerWatch, interval_s: float) -> Reading:
    """Waits for a server that is not ready. Raises ConfigError where no server answers."""
    has_printed = False
    while True:
        try:
            return watch.read()
        except NotReadyError as e:
            if not has_printed:
                print(f"{e}; waiting for it, Ctrl-C ends", file=sys.stderr, flush=True)
            has_printed = True
            time.sleep(interval_s)


def _once(watch: ServerWatch, history: History, interval_s: float) -> int:
    time.sleep(interval_s)  # rates need two readings
    history.add(watch.read())
    style = Style(sys.stdout)
    state = history.last.state
    print("\n".join([*summary_lines(history, watch.url, style), "", *request_lines(state, len(state.requests), style)]))
    return 0


def _live(watch: ServerWatch, history: History, interval_s: float) -> None:
    style, trouble = Style(sys.stdout), ""
    while True:
        width, height = shutil.get_terminal_size()
        lines = screen(history, watch.url, style, width, height)
        if trouble:
            lines[-1] = style.paint(trouble[: width - 1], "red")
        sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
        sys.stdout.flush()
        if _quits_within(interval_s):
            return
        try:
            history.add(watch.read())
            trouble = ""
        except ConfigError as e:
            trouble = str(e)  # the server may come back


def _quits_within(seconds: float) -> bool:
    """Waits, and returns True as soon as q is pressed."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Opens a page of its own with keys that need no Enter; restores the terminal afterwards."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that the terminal is restored
    try:
        if before is not None:
            tty.setcbreak(sys.stdin)
        sys.stdout.write(ENTER)
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


RATE_S, LATENCY_S, HITS_S = 4.0, 20.0, 60.0
"""The windows over which rates, latencies and cache hits are taken."""
SPARKS = "▁▂▃▄▅▆▇█"
OWNERS = ("cyan", "yellow", "blue", "magenta", "green", "red")
MAX_MAP_ROWS = 8
PLACES = {"preempted": "waits, preempted", "blocked": "held back", "waiting": "waits"}


class History:
    """The readings of the last minute, and figures derived from them."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self.written: deque[float] = deque(maxlen=40)
        """Tokens per second, reading by reading."""

    def add(self, reading: Reading) -> None:
        """Adds a reading and drops those that are too old."""
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[0].time_s < reading.time_s - HITS_S - 5:
            self._readings.popleft()
        speed = self.rate("vllm:generation_tokens_total")
        if speed is not None:
            self.written.append(speed)

    @property
    def last(self) -> Reading:
        """The newest reading."""
        return self._readings[-1]

    def _pair(self, window_s: float) -> tuple[Reading, Reading] | None:
        """Returns the last reading and the latest that is `window_s` older, or the first."""
        last = self._readings[-1]
        older = [reading for reading in self._readings if reading.time_s <= last.time_s - window_s]
        first = older[-1] if older else self._readings[0]
        return None if first is last or first.metrics is None or last.metrics is None else (first, last)

    def growth(self, name: str, window_s: float) -> float | None:
        """Returns the growth of a counter."""
        pair = self._pair(window_s)
        return growth(pair[0].metrics, pair[1].metrics, name) if pair and pair[0].metrics and pair[1].metrics else None

    def rate(self, name: str) -> float | None:
        """Returns the growth of a counter per second."""
        grown, pair = self.growth(name, RATE_S), self._pair(RATE_S)
        return grown / max(1e-9, pair[1].time_s - pair[0].time_s) if grown is not None and pair else None

    def quantile(self, name: str, share: float) -> float | None:
        """Returns a quantile of a histogram."""
        pair = self._pair(LATENCY_S)
        if pair is None or pair[0].metrics is None or pair[1].metrics is None:
            return None
        return quantile_between(pair[0].metrics, pair[1].metrics, name, share)


def summary_lines(history: History, url: str, style: Style) -> list[str]:
    """Returns the lines of figures."""
    state = history.last.state
    blocks, usable = state.kv_cache, max(1, state.kv_cache.total - 1)
    in_use = usable - blocks.free
    shared = blocks.stride * sum(length for length, references, _ in _without_null(blocks) if references > 1)
    remembered = blocks.stride * sum(length for length, refs, cached in _without_null(blocks) if not refs and cached)
    about = "about " if blocks.stride > 1 else ""
    ttft = [history.quantile("vllm:time_to_first_token_seconds", share) for share in (0.5, 0.95)]
    itl = [history.quantile("vllm:inter_token_latency_seconds", share) for share in (0.5, 0.95)]
    queries = history.growth("vllm:prefix_cache_queries_total", HITS_S)
    hits = history.growth("vllm:prefix_cache_hits_total", HITS_S)
    found = f"{100 * (hits or 0) / queries:.0f} % of prompt tokens, last minute" if queries else "-"
    rows = [
        ("running", f"{_bar(state.running / state.max_num_seqs)} {state.running} of {state.max_num_seqs}"),
        ("waiting", f"{state.waiting}{'' if state.paused == 'no' else f' (paused: {state.paused})'}"),
        ("writing", f"{_rate(history.rate('vllm:generation_tokens_total'))} tokens/s {_sparks(history.written)}"),
        ("reading", f"{_rate(history.rate('vllm:prompt_tokens_total'))} tokens/s"),
        ("first token", f"after {duration(ttft[0])}, 1 in 20 after more than {duration(ttft[1])}"),
        ("each further", f"after {duration(itl[0])}, 1 in 20 after more than {duration(itl[1])}"),
        ("KV cache", f"{_bar(in_use / usable)} {100 * in_use / usable:.0f} %, {in_use:,} of {usable:,} blocks"),
        ("", f"{about}{shared:,} shared, {about}{remembered:,} free ones remember a beginning"),
        ("found in cache", found),
    ]
    drafts = _describe_drafts(history)
    rows += [("speculation", drafts)] if drafts else []
    title = f"Quire {state.version} · {style.printable(state.model)} · {url}"
    return [
        style.paint(title, "bold"),
        *(f"{style.paint(f'{name:<15}', 'dim')}{value}".rstrip() for name, value in rows),
    ]


def _describe_drafts(history: History) -> str:
    """Returns the acceptance of the last minute; empty for a server that does not speculate."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    grown = [history.growth(f"vllm:spec_decode_num_{name}_total", HITS_S) for name in names]
    if None in grown:
        return ""
    num_drafts, num_tokens, num_accepted = (number or 0.0 for number in grown)
    if not num_drafts:
        return "no drafts in the last minute"
    return (
        f"{100 * num_accepted / num_tokens:.0f} % of draft tokens accepted, {1 + num_accepted / num_drafts:.2f} tokens "
        "per step with drafts, last minute"
    )


def map_lines(state: StateView, width: int, style: Style) -> list[str]:
    """Returns the map of the cache: a character for each block, or for neighbours of which the fullest is drawn."""
    cells = [(refs, cached) for length, refs, cached in state.kv_cache.runs for _ in range(length)]
    per_cell = max(1, -(-len(cells) // (width * MAX_MAP_ROWS)))
    owners = _owners(state)
    shown = [
        _cell(max(cells[i : i + per_cell]), owners.get(i * state.kv_cache.stride), style) if i else "×"
        for i in range(0, len(cells), per_cell)
    ]
    each = per_cell * state.kv_cache.stride
    legend = f"█ shared  ■ one request  ░ free, remembers  · free, empty{f'  (each {each} blocks)' if each > 1 else ''}"
    rows = ["".join(shown[i : i + width]) for i in range(0, len(shown), width)]
    unused = state.kv_cache.total - state.kv_cache.touched
    more = [style.paint(f"{unused:,} blocks were never used", "dim")] if unused else []
    return [style.paint(legend, "dim"), *rows, *more]


def _owners(state: StateView) -> dict[int, str]:
    """Returns the colour of each block that a request holds."""
    return {
        block_id: OWNERS[sum(request.key.encode()) % len(OWNERS)]
        for request in state.requests
        for first, length in request.blocks
        for block_id in range(first, first + length)
    }


def _cell(kind: tuple[int, int], owner: str | None, style: Style) -> str:
    references, cached = kind
    if references > 1:
        return "█"
    if references == 1:
        return style.paint("■", owner) if owner else "■"
    return "░" if cached else "·"


def request_lines(state: StateView, count: int, style: Style) -> list[str]:
    """Returns the table of requests, of which `count` are shown."""
    head = ("request", "stands", "prompt", "cached", "written", "blocks", "age", "preempted")
    rows = [head, *(_row(request, state.time, style) for request in state.requests[:count])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    hidden = len(state.requests) - min(count, len(state.requests)) + state.requests_left_out
    lines[0] = style.paint(lines[0], "dim")
    if not state.requests:
        return ["no request is running or waiting"]
    return [*lines, *([f"and {hidden:,} more"] if hidden else [])]


def _row(request: RequestView, now: float, style: Style) -> tuple[str, ...]:
    written = f"{request.output_tokens:,}" + (f"/{request.max_tokens:,}" if request.max_tokens else "")
    return (
        style.printable(request.id)[:40],
        PLACES.get(request.place, request.place),
        f"{min(request.computed_tokens, request.prompt_tokens):,}/{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        written,
        f"{request.num_blocks:,}",
        duration(max(0.0, now - request.arrival_time)),
        f"{request.preemptions:,}" if request.preemptions else "-",
    )


def screen(history: History, url: str, style: Style, width: int, height: int) -> list[str]:
    """Returns the lines that fit on a terminal, requests last."""
    state = history.last.state
    lines = [*summary_lines(history, url, style), "", *map_lines(state, max(20, width - 1), style), ""]
    footer = style.paint("q ends · in a browser: /ui/dashboard", "dim")
    room = max(1, height - len(lines) - 3)
    return [*[*lines, *request_lines(state, room, style)][: height - 1], footer]


def _without_null(blocks: BlocksView) -> list[tuple[int, int, int]]:
    """Returns the runs without block 0, which no request holds."""
    (length, references, cached), *rest = blocks.runs
    return [(length - 1, references, cached), *rest]


def _bar(share: float, width: int = 20) -> str:
    full = round(width * min(1.0, max(0.0, share)))
    return "█" * full + "░" * (width - full)


def _sparks(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    return "".join(SPARKS[min(7, int(8 * value / top))] if top > 0 else SPARKS[0] for value in values)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Returns "250 ms" for 0.25."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
