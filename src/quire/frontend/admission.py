"""Admission: limits on what may wait and on what may be promised. A request beyond them is refused before any work.

A request *waits* from its arrival until its first token or its end; it *lives* until its end. While it waits, its
prompt counts against the queue's limits. While it lives, its prompt and all the output it may have count against the
tokens that the server promises. Each of the n outputs of a prompt counts as a request with a prompt of its own, as the
engine core sees them.

A reservation is made before the prompt is tokenized, by an estimate that is corrected afterwards. A correction refuses
nothing, so the limits may be exceeded by the error of the estimates of prompts in the tokenizer. A request is never
refused for its own size: while nothing else is reserved it is admitted, or a prompt above the limit could never be
served.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import OverloadedError
from quire.frontend.metrics.collect.ledger import Receipt, RequestLedger
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.peers import SharedCount

ASCII_CHARS_PER_TOKEN = 4
OTHER_CHARS_PER_TOKEN = 2
"""For texts that are not all ASCII: between Cyrillic words and Chinese characters."""
DRAIN_MEMORY_S = 10.0
"""Time constant of the release rate that `retry_after_s` is computed from."""
MAX_RETRY_AFTER_S = 60

Clock = Callable[[], float]


class SharedQuota:
    """Amounts of one quota that several processes have taken, and have released so far."""

    __slots__ = ("_freed", "_freed_by_us", "_freed_seen", "_taken")

    def __init__(self, taken: SharedCount, freed: SharedCount) -> None:
        self._taken, self._freed = taken, freed
        self._freed_by_us = 0
        self._freed_seen = freed.others()

    def put(self, taken: int, more_freed: int) -> None:
        """Publishes what this process holds, and adds to what it has released."""
        self._freed_by_us += more_freed
        self._taken.put(taken)
        self._freed.put(self._freed_by_us)

    def taken_by_others(self) -> int:
        """Returns the amount that the other processes hold."""
        return self._taken.others()

    def take_freed_by_others(self) -> int:
        """Returns the amount the others have released since the last call. A killed process resets its counter, so the
        difference can be negative: it counts as 0."""
        seen, self._freed_seen = self._freed_seen, self._freed.others()
        return max(0, self._freed_seen - seen)


class QuotaRule(NamedTuple):
    """The flag that limits a quota, its words in the refusal of a request, and the error."""

    name: str
    words: str
    error: type[OverloadedError] = OverloadedError


QUEUED_REQS = QuotaRule("max_num_queued_reqs", "requests wait for their first token")
QUEUED_TOKENS = QuotaRule("max_num_queued_tokens", "prompt tokens wait for a first token")
RESERVED_TOKENS = QuotaRule("max_num_reserved_tokens", "tokens of prompts and outputs are promised to live requests")


class Quota:
    """An amount with a limit (None: unlimited), the part of it that is taken, and the rate at which it is released.

    Where several processes keep one (`share`), each of them may take what is left at the same moment: by that much the
    limit may be passed.
    """

    __slots__ = ("_clock", "_freed", "_ours", "_rule", "_shared", "_since", "_stamp", "limit")

    def __init__(self, rule: QuotaRule, limit: int | None, clock: Clock = time.monotonic) -> None:
        self._rule = rule
        self.limit = limit
        self._ours = 0
        self._shared: SharedQuota | None = None
        self._clock = clock
        self._freed = 0.0
        """Amount released, decayed: what was released `DRAIN_MEMORY_S` ago counts 1/e."""
        self._since = self._stamp = clock()

    def share(self, shared: SharedQuota) -> None:
        """Makes the limit one of all processes that keep `shared` together. Called before anything is taken."""
        self._shared = shared

    @property
    def taken(self) -> int:
        """Amount taken, by all processes that share the quota."""
        return self._ours if self._shared is None else self._ours + self._shared.taken_by_others()

    def check(self, more: int, rejections: Counter[str]) -> None:
        """Raises the error of the rule if `more` would exceed the limit now, and counts the rejection."""
        if self.limit is None or not (taken := self.taken) or taken + more <= self.limit:
            return
        name, words, error = self._rule
        rejections[name] += 1
        retry_after_s = self.retry_after_s(taken + more - self.limit)
        raise error(
            f"{taken} {words}, {more} more are too many for --{name.replace('_', '-')} {self.limit}; try again in "
            f"{retry_after_s} s",
            param=name,
            value=taken + more,
            retry_after_s=retry_after_s,
        )

    def change(self, more: int) -> None:
        """Takes more, or releases some."""
        self._forget()
        freed = max(0, -more)
        self._freed += freed
        self._ours += more
        if self._shared is not None:
            self._shared.put(self._ours, freed)

    def correct(self, more: int) -> None:
        """Corrects an estimated amount. Nothing was released."""
        self._ours += more
        if self._shared is not None:
            self._shared.put(self._ours, 0)

    def retry_after_s(self, amount: int) -> int:
        """Returns in how many seconds `amount` will be free, at the present release rate: 1 to `MAX_RETRY_AFTER_S`."""
        self._forget()
        age = (self._stamp - self._since) / DRAIN_MEMORY_S
        speed = self._freed / (DRAIN_MEMORY_S * -math.expm1(-age)) if age > 0 else 0.0
        if speed <= 0:
            return 1 if age < 1 else MAX_RETRY_AFTER_S
        return max(1, math.ceil(min(MAX_RETRY_AFTER_S, amount / speed)))  # amount / speed may be infinite

    def _forget(self) -> None:
        now = self._clock()
        if not self.taken and now - self._stamp > DRAIN_MEMORY_S:  # nothing could come free: that was no slowness
            self._since, self._freed = now, 0.0
        self._freed *= math.exp((self._stamp - now) / DRAIN_MEMORY_S)
        if self._shared is not None:
            self._freed += self._shared.take_freed_by_others()
        self._stamp = now


Charge = tuple[Quota, int]


class Demand(NamedTuple):
    """The core requests that a user request becomes, and the prompt and output tokens that each may have."""

    num_reqs: int
    num_tokens_each: int
    num_output_tokens_each: int = 0


class AdmissionControl:
    """Counts waiting and live requests and keeps them under their limits. Belongs to one thread."""

    def __init__(
        self,
        max_num_reqs: int | None = None,
        max_num_tokens: int | None = None,
        max_num_reserved_tokens: int | None = None,
        *,
        ledger: RequestLedger | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.ledger = RequestLedger() if ledger is None else ledger
        """Counts of the user requests that came in, and of how each ended."""
        self._reqs = Quota(QUEUED_REQS, max_num_reqs, clock)
        self._tokens = Quota(QUEUED_TOKENS, max_num_tokens, clock)
        self._reserved = Quota(RESERVED_TOKENS, max_num_reserved_tokens, clock)
        self.rejections: Counter[str] = Counter()
        """Number of refused user requests, by the name of the limit."""

    def share(self, reqs: SharedQuota, tokens: SharedQuota, reserved: SharedQuota) -> None:
        """Makes the limits those of all processes that keep these quotas together. Called before anything is
        admitted."""
        for quota, shared in ((self._reqs, reqs), (self._tokens, tokens), (self._reserved, reserved)):
            quota.share(shared)

    @property
    def max_num_reqs(self) -> int | None:
        """Maximum number of queued requests; None: unlimited."""
        return self._reqs.limit

    @property
    def max_num_tokens(self) -> int | None:
        """Maximum number of prompt tokens of queued requests; None: unlimited."""
        return self._tokens.limit

    @property
    def max_num_reserved_tokens(self) -> int | None:
        """Maximum number of prompt and output tokens of all live requests; None: unlimited."""
        return self._reserved.limit

    @property
    def num_reqs(self) -> int:
        """Number of waiting requests."""
        return self._reqs.taken

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens of waiting requests."""
        return self._tokens.taken

    @property
    def num_reserved_tokens(self) -> int:
        """Number of prompt tokens of live requests, and of the output tokens they may have."""
        return self._reserved.taken

    def check_admission(self, num_reqs: int = 1, num_tokens: int = 1, num_output_tokens: int = 0) -> None:
        """Raises OverloadedError if `num_reqs` requests with so many tokens in all would be refused now."""
        self._reqs.check(num_reqs, self.rejections)
        self._tokens.check(num_tokens, self.rejections)
        self._reserved.check(num_tokens + num_output_tokens, self.rejections)

    def reserve(self, num_reqs: int, num_tokens_each: int, num_output_tokens_each: int = 0) -> Reservation:
        """Returns a reservation for `num_reqs` requests with prompts and outputs of so many tokens. Raises
        OverloadedError."""
        (reservation,) = self.reserve_all([Demand(num_reqs, num_tokens_each, num_output_tokens_each)])
        return reservation

    def reserve_all(self, demands: Sequence[Demand], charges: Sequence[Charge] = ()) -> list[Reservation]:
        """Returns a reservation for each of `demands`. Raises OverloadedError if all of them together are refused.

        `charges` are checked first, and made if nothing is refused. The caller releases them.
        """
        receipts = [self.ledger.receive(demand.num_reqs) for demand in demands]
        try:
            for quota, more in charges:
                quota.check(more, self.rejections)
            self.check_admission(
                sum(demand.num_reqs for demand in demands),
                sum(demand.num_reqs * demand.num_tokens_each for demand in demands),
                sum(demand.num_reqs * demand.num_output_tokens_each for demand in demands),
            )
        except OverloadedError as e:
            for receipt in receipts:
                receipt.reject(e)
            raise
        for quota, more in charges:
            quota.change(more)
        quotas = self._reqs, self._tokens, self._reserved
        return [Reservation(receipt, demand, *quotas) for receipt, demand in zip(receipts, demands, strict=True)]


class Reservation:
    """The part of the quotas that one user request holds. It is released part by part, and never twice."""

    __slots__ = (
        "_num_live",
        "_num_tokens_each",
        "_num_waiting",
        "_reqs",
        "_reserved",
        "_reserved_each",
        "_tokens",
        "receipt",
    )

    def __init__(self, receipt: Receipt, demand: Demand, reqs: Quota, tokens: Quota, reserved: Quota) -> None:
        self.receipt = receipt
        self._reqs, self._tokens, self._reserved = reqs, tokens, reserved
        self._num_waiting = self._num_live = demand.num_reqs
        self._num_tokens_each = demand.num_tokens_each
        self._reserved_each = demand.num_tokens_each + demand.num_output_tokens_each
        reqs.change(self._num_waiting)
        tokens.change(self._num_waiting * self._num_tokens_each)
        reserved.change(self._num_live * self._reserved_each)

    def correct(self, num_tokens_each: int, num_output_tokens_each: int = 0) -> None:
        """Corrects the estimate: the true length of the prompt, and the most tokens its output may have."""
        reserved_each = num_tokens_each + num_output_tokens_each
        self._tokens.correct(self._num_waiting * (num_tokens_each - self._num_tokens_each))
        self._reserved.correct(self._num_live * (reserved_each - self._reserved_each))
        self._num_tokens_each, self._reserved_each = num_tokens_each, reserved_each

    def stop_waiting(self, num: int = 1) -> None:
        """Records that one of the requests, or `num` of them, wait no more."""
        num = min(num, self._num_waiting)
        if num:
            self._num_waiting -= num
            self._reqs.change(-num)
            self._tokens.change(-num * self._num_tokens_each)

    def end_one(self, *, waits: bool) -> None:
        """Records that one of the requests has ended; `waits` if it had no token."""
        if waits:
            self.stop_waiting()
        if self._num_live:
            self._num_live -= 1
            self._reserved.change(-self._reserved_each)

    def release(self, error: BaseException | None = None) -> None:
        """Releases everything. Requests that were not accepted are refused because of `error`; None: their client has
        left."""
        self.receipt.reject(error)
        self.stop_waiting(self._num_waiting)
        if self._num_live:
            self._reserved.change(-self._num_live * self._reserved_each)
            self._num_live = 0


def estimate_num_tokens(prompt: Any) -> int:
    """Returns the estimated number of tokens of a prompt of any form, without reading it; at least 1."""
    if isinstance(prompt, EngineCoreRequest):
        prompt = prompt.prompt_token_ids
    elif isinstance(prompt, Mapping):
        forms = (prompt.get(key) for key in ("prompt_token_ids", "prompt_embeds", "prompt"))
        prompt = next((form for form in forms if form is not None), None)
    if not hasattr(prompt, "__len__"):
        return 1
    if isinstance(prompt, str):
        return estimate_text_tokens([prompt])
    return max(1, len(prompt))


def estimate_text_tokens(texts: Iterable[str]) -> int:
    """Returns the estimated number of tokens of the parts of one text; at least 1."""
    return 1 + sum(len(text) // (ASCII_CHARS_PER_TOKEN if text.isascii() else OTHER_CHARS_PER_TOKEN) for text in texts)


def demand_of(params: Any, num_tokens: int, max_model_len: int) -> Demand:
    """Returns the demand of a user request with a prompt of about so many tokens."""
    return Demand(count_requests(params), num_tokens, max_output_tokens(params, max_model_len, num_tokens))


def count_requests(params: Any) -> int:
    """Returns the number of core requests that a user request becomes. An invalid number is refused later, by its
    name."""
    n = params.n if isinstance(params, SamplingParams) else 1
    return n if isinstance(n, int) and n > 0 else 1


def max_output_tokens(params: Any, max_model_len: int, num_prompt_tokens: int) -> int:
    """Returns the most tokens that each output of `params` may have after such a prompt; 0 where nothing is
    generated."""
    if not isinstance(params, SamplingParams):
        return 0
    quota = max(0, max_model_len - num_prompt_tokens)
    limit = params.max_tokens
    return quota if not isinstance(limit, int) else min(max(0, limit), quota)
