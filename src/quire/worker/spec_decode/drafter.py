"""The interface of a drafter: it guesses the next tokens of requests, and the next step verifies them.

A draft is a hint. Whatever a drafter proposes, the tokens that a request gets are those it would get without: a draft
is kept only where it equals the token that is drawn at its position. A wrong draft costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.speculative import Drafting
from quire.worker.attention.layer import Attention
from quire.worker.input_batch import StepInputs
from quire.worker.loader import LoadedModel, Placement
from quire.worker.loader.shards import Sharding
from quire.worker.model_runner import ModelRunner


class DraftRow(NamedTuple):
    """One request that may be drafted for. The arrays are views: use them at once."""

    req_id: str
    row: int
    """Its row of the `InputBatch`."""
    token_ids: npt.NDArray[np.int32]
    """Prompt and outputs, [n]."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are in the cache."""
    max_drafts: int
    """Most drafts it can use, at least 1."""
    prediction: npt.NDArray[np.int32] | None = None
    """Tokens that its user expects in the output."""
    cache_salt: str | None = None
    """Drafts may come from the outputs of requests with the same salt only."""


class Proposal(NamedTuple):
    """Drafts for one request, in the order of its rows; no drafts is an empty proposal."""

    token_ids: list[int]
    confidences: list[int]
    """A bucket from 0 (a guess) to 15 (nearly certain) for each token; what a bucket is worth is measured."""
    from_prediction: bool = False
    """True if the drafts come from `DraftRow.prediction`."""


NO_PROPOSAL = Proposal([], [])


class Drafter(Protocol):
    """Proposes drafts. Owns whatever it remembers of requests; knows nothing of scheduling.

    It may raise: speculation is then switched off, and no token changes. Its class is called with a `DrafterContext`.
    """

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """Returns a proposal for each row, of at most `max_drafts` tokens."""
        ...

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Learns from the new tokens of a request, of which the first `num_accepted` were drafts."""
        ...

    def forget(self, req_id: str) -> None:
        """Drops what it remembers of a request that has ended or was preempted. Unknown ids are ignored."""
        ...

    def reset(self) -> None:
        """Drops what it learned from any request: prefixes are no longer cached, or the weights are others."""


DRAFTER_METHODS = ("propose", "observe", "forget", "reset")


class ModelDrafter(Drafter, Protocol):
    """A drafter with weights, and with layers in the KV cache (`draft_kv.py`)."""

    @property
    def loaded(self) -> LoadedModel:
        """Its weights, which sleep with the target's."""
        ...

    @property
    def ends(self) -> LoadedModel | None:
        """Parts of the target that it has besides those of the worker."""
        ...

    @property
    def layers(self) -> Sequence[Attention]:
        """Its attention layers."""
        ...

    def release_kv_cache(self) -> None:
        """Drops all references to the KV cache, whose memory is about to be freed."""
        ...


class TargetStep(NamedTuple):
    """Results of the target's last step. Tensors may be views: use them until the next step."""

    inputs: StepInputs
    req_ids: list[str]
    """In the order of `inputs.rows`. A request may have left the batch since."""
    hidden: Tensor
    """[num_tokens, hidden_size]"""
    sampled_token_ids: list[list[int]]
    """New tokens of each request; the batch has them already."""
    tapped: tuple[Tensor, ...] = ()
    """Inputs of the target's tapped layers, like `hidden`: models/decoder.py."""


class Lengths(Protocol):
    """Decides how many drafts of which request pay."""

    def limit(self, rows: Sequence[DraftRow]) -> Sequence[DraftRow]:
        """Returns the rows to draft for, in their order, some perhaps with a lower `max_drafts`."""
        ...

    def cut(self, rows: Sequence[DraftRow], proposals: Sequence[Proposal]) -> list[int]:
        """Returns how many drafts of each proposal the next step is to verify."""
        ...

    def observe_drafts(self, confidences: Sequence[int], num_accepted: int) -> None:
        """Learns the fate of drafts of one request: the first `num_accepted` were right, the next one was wrong, and
        nothing is known of the others."""
        ...

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Learns how long a step took that computed `num_rows` tokens, logits for each: no prompt, no padding."""
        ...

    def observe_drafting(self, num_rows: int, seconds: float, is_steady: bool = True) -> None:
        """Learns how long `propose` took for `num_rows` requests; not `is_steady` if some of them had no drafts in the
        last step, so that it may have read their prompts."""
        ...


@dataclass
class DrafterContext:
    """The parts of the worker that a drafter may use.

    The batch and the KV cache of `runner` exist only after initialize_kv_cache, and are others after each call of it:
    read them through `runner` at every use.
    """

    config: EngineConfig
    drafting: Drafting
    placement: Placement
    """Device, type and kernels. Of several workers one drafts, with the whole of a model that drafts."""
    runner: ModelRunner
    """The target: `model`, `backend`, `batch`, `kv_cache`."""
    lengths: Lengths
    sharding: Sharding | None = None
    """Division of the target among workers; None: this one has all of it. With others the target cannot be called by a
    drafter, because they would not take part."""
    step: TargetStep | None = None
    """The last step; None before the first."""
