"""An engine core of forty lines: one token per request and step, from a function of the tokens so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.frontend.client.base import EngineCoreClient
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from quire.wire.execution import LogprobsLists
from quire.wire.stats import PrefillStats, SchedulerStats
from quire.wire.utility import UTILITIES

Model = Callable[[Sequence[int]], dict[int, float]]
"""Tokens so far to the log-probabilities of every next token."""


def counting_model(tokens: Sequence[int]) -> dict[int, float]:
    """The most likely token is the last one plus one."""
    return {tokens[-1] + 1: -0.5, tokens[-1] + 2: -1.0, tokens[-1] + 3: -2.0}


class FakeClient(EngineCoreClient):
    """Greedy; stops as a core does. The engine's clock advances by one second per step."""

    def __init__(self, model: Model = counting_model, max_model_len: int = 64) -> None:
        self.model = model
        self.ready_response = EngineCoreReadyResponse(
            max_model_len=max_model_len,
            num_gpu_blocks=8,
            block_size=16,
            kv_cache_size_tokens=128,
            kv_cache_max_concurrency=2.0,
            supported_tasks=("generate",),
        )
        self.now = 100.0
        self.live: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.before_step: Callable[[], None] = lambda: None
        self.num_steps = 0
        self.is_shut_down = False
        self.utilities: list[tuple[Any, ...]] = []
        self.utility_results: dict[str, Any] = {"reset_prefix_cache": True, "collective_rpc": ["pong"]}
        """Results of control verbs, by name."""

    def add_request(self, request: EngineCoreRequest) -> None:
        self.added.append(request)
        self.live[request.request_id] = (request, [])

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.live.pop(request_id, None)

    def get_output(self) -> EngineCoreOutputs:
        self.before_step()
        self.num_steps += 1
        self.now += 1.0
        outputs = [self._advance(*entry) for entry in list(self.live.values())]
        return EngineCoreOutputs(
            outputs=outputs,
            timestamp=self.now,
            scheduler_stats=SchedulerStats(num_running_reqs=len(self.live)),
        )

    def _advance(self, request: EngineCoreRequest, generated: list[int]) -> EngineCoreOutput:
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None
        assert prompt is not None
        ranked = sorted(self.model([*prompt, *generated]).items(), key=lambda item: -item[1])
        token = ranked[0][0]
        first = not generated
        generated.append(token)
        reason: FinishReason | None = None
        if token in params.all_stop_token_ids and len(generated) > params.min_tokens:
            reason = FinishReason.STOP
        elif len(generated) == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.live[request.request_id]
        rows = [ranked[0], *ranked[: params.logprobs or 0]]
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            new_logprobs=LogprobsLists([[i for i, _ in rows]], [[v for _, v in rows]], [1])
            if params.logprobs is not None
            else None,
            finish_reason=reason,
            stop_reason=token if reason is FinishReason.STOP and token != params.eos_token_id else None,
            events=[
                EngineCoreEvent(EngineCoreEventType.QUEUED, self.now - 0.75),
                EngineCoreEvent(EngineCoreEventType.SCHEDULED, self.now - 0.5),
            ]
            if first
            else None,
            prefill_stats=PrefillStats(len(prompt), len(prompt) - 1, 1) if first else None,
        )

    def call_utility(self, method: str, *args: Any) -> Any:
        assert len(args) <= len(UTILITIES[method].arguments)
        self.utilities.append((method, *args))
        return self.utility_results.get(method)

    def shutdown(self) -> None:
        self.is_shut_down = True
