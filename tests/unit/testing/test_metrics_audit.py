from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from quire.frontend.metrics.catalog.spec import KV_TRANSFER, LORA, SPEC_DECODE
from quire.frontend.metrics.collect.events import FinishedRequestStats, IterationStats
from quire.frontend.metrics.collect.facts import NO_DRAFTS, FrontendFacts
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit, read_exposition, watching
from quire.wire.engine_core import FinishReason
from quire.wire.stats import KVTransferStats, SchedulerStats, SpecDecodingStats

RIGHT = SpecDecodingStats(
    3,
    num_drafts=4,
    num_draft_tokens=10,
    num_accepted_tokens=5,
    num_accepted_tokens_per_pos=[3, 2, 0],
    num_rejected_tokens=4,
    num_cut_tokens=1,
    num_proposed_tokens=14,
    num_unused_tokens={"ended": 2, "cap": 1},
)
"""One token is in flight."""


def draft_books(stats: SpecDecodingStats, num_accepted: int = 5) -> PrometheusStatLogger:
    """Returns the metrics of an engine at rest that has verified drafts of one request."""
    ledger = RequestLedger(num_received=1, num_accepted=1, finished={"stop": 1})
    setup = MetricsSetup(model_name="m", conditions=frozenset({SPEC_DECODE}), num_spec_tokens=3)
    facts = FrontendFacts(time=1.0, ledger=ledger, num_live={}, core_counts={NO_DRAFTS: 0})
    metrics = PrometheusStatLogger(setup, lambda: facts)
    finished = FinishedRequestStats(
        request_id="a",
        finish_reason=FinishReason.STOP,
        e2e_latency=1.0,
        num_prompt_tokens=0,
        num_generation_tokens=0,
        max_tokens_param=None,
        queued_time=None,
        prefill_time=None,
        decode_time=None,
        inference_time=None,
        mean_time_per_output_token=0.0,
        num_cached_tokens=0,
        num_preemptions=0,
        is_corrupted=False,
        num_draft_tokens=10,
        num_accepted_draft_tokens=num_accepted,
    )
    step = SchedulerStats(num_free_blocks=1, spec_decoding_stats=stats)
    metrics.record(step, IterationStats(1.0, finished_requests=[finished]))
    return metrics


def test_books_of_drafts_that_add_up() -> None:
    metrics = draft_books(RIGHT)
    MetricsAudit().check_at_rest(metrics.snapshot())
    MetricsAudit().check_at_rest(read_exposition(metrics.exposition()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_rejected_tokens": 3}, "draft tokens, and accepted . rejected . cut: 10 is not 9"),
        ({"num_proposed_tokens": 12}, "10 draft tokens and 3 unused ones are more than the 12 proposed"),
        ({"num_accepted_tokens_per_pos": [3, 1, 0]}, "their sum over positions: 5 is not 4"),
        ({"num_accepted_tokens_per_pos": [2, 3, 0]}, "do not fall with the position"),
        ({"num_accepted_tokens_per_pos": [5, 0, 0]}, "more than 4 drafts were accepted in part"),
        ({"num_drafts": 3}, "3 drafts have 10 tokens"),
        ({"num_drafts": 11}, "11 drafts have 10 tokens"),
    ],
)
def test_broken_laws_of_drafts_are_found(change: dict[str, Any], words: str) -> None:
    metrics = draft_books(msgspec.structs.replace(RIGHT, **change))
    for snapshot in (metrics.snapshot(), read_exposition(metrics.exposition())):
        with pytest.raises(AssertionError, match=words):
            MetricsAudit().check(snapshot)


def test_drafts_of_requests_that_do_not_add_up_are_found_at_rest() -> None:
    metrics = draft_books(RIGHT, num_accepted=4)
    MetricsAudit().check(metrics.snapshot())
    with pytest.raises(AssertionError, match=r"quire_request_accepted_draft_tokens, and vllm:\w+: 4 is not 5"):
        MetricsAudit().check_at_rest(metrics.snapshot())


def test_an_engine_with_live_requests_is_not_at_rest() -> None:
    facts = FrontendFacts(time=1.0, ledger=RequestLedger(num_received=1, num_accepted=1), num_live={"running": 1})
    snapshot: MetricsSnapshot = PrometheusStatLogger(MetricsSetup(model_name="m"), lambda: facts).snapshot()
    MetricsAudit().check(snapshot)
    with pytest.raises(AssertionError, match="not at rest"):
        MetricsAudit().check_at_rest(snapshot)


TRANSFERS = KVTransferStats(
    num_loads_begun=2,
    num_loads={"partial": 1},
    num_loads_in_flight=1,
    num_read_records=5,
    num_accepted_records=3,
    num_rejected_records={"mac": 1, "io": 1},
    num_held_blocks={"loading": 2, "pinned": 4},
    num_saves_begun=4,
    num_waiting_saves={"pinned": 4},
)
BLOCKS = SchedulerStats(num_used_blocks=5, num_cached_blocks=1, num_free_blocks=9, num_held_blocks=4)


@pytest.mark.parametrize(
    ("blocks", "transfers", "words"),
    [
        ({}, {}, ""),
        ({}, {"num_read_records": 6}, "records read, and accepted . rejected: 6 is not 5"),
        ({}, {"num_rejected_records": {"mac": 1}}, "records read, and accepted . rejected: 5 is not 4"),
        ({}, {"num_accepted_records": 4}, "records read, and accepted . rejected: 5 is not 6"),
        ({"num_held_blocks": 0}, {}, "blocks of engine 0: 15 is not 19"),
        ({"num_used_blocks": 9}, {}, "blocks of engine 0: 23 is not 19"),
        ({"num_used_blocks": 2, "num_held_blocks": 7}, {}, "7 blocks are held by transfers, which have 6 references"),
        ({}, {"num_loads_in_flight": 0}, "loads begun, and ended . in flight: 2 is not 1"),
    ],
)
def test_broken_laws_of_transfers_are_found(blocks: dict[str, Any], transfers: dict[str, Any], words: str) -> None:
    facts = FrontendFacts(time=1.0, ledger=RequestLedger(), num_live={})
    metrics = PrometheusStatLogger(MetricsSetup(model_name="m", conditions=frozenset({KV_TRANSFER})), lambda: facts)
    audit = MetricsAudit()
    idle = SchedulerStats(num_free_blocks=BLOCKS.num_blocks)
    metrics.record(idle, None)
    audit.check(metrics.snapshot())
    broken = msgspec.structs.replace(BLOCKS, kv_transfer=msgspec.structs.replace(TRANSFERS, **transfers), **blocks)
    metrics.record(broken, None)
    if not words:
        audit.check(metrics.snapshot())
        audit.check(read_exposition(metrics.exposition()))
        return
    with pytest.raises(AssertionError, match=words):
        audit.check(metrics.snapshot())


def test_it_looks_while_the_block_runs_and_no_longer() -> None:
    looks = 0

    async def look() -> None:
        nonlocal looks
        while True:
            looks += 1
            await asyncio.sleep(0)

    async def run() -> None:
        async with watching(look()):
            for _ in range(5):
                await asyncio.sleep(0)
        seen = looks
        assert seen >= 5
        await asyncio.sleep(0)
        assert looks == seen

    asyncio.run(run())


def test_a_watcher_may_end_by_itself() -> None:
    async def run() -> None:
        async with watching(asyncio.sleep(0)):
            for _ in range(3):
                await asyncio.sleep(0)

    asyncio.run(run())


def test_what_it_finds_is_raised_after_the_block_and_whatever_the_block_raises() -> None:
    ended = []

    async def find() -> None:
        raise AssertionError("it is wrong")

    async def run(error: Exception | None) -> None:
        async with watching(find()):
            await asyncio.sleep(0)
            ended.append(error)
            if error is not None:
                raise error

    with pytest.raises(AssertionError, match="it is wrong"):
        asyncio.run(run(None))
    with pytest.raises(AssertionError, match="it is wrong") as found:
        asyncio.run(run(KeyError("lost")))
    assert isinstance(found.value.__context__, KeyError)
    assert len(ended) == 2


def test_a_block_that_fails_ends_the_watching() -> None:
    async def run() -> None:
        forever = asyncio.Event()
        with pytest.raises(KeyError):
            async with watching(_wait(forever)):
                raise KeyError
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def test_tokens_of_adapters_that_do_not_add_up_are_found() -> None:
    """They do not if a token is counted for two adapters."""
    logger = PrometheusStatLogger(
        MetricsSetup(model_name="m", conditions=frozenset({LORA})),
        lambda: FrontendFacts(time=1.0, ledger=RequestLedger(num_delivered_tokens=4), num_live={}),
    )
    stats = IterationStats(num_generation_tokens=4)
    stats.add_adapter_tokens("a", 0, 3)
    logger.record(None, stats)
    audit = MetricsAudit(one_clock=False)
    audit.check(logger.snapshot())
    found = logger.snapshot()
    found.find("quire_lora_generation_tokens").series[-1].value += 1
    with pytest.raises(AssertionError, match="generated tokens, and those of all adapters: 4 is not 5"):
        audit.check(found)
