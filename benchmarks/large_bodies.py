"""Measures the time of `/health` while a client sends one large body after the other.

    python -m benchmarks.large_bodies [--only NAME ...] [--seconds 6]

The script starts `quire serve` on the loopback interface, and a client in a process of its own for each kind of body.
It requests `/health` over an open connection, each time 5 ms after the last answer, and prints the percentiles, also
of an idle server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks.bodies import LARGE_BODIES
from quire import envs
from quire.cli.bench.startup import own_server

PAUSE_S = 0.005


def _ask(connection: http.client.HTTPConnection) -> float:
    """Returns the milliseconds of one question."""
    start = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    return 1000 * (time.perf_counter() - start)


def _watch(address: tuple[str, int], seconds: float) -> list[float]:
    connection = http.client.HTTPConnection(*address)
    until = time.perf_counter() + seconds
    times = []
    while time.perf_counter() < until:
        times.append(_ask(connection))
        time.sleep(PAUSE_S)
    connection.close()
    return sorted(times)


def _send(address: tuple[str, int], name: str) -> None:
    """Sends a body for ever; prints status and seconds after each. Ends when its standard output is closed."""
    path, value = LARGE_BODIES[name]()
    body = json.dumps(value).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {envs.API_KEY.get()}"}
    while True:
        connection = http.client.HTTPConnection(*address)
        start = time.perf_counter()
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        print(answer.status, time.perf_counter() - start, len(body), flush=True)


def _row(name: str, times: list[float], rest: str) -> str:
    cuts = statistics.quantiles(times, n=100)
    figures = " | ".join(f"{value:.1f}" for value in (cuts[49], cuts[94], cuts[98], times[-1]))
    return f"| {name} | {figures} | {rest} |"


def _measure(address: tuple[str, int], name: str, seconds: float) -> str:
    host, port = address
    command = [sys.executable, "-m", "benchmarks.large_bodies", "--send", name, "--to", f"{host}:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        sender.stdout.readline()  # the first body
        times = _watch(address, seconds)
        sender.terminate()
        lines = [line.split() for line in sender.stdout]
    statuses = Counter(line[0] for line in lines)
    took = f"{statistics.median(float(line[1]) for line in lines):.2f} s" if lines else "longer"
    size = f"{int(lines[0][2]) / 1e6:.1f} MB" if lines else ""
    return _row(name, times, f"{size} | {took} | {', '.join(f'{n} x {s}' for s, n in statuses.items())}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=LARGE_BODIES, help="kinds of bodies; all by default")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each kind")
    parser.add_argument("--server-flags", default="", help="further flags of quire serve, in one word")
    parser.add_argument("--send", choices=LARGE_BODIES, help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    args: Any = parser.parse_args()
    if args.send:
        host, _, port = args.to.partition(":")
        _send((host, int(port)), args.send)
    with own_server(args.server_flags.split()) as (url, key):
        parts = urlsplit(url)
        address = (str(parts.hostname), int(parts.port or 80))
        os.environ[envs.API_KEY.name] = key  # for the processes that send
        print("| body | p50, ms | p95 | p99 | worst | size | one takes | answers |\n|---|--:|--:|--:|--:|--:|--:|---|")
        print(_row("none", _watch(address, args.seconds), "| | "), flush=True)
        for name in args.only or LARGE_BODIES:
            print(_measure(address, name, args.seconds), flush=True)


if __name__ == "__main__":
    main()
