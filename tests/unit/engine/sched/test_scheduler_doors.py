"""Where later parts plug in: draft tokens and structured output."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import AdmissionGate
from quire.engine.structured_output.request import StructuredOutputRequest
from quire.structured_outputs import StructuredOutputsParams
from quire.wire.execution import DraftTokenIds, GrammarOutput, SchedulerOutput

from ..harness import Engine, digest, make_request, make_scheduler


class Grammars(AdmissionGate):
    """Some requests are not ready yet."""

    def __init__(self, *pending: str) -> None:
        self.pending = set(pending)

    def is_ready(self, request: Request) -> bool:
        return request.request_id not in self.pending

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        return GrammarOutput([request.request_id for request in requests], None)


class Anything:
    """A grammar that allows all."""

    def is_complete(self) -> bool:
        return False


# -- structured output -----------------------------------------------------------------------------------------


def test_who_is_not_ready_is_passed_over_and_counted() -> None:
    grammars = Grammars("a", "c")
    engine = Engine(make_scheduler(structured_output_manager=grammars))
    engine.add(*(make_request(name, 4) for name in "abcd"))
    assert list(engine.step().num_scheduled_tokens) == ["b", "d"]
    stats = engine.scheduler.make_stats()
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (2, 0, 2)
    assert engine.scheduler.get_request_counts() == (2, 2)


def test_who_becomes_ready_is_next_in_the_old_order() -> None:
    grammars = Grammars("a", "b", "c")
    engine = Engine(make_scheduler(structured_output_manager=grammars, max_num_seqs=3))
    engine.add(*(make_request(name, 4) for name in "abcd"))
    engine.step()
    engine.add(make_request("e", 4))
    grammars.pending = {"b"}
    assert list(engine.step().num_scheduled_tokens) == ["d", "a", "c"], "before e, which came later"


def test_who_is_not_ready_can_be_aborted() -> None:
    engine = Engine(make_scheduler(structured_output_manager=Grammars("a")))
    engine.add(make_request("a", 4))
    engine.step()
    assert engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == [("a", 0)]
    engine.run()
    assert len(engine.scheduler.waiting) == 0


def test_masks_come_from_the_manager() -> None:
    scheduler = make_scheduler(structured_output_manager=Grammars())
    request = make_request("a", 4)
    request.structured_output = StructuredOutputRequest(StructuredOutputsParams(regex="a*"))
    request.structured_output.compiling.set_result(Anything())
    scheduler.add_request(request)
    mask = scheduler.get_grammar_bitmask(scheduler.schedule())
    assert mask is not None
    assert mask.structured_output_request_ids == ["a"]
    scheduler = make_scheduler()
    assert scheduler.get_grammar_bitmask(scheduler.schedule()) is None


# -- drafts ----------------------------------------------------------------------------------------------------


def draft(engine: Engine, request_id: str, token_ids: list[int]) -> None:
    engine.scheduler.update_draft_token_ids(DraftTokenIds([request_id], [token_ids]))


def guess(engine: Engine, request_id: str, num_right: int, num_wrong: int) -> list[int]:
    """Returns the model's next token, then a wrong one."""
    tokens = list(engine.scheduler.requests[request_id].all_token_ids)
    for _ in range(num_right):
        tokens.append(digest(request_id, tokens))
    return tokens[len(tokens) - num_right :] + [-1] * num_wrong if num_right else [-1] * num_wrong


def test_drafts_change_how_many_steps_it_takes_and_nothing_else() -> None:
    plain = Engine(make_scheduler(), digest)
    plain.add(make_request("a", 4, max_tokens=20))
    plain.run()
    engine = Engine(make_scheduler(num_spec_tokens=3), digest)
    engine.add(make_request("a", 4, max_tokens=20))
    engine.step()
    num_steps = 1
    while engine.scheduler.has_unfinished_requests():
        drafts = guess(engine, "a", num_steps % 4, 3 - num_steps % 4)
        draft(engine, "a", drafts)
        output = engine.step()
        assert output.scheduled_spec_decode_tokens == {"a": drafts}
        assert output.num_scheduled_tokens == {"a": 4}
        num_steps += 1
    assert engine.tokens("a") == plain.tokens("a")
    assert num_steps == 8, "1, then 2, 3, 4, 1, 2, 3 and 4 tokens"


def test_rejected_drafts_are_taken_back() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=3), digest)
    request = make_request("a", 4)
    engine.add(request)
    engine.step()
    draft(engine, "a", guess(engine, "a", 1, 2))
    engine.step()
    assert len(engine.outputs["a"][1].new_token_ids) == 2
    assert (request.num_tokens, request.num_computed_tokens) == (7, 6)
    assert request.spec_token_ids == []


def test_drafts_are_counted() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=3), digest)
    engine.add(make_request("a", 4, max_tokens=40), make_request("b", 4, max_tokens=40))
    engine.step()
    draft(engine, "a", guess(engine, "a", 2, 1))
    draft(engine, "b", guess(engine, "b", 0, 2))
    stats = engine.update(engine.schedule())[0].scheduler_stats
    assert stats is not None
    spec = stats.spec_decoding_stats
    assert spec is not None
    assert (spec.num_spec_tokens, spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens) == (3, 2, 5, 2)
    assert spec.num_accepted_tokens_per_pos == [1, 1, 0]
    stats = engine.update(engine.schedule())[0].scheduler_stats
    assert stats is not None
    assert stats.spec_decoding_stats is None


def test_drafts_that_do_not_fit_the_budget_are_cut() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4, max_num_scheduled_tokens=4), digest)
    engine.add(make_request("a", 4))
    engine.step()
    draft(engine, "a", [-1, -2, -3, -4])
    output = engine.step()
    assert output.scheduled_spec_decode_tokens == {"a": [-1, -2, -3]}
    assert output.num_scheduled_tokens == {"a": 4}


def test_drafts_are_cut_even_where_prompts_may_not_be() -> None:
    engine = Engine(
        make_scheduler(num_spec_tokens=3, max_num_scheduled_tokens=6, max_model_len=6, enable_chunked_prefill=False),
        lambda request_id, tokens: 0,
    )
    engine.add(make_request("a", 2, max_tokens=5), make_request("b", 2, max_tokens=5))
    engine.step()
    draft(engine, "a", [0, 0, 0])
    draft(engine, "b", [0, 0, 0])
    assert engine.step().num_scheduled_tokens == {"a": 3, "b": 3}


def test_drafts_do_not_reach_beyond_the_context() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=4, max_model_len=8), digest)
    engine.add(make_request("a", 4))
    engine.step()
    draft(engine, "a", [-1, -2, -3, -4])
    assert engine.scheduler.requests["a"].spec_token_ids == [-1, -2]
    engine.run()
    assert len(engine.tokens("a")) == 4


def test_drafts_for_requests_that_cannot_use_them_are_ignored() -> None:
    engine = Engine(make_scheduler(num_spec_tokens=2, max_num_batched_tokens=8, max_num_seqs=1), digest)
    engine.add(make_request("a", 12), make_request("b", 4))
    engine.step()
    for request_id in ("a", "b", "nobody"):
        draft(engine, request_id, [1, 2])
    assert all(not request.spec_token_ids for request in engine.scheduler.requests.values())


def test_a_preempted_request_loses_its_drafts_even_those_of_this_step() -> None:
    engine = Engine(make_scheduler(num_blocks=5, num_spec_tokens=1, scheduling_policy="priority"), digest)
    engine.add(make_request("low", 5, priority=9))
    engine.step()  # two of four blocks
    engine.add(make_request("high", 6, priority=1))
    engine.step()
    draft(engine, "low", [-1])
    draft(engine, "high", [-1])
    for _ in range(3):
        output = engine.step()
        if output.preempted_req_ids:
            break
    assert output.preempted_req_ids == {"low"}
    assert "low" not in output.scheduled_spec_decode_tokens
    assert engine.scheduler.requests["low"].spec_token_ids == []
    assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
