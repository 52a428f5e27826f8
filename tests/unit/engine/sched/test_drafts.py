"""Tests each rule about a proposal, and the books (laws L1 to L3 of speculation)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.drafts import DraftFitter
from quire.engine.structured_output.request import GrammarVerdict, StructuredOutputRequest
from quire.structured_outputs import StructuredOutputsParams
from quire.wire.execution import DraftTokenIds, ModelRunnerOutput
from quire.wire.stats import SpecDecodingStats

from ..harness import Engine, digest, make_request, make_scheduler


def running(num_prompt: int = 4, **fields: Any) -> Request:
    """A request whose last token is not computed yet."""
    request = make_request("a", num_prompt, **fields)
    request.append_output_token_ids(7)
    request.start(request.num_tokens - 1)
    return request


def fit(fitter: DraftFitter, request: Request, token_ids: list[int], **more: Any) -> list[int]:
    fitter.fit(DraftTokenIds(["a"], [token_ids], **more), {"a": request}, 1)
    return request.spec_token_ids


def unused(fitter: DraftFitter) -> dict[str, int]:
    stats = fitter.take_stats()
    return {} if stats is None else stats.num_unused_tokens


def test_what_fits_is_kept() -> None:
    fitter = DraftFitter(3, 100)
    assert fit(fitter, running(), [1, 2, 3], seconds=0.5) == [1, 2, 3]
    stats = fitter.take_stats()
    assert stats is not None
    assert (stats.num_proposed_tokens, stats.num_unused_tokens, stats.draft_seconds) == (3, {}, 0.5)
    assert stats.num_accepted_tokens_per_pos == [0, 0, 0], "every position is there from the start"
    assert fitter.take_stats() is None


def test_unknown_and_waiting_requests_have_ended() -> None:
    fitter = DraftFitter(3, 100)
    fitter.fit(DraftTokenIds(["b"], [[1, 2]]), {}, 1)
    assert fit(fitter, make_request("a"), [1]) == []
    assert unused(fitter) == {"ended": 3}


@pytest.mark.parametrize("num_computed", [2, 5])
def test_a_request_without_a_last_token_cannot_use_drafts(num_computed: int) -> None:
    """Its prompt is not computed, or its next token is in flight."""
    fitter, request = DraftFitter(3, 100), running()
    request.num_computed_tokens = num_computed
    assert fit(fitter, request, [1, 2]) == []
    assert unused(fitter) == {"invalid": 2}


def test_ids_outside_the_vocabulary_cut() -> None:
    fitter = DraftFitter(4, 100, vocab_size=10)
    assert fit(fitter, running(), [9, 10, 1]) == [9]
    assert fit(fitter, running(), [1, 2, 3, -1]) == [1, 2, 3]
    assert unused(fitter) == {"invalid": 3}


def test_the_later_of_two_proposals_counts() -> None:
    fitter, request = DraftFitter(3, 100), running()
    fit(fitter, request, [1, 2])
    assert fit(fitter, request, [3]) == [3]
    assert unused(fitter) == {"invalid": 2}


@pytest.mark.parametrize(
    ("drafts", "kept", "num_jumped"),
    [([8, 9, 1, 2], [1, 2], 2), ([8, 9], [], 2), ([8], [], 1), ([8, 1, 2], [], 3), ([1], [], 1)],
)
def test_forced_tokens_are_stripped(drafts: list[int], kept: list[int], num_jumped: int) -> None:
    fitter, request = DraftFitter(4, 100), running()
    request.append_output_token_ids([8, 9])
    request.unsent_token_ids = [8, 9]
    assert fit(fitter, request, drafts) == kept
    assert unused(fitter) == {"jumped": num_jumped}


def test_room_ends_one_token_before_the_context_and_before_max_tokens() -> None:
    fitter = DraftFitter(9, 10)
    assert fit(fitter, running(6), [1, 2, 3, 4]) == [1, 2], "8 and 9 and, without a draft, 10"
    assert fit(fitter, running(4, max_tokens=3), [1, 2, 3]) == [1], "one output is there, one comes without a draft"
    assert fit(fitter, running(4, max_tokens=1), [1]) == []
    assert unused(fitter) == {"context": 5}


class OnlySmall(StructuredOutputRequest):
    """A grammar that allows tokens below 5."""

    def count_valid(self, token_ids: list[int]) -> int:
        return next((i for i, token_id in enumerate(token_ids) if token_id >= 5), len(token_ids))

    def check_start(self) -> GrammarVerdict:
        return GrammarVerdict.GOES_ON


def test_the_grammar_cuts() -> None:
    fitter, request = DraftFitter(4, 100), running()
    request.structured_output = OnlySmall(StructuredOutputsParams(json_object=True))
    assert fit(fitter, request, [1, 4, 5, 1]) == [1, 4]
    assert unused(fitter) == {"grammar": 2}


def test_caps() -> None:
    fitter = DraftFitter(4, 100, caps=[(1, 2, 9), (4, 8, 1), (16, 16, 0)])
    lengths = []
    for num_running in (1, 2, 3, 4, 8, 9, 15, 16, 99):
        request = running()
        fitter.fit(DraftTokenIds(["a"], [[1, 2, 3, 4, 5]]), {"a": request}, num_running)
        lengths.append(len(request.spec_token_ids))
    assert lengths == [4, 4, 4, 1, 1, 1, 1, 0, 0], "gaps and the tail carry the last; K is the most"
    assert fit(fitter, running(extra_args={"num_speculative_tokens": 2}), [1, 2, 3]) == [1, 2]
    assert unused(fitter) == {"cap": 45 - 16 + 1}


def test_a_failed_drafter_gets_no_more_blocks() -> None:
    fitter = DraftFitter.from_config(
        EngineArgs("demo", spec_model="demo-draft", spec_tokens=4).create_engine_config(), 100
    )
    assert fitter is not None
    assert fitter.num_lookahead_tokens == 4
    fitter.fit(DraftTokenIds([], [], is_enabled=False), {}, 1)
    assert fitter.num_lookahead_tokens == 0
    for _ in range(2):
        fitter.drop(1, "ended")
        stats = fitter.take_stats()
        assert stats is not None
        assert not stats.is_enabled


def test_a_core_that_must_not_speculate_says_so_in_every_step() -> None:
    config = EngineArgs("demo", spec_model="demo-draft", spec_tokens=4).create_engine_config()
    off = dataclasses.replace(config, speculative_config=config.speculative_config.without_drafts())
    assert off.speculative_config.drafting is None
    fitter = DraftFitter.from_config(off, 100)
    assert fitter is not None
    assert fitter.num_lookahead_tokens == 0
    for _ in range(2):
        assert fitter.take_stats() == SpecDecodingStats(4, num_accepted_tokens_per_pos=[0] * 4, is_enabled=False)


# -- in the scheduler --------------------------------------------------------------------------------------------


class Audit:
    """Sums of all statistics of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sums = SpecDecodingStats(0)
        self.unused: dict[str, int] = {}

    def step(self) -> None:
        output = self.engine.schedule()
        self.take(self.engine.update(output))

    def take(self, batches: Any) -> None:
        for batch in batches.values():
            stats = batch.scheduler_stats and batch.scheduler_stats.spec_decoding_stats
            if stats:
                for name in ("num_draft_tokens", "num_accepted_tokens", "num_rejected_tokens", "num_cut_tokens"):
                    setattr(self.sums, name, getattr(self.sums, name) + getattr(stats, name))
                self.sums.num_proposed_tokens += stats.num_proposed_tokens
                for reason, count in stats.num_unused_tokens.items():
                    self.unused[reason] = self.unused.get(reason, 0) + count

    def check(self) -> None:
        """L1, and L2 with nothing in flight."""
        sums = self.sums
        assert sums.num_draft_tokens == sums.num_accepted_tokens + sums.num_rejected_tokens + sums.num_cut_tokens
        assert sums.num_proposed_tokens == sums.num_draft_tokens + sum(self.unused.values())


def draft(engine: Engine, request_id: str, token_ids: list[int], **more: Any) -> None:
    engine.scheduler.update_draft_token_ids(DraftTokenIds([request_id], [token_ids], **more))


def right(engine: Engine, request_id: str, count: int) -> list[int]:
    tokens = list(engine.scheduler.requests[request_id].all_token_ids)
    for _ in range(count):
        tokens.append(digest(request_id, tokens))
    return tokens[-count:]


def test_tokens_behind_a_stop_are_cut_and_not_accepted() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4), digest)
    request = make_request("a", 4)
    engine.add(request)
    audit = Audit(engine)
    audit.step()
    drafts = right(engine, "a", 4)
    request.sampling_params.stop_token_ids = [drafts[1]]
    draft(engine, "a", drafts, predicted_req_ids=["a"])
    audit.step()
    last = engine.last("a")
    assert last.new_token_ids == drafts[:2]
    metrics = last.spec_decode_metrics
    assert metrics is not None
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens, metrics.from_prediction) == (4, 2, True)
    assert (audit.sums.num_accepted_tokens, audit.sums.num_cut_tokens, audit.sums.num_rejected_tokens) == (2, 2, 0)
    audit.check()


def test_an_abort_in_flight_is_in_the_books() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4), digest)
    engine.add(make_request("a", 4), make_request("b", 4), make_request("c", 4))
    audit = Audit(engine)
    audit.step()
    draft(engine, "a", [1, 2])
    draft(engine, "b", [1, 2, 3])
    output = engine.schedule()
    result = engine.worker.execute(output)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ERROR)
    audit.take(engine.update(output, result))
    draft(engine, "c", [1])
    engine.scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    audit.step()
    assert audit.unused == {"aborted": 3, "ended": 3}
    audit.check()


def test_abandoned_and_preempted_drafts_are_in_the_books() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4), digest)
    engine.add(make_request("a", 4), make_request("b", 4))
    audit = Audit(engine)
    audit.step()
    draft(engine, "a", [1, 2])
    engine.schedule()
    draft(engine, "a", [1])  # its token is in flight
    engine.scheduler.abandon_steps()
    engine.worker.tokens.clear()
    audit.step()
    draft(engine, "b", [1, 2, 3])
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    audit.step()
    assert audit.unused == {"abandoned": 2, "invalid": 1, "preempted": 3}
    audit.check()


def test_waiting_prompts_come_before_drafts() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4, max_num_batched_tokens=8), digest)
    engine.add(make_request("a", 4))
    audit = Audit(engine)
    audit.step()
    draft(engine, "a", [1, 2, 3, 4])
    engine.add(make_request("b", 5))
    output = engine.schedule()
    assert output.num_scheduled_tokens == {"a": 3, "b": 5}
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2]}
    audit.take(engine.update(output))
    assert audit.unused == {"budget": 2}
    audit.check()


@pytest.mark.parametrize("num_lookahead_tokens", [0, 4])
def test_drafts_take_no_block_that_a_running_request_may_need(num_lookahead_tokens: int) -> None:
    """Blocks of 4. Both hold 1 block of 5 tokens' room: with 2 blocks free none is left for drafts, not even to look
    ahead."""
    engine = Engine(make_scheduler(5, num_spec_tokens=4, num_lookahead_tokens=num_lookahead_tokens), digest)
    engine.add(make_request("a", 2, max_tokens=6), make_request("b", 2, max_tokens=6))
    audit = Audit(engine)
    audit.step()
    draft(engine, "a", [1, 2, 3, 4])
    output = engine.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [1]}, "the last block has room for one"
    audit.take(engine.update(output))
    while engine.scheduler.has_unfinished_requests():
        for request_id in engine.scheduler.requests:
            draft(engine, request_id, [1, 2])
        output = engine.schedule()
        assert not output.preempted_req_ids, "without drafts all would fit"
        audit.take(engine.update(output))
    assert audit.unused["blocks"] >= 3


def test_a_drafter_gets_blocks_ahead_from_the_first_step() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4, num_lookahead_tokens=4), digest)
    engine.add(make_request("a", 4, max_tokens=9))
    output = engine.step()
    assert len(output.scheduled_new_reqs[0].block_ids[0]) == 2
    draft(engine, "a", [1, 2, 3, 4])
    output = engine.step()
    assert [len(ids[0]) for ids in output.scheduled_cached_reqs.new_block_ids if ids] == [2], "13 tokens"
    engine.run()


@pytest.mark.parametrize("num_matched", [0, 1, 3, 4])
@pytest.mark.parametrize("ends", ["finished", "aborted", "preempted"])
def test_a_follow_up_finds_the_prefix_of_accepted_tokens(num_matched: int, ends: str) -> None:
    """And no more than without speculation: the last token of a request was never computed."""
    engine = Engine(make_scheduler(num_spec_tokens=4, enable_caching=True), digest)
    request = make_request("a", 6, max_tokens=50)
    engine.add(request)
    engine.step()
    drafts = right(engine, "a", num_matched) if num_matched else []
    if ends == "finished":  # the last draft that matches ends it
        request.sampling_params.stop_token_ids = [drafts[-1]] if drafts else [right(engine, "a", 1)[0]]
    draft(engine, "a", drafts + [1] * (4 - num_matched))
    engine.step()
    tokens = list(request.all_token_ids)
    if ends == "aborted":
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    elif ends == "preempted":
        engine.scheduler._preempt(engine.scheduler.running.pop(), 0.0)
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert request.is_finished
    follow_up = make_request("b", [*tokens, 1])
    _, num_hits = engine.scheduler.kv_cache_manager.get_computed_blocks(follow_up)
    assert num_hits == (len(tokens) - 1) // 4 * 4


def test_drafts_wait_for_a_token_in_flight() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=2), digest)
    engine.add(make_request("a", 4))
    engine.step()
    draft(engine, "a", [1, 2])
    first = engine.schedule()
    assert first.num_scheduled_tokens == {"a": 3}
    assert engine.schedule().num_scheduled_tokens == {}
    result = engine.worker.execute(first)
    engine.update(first, result)


def test_the_worker_hears_of_predictions_and_salts_where_there_is_a_drafter() -> None:
    for num_spec_tokens, expected in ((2, ([5, 6], "s")), (0, ([], None))):
        engine = Engine(make_scheduler(num_spec_tokens=num_spec_tokens), digest)
        request = make_request("a", 4, cache_salt="s")
        request.origin.prediction_token_ids = [5, 6]
        engine.add(request)
        (new,) = engine.step().scheduled_new_reqs
        assert (new.prediction_token_ids, new.cache_salt) == expected


def test_a_request_goes_back_to_its_last_certain_token() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=2), digest)
    request = make_request("a", 4)
    engine.add(request)
    engine.step()
    draft(engine, "a", [1, 2])
    output = engine.schedule()
    engine.update(output, ModelRunnerOutput(["a"], [[9]]))
    assert (request.num_tokens, request.num_computed_tokens) == (6, 5)
