"""Admission: how much may wait. A request that does not fit is refused before any work is done for it.

A request *waits* from the moment it is handed in until its first token is there, or its end. Each of the n outputs of
a prompt counts as a request with a prompt of its own, as the engine core sees them. Room is reserved before the prompt
is tokenized, by an estimate that is corrected afterwards; the correction refuses nobody, so the limits may be passed by
what the estimates of prompts in the tokenizer were wrong. A request is never refused for its own size: where nothing
waits it is admitted, or a prompt above the limit could never be served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import OverloadedError
from quire.frontend.metrics.ledger import Receipt, RequestLedger
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest

ASCII_CHARS_PER_TOKEN = 4
OTHER_CHARS_PER_TOKEN = 2
"""Of texts that are not all ASCII: between Cyrillic words and Chinese characters."""


class AdmissionControl:
    """Counts what waits, and keeps it under its limits (None: no limit). Belongs to one thread."""

    def __init__(
        self,
        max_num_reqs: int | None = None,
        max_num_tokens: int | None = None,
        ledger: RequestLedger | None = None,
    ) -> None:
        self._ledger = RequestLedger() if ledger is None else ledger
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.num_reqs = 0
        """Waiting now."""
        self.num_tokens = 0
        """Of their prompts."""
        self.rejections: Counter[str] = Counter()
        """How many user requests were refused, by the name of the limit."""

    def check_admission(self, num_reqs: int = 1, num_tokens: int = 1) -> None:
        """Raises OverloadedError if `num_reqs` requests with prompts of `num_tokens` in all would be refused now."""
        self._check("max_num_queued_reqs", "requests", self.num_reqs, num_reqs, self.max_num_reqs)
        self._check("max_num_queued_tokens", "prompt tokens", self.num_tokens, num_tokens, self.max_num_tokens)

    def _check(self, name: str, what: str, waiting: int, more: int, limit: int | None) -> None:
        if limit is not None and waiting and waiting + more > limit:
            self.rejections[name] += 1
            raise OverloadedError(
                f"the queue is full: {waiting} {what} wait for their first token, {more} more are too many for "
                f"--{name.replace('_', '-')} {limit}; try again later",
                param=name,
                value=waiting + more,
            )

    def reserve(self, num_reqs: int, num_tokens_each: int) -> Reservation:
        """Room for `num_reqs` requests of `num_tokens_each`. Raises OverloadedError."""
        return self.reserve_all([num_tokens_each], num_reqs)[0]

    def reserve_all(self, nums_tokens: Sequence[int], num_reqs_each: int) -> list[Reservation]:
        """Room for several prompts that come together, each so often. Raises OverloadedError; then there is none."""
        receipts = [self._ledger.receive(num_reqs_each) for _ in nums_tokens]
        try:
            self.check_admission(num_reqs_each * len(nums_tokens), num_reqs_each * sum(nums_tokens))
        except OverloadedError as e:
            for receipt in receipts:
                receipt.reject(e)
            raise
        self._change(num_reqs_each * len(nums_tokens), num_reqs_each * sum(nums_tokens))
        return [
            Reservation(self, receipt, num_reqs_each, num_tokens)
            for receipt, num_tokens in zip(receipts, nums_tokens, strict=True)
        ]

    def _change(self, num_reqs: int, num_tokens: int) -> None:
        self.num_reqs += num_reqs
        self.num_tokens += num_tokens


class Reservation:
    """The room one user request takes in the queue. It is given back part by part, and never twice."""

    __slots__ = ("_control", "_num_reqs", "_num_tokens_each", "_receipt")

    def __init__(self, control: AdmissionControl, receipt: Receipt, num_reqs: int, num_tokens_each: int) -> None:
        self._control = control
        self._receipt = receipt
        self._num_reqs = num_reqs
        self._num_tokens_each = num_tokens_each

    def correct(self, num_tokens_each: int) -> None:
        """The prompt is tokenized: this is its true length."""
        self._control._change(0, self._num_reqs * (num_tokens_each - self._num_tokens_each))
        self._num_tokens_each = num_tokens_each

    def accept_one(self) -> None:
        """One of the requests is the engine's from now on."""
        self._receipt.accept_one()

    def release_one(self) -> None:
        """One of the requests waits no more."""
        if self._num_reqs:
            self._num_reqs -= 1
            self._control._change(-1, -self._num_tokens_each)

    def release(self, error: BaseException | None = None) -> None:
        """None of them waits any more. Those that are not the engine's are refused because of `error`; None: their
        client has left."""
        self._receipt.reject(error)
        self._control._change(-self._num_reqs, -self._num_reqs * self._num_tokens_each)
        self._num_reqs = 0


def estimate_num_tokens(prompt: Any) -> int:
    """How long a prompt of any form will be, without reading it; at least 1."""
    if isinstance(prompt, EngineCoreRequest):
        prompt = prompt.prompt_token_ids
    elif isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    if not hasattr(prompt, "__len__"):
        return 1
    if isinstance(prompt, str):
        per_token = ASCII_CHARS_PER_TOKEN if prompt.isascii() else OTHER_CHARS_PER_TOKEN
        return len(prompt) // per_token + 1
    return max(1, len(prompt))


def count_requests(params: Any) -> int:
    """How many core requests a user request becomes; what is no valid number is refused later, by its name."""
    n = params.n if isinstance(params, SamplingParams) else 1
    return n if isinstance(n, int) and n > 0 else 1
