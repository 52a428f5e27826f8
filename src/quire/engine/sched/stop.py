"""Decides when a sequence ends by its own tokens. Pure functions: they read a request and change nothing.

Stop *strings* are not here: text belongs to the frontend, which aborts the request when it finds one.

The order of the checks decides which reason is reported when several apply:

1. end-of-sequence token, unless `ignore_eos`             -> stopped
2. a token of `stop_token_ids`                            -> stopped, `stop_reason` is the token
3. `max_model_len` or `max_tokens` reached                -> length
4. the output ends in a repeated pattern                  -> repetition

1, 2 and 4 wait for `min_tokens` outputs; 3 does not, because the context cannot grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.request import Request, RequestStatus
from quire.sampling_params import RepetitionDetectionParams


class Stop(NamedTuple):
    """The end of a request. `reason` is the stop token, where one was asked for by id."""

    status: RequestStatus
    reason: int | None = None


_EOS = Stop(RequestStatus.FINISHED_STOPPED)
_LENGTH = Stop(RequestStatus.FINISHED_LENGTH_CAPPED)
_REPETITION = Stop(RequestStatus.FINISHED_REPETITION)


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """Returns how the last token of a generating request ends it, or None. Called after each appended token."""
    params = request.sampling_params
    assert params is not None
    num_outputs = request.num_tokens - request.num_prompt_tokens
    may_stop = num_outputs >= params.min_tokens
    if may_stop:
        last = request.all_token_ids[-1]
        if last == params.eos_token_id and not params.ignore_eos:
            return _EOS
        if params.stop_token_ids and last in params.stop_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED, last)
    if request.num_tokens >= max_model_len or (params.max_tokens is not None and num_outputs >= params.max_tokens):
        return _LENGTH
    detection = params.repetition_detection
    if may_stop and detection is not None:
        window = detection.max_pattern_size * detection.min_count
        start = max(request.num_prompt_tokens, request.num_tokens - window)
        if ends_in_repetition(request.all_token_ids[start:], detection):
            return _REPETITION
    return None


def ends_in_repetition(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Returns whether `tokens` end in one pattern of an allowed size, `min_count` or more times in a row.

    A pattern of p tokens repeated c times at the end means that the last p*(c-1) tokens equal those p places before
    them: read backwards, the tokens share a prefix of p*(c-1) with themselves shifted by p. The Z-function gives the
    length of that prefix for every p at once, so the time is linear in the window of at most max_pattern_size *
    min_count tokens.
    """
    if not params.enabled:
        return False
    smallest = max(params.min_pattern_size, 1)
    largest = min(params.max_pattern_size, len(tokens) // params.min_count)
    if largest < smallest:
        return False
    backwards = tokens[-largest * params.min_count :][::-1]
    if backwards[0] not in backwards[smallest : largest + 1]:
        return False  # the usual case, at the speed of C: the last token did not occur within a pattern's length
    shared = z_function(backwards)
    repeats = params.min_count - 1
    return any(shared[size] >= size * repeats for size in range(smallest, largest + 1))


def z_function(sequence: Sequence[int]) -> list[int]:
    """Returns z, where z[i] is how many leading items of `sequence` and of `sequence[i:]` are equal; z[0] is the
    length.

    Gusfield, "Algorithms on Strings, Trees, and Sequences" (1997), section 1.4: linear, because no item is compared
    successfully twice.
    """
    n = len(sequence)
    z = [n] * n
    left = right = 0  # the rightmost window [left, right) known to equal a prefix
    for i in range(1, n):
        length = min(z[i - left], right - i) if i < right else 0
        while i + length < n and sequence[length] == sequence[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z
