"""`n` outputs of one prompt: n requests to the core, one request to the user."""

from __future__ import annotations

import copy

import msgspec

from quire.outputs import CompletionOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreRequest

_INT64_RANGE = 1 << 64


class ParentRequest:
    """What the user asked for once and the core sees n times. Its id is internal, like its children's."""

    def __init__(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.sampling_params = request.sampling_params
        self.child_requests: set[str] = set()
        self.max_num_generation_tokens = 0
        self._outputs: dict[int, CompletionOutput] = {}

    @property
    def n(self) -> int:
        """How many outputs were asked for."""
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Id and parameters of child `index`: n=1, and a seed of its own, `seed + index` (within int64)."""
        child_id = f"{index}_{self.request_id}"
        self.child_requests.add(child_id)
        params = copy.copy(self.sampling_params)
        params.n = 1
        if params.seed is not None:
            params.seed = (params.seed + index + _INT64_RANGE // 2) % _INT64_RANGE - _INT64_RANGE // 2
        return child_id, params

    def get_outputs(self, child_id: str, output: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """What a child's output gives the user: (outputs to show now, is the whole request finished).

        FINAL_ONLY collects the children and shows all of them, in order, with the last one; otherwise each output is
        passed on as it comes.
        """
        if output.finished():
            self.child_requests.discard(child_id)
        finished = not self.child_requests
        if self.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return [output], finished
        self._outputs[output.index] = output
        return ([self._outputs[i] for i in sorted(self._outputs)] if finished else []), finished

    def observe_num_generation_tokens(self, num_tokens: int) -> int:
        """Count a finished child; the longest so far."""
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_tokens)
        return self.max_num_generation_tokens


def fan_out(request: EngineCoreRequest) -> tuple[ParentRequest | None, list[EngineCoreRequest]]:
    """(the parent, its n children), or (None, [request]) for a request of one output."""
    if request.sampling_params is None or request.sampling_params.n == 1:
        return None, [request]
    parent = ParentRequest(request)
    children = []
    for index in range(parent.n):
        child_id, params = parent.get_child_info(index)
        children.append(msgspec.structs.replace(request, request_id=child_id, sampling_params=params))
    return parent, children
