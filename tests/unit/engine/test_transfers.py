"""Reports that come on other threads, and the alarm."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.transfers import TransferLink
from quire.errors import ConfigError
from quire.wire.kv_transfer import KVConnectorOutput, LoadResult, SaveResult, TransferAggregator


class Transferring:
    """The part of an executor that a link uses."""

    def send_transfers(self, orders: Any) -> None: ...

    def register_transfer_callback(self, callback: Any) -> None:
        self.report = callback


def make_link(woken: threading.Event) -> tuple[TransferLink, Transferring]:
    executor: Any = Transferring()
    return TransferLink(executor, woken.set), executor


def test_a_report_of_another_thread_ends_the_wait_and_wakes_the_loop() -> None:
    woken = threading.Event()
    link, executor = make_link(woken)
    assert not link.has_reports
    report = KVConnectorOutput(loads=[LoadResult(1, 2)])
    thread = threading.Thread(target=executor.report, args=(report,))
    thread.start()
    link.wait(60.0)
    thread.join()
    assert woken.is_set()
    assert link.has_reports
    assert link.take() == [report]
    assert link.take() == []
    link.close()


def test_the_alarm_wakes_the_loop_once() -> None:
    woken = threading.Event()
    link, _ = make_link(woken)
    link.set_alarm(3600.0)
    assert not woken.is_set()
    link.set_alarm(0.0)
    assert woken.wait(60.0)
    woken.clear()
    link.set_alarm(float("inf"))
    link.close()
    link.close()
    assert not woken.is_set()


def test_workers_that_cannot_transfer_are_refused() -> None:
    executor: Any = type("Plain", (Executor,), dict.fromkeys(Executor.__abstractmethods__))(EngineConfig())
    with pytest.raises(ConfigError, match="Plain cannot transfer blocks"):
        TransferLink(executor, lambda: None)


def test_a_transfer_has_ended_when_all_workers_have_reported_it() -> None:
    aggregator = TransferAggregator(3)
    first = aggregator.add(KVConnectorOutput([LoadResult(1, 5, "ok", 10, 1.0)], [SaveResult(2, 4)], {7: 1}, {"x": 1}))
    assert first == KVConnectorOutput(progress={7: 1}, info={"x": 1})
    assert not aggregator.add(KVConnectorOutput([LoadResult(1, 3, "partial", 6, 3.0, "mac")])).loads
    last = aggregator.add(KVConnectorOutput([LoadResult(1, 4, "cancelled", 8, 2.0)], [SaveResult(2, 4)]))
    assert last.loads == [LoadResult(1, 3, "partial", 24, 3.0, "mac")]
    assert last.saves == []
    assert aggregator.add(KVConnectorOutput(saves=[SaveResult(2, 1, "failed", 1, 0.5, "io")])).saves == [
        SaveResult(2, 1, "failed", 1, 0.5, "io")
    ]
