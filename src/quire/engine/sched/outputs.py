"""Makes the outputs for the frontend from the worker's results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from quire.engine.request import Request, RequestStatus
from quire.engine.sched.drafts import DraftFitter
from quire.engine.sched.stop import Stop, check_stop
from quire.engine.structured_output.request import GrammarVerdict, StructuredOutputRequest
from quire.errors import error_name
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.stats import PrefillStats, SchedulerStats, divide_by_source

MAX_JUMP = 64
"""Most tokens that a grammar appends at once; those after them come with the next step."""
_COMPLETE = Stop(RequestStatus.FINISHED_STOPPED)


def apply_result(
    request: Request, result: ModelRunnerOutput, new_token_ids: list[int], max_model_len: int
) -> EngineCoreOutput | None:
    """Appends the tokens of a step to a request, up to a stop. Returns the output for its client.

    Returns None while there is nothing to report (its prompt is not computed yet). Sets the request's status if it
    ended.
    """
    request_id = request.request_id
    first = request.num_tokens == request.num_prompt_tokens
    if request.sampling_params is None:
        return _apply_pooling_result(request, result)
    if not new_token_ids:
        return None
    kept = _append_until_stop(request, new_token_ids, max_model_len)
    ends = request.status is not RequestStatus.RUNNING
    error_message, error_type = _describe_error(request) if ends else (None, "")
    logprobs = result.logprobs.get(request_id) if result.logprobs else None
    if logprobs is not None and len(kept) < len(new_token_ids):
        logprobs = logprobs.slice_rows(0, len(kept))
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=kept,
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=result.prompt_logprobs.get(request_id) if first else None,
        finish_reason=request.status.finish_reason if ends else None,
        stop_reason=request.report.stop_reason if ends else None,
        events=request.report.take_events() if request.report.events else None,
        prefill_stats=make_prefill_stats(request) if first else None,
        trace_headers=request.origin.trace_headers,
        num_nans_in_logits=sum(result.num_nans_in_logits[request_id][: len(kept)])
        if request_id in result.num_nans_in_logits
        else 0,
        error_message=error_message,
        error_type=error_type,
        adapter=request.report.adapter if first else None,
    )


def _describe_error(request: Request) -> tuple[str | None, str]:
    """Returns the message and the type of the error that ended a request; (None, ""): no error did."""
    error = request.report.error
    return (None, "") if error is None else (str(error), error_name(error))


def _append_until_stop(request: Request, new_token_ids: list[int], max_model_len: int) -> list[int]:
    """Returns the tokens kept: all, or those up to and with the one that ended the request, and tokens that a grammar
    forces."""
    for count, token_id in enumerate(new_token_ids, start=1):
        if _append(request, token_id, max_model_len):
            return new_token_ids[:count]
    if request.structured_output is None or not request.structured_output.jumps:
        return new_token_ids
    forced: list[int] = []
    for token_id in forced_tokens(request):
        forced.append(token_id)
        if _append(request, token_id, max_model_len):
            break
    request.unsent_token_ids += forced
    return new_token_ids + forced


def _append(request: Request, token_id: int, max_model_len: int) -> bool:
    """Appends a token. Returns whether it has ended the request."""
    request.append_output_token_ids(token_id)
    stop = check_stop(request, max_model_len)
    if request.structured_output is not None:
        stop = _check_grammar(request, request.structured_output, token_id, stop)
    if stop is None:
        return False
    request.status = stop.status
    request.report.stop_reason = stop.reason
    return True


def _check_grammar(
    request: Request, structured: StructuredOutputRequest, token_id: int, stop: Stop | None
) -> Stop | None:
    """Passes the appended token to the grammar. Returns the stop, given that `stop` would end the request otherwise.

    A complete form ends the output at once, without an end-of-sequence token, whatever `ignore_eos` and `min_tokens`
    say, and although max_tokens may be used up, too.
    """
    match structured.accept(token_id):
        case GrammarVerdict.COMPLETE:
            return _COMPLETE if stop is None or stop.status is RequestStatus.FINISHED_LENGTH_CAPPED else stop
        case GrammarVerdict.BROKEN:
            request.report.error = structured.error
            return Stop(RequestStatus.FINISHED_ERROR)
        case GrammarVerdict.GOES_ON:
            return stop


def _apply_pooling_result(request: Request, result: ModelRunnerOutput) -> EngineCoreOutput | None:
    pooled = result.pooler_output.get(request.request_id)
    if pooled is None:
        return None
    request.status = RequestStatus.FINISHED_STOPPED
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        pooling_output=pooled,
        finish_reason=request.status.finish_reason,
        events=request.report.take_events(),
        prefill_stats=make_prefill_stats(request),
        trace_headers=request.origin.trace_headers,
    )


def make_prefill_stats(request: Request) -> PrefillStats:
    """Returns where the prompt's tokens came from at the request's first admission: recomputation is not counted
    again."""
    report, num_prompt = request.report, request.num_prompt_tokens
    num_local = max(report.num_cached_tokens, 0) - report.num_external_tokens
    num_cached = min(num_local + report.num_external_tokens, num_prompt)
    num_local = min(num_local, num_cached)  # the start of what was cached
    return PrefillStats(
        num_prompt_tokens=num_prompt,
        num_computed_tokens=num_prompt - num_cached,
        num_local_cached_tokens=num_local,
        num_external_cached_tokens=num_cached - num_local,
        external_by_source=divide_by_source(num_cached - num_local, report.external_by_source),
        load_span=report.load_span if num_cached > num_local else None,
    )


class OutputCollector:
    """Makes outputs from results, and hands them over once per step, grouped by client.

    With `include_finished_set` each client also gets the ids of all its requests that ended, aborts included.
    """

    def __init__(self, max_model_len: int, include_finished_set: bool, drafts: DraftFitter | None) -> None:
        self._max_model_len = max_model_len
        self._drafts = drafts
        self._outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._finished: defaultdict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._num_ends = 0
        """Number of outputs without tokens."""

    def add_result(
        self, requests: list[Request], scheduler_output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[Request]:
        """Gives each of a step's requests what was computed for it. Returns those that have ended by it.

        Skips a request that ended while the step was in flight. One that was preempted meanwhile keeps its token, which
        is the one its recomputation would yield.
        """
        token_ids = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        ended: list[Request] = []
        for request in requests:
            request_id = request.request_id
            num_drafts = len(drafts[request_id]) if request_id in drafts else 0
            if request.is_finished:
                if num_drafts and self._drafts is not None:
                    self._drafts.drop_of_ended(request, num_drafts)
                continue
            new_token_ids = token_ids.get(request_id, [])
            num_matched = max(len(new_token_ids) - 1, 0)
            if num_drafts and request.status is RequestStatus.RUNNING:
                request.num_computed_tokens -= num_drafts - num_matched  # their slots will be overwritten
            output = apply_result(request, result, new_token_ids, self._max_model_len)
            if num_drafts and self._drafts is not None:
                num_kept = 0 if output is None else len(output.new_token_ids)
                metrics = self._drafts.record(request, num_drafts, num_matched, num_kept)
                if output is not None:
                    output.spec_decode_metrics = metrics
            if output is not None:
                self._outputs[request.origin.client_index].append(output)
                if output.finish_reason is not None:
                    ended.append(request)
        return ended

    def add_end(self, request: Request) -> None:
        """Adds the end of a request that no result of the worker caused."""
        self._num_ends += 1
        error_message, error_type = _describe_error(request)
        self._outputs[request.origin.client_index].append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.status.finish_reason,
                stop_reason=request.report.stop_reason,
                events=request.report.take_events(),
                trace_headers=request.origin.trace_headers,
                error_message=error_message,
                error_type=error_type,
            )
        )

    def note_finished(self, request: Request) -> None:
        """Notes the id of a request that has ended, and adds to its last output what is known only now."""
        if request.report.transfer_params is not None:
            for output in reversed(self._outputs[request.origin.client_index]):
                if output.request_id == request.request_id:
                    output.kv_transfer_params = request.report.transfer_params
                    break
        if self._finished is not None:
            self._finished[request.origin.client_index].add(request.request_id)

    def take(self, timestamp: float, stats: SchedulerStats | None) -> dict[int, EngineCoreOutputs]:
        """Returns everything gathered, by client, under one `timestamp`.

        `stats` go to client 0, which exists as long as the core: they must be counted once.
        """
        batches = {
            client: EngineCoreOutputs(outputs=outputs, timestamp=timestamp) for client, outputs in self._outputs.items()
        }
        self._outputs.clear()
        if self._finished:
            for client, request_ids in self._finished.items():
                batch = batches.setdefault(client, EngineCoreOutputs(timestamp=timestamp))
                batch.finished_requests = request_ids
            self._finished.clear()
        if stats is not None:
            stats.spec_decoding_stats = None if self._drafts is None else self._drafts.take_stats()
            stats.num_decoded_reqs = -self._num_ends
            for batch in batches.values():
                _count_tokens(stats, batch.outputs)
            owner = batches.get(0)
            if owner is None:
                owner = batches[0] = EngineCoreOutputs(timestamp=timestamp)
            owner.scheduler_stats = stats
        self._num_ends = 0
        return batches


def _count_tokens(stats: SchedulerStats, outputs: list[EngineCoreOutput]) -> None:
    """Adds the tokens of these outputs to the statistics. Nearly all have one token that is not their request's
    first."""
    num_tokens = 0
    for output in outputs:
        num_tokens += len(output.new_token_ids)
        if output.prefill_stats is not None:
            stats.num_prefilled_tokens += output.prefill_stats.num_computed_tokens
            stats.num_decoded_reqs -= 1
    stats.num_generation_tokens += num_tokens
    stats.num_decoded_reqs += len(outputs)


def forced_tokens(request: Request) -> Iterator[int]:
    """Yields the tokens that the grammar forces. The caller must append each before it asks for the next."""
    structured, params = request.structured_output, request.sampling_params
    if structured is None or params is None or not structured.jumps:
        return
    for _ in range(MAX_JUMP):
        token_id = structured.forced_token()
        if token_id is None or (params.min_tokens and token_id in params.all_stop_token_ids):
            return
        yield token_id
