"""Reports of workers that come beside the steps: those of transfers are joined before the engine gets them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.executor.late_answers import LateAnswers
from quire.wire.kv_transfer import KVConnectorOutput, LoadResult, SaveResult
from quire.wire.worker_calls import (
    TransferReport,
    WorkerReply,
    decode_late,
    encode_late_answer,
    encode_transfer_report,
)


@pytest.fixture
def late() -> Iterator[LateAnswers]:
    answers = LateAnswers(2)
    yield answers
    answers.close()


def test_a_report_and_an_answer_are_told_apart() -> None:
    output = KVConnectorOutput([LoadResult(1, 3, "partial", 9, 0.5, "mac")], [], {2: 1}, {"fingerprint": b"\x00f"})
    assert decode_late(encode_transfer_report(1, output)) == TransferReport(1, output)
    answer = decode_late(encode_late_answer(1, WorkerReply(7), 40))
    assert not isinstance(answer, TransferReport)
    assert answer.rank == 1


def test_the_engine_gets_what_all_workers_have_reported(late: LateAnswers) -> None:
    """An answer on the same socket is not held up, nor lost."""
    reports: list[KVConnectorOutput] = []
    late.transfers.register_callback(reports.append)
    size = late.expect(7, "measure_adapter", sum)
    done = KVConnectorOutput([LoadResult(1, 5)], [SaveResult(2, 4)])
    late.theirs.send(encode_transfer_report(0, done))
    late.theirs.send(encode_late_answer(0, WorkerReply(7), 40))
    late.take()
    assert reports == []
    late.theirs.send(encode_transfer_report(1, KVConnectorOutput([LoadResult(1, 3, "partial", reason="mac")])))
    late.theirs.send(encode_late_answer(1, WorkerReply(7), 2))
    late.take()
    assert size.result(0) == 42
    assert reports == [KVConnectorOutput([LoadResult(1, 3, "partial", reason="mac")], rank=1)]


def test_namespaces_that_come_before_the_engine_listens_are_kept(late: LateAnswers) -> None:
    """Workers know theirs when the cache is allocated; the scheduler is made later."""
    for rank in (1, 0):
        late.theirs.send(encode_transfer_report(rank, KVConnectorOutput(info={"fingerprint": bytes([rank])})))
    late.take()
    reports: list[KVConnectorOutput] = []
    late.transfers.register_callback(reports.append)
    assert [(report.rank, report.info) for report in reports] == [
        (1, {"fingerprint": b"\x01"}),
        (0, {"fingerprint": b"\x00"}),
    ]
    late.theirs.send(encode_transfer_report(0, KVConnectorOutput(info={"x": 1})))
    late.take()
    assert reports[2:] == [KVConnectorOutput(info={"x": 1})], "what was kept is passed on once"
