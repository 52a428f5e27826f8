"""How long `/metrics` takes over HTTP while the server is busy: `python -m benchmarks.scrapes`, with Quire importable.

A server of the demo model is asked by `quire bench serve` for 256 streams at once, and scraped 20 times a second over
an open connection meanwhile, with one API process and with several, whose numbers the first merges. Client, scraper
and server share the machine, and a scrape waits until the loop that answers it has a turn: this is what Prometheus
sees, not what a scrape costs (`benchmarks/metrics_cost.py` says that).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import httpx2

from quire.cli.bench.own_server import own_server


def scrape_regularly(url: str, load: subprocess.Popen[bytes], rate: float, num_running: int) -> list[float]:
    """Milliseconds of each scrape that found at least so many requests running, until the load ends."""
    times = []
    with httpx2.Client(base_url=url) as client:
        due = time.monotonic()
        while load.poll() is None:
            start = time.perf_counter()
            text = client.get("/metrics").raise_for_status().text
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            (line,) = (line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
            if float(line.rsplit(" ", 1)[1]) >= num_running:
                times.append(elapsed_ms)
            due = max(due + 1 / rate, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    return times


def measure(model: str, num_processes: int, num_requests: int, rate: float, seconds: float) -> list[float]:
    """Of one server."""
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
            times = scrape_regularly(url, load, rate, num_requests * 9 // 10)
            if load.wait():
                errors.seek(0)
                raise SystemExit(errors.read().decode())
    return times


def make_row(num_processes: int, times: Sequence[float]) -> str:
    """Of the table."""
    if not times:
        return f"| {num_processes} | none found so many requests running | | | |"
    ordered = sorted(times)
    worst = ordered[-1]
    p99 = ordered[int(0.99 * len(ordered))]
    return f"| {num_processes} | {len(ordered)} | {statistics.median(ordered):.1f} | {p99:.1f} | {worst:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20.0, help="scrapes per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load, about")
    args = parser.parse_args()
    print("| API processes | scrapes | median, ms | p99, ms | worst, ms |\n|--:|--:|--:|--:|--:|", flush=True)
    for num_processes in args.processes:
        times = measure(args.model, num_processes, args.requests, args.rate, args.seconds)
        print(make_row(num_processes, times), flush=True)


if __name__ == "__main__":
    main()
