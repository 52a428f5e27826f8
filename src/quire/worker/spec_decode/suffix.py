"""Drafts from what followed the same tokens before: in the request's own text, and in past outputs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from quire.worker.spec_decode.drafter import Drafter, DrafterContext, DraftRow, Proposal
from quire.worker.spec_decode.prediction import draft_of_prediction
from quire.worker.spec_decode.suffix_index import SuffixDrafts, SuffixRules, SuffixStore, TokenArray, make_suffix_store

TOKENS_PER_STEP = 512
"""Most tokens of past outputs that are learned in one step: less than a millisecond."""


class SuffixDrafter(Drafter):
    """Chooses between two indexes the one that promises more tokens: that of the request, and that of the outputs of
    ended requests with the same cache salt. Both are in one store of `suffix_decoding_max_bytes`: the oldest outputs
    make room for others and for the texts of requests."""

    def __init__(self, context: DrafterContext) -> None:
        drafting = context.drafting
        self._depth = max(drafting.suffix_decoding_max_tree_depth, 2)
        self._max_bytes = drafting.suffix_decoding_max_bytes
        self._max_cached_requests = drafting.suffix_decoding_max_cached_requests
        self._rules = SuffixRules(drafting.suffix_decoding_max_spec_factor, drafting.suffix_decoding_min_token_prob)
        self.reset()

    def reset(self) -> None:
        self._store = make_suffix_store(self._depth, self._max_bytes)
        self._texts: dict[str, _Text] = {}  # by request id
        self._past = PastOutputs(self._store, self._max_cached_requests)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self._past.learn(TOKENS_PER_STEP)
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> Proposal:
        text = self._follow(row)
        predicted = draft_of_prediction(row)
        if predicted is not None:
            return predicted
        found = self._past.propose(row.cache_salt, row.token_ids[1 - self._depth :], row.max_drafts, self._rules)
        if text.index is not None:
            own = self._store.propose(text.index, None, row.max_drafts, self._rules)
            found = own if own.score >= found.score else found
        return Proposal(found.token_ids, found.confidences)

    def _follow(self, row: DraftRow) -> _Text:
        """Returns the text of a request, with its new tokens."""
        text = self._texts.get(row.req_id)
        if text is None or text.num_tokens > len(row.token_ids):
            self._close(text)
            text = self._texts[row.req_id] = _Text(row.cache_salt, self._store.open())
        new = row.token_ids[text.num_tokens :]
        text.outputs += new[max(row.num_prompt_tokens - text.num_tokens, 0) :].tolist()
        text.unread.clear()
        text.num_tokens = len(row.token_ids)
        if text.index is not None and not self._past.extend_making_room(text.index, new):
            self._close(text)  # no memory: the request is drafted for from past outputs
        return text

    def _close(self, text: _Text | None) -> None:
        if text is not None and text.index is not None:
            self._store.close(text.index)
            text.index = None

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        if req_id in self._texts:
            self._texts[req_id].unread += token_ids

    def forget(self, req_id: str) -> None:
        text = self._texts.pop(req_id, None)
        if text is not None:
            self._close(text)
            self._past.add(text.cache_salt, np.array(text.outputs + text.unread, np.int32))


class _Text:
    """A request's text, as far as it was read."""

    def __init__(self, cache_salt: str | None, index: int | None) -> None:
        self.cache_salt, self.index = cache_salt, index
        self.num_tokens = 0
        self.outputs: list[int] = []
        self.unread: list[int] = []
        """Outputs since the request was last drafted for."""


class PastOutputs:
    """Outputs of ended requests, the oldest forgotten first: in an index for each cache salt."""

    def __init__(self, store: SuffixStore, max_requests: int) -> None:
        self._store, self._max_requests = store, max_requests
        self._indexes: dict[str | None, int] = {}
        self._order: deque[str | None] = deque()
        """Salts of the learned outputs, the oldest first."""
        self._counts: Counter[str | None] = Counter()
        """Outputs in each index."""
        self._pending: deque[tuple[str | None, TokenArray]] = deque()
        """Outputs, or the ends of them, that are not learned yet."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, cache_salt: str | None, token_ids: TokenArray) -> None:
        """Takes an output, to be learned later."""
        if self._max_requests and len(token_ids) > 1:
            if len(self._pending) >= self._max_requests:
                self._pending.pop()
            self._pending.append((cache_salt, token_ids))

    def learn(self, max_tokens: int) -> None:
        """Learns up to so many tokens of the outputs that were added."""
        while self._pending and max_tokens > 0:
            salt, token_ids = self._pending.popleft()
            if salt not in self._indexes:
                index = self._store.open()
                if index is None:
                    continue
                self._indexes[salt] = index
            index, now = self._indexes[salt], token_ids[:max_tokens]
            max_tokens -= len(now)
            if not self.extend_making_room(index, now) or (len(now) == len(token_ids) and not self._store.end(index)):
                self._close(salt)
            elif len(now) < len(token_ids):
                self._pending.appendleft((salt, token_ids[len(now) :]))
            else:
                self._order.append(salt)
                self._counts[salt] += 1
                while len(self._order) > self._max_requests:
                    self._drop_oldest()

    def extend_making_room(self, index: int, token_ids: TokenArray) -> bool:
        """Extends the last text of an index, and drops outputs where memory is short. Returns False
        if there is still no room."""
        while (taken := self._store.extend(index, token_ids)) < len(token_ids):
            if not self._order:
                return False
            token_ids = token_ids[taken:]
            self._drop_oldest(index)
        return True

    def _drop_oldest(self, kept: int | None = None) -> None:
        salt = self._order.popleft()
        self._counts[salt] -= 1
        self._store.drop_first(self._indexes[salt])
        is_pending = bool(self._pending) and self._pending[0][0] == salt
        if not self._counts[salt] and self._indexes[salt] != kept and not is_pending:
            self._close(salt)

    def _close(self, salt: str | None) -> None:
        """Forgets the outputs of a salt."""
        self._store.close(self._indexes.pop(salt))
        del self._counts[salt]
        self._order = deque(other for other in self._order if other != salt)

    def propose(self, salt: str | None, context: TokenArray, max_drafts: int, rules: SuffixRules) -> SuffixDrafts:
        """Returns what may follow, by the outputs with the same salt."""
        if salt not in self._indexes:
            return SuffixDrafts([], [], 0.0)
        return self._store.propose(self._indexes[salt], context, max_drafts, rules)
