"""The runner against a dense model without cache: under a random scheduler, and feature by feature."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.sampling_params import SamplingParams
from quire.wire.execution import GrammarOutput, SchedulerOutput

from .toy import (
    VOCAB,
    RandomScheduler,
    ToyRequest,
    cached_request,
    dense_logits,
    make_runner,
    new_request,
    run_step,
)

GREEDY = SamplingParams(temperature=0)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


@pytest.mark.parametrize("seed", range(6))
def test_every_token_equals_the_dense_model_whatever_the_scheduler_does(seed: int) -> None:
    """Greedy tokens and both kinds of logprobs, over chunks, skipped steps, preemption and re-used blocks."""
    runner, scheduler, rng = make_runner(), RandomScheduler(seed), random.Random(seed)
    requests = {}
    for i in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 20, 40]))]
        params = SamplingParams(
            temperature=0, logprobs=rng.choice([None, 3]), prompt_logprobs=rng.choice([None, 0, 2]), max_tokens=12
        )
        requests[f"r{i}"] = ToyRequest(f"r{i}", prompt, params)
    scheduler.waiting = list(requests.values())
    prompt_logprobs, logprobs, num_done = {}, {req_id: [] for req_id in requests}, 0
    while num_done < len(requests):
        scheduled = scheduler.schedule()
        output = run_step(runner, scheduled)
        for req_id, tensors in output.prompt_logprobs.items():
            assert req_id not in prompt_logprobs, "handed over twice"
            assert requests[req_id].outputs == []
            prompt_logprobs[req_id] = tensors
        for req_id, lists in output.logprobs.items():
            logprobs[req_id].append(lists)
        num_done += len(scheduler.update(scheduled, output, max_tokens=12))
    assert scheduler.num_preemptions > 5
    assert runner.batch.num_reqs <= len(scheduler.finished_ids)
    for req_id, request in requests.items():
        reference = log_softmax(dense_logits(runner.model, request.tokens).numpy())
        first = len(request.prompt) - 1
        assert reference[first:-1].argmax(-1).tolist() == request.outputs
        assert len(logprobs[req_id]) == (12 if request.params.logprobs is not None else 0)
        for position, lists in enumerate(logprobs[req_id], start=first):
            np.testing.assert_allclose(lists.logprobs[0], reference[position][lists.logprob_token_ids[0]], atol=2e-5)
        assert (req_id in prompt_logprobs) == (request.params.prompt_logprobs is not None)
        if req_id in prompt_logprobs:
            rows = prompt_logprobs[req_id]
            assert rows.logprobs.shape == (first, 1 + request.params.prompt_logprobs)
            assert rows.logprob_token_ids[:, 0].tolist() == request.prompt[1:]
            expected = np.take_along_axis(reference[:first], rows.logprob_token_ids.astype(np.int64), axis=1)
            np.testing.assert_allclose(rows.logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_gets_the_same_tokens_alone_and_in_any_company(temperature: float) -> None:
    rng = random.Random(9)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(10)]
    results = []
    for seed in (None, 1, 2):
        runner, scheduler = make_runner(), RandomScheduler(seed or 0)
        requests = [
            ToyRequest(
                f"r{i}", prompt, SamplingParams(temperature=temperature, top_p=0.9, seed=i, presence_penalty=0.3)
            )
            for i, prompt in enumerate(prompts)
        ]
        for group in [[r] for r in requests] if seed is None else [requests]:
            scheduler.waiting = list(group)
            num_done = 0
            while num_done < len(group):
                scheduled = scheduler.schedule()
                num_done += len(scheduler.update(scheduled, run_step(runner, scheduled), max_tokens=10))
        results.append([r.outputs for r in requests])
    assert results[0] == results[1] == results[2]


def test_a_step_without_tokens_only_applies_the_diff() -> None:
    runner = make_runner()
    run_step(runner, new_request("a", [1, 2, 3], 3))
    output = runner.execute_model(SchedulerOutput(finished_req_ids={"a", "never seen"}))
    assert output is not None
    assert output.req_ids == []
    assert runner.batch.num_reqs == 0


def test_there_is_nothing_to_sample_before_a_forward_pass() -> None:
    with pytest.raises(AssertionError, match="no step to sample"):
        make_runner().sample_tokens(None)


@pytest.mark.parametrize("where", ["forward", "_move_row", "append_tokens", "between the halves"])
def test_after_a_broken_step_requests_start_anew(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may strike anywhere in a step. The engine then gives up what was in flight and sends the living anew."""
    runner = make_runner()
    for i, req_id in enumerate("abc"):
        run_step(runner, new_request(req_id, [i, 1, 2], 3, first_block=1 + 40 * i))

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    target = runner.model if where == "forward" else runner.batch
    step = cached_request("c", 3, 1)
    step.finished_req_ids.add("a")  # so that the row of c moves
    with monkeypatch.context() as patch:
        if where != "between the halves":
            patch.setattr(target, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_step(runner, step)
        else:
            runner.execute_model(step)
    step = new_request("c", [2, 1, 2], 4, SamplingParams(temperature=0, presence_penalty=0.1), first_block=7)
    step.scheduled_new_reqs[0].output_token_ids = [5]
    step.preempted_req_ids = {"b", "c"}
    step.finished_req_ids = {"a"}
    (tokens,) = run_step(runner, step).sampled_token_ids
    logits = dense_logits(runner.model, [2, 1, 2, 5])[-1]
    logits[5] -= 0.1
    assert tokens == [int(logits.argmax())]
    assert runner.batch.req_ids == ["c"]


def test_an_id_may_be_used_again_in_the_step_that_ends_it() -> None:
    runner = make_runner()
    run_step(runner, new_request("a", [1, 2, 3], 3))
    step = new_request("a", [4, 5], 2, first_block=50)
    step.finished_req_ids.add("a")
    (tokens,) = run_step(runner, step).sampled_token_ids
    assert tokens == [int(dense_logits(runner.model, [4, 5])[-1].argmax())]


def test_a_resumed_request_goes_on_with_its_outputs() -> None:
    """Penalties, random numbers and min_tokens count outputs from before the preemption."""
    params = SamplingParams(seed=7, frequency_penalty=0.5, logit_bias={3: 2.0})

    def generate(interrupt_at: int | None) -> list[int]:
        runner, outputs = make_runner(), []
        outputs += run_step(runner, new_request("a", [5, 6, 7], 3, params)).sampled_token_ids[0]
        while len(outputs) < 9:
            if len(outputs) == interrupt_at:
                step = new_request("a", [5, 6, 7], 3 + len(outputs), params, first_block=60)
                step.scheduled_new_reqs[0].output_token_ids = list(outputs)
                step.preempted_req_ids.add("a")
            else:
                step = cached_request("a", 2 + len(outputs), 1)
            outputs += run_step(runner, step).sampled_token_ids[0]
        return outputs

    assert generate(None) == generate(1) == generate(5)


@pytest.mark.parametrize("resumed_at", [0, 8])
def test_prompt_logprobs_survive_a_preemption(resumed_at: int) -> None:
    """A preempted prompt starts over, or goes on where the prefix cache still has what it had computed."""
    prompt = [i * 7 % VOCAB for i in range(20)]
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    runner = make_runner()
    assert run_step(runner, new_request("a", prompt, 12, params)).prompt_logprobs == {}
    run_step(runner, SchedulerOutput(preempted_req_ids={"a"}))
    step = new_request("a", prompt, 5, params)
    step.scheduled_new_reqs[0].num_computed_tokens = resumed_at
    assert run_step(runner, step).prompt_logprobs == {}
    start = resumed_at + 5
    rows = run_step(runner, cached_request("a", start, 20 - start)).prompt_logprobs["a"]
    reference = log_softmax(dense_logits(runner.model, prompt).numpy())
    np.testing.assert_allclose(rows.logprobs[:, 0], reference[np.arange(19), prompt[1:]], atol=2e-5)
    ranks = 1 + (reference[:19] > reference[np.arange(19), prompt[1:]][:, None]).sum(-1)
    assert rows.selected_token_ranks.tolist() == ranks.tolist()


def test_prompt_logprobs_of_tokens_read_from_the_cache_are_unknown() -> None:
    prompt = [i * 7 % VOCAB for i in range(20)]
    runner = make_runner()
    run_step(runner, new_request("a", prompt, 20))
    step = new_request(
        "b", prompt, 8, SamplingParams(temperature=0, prompt_logprobs=0, skip_reading_prefix_cache=False)
    )
    step.scheduled_new_reqs[0].num_computed_tokens = 12
    rows = run_step(runner, step).prompt_logprobs["b"]
    assert np.isnan(rows.logprobs[:12]).all()
    assert (rows.selected_token_ranks[:12] == 0).all()
    assert np.isfinite(rows.logprobs[12:]).all()
    assert rows.logprob_token_ids[:, 0].tolist() == prompt[1:]


def test_prompt_logprobs_are_forgotten_with_the_request() -> None:
    runner = make_runner()
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    run_step(runner, new_request("a", [1, 2, 3, 4], 2, params))
    run_step(runner, SchedulerOutput(finished_req_ids={"a"}))
    assert "a" not in runner.sampler.prompts.wanted


@pytest.mark.parametrize("count", [-1, 0, 200])
def test_prompt_logprobs_of_one_token_and_of_the_whole_vocabulary(count: int) -> None:
    runner = make_runner()
    params = SamplingParams(temperature=0, prompt_logprobs=count)
    rows = run_step(runner, new_request("a", [4], 1, params)).prompt_logprobs["a"]
    width = 1 + (0 if count == 0 else VOCAB)
    assert rows.logprobs.shape == (0, width)
    rows = run_step(runner, new_request("b", [4, 5, 6], 3, params, first_block=60)).prompt_logprobs["b"]
    assert rows.logprobs.shape == (2, width)
    if count:
        np.testing.assert_allclose(np.exp(rows.logprobs[:, 1:]).sum(-1), 1, atol=1e-5)


def test_nans_are_counted_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_COMPUTE_NANS_IN_LOGITS", "1")
    runner = make_runner()
    runner.model.positions[2] = torch.nan  # spoils position 2 and what sees it
    assert run_step(runner, new_request("a", [1, 2], 2)).num_nans_in_logits == {"a": [0]}
    assert run_step(runner, new_request("b", [1, 2, 3], 3, first_block=60)).num_nans_in_logits == {"b": [VOCAB]}
    monkeypatch.delenv("QUIRE_COMPUTE_NANS_IN_LOGITS")
    assert run_step(make_runner(), new_request("a", [1, 2], 2)).num_nans_in_logits == {}


def test_nans_of_rejected_drafts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_COMPUTE_NANS_IN_LOGITS", "1")
    right = make_runner()
    run_step(right, new_request("a", [1, 2], 2))
    follower = run_step(right, cached_request("a", 2, 1)).sampled_token_ids[0][0]
    for draft, counted in ((follower, [0, VOCAB]), ((follower + 1) % VOCAB, [0])):
        runner = make_runner()
        run_step(runner, new_request("a", [1, 2], 2))
        compute = runner.model.compute_logits
        spoiled = torch.tensor([[0.0], [torch.nan]])
        monkeypatch.setattr(runner.model, "compute_logits", lambda hidden, f=compute, by=spoiled: f(hidden) + by)
        step = cached_request("a", 2, 2)
        step.scheduled_spec_decode_tokens = {"a": [draft]}
        assert run_step(runner, step).num_nans_in_logits == {"a": counted}


def test_grammar_masks_reach_their_rows() -> None:
    runner = make_runner()
    run_step(runner, new_request("a", [1, 2], 2))
    step = new_request("b", [3, 4], 2, first_block=60)
    step.scheduled_cached_reqs = cached_request("a", 2, 1).scheduled_cached_reqs
    step.num_scheduled_tokens["a"] = 1
    step.total_num_scheduled_tokens = 3
    assert runner.execute_model(step) is None
    bitmask = np.array([[0], [1 << 17]], np.int32)
    output = runner.sample_tokens(GrammarOutput(["not in this step", "b"], bitmask))
    free = int(dense_logits(runner.model, runner.batch.token_ids[0, :3].tolist())[-1].argmax())
    assert dict(zip(output.req_ids, output.sampled_token_ids, strict=True)) == {"a": [free], "b": [17]}


def test_sampling_metadata_is_made_once_per_batch() -> None:
    runner = make_runner()
    run_step(runner, new_request("a", [1, 2], 2, SamplingParams(seed=1)))
    metadata = runner.sampler._metadata
    run_step(runner, cached_request("a", 2, 1))
    assert runner.sampler._metadata is metadata
    run_step(runner, new_request("b", [1, 2], 2, SamplingParams(seed=2), first_block=60))
    assert runner.sampler._metadata is not metadata


def test_runs_without_requests_leave_the_batch_alone() -> None:
    runner = make_runner()
    run_step(runner, new_request("a", [1, 2, 3], 3))
    runner.execute_dummy_batch()
    runner.profile_run(runner.get_kv_cache_specs(4, torch.float32))
    (tokens,) = run_step(runner, cached_request("a", 3, 1)).sampled_token_ids
    assert tokens == [int(dense_logits(runner.model, runner.batch.token_ids[0, :4].tolist())[-1].argmax())]
