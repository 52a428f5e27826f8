"""The output processor, row by row of the checklist, then properties over random streams."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import GenerationError, ValidationError
from quire.frontend.drafts import DraftCounts
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.output_processor import OutputProcessor, fan_out
from quire.frontend.text.detokenizer import IncrementalDetokenizer, TextDetokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.outputs import Logprob, PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from quire.wire.execution import LogprobsLists, LogprobsTensors
from quire.wire.stats import PrefillStats, SpecDecodeMetrics
from tests.seeds import examples

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def make_request(internal: str = "a-1", external: str = "a", **params: object) -> EngineCoreRequest:
    fields: dict[str, object] = {"max_tokens": 50, **params}
    sampling = SamplingParams(**fields)  # type: ignore[arg-type]
    return EngineCoreRequest(internal, [1, 2, 3], sampling, None, 1000.0, external_req_id=external)


def make_output(request_id: str, ids: list[int], **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, ids, **fields)  # type: ignore[arg-type]


class Queue:
    def __init__(self) -> None:
        self.outputs: list[object] = []

    def put(self, output: object) -> None:
        self.outputs.append(output)


def processor(tokenizer: Tokenizer | None = None, **options: object) -> OutputProcessor:
    return OutputProcessor(tokenizer, **{"log_stats": True, **options})  # type: ignore[arg-type]


def feed(p: OutputProcessor, *outputs: EngineCoreOutput) -> list[RequestOutput]:
    given = p.process_outputs(outputs).request_outputs
    assert all(isinstance(o, RequestOutput) for o in given)
    return given  # type: ignore[return-value]


# -- registering ------------------------------------------------------------------------------------------------------


def test_a_request_is_known_by_its_internal_id_and_shown_by_its_external_one() -> None:
    p = processor()
    for internal in ("a-1", "a-2"):
        p.add_request(make_request(internal), "prompt")
    assert list(p.request_states) == ["a-1", "a-2"]
    assert {name: list(ids) for name, ids in p.external_req_ids.items()} == {"a": ["a-1", "a-2"]}
    assert (p.get_num_unfinished_requests(), p.has_unfinished_requests()) == (2, True)
    (shown,) = feed(p, make_output("a-2", [7]))
    assert shown.request_id == "a"


def test_an_internal_id_is_unique() -> None:
    p = processor()
    p.add_request(make_request(), None)
    with pytest.raises(ValueError, match="a-1 is in use"):
        p.add_request(make_request(), None)


def test_detokenize_false_makes_no_text_and_no_texts_of_logprobs(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    p.add_request(make_request(detokenize=False, logprobs=0), None)
    state = p.request_states["a-1"]
    assert type(state.detokenizer) is IncrementalDetokenizer
    (shown,) = feed(p, make_output("a-1", [70], new_logprobs=LogprobsLists([[70]], [[-1.0]], [1])))
    assert shown.outputs[0].text == ""
    assert shown.outputs[0].logprobs == [{70: Logprob(-1.0, 1, None)}]
    p.add_request(make_request("b-1", "b"), None)
    assert type(p.request_states["b-1"].detokenizer) is TextDetokenizer


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_unknown_ids_are_ignored() -> None:
    p = processor()
    assert p.process_outputs([make_output("gone", [1])]).request_outputs == []


def test_fields_of_a_request_output(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    p.add_request(make_request(), "the prompt")
    ids = tokenizer.encode("fox", add_special_tokens=False)
    (shown,) = feed(p, make_output("a-1", ids, prefill_stats=PrefillStats(3, 1, 2), finish_reason=FinishReason.LENGTH))
    assert (shown.prompt, shown.prompt_token_ids, shown.prompt_logprobs) == ("the prompt", [1, 2, 3], None)
    assert (shown.finished, shown.num_cached_tokens, shown.lora_request) == (True, 2, None)
    assert shown.kv_transfer_params is None
    (completion,) = shown.outputs
    assert (completion.index, completion.text, list(completion.token_ids)) == (0, "fox", ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert not p.has_unfinished_requests()
    assert (p.request_states, p.external_req_ids, p.parent_requests) == ({}, {}, {})


@pytest.mark.parametrize("log_stats", [True, False])
def test_metrics_only_with_statistics(log_stats: bool) -> None:
    p = processor(log_stats=log_stats)
    p.add_request(make_request(), None)
    result = p.process_outputs([make_output("a-1", [7])], 5.0, IterationStats() if log_stats else None)
    (shown,) = result.request_outputs
    assert isinstance(shown, RequestOutput)
    assert (shown.metrics is not None) == log_stats
    if shown.metrics is not None:
        assert (shown.metrics.arrival_time, shown.metrics.first_token_ts) == (1000.0, 5.0)


def test_each_output_kind_delivers_its_part(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two", add_special_tokens=False)
    texts: dict[RequestOutputKind, list[str]] = {}
    counts: dict[RequestOutputKind, list[int]] = {}
    for kind in RequestOutputKind:
        p = processor(tokenizer)
        p.add_request(make_request(output_kind=kind), None)
        shown = []
        for i in ids:
            shown += feed(p, make_output("a-1", [i]))
        shown += feed(p, make_output("a-1", [ids[0]], finish_reason=FinishReason.LENGTH))
        texts[kind] = [o.outputs[0].text for o in shown]
        counts[kind] = [len(o.outputs[0].token_ids) for o in shown]
        assert [o.finished for o in shown] == [False] * (len(shown) - 1) + [True]
    total = tokenizer.decode([*ids, ids[0]])
    assert texts[FINAL_ONLY] == [total]
    assert counts[FINAL_ONLY] == [len(ids) + 1]
    assert texts[CUMULATIVE] == [tokenizer.decode([*ids, ids[0]][:n]) for n in range(1, len(ids) + 2)]
    assert counts[CUMULATIVE] == list(range(1, len(ids) + 2))
    assert "".join(texts[DELTA]) == total
    assert counts[DELTA] == [1] * (len(ids) + 1)


def test_finish_reasons_and_stop_reasons() -> None:
    for reason in FinishReason:
        p = processor()
        p.add_request(make_request(), None)
        assert feed(p, make_output("a-1", [7]))[0].outputs[0].finish_reason is None
        (shown,) = feed(p, make_output("a-1", [8], finish_reason=reason, stop_reason=8))
        assert (shown.outputs[0].finish_reason, shown.outputs[0].stop_reason) == (str(reason), 8)
        assert shown.outputs[0].finished()


def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    p.add_request(make_request(), None)
    ids = tokenizer.encode("ab!", add_special_tokens=False)
    (shown,) = feed(p, make_output("a-1", ids, finish_reason=FinishReason.STOP, stop_reason=ids[-1]))
    assert (shown.outputs[0].text, list(shown.outputs[0].token_ids)) == ("ab", ids)


def test_a_stop_string_ends_the_request_here_and_the_core_is_told(tokenizer: Tokenizer) -> None:
    """Surplus tokens and their log-probabilities are dropped."""
    p = processor(tokenizer)
    p.add_request(make_request(stop=["!"], logprobs=0), None)
    ids = tokenizer.encode("1!2", add_special_tokens=False)
    assert len(ids) == 3
    logprobs = LogprobsLists([[i] for i in ids], [[-1.0], [-2.0], [-4.0]], [1, 1, 1])
    result = p.process_outputs([make_output("a-1", ids, new_logprobs=logprobs)])
    assert result.reqs_to_abort == ["a-1"]
    (shown,) = result.request_outputs
    assert isinstance(shown, RequestOutput)
    (completion,) = shown.outputs
    assert (completion.text, list(completion.token_ids)) == ("1", ids[:2])
    assert (completion.finish_reason, completion.stop_reason, shown.finished) == ("stop", "!", True)
    assert completion.logprobs is not None
    assert (len(completion.logprobs), completion.cumulative_logprob) == (2, -3.0)
    assert not p.has_unfinished_requests()


def test_a_stop_string_in_the_last_output_of_the_core_needs_no_abort(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    p.add_request(make_request(stop=["!"]), None)
    ids = tokenizer.encode("1!", add_special_tokens=False)
    result = p.process_outputs([make_output("a-1", ids, finish_reason=FinishReason.LENGTH)])
    assert result.reqs_to_abort == []
    (shown,) = result.request_outputs
    assert isinstance(shown, RequestOutput)
    assert shown.outputs[0].stop_reason == "!"


def test_stop_strings_are_held_back_until_the_end_in_deltas(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    p.add_request(make_request(stop=["##!"], output_kind=DELTA), None)
    hashes = tokenizer.encode("#", add_special_tokens=False)
    texts = [feed(p, make_output("a-1", hashes))[0].outputs[0].text for _ in range(3)]
    assert texts == ["", "", "#"]
    (last,) = feed(p, make_output("a-1", hashes, finish_reason=FinishReason.LENGTH))
    assert last.outputs[0].text == "###"


@pytest.mark.parametrize("from_request", [True, False])
def test_outputs_wait_for_the_stream_interval(tokenizer: Tokenizer, from_request: bool) -> None:
    """First token at once, then every third, then the end."""
    p = processor(tokenizer, stream_interval=1 if from_request else 3)
    p.add_request(make_request(output_kind=DELTA, logprobs=0, stream_interval=3 if from_request else None), None)
    sizes = []
    for n in range(8):
        logprobs = LogprobsLists([[70]], [[-1.0]], [1])
        reason = FinishReason.LENGTH if n == 7 else None
        shown = feed(p, make_output("a-1", [70], finish_reason=reason, new_logprobs=logprobs))
        sizes.append([len(o.outputs[0].token_ids) for o in shown])
        assert all(len(o.outputs[0].logprobs or ()) == len(o.outputs[0].token_ids) for o in shown)
    assert sizes == [[1], [], [], [3], [], [], [3], [1]]


def test_prompt_logprobs_in_every_cumulative_output_and_in_one_delta() -> None:
    tensors = LogprobsTensors(
        np.array([[2], [3]], np.int32), np.array([[-1.0], [-2.0]], np.float32), np.ones(2, np.int32)
    )
    expected = [None, {2: Logprob(-1.0, 1)}, {3: Logprob(-2.0, 1)}]
    for kind, seen in ((CUMULATIVE, [expected, expected]), (DELTA, [expected, None])):
        p = processor()
        p.add_request(make_request(prompt_logprobs=0, output_kind=kind), None)
        shown = feed(p, make_output("a-1", [7], new_prompt_logprobs_tensors=tensors)) + feed(p, make_output("a-1", [8]))
        assert [o.prompt_logprobs for o in shown] == seen


def test_a_pooling_output_is_delivered_with_its_counts() -> None:
    p = processor()
    request = EngineCoreRequest("e-1", [1, 2], None, PoolingParams(task="embed"), 0.0, external_req_id="e")
    p.add_request(request, None)
    iteration = IterationStats()
    output = make_output(
        "e-1", [], pooling_output=[0.5], finish_reason=FinishReason.STOP, prefill_stats=PrefillStats(2, 1, 1)
    )
    result = p.process_outputs([output], 1.0, iteration)
    (shown,) = result.request_outputs
    assert isinstance(shown, PoolingRequestOutput)
    assert (shown.request_id, shown.outputs.data, shown.prompt_token_ids) == ("e", [0.5], [1, 2])
    assert (shown.finished, shown.num_cached_tokens) == (True, 1)
    assert iteration.finished_requests[0].max_tokens_param is None
    assert iteration.num_prompt_tokens == 2


def test_an_aborted_pooling_request_ends_without_a_result() -> None:
    p, queue = processor(), Queue()
    request = EngineCoreRequest("e-1", [1, 2], None, PoolingParams(task="embed"), 0.0, external_req_id="e")
    p.add_request(request, None, queue=queue)
    assert p.abort_requests(["e"]) == ["e-1"]
    (last,) = queue.outputs
    assert isinstance(last, PoolingRequestOutput)
    assert (last.finished, last.finish_reason, last.outputs.data) == (True, "abort", None)


def test_a_failed_pooling_request_says_why() -> None:
    """Requests fail in the core, here, or by a senseless output: a step returns an output without a result."""
    p = processor()
    for i in range(3):
        request = EngineCoreRequest(f"e-{i}", [1, 2], None, PoolingParams(task="embed"), 0.0, external_req_id="e")
        p.add_request(request, None)
    failed = make_output("e-0", [], finish_reason=FinishReason.ERROR, error_message="no room")
    shown = p.process_outputs([failed]).request_outputs + p.fail_requests(["e-1"], ValueError("late")).request_outputs
    assert [o.finish_reason for o in shown] == ["error", "error"]
    assert [o.error_message for o in shown if isinstance(o, PoolingRequestOutput)] == ["no room", "late"]
    assert list(p.request_states) == ["e-2"]


# -- queues -----------------------------------------------------------------------------------------------------------


def test_outputs_of_an_awaited_request_go_to_its_queue() -> None:
    p, queue = processor(), Queue()
    p.add_request(make_request(), None, queue=queue)
    p.add_request(make_request("b-1", "b"), None)
    result = p.process_outputs([make_output("a-1", [7]), make_output("b-1", [8])])
    assert [o.request_id for o in result.request_outputs] == ["b"]
    assert [o.request_id for o in queue.outputs if isinstance(o, RequestOutput)] == ["a"]


# -- aborts -----------------------------------------------------------------------------------------------------------


def test_abort_by_external_id_takes_all_requests_of_that_name() -> None:
    p = processor()
    for internal in ("a-1", "a-2"):
        p.add_request(make_request(internal), None)
    p.add_request(make_request("b-1", "b"), None)
    assert p.abort_requests(["a", "nobody"]) == ["a-1", "a-2"]
    assert list(p.request_states) == ["b-1"]
    assert p.abort_requests(["a"]) == []  # a second time changes nothing


def test_abort_by_internal_id() -> None:
    p = processor()
    for internal in ("a-1", "a-2"):
        p.add_request(make_request(internal), None)
    assert p.abort_requests(["a-2", "a-9"], internal=True) == ["a-2"]
    assert p.abort_requests(["a-1"]) == []  # an internal id is no external one
    assert list(p.request_states) == ["a-1"]


def test_abort_of_a_parent_takes_its_children() -> None:
    p = processor()
    parent, children = fan_out(make_request(n=3))
    for index, child in enumerate(children):
        p.add_request(child, None, parent, index)
    feed(p, make_output("1_a-1", [7], finish_reason=FinishReason.LENGTH))
    assert p.abort_requests(["a-1"], internal=True) == ["0_a-1", "2_a-1"]
    assert (p.request_states, p.parent_requests, p.external_req_ids) == ({}, {}, {})


@pytest.mark.parametrize("n", [1, 2])
def test_an_aborted_stream_gets_one_last_output(n: int) -> None:
    p, queue = processor(), Queue()
    parent, children = fan_out(make_request(n=n, output_kind=FINAL_ONLY))
    for index, child in enumerate(children):
        p.add_request(child, None, parent, index, queue)
    p.process_outputs([make_output(children[0].request_id, [7])])
    p.abort_requests(["a"])
    (last,) = queue.outputs
    assert isinstance(last, RequestOutput)
    assert last.finished
    assert [c.finish_reason for c in last.outputs] == ["abort"] * n
    assert [list(c.token_ids) for c in last.outputs] == [[7], []][:n]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_request_is_an_error_for_whoever_awaits_it() -> None:
    p, queue, iteration = processor(), Queue(), IterationStats()
    p.add_request(make_request(), None, queue=queue)
    failure = make_output("a-1", [], finish_reason=FinishReason.ERROR, error_message="it failed; send it again")
    result = p.process_outputs([failure], 1.0, iteration)
    (error,) = queue.outputs
    assert isinstance(error, GenerationError)
    assert str(error) == "it failed; send it again"
    assert (result.reqs_to_abort, p.request_states, p.external_req_ids) == ([], {}, {})
    assert [f.finish_reason for f in iteration.finished_requests] == [FinishReason.ERROR]


def test_tokens_of_a_step_that_fails_at_its_last_one_are_the_readers() -> None:
    """With drafts a step yields several tokens, and the grammar may refuse the last."""
    p, queue, iteration = processor(), Queue(), IterationStats()
    p.add_request(make_request(logprobs=0, output_kind=DELTA), None, queue=queue)
    logprobs = LogprobsLists([[7], [8], [9]], [[-0.5], [-1.5], [-2.5]], [1, 2, 3])
    fields = {"new_logprobs": logprobs, "error_message": "it failed", "error_type": "ValidationError"}
    p.process_outputs([make_output("a-1", [7, 8, 9], finish_reason=FinishReason.ERROR, **fields)], 1.0, iteration)
    output, error = queue.outputs
    assert isinstance(output, RequestOutput)
    assert list(output.outputs[0].token_ids) == [7, 8]
    assert [next(iter(entry)) for entry in output.outputs[0].logprobs or ()] == [7, 8]
    assert isinstance(error, ValidationError)
    assert [f.finish_reason for f in iteration.finished_requests] == [FinishReason.ERROR]


@pytest.mark.parametrize("has_queue", [False, True])
def test_a_stop_string_comes_before_the_failure_of_a_later_token(tokenizer: Tokenizer, has_queue: bool) -> None:
    ids = tokenizer.encode("one two three")
    p, queue = processor(tokenizer), Queue()
    p.add_request(make_request(stop=[" two"]), "prompt", queue=queue if has_queue else None)
    failure = make_output("a-1", [*ids, 5], finish_reason=FinishReason.ERROR, error_message="it failed")
    result = p.process_outputs([failure])
    (shown,) = queue.outputs if has_queue else result.request_outputs
    assert isinstance(shown, RequestOutput)
    completion = shown.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one", "stop", " two")
    assert completion.error_message is None
    assert result.reqs_to_abort == ["a-1"]


def test_one_failed_output_of_n_ends_the_whole_request() -> None:
    p, queue = processor(), Queue()
    parent, children = fan_out(make_request(n=3, output_kind=DELTA))
    for index, child in enumerate(children):
        p.add_request(child, None, parent, index, queue)
    feed(p, make_output("0_a-1", [7], finish_reason=FinishReason.STOP))
    result = p.process_outputs([make_output("1_a-1", [], finish_reason=FinishReason.ERROR)])
    assert result.reqs_to_abort == ["2_a-1"]
    assert isinstance(queue.outputs[1], GenerationError)
    assert (p.request_states, p.parent_requests, p.external_req_ids) == ({}, {}, {})


def test_without_a_queue_a_failure_is_an_output_with_its_message() -> None:
    p = processor()
    p.add_request(make_request(), "prompt")
    feed(p, make_output("a-1", [7]))
    (shown,) = feed(p, make_output("a-1", [], finish_reason=FinishReason.ERROR, error_message="it failed"))
    (completion,) = shown.outputs
    assert (completion.finish_reason, completion.error_message) == ("error", "it failed")
    assert (list(completion.token_ids), shown.finished) == ([7], True)


# -- n outputs --------------------------------------------------------------------------------------------------------


def test_n_outputs_come_together_when_final() -> None:
    p = processor()
    parent, children = fan_out(make_request(n=2, output_kind=FINAL_ONLY))
    for index, child in enumerate(children):
        p.add_request(child, "p", parent, index)
    assert list(p.parent_requests) == ["a-1"]
    iteration = IterationStats()
    assert not p.process_outputs(
        [make_output("1_a-1", [7, 8], finish_reason=FinishReason.LENGTH)], 1.0, iteration
    ).request_outputs
    assert (iteration.max_num_generation_tokens, iteration.n_params) == ([], [])
    result = p.process_outputs([make_output("0_a-1", [9], finish_reason=FinishReason.STOP)], 1.0, iteration)
    (shown,) = result.request_outputs
    assert isinstance(shown, RequestOutput)
    assert (shown.request_id, shown.finished) == ("a", True)
    assert [(c.index, list(c.token_ids), c.finish_reason) for c in shown.outputs] == [
        (0, [9], "stop"),
        (1, [7, 8], "length"),
    ]
    assert (iteration.max_num_generation_tokens, iteration.n_params) == ([2], [2])
    assert len(iteration.finished_requests) == 2
    assert p.parent_requests == {}


def test_streamed_n_outputs_come_one_by_one() -> None:
    p = processor()
    parent, children = fan_out(make_request(n=2, output_kind=DELTA))
    for index, child in enumerate(children):
        p.add_request(child, None, parent, index)
    shown = feed(p, make_output("1_a-1", [7]), make_output("0_a-1", [8], finish_reason=FinishReason.STOP))
    assert [(o.finished, o.outputs[0].index) for o in shown] == [(False, 1), (False, 0)]
    (last,) = feed(p, make_output("1_a-1", [9], finish_reason=FinishReason.STOP))
    assert last.finished


# -- statistics -------------------------------------------------------------------------------------------------------

STEPS = [(3, 3), (2, 0), (3, 1)]
"""(Verified, accepted) drafts of three steps."""


def feed_drafts(p: OutputProcessor, *, from_prediction: bool = False) -> list[RequestOutput]:
    """Feeds a token without drafts, and an output for each of `STEPS`, of which the last ends request a-1."""
    outputs = [make_output("a-1", [7], prefill_stats=PrefillStats(3, 3))]
    for number, (drafted, accepted) in enumerate(STEPS):
        outputs.append(
            make_output(
                "a-1",
                [8 + number] * (accepted + 1),
                finish_reason=FinishReason.LENGTH if number == len(STEPS) - 1 else None,
                spec_decode_metrics=SpecDecodeMetrics(drafted, accepted, from_prediction),
            )
        )
    return [shown for output in outputs for shown in feed(p, output)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_last_output_shows_the_drafts_of_the_request(kind: RequestOutputKind) -> None:
    for level in ("none", "summary", "detailed"):
        p = processor(drafts=DraftCounts(4, level))
        p.add_request(make_request(output_kind=kind), None)
        *earlier, last = [shown.outputs[0] for shown in feed_drafts(p)]
        assert not any(shown.spec_decode_metrics for shown in earlier)
        metrics = last.spec_decode_metrics
        if level == "none":
            assert metrics is None
            continue
        assert metrics is not None
        assert (metrics.num_spec_steps, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (3, 8, 4)
        assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate) == (1 + 4 / 3, 0.5)
        assert (metrics.acceptance_histogram, metrics.num_spec_tokens) == ([1, 1, 0, 1, 0], 4)
        per_step = ([3, 0, 1], [3, 2, 3]) if level == "detailed" else (None, None)
        assert (metrics.per_step_accepted, metrics.per_step_drafted) == per_step


def test_without_drafts_the_figures_are_those_of_plain_decoding() -> None:
    p = processor(drafts=DraftCounts(2, "summary"))
    p.add_request(make_request(), None)
    (shown,) = feed(p, make_output("a-1", [7], finish_reason=FinishReason.STOP))
    metrics = shown.outputs[0].spec_decode_metrics
    assert metrics is not None
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate, metrics.num_spec_steps) == (1, 0, 0)
    assert metrics.acceptance_histogram == [0, 0, 0]
    plain = processor()
    plain.add_request(make_request(), None)
    (shown,) = feed(plain, make_output("a-1", [7], finish_reason=FinishReason.STOP))
    assert shown.outputs[0].spec_decode_metrics is None


@pytest.mark.parametrize("from_prediction", [True, False])
def test_tokens_of_a_prediction_are_counted_apart(from_prediction: bool) -> None:
    p = processor(drafts=DraftCounts(4))
    p.add_request(make_request(output_kind=FINAL_ONLY), None)
    (last,) = [shown.outputs[0] for shown in feed_drafts(p, from_prediction=from_prediction)]
    counted = (last.num_accepted_prediction_tokens, last.num_rejected_prediction_tokens)
    assert counted == ((4, 4) if from_prediction else (0, 0))
    assert last.spec_decode_metrics is None


def test_predicted_tokens_behind_a_stop_string_are_rejected(tokenizer: Tokenizer) -> None:
    """The core has accepted them and knows of no stop string."""
    ids = tokenizer.encode("a fox, and more of it", add_special_tokens=False)
    p = processor(tokenizer, drafts=DraftCounts(len(ids), "summary"))
    p.add_request(make_request(stop=["fox"]), None)
    metrics = SpecDecodeMetrics(len(ids) - 1, len(ids) - 1, True)
    (shown,) = feed(p, make_output("a-1", ids, spec_decode_metrics=metrics))
    last = shown.outputs[0]
    assert last.finish_reason == "stop"
    assert 0 < last.num_accepted_prediction_tokens == len(last.token_ids) < len(ids) - 1
    assert last.num_accepted_prediction_tokens + last.num_rejected_prediction_tokens == len(ids) - 1
    assert last.spec_decode_metrics is not None
    assert last.spec_decode_metrics.num_accepted_draft_tokens == len(ids) - 1, "as in the core's counters"


def test_drafts_of_a_finished_request_are_in_its_statistics() -> None:
    for drafts, expected in ((None, (None, None)), (DraftCounts(4), (3, 2))):
        p, iteration = processor(drafts=drafts), IterationStats(1003.0)
        p.add_request(make_request(), None, queue=Queue())
        metrics = SpecDecodeMetrics(3, 2)
        failed = make_output("a-1", [1] * 3, finish_reason=FinishReason.ERROR, spec_decode_metrics=metrics)
        p.process_outputs([failed], 1.0, iteration)  # the core has counted its drafts, too
        (finished,) = iteration.finished_requests
        assert (finished.num_draft_tokens, finished.num_accepted_draft_tokens) == expected


def test_statistics_of_a_request() -> None:
    p = processor()
    p.add_request(make_request(max_tokens=9), None)
    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.0)]
    first, second = IterationStats(1003.0), IterationStats(1008.0)
    p.process_outputs([make_output("a-1", [7], events=events, prefill_stats=PrefillStats(3, 1, 2))], 4.0, first)
    p.process_outputs([make_output("a-1", [8], finish_reason=FinishReason.LENGTH)], 6.0, second)
    assert (first.num_prompt_tokens, first.time_to_first_tokens, first.finished_requests) == (3, [3.0], [])
    assert (second.num_prompt_tokens, second.inter_token_latencies) == (0, {2.0: 1})
    (finished,) = second.finished_requests
    assert (finished.request_id, finished.finish_reason) == ("a", FinishReason.LENGTH)
    assert (finished.e2e_latency, finished.queued_time, finished.prefill_time) == (8.0, 1.0, 2.0)
    assert (finished.num_cached_tokens, finished.max_tokens_param) == (2, 9)
    assert (second.max_num_generation_tokens, second.n_params) == ([2], [1])


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3)), max_size=12), st.randoms())
def test_waits_are_those_of_each_request(steps: list[dict[str, int]], rng: random.Random) -> None:
    """Requests take part in steps as they like, in any order: each output but the first waited since the one before."""
    p = processor()
    for name in "abcdef":
        p.add_request(make_request(f"{name}-1", name), None)
    last_ts: dict[str, float] = {}
    for step, num_tokens in enumerate(steps, start=1):
        timestamp = step / 8
        outputs = [make_output(f"{name}-1", [7] * number) for name, number in num_tokens.items()]
        rng.shuffle(outputs)
        iteration = IterationStats()
        p.process_outputs(outputs, timestamp, iteration)
        waits = [timestamp - last_ts[name] for name in num_tokens if name in last_ts]
        assert iteration.inter_token_latencies == Counter(waits)
        assert len(iteration.first_tokens) == len(num_tokens.keys() - last_ts.keys())
        assert iteration.num_generation_tokens == sum(num_tokens.values())
        last_ts |= dict.fromkeys(num_tokens, timestamp)
    for name in last_ts:
        stats = p.request_states[f"{name}-1"].stats
        assert stats is not None
        assert stats.last_token_ts == last_ts[name]
        assert stats.num_generation_tokens == sum(num_tokens.get(name, 0) for num_tokens in steps)


def test_every_request_is_booked_once_however_it_ends(tokenizer: Tokenizer) -> None:
    """Ends: by the core, by a stop string here, by an abort (promise P12 f)."""
    p, iteration = processor(tokenizer), IterationStats()
    for name in "abc":
        p.add_request(make_request(f"{name}-1", name, stop=["!"]), None)
    stop = tokenizer.encode("!", add_special_tokens=False)
    p.process_outputs(
        [make_output("a-1", [70], finish_reason=FinishReason.LENGTH), make_output("b-1", stop)], 1.0, iteration
    )
    p.abort_requests(["c"], iteration_stats=iteration)
    p.process_outputs([make_output("b-1", [70], finish_reason=FinishReason.ABORT)], 2.0, iteration)
    booked = [(f.request_id, f.finish_reason) for f in iteration.finished_requests]
    assert booked == [("a", FinishReason.LENGTH), ("b", FinishReason.STOP), ("c", FinishReason.ABORT)]


def test_the_first_output_may_have_no_tokens() -> None:
    p, iteration = processor(), IterationStats(1001.0)
    p.add_request(make_request(), None)
    p.process_outputs([make_output("a-1", [], prefill_stats=PrefillStats(3, 3))], 1.0, iteration)
    assert iteration.time_to_first_tokens == []
    p.process_outputs([make_output("a-1", [7], prefill_stats=PrefillStats(3, 3))], 2.0, iteration)
    assert iteration.time_to_first_tokens == [1.0]


# -- any stream -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    kind=st.sampled_from(list(RequestOutputKind)),
    interval=st.integers(1, 3),
    n=st.integers(1, 3),
    data=st.data(),
)
def test_what_a_user_sees_is_always_a_prefix_of_the_result(
    tokenizer: Tokenizer, lengths: list[int], kind: RequestOutputKind, interval: int, n: int, data: st.DataObject
) -> None:
    """And exactly one output is the last one, whatever the order of the core's outputs."""
    p = processor(tokenizer, stream_interval=interval)
    todo: dict[str, list[int]] = {}
    results: dict[tuple[str, int], list[int]] = {}
    for number, length in enumerate(lengths):
        parent, children = fan_out(make_request(f"{number}-1", str(number), n=n, output_kind=kind))
        for index, child in enumerate(children):
            p.add_request(child, None, parent, index)
            todo[child.request_id] = results[str(number), index] = [70 + number + index] * (length + index)
    seen: dict[tuple[str, int], list[int]] = {key: [] for key in results}
    finished: list[str] = []
    while todo:
        request_id = data.draw(st.sampled_from(sorted(todo)))
        tokens = todo[request_id]
        count = data.draw(st.integers(1, len(tokens)))
        todo[request_id] = tokens[count:]
        reason = None if todo[request_id] else FinishReason.LENGTH
        if reason is not None:
            del todo[request_id]
        for shown in feed(p, make_output(request_id, tokens[:count], finish_reason=reason)):
            assert shown.request_id not in finished
            finished += [shown.request_id] if shown.finished else []
            for completion in shown.outputs:
                key = (shown.request_id, completion.index)
                seen[key] = seen[key] + list(completion.token_ids) if kind is DELTA else list(completion.token_ids)
                assert seen[key] == results[key][: len(seen[key])]
    assert seen == results
    assert sorted(finished) == [str(number) for number in range(len(lengths))]
    assert (p.request_states, p.parent_requests, p.external_req_ids) == ({}, {}, {})
