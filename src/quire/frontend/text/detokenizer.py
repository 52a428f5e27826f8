"""Token ids to text as they arrive, the stop strings in that text, and the log-probabilities of the tokens.

`TextStream` turns ids into text, `TextDetokenizer` adds stop strings and what a request may show. The text of a request
is the same however its tokens arrive: one at a time, several in a step, or all at once.

`LogprobsProcessor` makes a map from token id to `Logprob` per position. The text of a token there is what it adds to
the output in its place: a token that ends inside a UTF-8 character shows what is complete, and the token that completes
the character shows all of it. So the texts of the sampled tokens, joined, are the text of the output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from quire.frontend.text.tokenizer import CONTEXT_TOKENS, REPLACEMENT, Tokenizer
from quire.outputs import Logprob, PromptLogprobs, SampleLogprobs
from quire.sampling_params import SamplingParams
from quire.wire.execution import LogprobsLists, LogprobsTensors


class StopMatch(NamedTuple):
    """A stop string and where it lies in the text: text[start:end] == stop."""

    stop: str
    start: int
    end: int


class StopStrings:
    """The stop strings of a request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_held = max(map(len, stops), default=1) - 1

    def find(self, text: str, start: int = 0) -> StopMatch | None:
        """Returns the stop string that a reader of text[start:] would be the first to have read completely.

        Of several that end at the same character the longest counts. So the answer does not depend on the order of the
        stop strings, nor on how the text was cut into tokens.
        """
        best: StopMatch | None = None
        for stop in self._stops:
            at = text.find(stop, start)
            if at >= 0 and (best is None or (at + len(stop), at) < (best.end, best.start)):
                best = StopMatch(stop, at, at + len(stop))
        return best

    def held_back(self, text: str, start: int = 0) -> int:
        """Returns how many characters at the end of text[start:] may begin a stop string and are not shown yet."""
        for at in range(max(start, len(text) - self._max_held), len(text)):
            if text[at] in self._first_chars:
                tail = text[at:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0


MAX_PENDING_TOKENS = 16
"""A character is complete after four bytes: what is still undecodable then is garbage and not held back for ever."""

MAX_KEPT_CHARS = 256
"""Length beyond which text that a reader of deltas has seen is dropped."""


class TextStream:
    """Decodes one token after another.

    A token's text depends on its neighbours: a character may be spread over several tokens, and some decoders treat the
    first token of a text or a run of byte tokens specially. So a short window is decoded each time: `_context`, tokens
    whose text is out already, and `_pending`, tokens whose text is not complete. Most tokens need no window: where the
    tokenizer's decoder gives a token the same text after any other, that text is looked up.

    (The `tokenizers` library has a DecodeStream of the same idea. It raises when a byte-fallback decoder rewrites text
    that is out, and its window grows without bound over invalid bytes.)
    """

    __slots__ = (
        "_added",
        "_context",
        "_last_was_added",
        "_look_up",
        "_pending",
        "_plain_texts",
        "_skipped",
        "_tokenizer",
    )

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True, spaces: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids if skip_special else frozenset()
        self._added = {} if skip_special or spaces else tokenizer.added_token_ids
        self._last_was_added = False
        self._look_up = tokenizer.has_fixed_texts and not self._added
        self._plain_texts = tokenizer.plain_texts if self._look_up else {}
        self._pending: list[int] = []
        self._context = self._prompt_context(prompt_ids)

    def _prompt_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Returns the end of the prompt, so that the output's first token keeps its leading space."""
        tail = [i for i in prompt_ids[-8 * CONTEXT_TOKENS :] if i not in self._skipped]
        for length in (CONTEXT_TOKENS, 2 * CONTEXT_TOKENS, 4 * CONTEXT_TOKENS):
            text = self._decode(tail[-length:])
            if not text.endswith(REPLACEMENT):
                return tail[-length:] if text else []  # ids that have no text are no context
        return []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend.decode(ids, skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        """Returns the text that is complete now that `token_id` has come; often "" in the middle of a character."""
        if self._context and not self._pending:
            plain = self._plain_texts.get(token_id)
            if plain is not None:
                self._context = [token_id]
                return plain
        if token_id in self._skipped:
            return ""
        if self._look_up and self._context and not self._pending:
            text = self._tokenizer.token_text(token_id)
            if text and REPLACEMENT not in text:
                self._context = [token_id]
                return text
        if self._added and self._is_second_added(token_id):
            flushed = self.flush()
            self._context = [token_id]
            return flushed + self._added[token_id]
        self._pending.append(token_id)
        text = self._text_after_context(self._pending)
        if text and not text.endswith(REPLACEMENT):
            self._take(len(self._pending))
            return text
        return self._push_overflow() if len(self._pending) > MAX_PENDING_TOKENS else ""

    def _is_second_added(self, token_id: int) -> bool:
        """Returns True for the second of two added tokens in a row, if no spaces are wanted between them."""
        was_added, self._last_was_added = self._last_was_added, token_id in self._added
        return was_added and self._last_was_added

    def flush(self) -> str:
        """Returns the text of what is pending, replacement characters and all: no more tokens will complete it."""
        text = self._text_after_context(self._pending) if self._pending else ""
        self._take(len(self._pending))
        return text

    def _text_after_context(self, ids: list[int]) -> str:
        before = self._decode(self._context) if self._context else ""
        text = self._decode(self._context + ids)
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(ids)  # a byte-fallback decoder now reads the context as garbage: what is out stays out

    def _take(self, count: int) -> None:
        """Makes the first `count` pending tokens, whose text is out, the context."""
        if count:
            self._context, self._pending = self._pending[:count], self._pending[count:]

    def _push_overflow(self) -> str:
        """Returns the text of all pending tokens but the last few, which may still become a character."""
        whole = self._text_after_context(self._pending)
        for kept in range(1, CONTEXT_TOKENS):
            text = self._text_after_context(self._pending[:-kept])
            if text + self._decode(self._pending[-kept:]) == whole:
                self._take(len(self._pending) - kept)
                return text
        return self.flush()


class IncrementalDetokenizer:
    """Collects the output token ids of a request. This base class makes no text: `detokenize=False`."""

    __slots__ = ("token_ids",)

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @staticmethod
    def from_params(
        tokenizer: Tokenizer | None, params: SamplingParams | None, prompt_ids: Sequence[int]
    ) -> IncrementalDetokenizer:
        """Returns the detokenizer a request asks for; without a tokenizer or a generation there is no text."""
        if tokenizer is None or params is None or not params.detokenize:
            return IncrementalDetokenizer()
        return TextDetokenizer(tokenizer, params, prompt_ids)

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        """Takes in new tokens. Returns the stop string they complete, if any.

        Tokens after one that completes a stop string are dropped. `stop_terminated`: the last token is a stop token and
        ended the request; it stays in `token_ids` and out of the text.
        """
        self.token_ids.extend(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Returns the text to show: all of it, or with `delta` what was not shown before."""
        return ""


class TextDetokenizer(IncrementalDetokenizer):
    """Makes the text of a request and watches it for stop strings.

    Text that may be the beginning of a stop string is not shown before that is decided, so a stream never shows a
    character it would have to take back. A stop string counts once more than `min_tokens` tokens are there.
    """

    __slots__ = (
        "_decided",
        "_include_stop",
        "_min_tokens",
        "_shown",
        "_shows_undecided",
        "_stops",
        "_stream",
        "_text",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        super().__init__()
        self._stream = TextStream(
            tokenizer,
            prompt_ids,
            skip_special=params.skip_special_tokens,
            spaces=params.spaces_between_special_tokens,
        )
        self._stops = StopStrings(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._shows_undecided = self._include_stop and not params.min_tokens
        """A stop string is part of the output and found as soon as it is there. With `min_tokens` it may not be: the
        text held back may hold a whole one, at which a later token ends the text."""
        self._text = ""
        self._decided = 0
        """Text before this is no part of a stop string and never will be."""
        self._shown = 0

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        if self._stops is None and not stop_terminated:
            self.token_ids.extend(new_token_ids)
            for token_id in new_token_ids:
                self._text += self._stream.push(token_id)
            self._decided = len(self._text)
            return None
        hide_last = stop_terminated and not self._include_stop
        last = len(new_token_ids) - 1
        for position, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if hide_last and position == last:
                continue
            match = self._append(self._stream.push(token_id))
            if match is not None:
                return match.stop
        return None

    def _append(self, chunk: str) -> StopMatch | None:
        self._text += chunk
        if self._stops is None:
            self._decided = len(self._text)
            return None
        if len(self.token_ids) > self._min_tokens:
            match = self._stops.find(self._text, self._decided)
            if match is not None:
                self._text = self._text[: match.end if self._include_stop else match.start]
                self._decided = len(self._text)
                self._stream.flush()  # what follows the stop string is dropped
                return match
        self._decided = len(self._text) - self._stops.held_back(self._text, self._decided)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        if finished:
            self._text += self._stream.flush()
        end = len(self._text) if finished or self._shows_undecided else self._decided
        start = self._shown if delta else 0
        self._shown = max(self._shown, end)
        text = self._text[start:end]
        if delta and self._decided > MAX_KEPT_CHARS:
            self._forget_shown()
        return text

    def _forget_shown(self) -> None:
        """Drops text that was shown: a reader of deltas does not need it, and long texts are not copied for each
        token."""
        count = min(self._shown, self._decided)
        self._text = self._text[count:]
        self._shown -= count
        self._decided -= count


class LogprobsProcessor:
    """Collects the log-probabilities of one request. Fields are None when they were not asked for."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        wanted = params.logprobs is not None or params.logprob_token_ids is not None
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        top = 0 if params.logprob_token_ids else params.logprobs or 0
        self._num_top = sys.maxsize if top == -1 else top
        self._before: list[int] = []
        self.logprobs: SampleLogprobs | None = [] if wanted else None
        self.cumulative_logprob: float | None = 0.0 if wanted else None
        self.prompt_logprobs: PromptLogprobs | None = None

    def update_from_output(self, new: LogprobsLists | None, prompt: LogprobsTensors | None, num_tokens: int) -> None:
        """Takes in a step's rows, the first `num_tokens` of the new ones: a stop string may have cut off the rest."""
        if prompt is not None:
            self._update_prompt(prompt)
        if new is not None and self.logprobs is not None:
            for ids, values, rank in zip(
                new.logprob_token_ids[:num_tokens], new.logprobs, new.sampled_token_ranks, strict=False
            ):
                self.logprobs.append(self._position(ids, values, rank, self._num_top, self._before))
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + values[0]
                self._before = [*self._before, ids[0]][-CONTEXT_TOKENS:]

    def _update_prompt(self, rows: LogprobsTensors) -> None:
        """Adds rows of the prompt. Row i predicts prompt token i + 1; nothing precedes the first one (its entry is
        None)."""
        self.prompt_logprobs = [None]
        lists = (rows.logprob_token_ids.tolist(), rows.logprobs.tolist(), rows.selected_token_ranks.tolist())
        for row, (ids, values, rank) in enumerate(zip(*lists, strict=True)):
            before = self._prompt_ids[max(0, row + 1 - CONTEXT_TOKENS) : row + 1]
            self.prompt_logprobs.append(self._position(ids, values, rank, len(ids), before))

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the log-probabilities of the prompt, once: for streams of deltas."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def _position(
        self, ids: Sequence[int], values: Sequence[float], rank: int, num_top: int, before: Sequence[int]
    ) -> dict[int, Logprob]:
        """Returns one position: the token that is there, the `num_top` most likely ones in order, then ones asked for
        by id."""
        entry: dict[int, Logprob] = {}
        for column, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            if token_id not in entry:
                of_column = rank if column == 0 else column if column <= num_top else None
                entry[token_id] = Logprob(value, of_column, self._text(token_id, before))
        return entry

    def _text(self, token_id: int, before: Sequence[int]) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.token_text(token_id)
        return text if REPLACEMENT not in text else text_after(self._tokenizer, before, token_id)


def text_after(tokenizer: Tokenizer, before: Sequence[int], token_id: int) -> str:
    """Returns the text `token_id`, which begins or ends inside a character, adds after the tokens `before`."""
    for length in range(1, min(len(before), CONTEXT_TOKENS - 1) + 1):
        context = list(before[-length:])
        text = tokenizer.decode([*context, token_id])
        if REPLACEMENT not in text:
            return text[len(tokenizer.decode(context).rstrip(REPLACEMENT)) :]
    return tokenizer.token_text(token_id).rstrip(REPLACEMENT)
