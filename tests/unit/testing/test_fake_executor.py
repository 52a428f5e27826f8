"""The fake computes the right tokens through any block table, and refuses every breach of the worker's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import AdapterError
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_hardware import ProtocolError, VirtualClock
from quire.testing.fake_model import KV_IDENTITY, FakeModel, expected_output
from quire.wire.execution import (
    BlockIds,
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from quire.wire.lora import AdapterLoad
from tests.unit.testing.conftest import FULL, SLIDING, make_executor

PROMPT = [1, 2, 3, 4, 5, 6]


def new(req_id: str, blocks: list[int] | BlockIds, num_tokens: int, **fields: Any) -> SchedulerOutput:
    """A step with one new request."""
    block_ids = blocks if isinstance(blocks, tuple) else (blocks,)
    fields.setdefault("prompt_token_ids", PROMPT)
    fields.setdefault("num_computed_tokens", 0)
    data = NewRequestData(req_id=req_id, block_ids=block_ids, **fields)
    return SchedulerOutput([data], num_scheduled_tokens={req_id: num_tokens}, total_num_scheduled_tokens=num_tokens)


def cached(req_id: str, num_computed: int, num_tokens: int, blocks: BlockIds | None = None) -> SchedulerOutput:
    """A step that goes on with one request."""
    return SchedulerOutput(
        [],
        CachedRequestData([req_id], [blocks], [num_computed]),
        num_scheduled_tokens={req_id: num_tokens},
        total_num_scheduled_tokens=num_tokens,
    )


def merge(*steps: SchedulerOutput) -> SchedulerOutput:
    """One step that does what all of them do."""
    merged = SchedulerOutput()
    for step in steps:
        merged.scheduled_new_reqs = merged.scheduled_new_reqs + step.scheduled_new_reqs
        for name in ("req_ids", "new_block_ids", "num_computed_tokens"):
            mine, theirs = getattr(merged.scheduled_cached_reqs, name), getattr(step.scheduled_cached_reqs, name)
            setattr(merged.scheduled_cached_reqs, name, mine + theirs)
        merged.num_scheduled_tokens = merged.num_scheduled_tokens | step.num_scheduled_tokens
        merged.total_num_scheduled_tokens += step.total_num_scheduled_tokens
    return merged


def run(executor: FakeExecutor, step: SchedulerOutput) -> list[list[int]]:
    """The tokens sampled in one step."""
    output = executor.execute_model(step)
    if output is None:
        output = executor.sample_tokens(None)
    assert isinstance(output, ModelRunnerOutput)
    assert output.req_ids == list(step.num_scheduled_tokens)
    return output.sampled_token_ids


def oracle(num_tokens: int, model: FakeModel | None = None, **params: Any) -> list[int]:
    """The first tokens that must follow PROMPT."""
    return expected_output(model or FakeModel(), PROMPT, SamplingParams(max_tokens=num_tokens, **params), 64).token_ids


def decode(executor: FakeExecutor, num_computed: int, count: int) -> list[int]:
    """Go on with request "a", whose table already has the blocks it needs."""
    return [run(executor, cached("a", num_computed + i, 1))[0][0] for i in range(count)]


# -- right tokens ------------------------------------------------------------------------------------------------


def test_prompt_then_decode_gives_the_oracles_tokens(executor: FakeExecutor) -> None:
    first = run(executor, new("a", [7, 2, 5], 6))[0]
    assert first + decode(executor, 6, 5) == oracle(6)
    assert executor.num_computed_tokens == 11


def test_a_prompt_in_chunks_samples_only_at_its_end(executor: FakeExecutor) -> None:
    assert run(executor, new("a", [3], 3)) == [[]]
    assert run(executor, cached("a", 3, 3, ([1],))) == [oracle(1)]


@pytest.mark.parametrize("specs", [(SLIDING,), (FULL, SLIDING), (SLIDING, SLIDING, FULL)])
def test_groups_of_other_kinds(specs: tuple[Any, ...]) -> None:
    executor = make_executor(*specs)
    tables = tuple([1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(len(specs)))
    model = FakeModel(tuple(getattr(spec, "sliding_window", None) for spec in specs))
    first = run(executor, new("a", tables, 6))[0]
    assert first + decode(executor, 6, 5) == oracle(6, model)


def test_a_resumed_request_goes_on_where_it_stopped(executor: FakeExecutor) -> None:
    tokens = oracle(5)
    assert run(executor, new("a", [1, 2, 3], 9, output_token_ids=tokens[:3]))[0] == tokens[3:4]
    assert decode(executor, 9, 1) == tokens[4:]


def test_shared_blocks_are_read_and_an_own_one_is_written(executor: FakeExecutor) -> None:
    run(executor, new("a", [1, 2], 6))
    assert run(executor, new("b", [1, 3], 2, num_computed_tokens=4)) == [oracle(1)]


def test_a_block_filled_in_the_same_step_may_be_shared_by_a_later_request(executor: FakeExecutor) -> None:
    step = merge(new("a", [1, 2], 6), new("b", [1, 3], 2, num_computed_tokens=4))
    assert run(executor, step) == [oracle(1)] * 2


@pytest.mark.parametrize("blocks", [[2, 1], [4, 2]])
def test_a_wrong_block_changes_the_token(executor: FakeExecutor, blocks: list[int]) -> None:
    run(executor, new("a", [1, 2], 6))
    executor.execute_model(SchedulerOutput(finished_req_ids={"a"}))
    assert run(executor, new("b", blocks, 2, num_computed_tokens=4)) != [oracle(1)]


def test_a_stale_block_changes_the_token(executor: FakeExecutor) -> None:
    run(executor, new("a", [1, 2], 6, prompt_token_ids=[9] * 6))
    executor.execute_model(SchedulerOutput(finished_req_ids={"a"}))
    assert run(executor, new("b", [1, 2], 2, num_computed_tokens=4)) != [oracle(1)]


def test_identities_never_share_kv(executor: FakeExecutor) -> None:
    salted = SamplingParams(extra_args={KV_IDENTITY: "salt"})
    run(executor, new("a", [1, 2], 6, sampling_params=salted))
    assert run(executor, new("b", [1, 3], 2, num_computed_tokens=4)) != [oracle(1)]
    assert oracle(9, extra_args={KV_IDENTITY: "salt"}) != oracle(9)
    with_lora = run(executor, new("c", [4, 5], 6, lora_request=LoRARequest("x", 1)))
    assert with_lora != [oracle(1)]


def test_an_adapter_is_used_while_it_is_in_memory_and_no_longer(executor: FakeExecutor, tmp_path: Path) -> None:
    lora = LoRARequest("x", 1, str(tmp_path))
    files = tmp_path / "adapter_model.safetensors"
    files.write_bytes(b"first")
    first = executor.load_adapter(AdapterLoad(lora, 1)).result()
    files.write_bytes(b"second")
    second = executor.load_adapter(AdapterLoad(lora, 2)).result()
    assert first.digest != second.digest
    tokens = [
        run(executor, new(name, blocks, 6, lora_request=lora, lora_revision=revision))
        for name, blocks, revision in (("a", [1, 2], 1), ("b", [3, 4], 2))
    ]
    assert tokens[0] != tokens[1]
    with pytest.raises(ProtocolError, match="loaded twice"):
        executor.load_adapter(AdapterLoad(lora, 2))
    executor.drop_adapter((1, 1))
    with pytest.raises(ProtocolError, match="was not loaded"):
        executor.drop_adapter((1, 1))
    with pytest.raises(ProtocolError, match=r"request c runs with adapter \(1, 1\)"):
        run(executor, new("c", [5, 6], 6, lora_request=lora, lora_revision=1))
    with pytest.raises(AdapterError, match="adapter_config"):
        executor.measure_adapter(LoRARequest("y", 2, "/missing")).result()


def test_logprobs_come_when_asked_for(executor: FakeExecutor) -> None:
    executor.execute_model(merge(new("a", [1, 2], 6, sampling_params=SamplingParams(logprobs=2)), new("b", [3, 4], 6)))
    output = executor.sample_tokens(None)
    (rows,) = output.logprobs.values()
    (token,) = oracle(1)
    assert rows.logprob_token_ids == [[token, token, (token + 1) % 256]]
    assert rows.sampled_token_ranks == [1]
    assert rows.logprobs[0][0] == rows.logprobs[0][1] > rows.logprobs[0][2]


# -- the pipeline ------------------------------------------------------------------------------------------------


def test_steps_in_flight_finish_in_order() -> None:
    executor = make_executor(pipeline_depth=2)
    assert executor.max_concurrent_batches == 2
    executed = executor.execute_model(new("a", [1], 3), non_block=True)
    assert not executed.done()
    assert executed.result() is None
    first = executor.sample_tokens(None, non_block=True)
    executor.execute_model(cached("a", 3, 3, ([2],)), non_block=True)
    second = executor.sample_tokens(None, non_block=True)
    assert not first.done()
    with pytest.raises(ProtocolError, match="before the steps started earlier"):
        second.result()
    assert first.result().sampled_token_ids == [[]]
    assert second.result().sampled_token_ids == [oracle(1)]


def test_too_many_steps_in_flight() -> None:
    executor = make_executor()
    executor.execute_model(new("a", [1], 3), non_block=True)
    executor.sample_tokens(None, non_block=True)
    executor.execute_model(cached("a", 3, 1), non_block=True)
    with pytest.raises(ProtocolError, match="while 1 are under way"):
        executor.sample_tokens(None, non_block=True).result()


def test_a_step_takes_its_time_on_the_injected_clock() -> None:
    clock = VirtualClock()
    slow = type("Slow", (FakeExecutor,), {"step_time_s": 1.0, "token_time_s": 0.5, "clock": clock})
    executor = make_executor(executor_class=slow)
    run(executor, new("a", [1, 2], 6))
    assert clock.now == 4.0
    run(executor, SchedulerOutput(finished_req_ids={"a"}))
    assert clock.now == 4.0


# -- breaches of the protocol --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (cached("b", 0, 1), "b is scheduled as a running one but is not known"),
        (new("a", [5], 1), "a is new but known already"),
        (cached("a", 5, 1), "a has 6 computed tokens, not 5"),
        (cached("a", 6, 2), "token 8 is scheduled, it has only 7"),
        (cached("a", 6, 0), r"tokens \[6, 6\) are scheduled"),
        (new("b", [5], 5), r"token 5 has no block in \[5\]"),
        (new("b", [5, 0], 6), "null block would be written"),
        (new("b", [0, 5], 2, num_computed_tokens=4), "read through the null block"),
        (new("b", [5, 10], 6), "block 10 does not exist"),
        (new("b", [2, 3], 6), "block 2 would be written while 2 live tables hold it"),
        (new("b", [5, 5], 6), "block 5 would be written while 2 live tables hold it"),
        (new("b", ([5], [6]), 4), "has 2 tables, not 1"),
        (
            new("b", [5, 6, 7, 8, 9, 3, 4, 1, 2], 33, prompt_token_ids=[1] * 36),
            "33 tokens are scheduled; the budget is 32",
        ),
        (new("b", [5, 6], 6, num_computed_tokens=-1), r"tokens \[-1, 5\) are scheduled"),
        (SchedulerOutput(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1), "data is given for"),
        (merge(cached("a", 6, 1), cached("a", 6, 1)), "data is given for|computed tokens"),
    ],
)
def test_a_breach_of_the_protocol_is_an_error(executor: FakeExecutor, step: SchedulerOutput, message: str) -> None:
    run(executor, new("a", [1, 2], 6))
    with pytest.raises(ProtocolError, match=message):
        run(executor, step)


def test_totals_must_add_up(executor: FakeExecutor) -> None:
    step = new("a", [1, 2], 6)
    step.total_num_scheduled_tokens = 5
    with pytest.raises(ProtocolError, match="does not add up to 5"):
        run(executor, step)


def test_too_many_requests(executor: FakeExecutor) -> None:
    with pytest.raises(ProtocolError, match="5 requests are running; the limit is 4"):
        run(executor, merge(*(new(str(i), [i + 1], 1) for i in range(5))))


def test_the_context_length_is_a_limit(executor: FakeExecutor) -> None:
    executor.collective_rpc("update_max_model_len", args=(5,))
    with pytest.raises(ProtocolError, match="token 6 is scheduled, max_model_len is 5"):
        run(executor, new("a", [1, 2], 6))


def test_a_finished_or_preempted_request_is_forgotten(executor: FakeExecutor) -> None:
    run(executor, new("a", [1, 2], 6))
    run(executor, SchedulerOutput(preempted_req_ids={"a"}))
    with pytest.raises(ProtocolError, match="not known"):
        run(executor, cached("a", 6, 1))
    assert run(executor, new("a", [2, 1], 6)) == [oracle(1)]
    run(executor, SchedulerOutput(finished_req_ids={"a", "never ran"}, preempted_req_ids={"told before"}))
    assert run(executor, new("b", [2, 1], 6)) == [oracle(1)]


def test_execute_and_sample_alternate(executor: FakeExecutor) -> None:
    with pytest.raises(ProtocolError, match="without a step"):
        executor.sample_tokens(None)
    executor.execute_model(new("a", [1, 2], 6))
    with pytest.raises(ProtocolError, match="called twice"):
        executor.execute_model(cached("a", 6, 1))


def test_a_mask_decides_where_it_forbids_the_models_token(executor: FakeExecutor) -> None:
    executor.execute_model(new("a", [1, 2], 6))
    mask = np.zeros((1, 2), dtype=np.int32)
    mask[0, 1] = 1 << 5
    assert executor.sample_tokens(GrammarOutput(["a"], mask)).sampled_token_ids == [[37]]


def test_a_block_that_left_the_window_may_go_to_another_request() -> None:
    executor = make_executor(SLIDING)
    run(executor, new("a", ([1, 2, 3],), 6))
    decode(executor, 6, 2)
    with pytest.raises(ProtocolError, match="block 1 would be written while 2"):
        run(executor, new("early", ([1],), 4))


def test_window_blocks_are_released_when_no_later_token_sees_them() -> None:
    executor = make_executor(SLIDING)
    tokens = run(executor, new("a", ([1, 2, 3],), 6))[0] + decode(executor, 6, 3)
    # Token 9 sees tokens 4..9 only: block 1 (tokens 0..3) is free for others.
    step = merge(cached("a", 9, 1), new("b", ([1, 4],), 6))
    sampled = run(executor, step)
    model = FakeModel((6,))
    assert [*tokens, *sampled[0]] == oracle(5, model)
    assert sampled[1] == oracle(1, model)


def test_the_rest_of_the_interface(executor: FakeExecutor) -> None:
    assert executor.get_kv_cache_specs() == [{"layer.0": FULL.__class__(16, 1, 1)}]
    assert executor.determine_available_memory() == [1 << 20]
    assert executor.get_supported_tasks() == ("generate",)
    assert executor.take_draft_token_ids() is None
    executor.check_health()
    executor.execute_dummy_batch()
    executor.shutdown()
