"""A step's input to the worker, and its result.

`SchedulerOutput` holds diffs, not state: the worker remembers a request from the step in which it appears in
`scheduled_new_reqs` until its id is in `finished_req_ids` or `preempted_req_ids`. A request that resumes after a
preemption (or after an engine restart) appears as a new one again, with the tokens it has generated so far: one path.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.kv_transfer import KVConnectorMetadata

BlockIds = tuple[list[int], ...]
"""Block ids per KV cache group."""


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that the worker does not know (or no longer knows)."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: BlockIds
    num_computed_tokens: int
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    output_token_ids: list[int] = []
    """Generated so far: empty for a fresh request, not for a resumed one."""
    lora_request: LoRARequest | None = None
    prediction_token_ids: list[int] = []
    """Tokens that the user expects in the output."""
    cache_salt: str | None = None
    """Isolates what a drafter remembers of past outputs, as it isolates the prefix cache."""
    prompt_embeds: npt.NDArray[Any] | None = None
    """[num_prompt_tokens, hidden_size] float32; None: all positions are tokens."""
    prompt_is_token_ids: list[bool] | None = None
    """True for each position of `prompt_embeds` that is a token instead; None: none is."""
    lora_revision: int = 0
    """Revision of the adapter that the request is bound to."""
    lora_start: int = 0
    """Position of the first token that the adapter applies to."""


class CachedRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The running requests of this step, as parallel lists."""

    req_ids: list[str] = []
    new_block_ids: list[BlockIds | None] = []
    """Blocks appended in this step, per request; None when there are none."""
    num_computed_tokens: list[int] = []
    """Tokens whose KV is in the cache before this step."""
    new_token_ids: dict[str, list[int]] = {}
    """Outputs whose KV is not in the cache, by request id: the last ones. Given where a grammar forced some, and to
    workers that do not sample; a worker may have the first of them."""

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.req_ids)


class SchedulerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One step. A request samples a token in it when its computed + scheduled tokens reach all the tokens it has."""

    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = {}
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    finished_req_ids: set[str] = set()
    """Finished or aborted since the last step: the worker forgets them."""
    preempted_req_ids: set[str] = set()
    """Preempted in this step: the worker forgets them, too."""
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    """True if a grammar must first see tokens of a step in flight: its mask cannot be computed yet."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """Transfers of blocks to begin before the step."""


class GrammarOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The token masks of the step's structured-output requests: [num_rows, ceil(vocab / 32)] int32.

    A row per id, and one more after it for each draft token of that request in this step.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: npt.NDArray[np.int32]


class LogprobsLists(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Log-probabilities of sampled tokens, a row per sampled token in the order of `sampled_token_ids`.

    Column 0 is the sampled token, then the top-k, most likely first.
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]
    """Rank of the sampled token, 1 for the most likely."""

    def slice_rows(self, start: int, stop: int) -> LogprobsLists:
        """Returns the rows of one request."""
        return LogprobsLists(
            self.logprob_token_ids[start:stop],
            self.logprobs[start:stop],
            self.sampled_token_ranks[start:stop],
        )


class LogprobsTensors(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Log-probabilities of prompt tokens, as arrays: they can be large. Row i is the prediction of prompt token i + 1.

    logprob_token_ids, logprobs: [num_rows, 1 + k] (int32, float32); selected_token_ranks: [num_rows] int32.
    """

    logprob_token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    selected_token_ranks: npt.NDArray[np.int32]


class ModelRunnerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The result of one step, a row per scheduled request in the order of `req_ids` (the worker's batch order)."""

    req_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    """New tokens of each request; empty while its prompt is not fully computed. Several with speculation."""
    logprobs: dict[str, LogprobsLists] = {}
    """Rows for its new tokens, by request id. Only requests that asked."""
    prompt_logprobs: dict[str, LogprobsTensors] = {}
    """All rows at once, by request id, in the step that completes the prompt. Only requests that asked."""
    pooler_output: dict[str, npt.NDArray[Any]] = {}
    num_nans_in_logits: dict[str, list[int]] = {}
    """NaNs in the logits of each new token, by request id."""


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
"""Result of a step without tokens."""


class DraftTokenIds(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Draft tokens proposed for the next step, parallel lists."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]
    predicted_req_ids: list[str] = []
    """Requests whose drafts come from their prediction."""
    seconds: float = 0.0
    """Time that drafting took."""
    is_enabled: bool = True
    """False once the drafter has failed: there will be no more drafts."""
