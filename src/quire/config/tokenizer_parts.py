"""Parts of a tokenizer.json that is made of another file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

MAX_TOKENS = 1 << 20
"""Maximum number of tokens of a vocabulary. The largest known has 262,144."""
MAX_TOKEN_BYTES = 1024
MAX_TOTAL_BYTES = 16 << 20
"""Maximum length of all tokens together: each of their bytes is a place where a token may be cut."""
Text = TypeVar("Text", str, bytes)


def added_token(token_id: int, content: str, *, special: bool = True) -> dict[str, Any]:
    """Returns an entry of `added_tokens`: a token that is found in text before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": content, **flags}


def post_processor(ids: Mapping[str, int], first: Sequence[str], last: Sequence[str] = ()) -> dict[str, Any] | None:
    """Returns the step that puts special tokens before and behind a text; None if there are none."""
    if not first and not last:
        return None
    before = [{"SpecialToken": {"id": token, "type_id": 0}} for token in first]
    behind = [{"SpecialToken": {"id": token, "type_id": 0}} for token in last]
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    for part in (*before, *behind):
        second.insert(len(second) if part in behind else len(second) - 1, _of_second(part))
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*before, text, *behind],
        "pair": [*before, text, *behind, *second],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in dict.fromkeys((*first, *last))
        },
    }


def _of_second(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"SpecialToken": {"id": part["SpecialToken"]["id"], "type_id": 1}}


def find_merges(tokens: Sequence[Text]) -> list[tuple[Text, Text]]:
    """Returns all pairs of tokens that make a token, in the order of the tokens they make, the best first.

    Vocabularies without a list of merges mean this: any two neighbours whose text together is a token are merged, the
    best token first. Raises ValueError for a vocabulary that is too long to cut.
    """
    check_sizes(tokens)
    known = frozenset(tokens)
    merges = []
    for token in tokens:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def check_sizes(tokens: Sequence[str] | Sequence[bytes]) -> None:
    """Raises ValueError for a vocabulary beyond the limits."""
    longest, total = max(map(len, tokens), default=0), sum(map(len, tokens))
    if len(tokens) > MAX_TOKENS or longest > MAX_TOKEN_BYTES or total > MAX_TOTAL_BYTES:
        raise ValueError(
            f"it has {len(tokens)} tokens, the longest of {longest}, all of {total} bytes; allowed are {MAX_TOKENS}, "
            f"{MAX_TOKEN_BYTES} and {MAX_TOTAL_BYTES}"
        )
