"""`quire top`: a server in a terminal, as /ui/dashboard shows it in a browser."""

from __future__ import annotations

import contextlib
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

from quire import envs
from quire.cli.command_line import CommandLine
from quire.cli.options import Arguments, Option
from quire.cli.server_watch import ServerWatch
from quire.cli.terminal import Style
from quire.cli.top_screen import History, request_lines, screen, summary_lines
from quire.errors import ConfigError

MIN_INTERVAL_S = 0.2
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""The terminal's second page, without a cursor and with lines cut at the edge, and back."""


def _validate_interval(value: float) -> None:
    if not MIN_INTERVAL_S <= value <= 3600:
        raise ConfigError(f"--interval {value:g} is not within {MIN_INTERVAL_S:g} to 3600 seconds")


def command_line() -> CommandLine:
    """The arguments of `quire top`."""
    return CommandLine(
        "quire top",
        "Watch a server: speed, latency, the KV cache block by block, every request. q or Ctrl-C ends.",
        [
            Option(name="url", help="Where it listens.", default="http://127.0.0.1:8000", metavar="URL"),
            Option(name="api_key", help="Its key, if it asks for one; QUIRE_API_KEY is another way.", metavar="KEY"),
            Option(
                name="interval",
                help="Seconds between two looks.",
                parse=float,
                default=1.0,
                validate=_validate_interval,
            ),
            Option(
                name="once",
                help="Look twice, print figures and requests as plain text, and end. So it is in a pipe.",
                is_switch=True,
                default=False,
            ),
        ],
    )


def run(args: Arguments) -> int:
    """Show until told to end. Raises ConfigError if nobody answers to begin with."""
    watch = ServerWatch(args["url"], args["api_key"] or envs.API_KEY.get() or "")
    history = History()
    history.add(watch.read())
    if args["once"] or not sys.stdout.isatty():
        return _once(watch, history, args["interval"])
    with contextlib.suppress(KeyboardInterrupt), _terminal():
        _live(watch, history, args["interval"])
    return 0


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
            trouble = str(e)  # it may come back


def _quits_within(seconds: float) -> bool:
    """Whether q is pressed within that time; the rest of it is waited."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """A page of its own, keys without Enter; afterwards everything is as it was."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the terminal must be given back
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
