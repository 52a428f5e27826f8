"""A real server of the demo model under load, scraped by a real Prometheus with the rules of deploy/.

`scripts/test -m prometheus` runs these tests. The programs are those that TESTS_PROMETHEUS and
TESTS_PROMTOOL name, or the system's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.process.serving import ServerProcess, serving

from .deploy import TARGET_LABELS, rules
from .load import load_on
from .server import Prometheus, prometheus

NUM_SEATS = 6
FLAGS = (
    "--max-num-seqs",
    str(NUM_SEATS),
    "--max-num-queued-reqs",
    "4",
    "--num-gpu-blocks-override",  # too few for as many answers as there are seats
    "100",
    "--max-model-len",
    "1024",
    "--kv-cache-metrics",
    "--kv-cache-metrics-sample",
    "1",
)
DEAD_TARGET = "127.0.0.1:1"
"""Nothing can listen there without being root: a server that is down."""

SIGNS_OF_LOAD = (
    "sum(vllm:num_preemptions_total) > 0",
    "sum(quire_preemption_recomputed_tokens_total) > 0",
    "sum(vllm:prefix_cache_hits_total) > 0",
    'sum(quire_requests_rejected_total{reason="max_num_queued_reqs"}) > 0',
    'sum(quire_requests_rejected_total{reason="prompt_too_long"}) > 0',
    'sum(quire_requests_finished_total{reason="abort"}) > 0',
    'sum(quire_requests_finished_total{reason="length"}) > 10',
    "sum(vllm:kv_block_lifetime_seconds_count) > 0",
    "sum(vllm:kv_block_reuse_gap_seconds_count) > 0",
    "sum(increase(vllm:generation_tokens_total[5m])) > 0",
)
"""Values that Prometheus must have scraped before the load ends."""


def find_program(name: str) -> str:
    """Its path; without one, the test is skipped."""
    variable = f"TESTS_{name.upper()}"
    found = os.environ.get(variable) or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: apt install prometheus, or name one with {variable}")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return find_program("promtool")


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Started only where there is a Prometheus to look at it."""
    find_program("prometheus")
    with serving(*FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def scraped(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen a load from its beginning to its end."""
    address = server.url.removeprefix("http://")
    directory = tmp_path_factory.mktemp("prometheus")
    with prometheus(find_program("prometheus"), directory, [address, DEAD_TARGET], TARGET_LABELS) as running:
        running.wait_for(f'up{{instance="{address}"}} == 1')
        with load_on(server.url, at_once=2 * NUM_SEATS):
            for sign in SIGNS_OF_LOAD:
                running.wait_for(sign)
        for name in [rule["record"] for rule in rules() if "record" in rule]:
            running.wait_for(f"{name} == {name}")  # recorded, and a number, which NaN is not
        running.wait_for("sum(quire_requests_live) + sum(quire_requests_in_admission) == 0")
        running.wait_for("sum(vllm:num_requests_running) + sum(vllm:num_requests_waiting) == 0")
        yield running
