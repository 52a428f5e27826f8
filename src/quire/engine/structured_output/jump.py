"""Tokens that a grammar forces: whose turn it is to skip the model, and which ones they are.

Where the mask of a step would allow one token, sampling could only give that token. It is appended at once instead,
and the next step computes it with the one before, as it would a prompt's. Nobody can tell the difference: the masks,
the random numbers (which count outputs) and the cached keys and values are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.request import Request

MAX_JUMP = 64
"""Tokens appended in one go: what comes after them comes with the next step."""


def may_jump(request: Request) -> bool:
    """Whether a token with a mask of its own is sure to be taken, and nobody wants to know how likely it was."""
    params = request.sampling_params
    return params is not None and not (
        params.num_logprobs is not None
        or params.logprob_token_ids
        or params.allowed_token_ids
        or params.bad_words_token_ids
        or params.bad_words
    )


def forced_tokens(request: Request) -> Iterator[int]:
    """The tokens that can only come next, one after another. Each must have been appended before the next is asked
    for."""
    structured, params = request.structured_output, request.sampling_params
    if structured is None or params is None or not structured.jumps:
        return
    for _ in range(MAX_JUMP):
        token_id = structured.forced_token()
        if token_id is None or (params.min_tokens and token_id in params.all_stop_token_ids):
            return
        yield token_id
