"""A form behind a model's reasoning: what may come when, by one token at a time and by many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.structured_output.backend import Grammar, place_form
from quire.errors import ClientError, ValidationError
from quire.structured_outputs import ReasoningTokens

from .test_manager import VOCAB, CountingGrammar

OPEN, CLOSE, EOS = 31, 38, 33
LAST = 3
"""The form is 1, 2, 3."""
INSIDE, OPENABLE = ReasoningTokens(CLOSE), ReasoningTokens(CLOSE, OPEN)
TOKENS = st.sampled_from([1, 2, 3, 7, OPEN, CLOSE, EOS])


def start(tokens: ReasoningTokens | None) -> Grammar:
    return place_form(CountingGrammar(LAST), tokens, [EOS, VOCAB + 5], VOCAB)


def allowed(grammar: Grammar) -> set[int]:
    row = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB]).tolist())


def test_without_reasoning_the_form_begins_at_once() -> None:
    assert allowed(start(None)) == {1}


def test_inside_anything_but_the_end_may_come_and_then_the_form() -> None:
    grammar = start(INSIDE)
    assert allowed(grammar) == set(range(VOCAB)) - {EOS}
    assert grammar.forced_token() is None
    for token_id in (7, 1, OPEN, 3, CLOSE):
        assert not grammar.is_complete()
        assert grammar.accept(token_id) is None
    for token_id in (1, 2, 3):
        assert allowed(grammar) == {token_id}
        assert grammar.accept(token_id) is None
    assert grammar.is_complete()


def test_reasoning_may_be_opened_or_not() -> None:
    assert allowed(start(OPENABLE)) == {OPEN, 1}
    assert allowed(start(OPENABLE).copy_with([OPEN])) == set(range(VOCAB)) - {EOS}
    assert allowed(start(OPENABLE).copy_with([OPEN, 7, CLOSE])) == {1}
    assert start(OPENABLE).copy_with([1, 2, 3]).is_complete()
    with pytest.raises(ClientError):
        start(OPENABLE).copy_with([1, OPEN])
    with pytest.raises(ClientError):
        start(OPENABLE).copy_with([CLOSE])


@given(st.sampled_from([INSIDE, OPENABLE]), st.lists(TOKENS, max_size=10), st.lists(TOKENS, max_size=10))
def test_many_tokens_are_judged_as_one_after_the_other(
    tokens: ReasoningTokens, before: list[int], drafts: list[int]
) -> None:
    grammar = start(tokens)
    for token_id in before:
        if token_id in allowed(grammar):
            grammar.accept(token_id)
    mask = allowed(grammar)
    expected, walker = 0, grammar.copy_with(())
    for token_id in drafts:
        if token_id not in allowed(walker) or walker.is_complete():
            break
        assert walker.accept(token_id) is None
        expected += 1
    assert grammar.count_valid(drafts) == expected
    assert allowed(grammar) == mask, "looking changes nothing"


@pytest.mark.parametrize("tokens", [ReasoningTokens(VOCAB), ReasoningTokens(CLOSE, VOCAB)])
def test_tokens_that_the_model_does_not_have(tokens: ReasoningTokens) -> None:
    with pytest.raises(ValidationError, match="the model has 40"):
        start(tokens)
