"""Measures the time of `/metrics` over HTTP while the server is busy: `python -m benchmarks.scrapes`.

`quire bench serve` requests 256 streams at once from a server of the demo model, which is scraped 20 times a second
over an open connection meanwhile, with one API process and with several, whose numbers the first one merges. A scrape
waits for a processor and for a turn of the event loop; its own cost is measured by `benchmarks/metrics_cost.py`.

Client, scraper and server share the machine, and a sleeping scraper, too, waits for a processor before it can read its
clock. So there are two figures: until the kernel had the last packet of the answer, which is the time for a scraper on
another machine, and until the scraper here had read it. Needs Linux, for the kernel's stamps. The age of the numbers is
that of the last engine step in them. With `--body-mb 5` a client sends a body of so many megabytes every second
besides (promise P14: `--processes 1 --requests 64 --body-mb 5 --seconds 300`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.cli.bench.startup import own_server

SO_TIMESTAMPNS = 35
"""Constant of asm-generic/socket.h that Python's `socket` does not have."""
STAMPS_WITHIN_S = 5.0
_TIMESPEC = struct.Struct("@qq")
HEAD = """\
| API processes | scrapes | until it came: median, ms | p99 | worst | until it was read: median, ms | p99 | worst | age of the numbers: median, ms | p99 | worst |
|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""  # noqa: E501


@dataclass(frozen=True)
class Scrape:
    """One answered scrape; milliseconds since it was sent."""

    text: str
    wire_ms: float
    """Time until the last packet of the answer had arrived."""
    read_ms: float
    """Time until the answer was read."""

    def value(self, name: str) -> float:
        """Returns the value of the metric's only series."""
        (line,) = (line for line in self.text.splitlines() if line.startswith(f"{name}{{"))
        return float(line.rsplit(" ", 1)[1])


class Scraper:
    """One open connection. Raises SystemExit for an answer that is not one of /metrics."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=60)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._request = f"GET /metrics HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
        due = time.monotonic() + STAMPS_WITHIN_S
        while not self._ask()[1]:  # the kernel begins to stamp packets some time after the option was set
            if time.monotonic() > due:
                raise SystemExit("this kernel does not say when a packet came: the benchmark needs Linux")

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def scrape(self) -> Scrape:
        """Sends a scrape and waits for the whole answer."""
        start = time.time_ns()
        answer, came = self._ask()
        read = time.time_ns()
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"the server answered {answer[:500]!r}")
        if not came:
            raise SystemExit("the kernel has stopped saying when a packet came")
        return Scrape(body.decode(), (came - start) / 1e6, (read - start) / 1e6)

    def _ask(self) -> tuple[bytes, int]:
        """Returns the answer, and when its last packet arrived; 0 if the kernel has no stamp."""
        answer, end, came = b"", None, 0
        self._socket.sendall(self._request)
        while end is None or len(answer) < end:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 20, socket.CMSG_SPACE(_TIMESPEC.size))
            if not data:
                raise SystemExit(f"the server closed the connection after {answer[:200]!r}")
            answer += data
            came = _read_stamp(ancillary)
            if end is None:
                end = _find_end(answer)
        return answer, came


def _read_stamp(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Returns when the kernel had the packet, in nanoseconds of the wall clock; 0 without a stamp."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack_from(data)
            return int(seconds * 10**9 + nanoseconds)
    return 0


def _find_end(answer: bytes) -> int | None:
    """Returns the length of the whole answer, once its head has arrived."""
    head, mark, _ = answer.partition(b"\r\n\r\n")
    if not mark:
        return None
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(head) + len(mark) + int(value)
    raise SystemExit(f"the server did not say how long its answer is: {head!r}")


def scrape_regularly(url: str, load: subprocess.Popen[bytes], rate: float, num_running: int) -> list[Scrape]:
    """Returns the scrapes that found at least `num_running` requests running, until the load ends."""
    scrapes = []
    with Scraper(url) as scraper:
        due = time.monotonic()
        while load.poll() is None:
            scrape = scraper.scrape()
            if scrape.value("vllm:num_requests_running") >= num_running:
                scrapes.append(scrape)
            due = max(due + 1 / rate, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    return scrapes


@contextmanager
def sending_bodies(url: str, key: str, megabytes: float) -> Iterator[None]:
    """Sends a prompt of so many megabytes once a second, which is too long for any model."""
    parts, has_ended = urlsplit(url), threading.Event()
    body = json.dumps({"prompt": "a page " * int(megabytes * 1e6 / 7)})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def send() -> None:
        is_over = not megabytes
        while not is_over:
            connection = http.client.HTTPConnection(parts.netloc, timeout=60)
            connection.request("POST", "/v1/completions", body, headers)
            status = connection.getresponse().status
            connection.close()
            if status != 400:
                raise SystemExit(f"a prompt of {megabytes} MB was answered with {status}, not 400")
            is_over = has_ended.wait(1.0)

    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        try:
            yield
        finally:
            has_ended.set()
        sender.result()


def measure(
    model: str, num_processes: int, num_requests: int, rate: float, seconds: float, body_mb: float
) -> list[Scrape]:
    """Returns the scrapes of one server."""
    flags = [model, "--max-num-seqs", str(num_requests), "--api-server-count", str(num_processes)]
    with own_server(flags) as (url, key):
        command = [sys.executable, "-m", "quire", "bench", "serve", "--model", model, "--url", url, "--api-key", key]
        lengths = ["--input-len", "32", "--output-len", "400"]
        amount = [
            "--num-prompts",
            str(int(num_requests * max(1.0, seconds / 5))),
            "--max-concurrency",
            str(num_requests),
        ]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen([*command, *lengths, *amount], stdout=subprocess.DEVNULL, stderr=errors) as load,
        ):
            with sending_bodies(url, key, body_mb):
                scrapes = scrape_regularly(url, load, rate, num_requests * 9 // 10)
            if load.wait():
                errors.seek(0)
                raise SystemExit(errors.read().decode())
    return scrapes


def make_row(num_processes: int, scrapes: Sequence[Scrape]) -> str:
    """Returns a row of the table."""
    if not scrapes:
        return f"| {num_processes} | none found so many requests running |" + " |" * (HEAD.count("|") // 2 - 3)
    cells = [
        _describe([scrape.wire_ms for scrape in scrapes]),
        _describe([scrape.read_ms for scrape in scrapes]),
        _describe([1e3 * scrape.value("quire_engine_step_age_seconds") for scrape in scrapes]),
    ]
    return f"| {num_processes} | {len(scrapes)} | " + " | ".join(cells) + " |"


def _describe(times: Sequence[float]) -> str:
    ordered = sorted(times)
    p99 = ordered[int(0.99 * len(ordered))]
    return f"{statistics.median(ordered):.1f} | {p99:.1f} | {ordered[-1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20.0, help="scrapes per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load, about")
    parser.add_argument("--body-mb", type=float, default=0.0, help="of a body sent once a second besides")
    args = parser.parse_args()
    print(HEAD, flush=True)
    for num_processes in args.processes:
        scrapes = measure(args.model, num_processes, args.requests, args.rate, args.seconds, args.body_mb)
        print(make_row(num_processes, scrapes), flush=True)


if __name__ == "__main__":
    main()
