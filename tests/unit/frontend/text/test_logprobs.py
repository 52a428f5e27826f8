from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.text.detokenizer import LogprobsProcessor, TextStream
from quire.frontend.text.tokenizer import REPLACEMENT, Tokenizer
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.wire.execution import LogprobsLists, LogprobsTensors

from ..toy_tokenizers import KINDS


def rows(*positions: tuple[list[int], list[float], int]) -> LogprobsLists:
    return LogprobsLists([p[0] for p in positions], [p[1] for p in positions], [p[2] for p in positions])


def processor(tokenizer: Tokenizer | None = None, prompt: tuple[int, ...] = (), **params: object) -> LogprobsProcessor:
    return LogprobsProcessor(tokenizer, SamplingParams(**params), list(prompt))  # type: ignore[arg-type]


def test_the_sampled_token_first_then_the_most_likely() -> None:
    p = processor(logprobs=2)
    p.update_from_output(rows(([7, 5, 6], [-3.0, -0.5, -1.0], 9), ([5, 5, 8], [-0.25, -0.25, -2.0], 1)), None, 2)
    assert p.logprobs is not None
    assert [list(position) for position in p.logprobs] == [[7, 5, 6], [5, 8]]
    assert p.logprobs[0] == {7: Logprob(-3.0, 9), 5: Logprob(-0.5, 1), 6: Logprob(-1.0, 2)}
    assert p.logprobs[1] == {5: Logprob(-0.25, 1), 8: Logprob(-2.0, 2)}
    assert p.cumulative_logprob == -3.25


def test_only_the_tokens_that_count() -> None:
    p = processor(logprobs=0)
    p.update_from_output(rows(([7], [-1.0], 1), ([8], [-2.0], 1)), None, 1)
    assert p.logprobs == [{7: Logprob(-1.0, 1)}]
    assert p.cumulative_logprob == -1.0


def test_tokens_asked_for_by_id_have_no_rank() -> None:
    p = processor(logprob_token_ids=[3, 7], logprobs=2)
    p.update_from_output(rows(([7, 3, 7], [-1.0, -9.0, -1.0], 4)), None, 1)
    assert p.logprobs == [{7: Logprob(-1.0, 4), 3: Logprob(-9.0, None)}]


def test_the_whole_vocabulary_has_ranks() -> None:
    p = processor(logprobs=-1)
    p.update_from_output(rows(([2, 0, 1, 2], [-3.0, -1.0, -2.0, -3.0], 3)), None, 1)
    assert p.logprobs == [{2: Logprob(-3.0, 3), 0: Logprob(-1.0, 1), 1: Logprob(-2.0, 2)}]


def test_nothing_asked_for_nothing_kept() -> None:
    p = processor()
    p.update_from_output(rows(([7], [-1.0], 1)), None, 1)
    assert (p.logprobs, p.cumulative_logprob, p.prompt_logprobs) == (None, None, None)


def test_prompt_logprobs_start_with_none_and_are_taken_once() -> None:
    p = processor(prompt=(4, 5, 6), prompt_logprobs=1)
    tensors = LogprobsTensors(
        np.array([[5, 9], [6, 6]], np.int32),
        np.array([[-2.0, -0.5], [-0.25, -0.25]], np.float32),
        np.array([3, 1], np.int32),
    )
    p.update_from_output(None, tensors, 0)
    expected = [None, {5: Logprob(-2.0, 3), 9: Logprob(-0.5, 1)}, {6: Logprob(-0.25, 1)}]
    assert p.prompt_logprobs == expected
    assert all(type(i) is int for position in expected[1:] for i in position or ())
    assert p.take_prompt_logprobs() == expected
    assert p.take_prompt_logprobs() is None


@given(
    text=st.text(st.sampled_from("ab é中😀据\u0301👩‍👩"), max_size=15),
    kind=st.sampled_from(["byte_level", "metaspace", "unigram"]),
)
def test_texts_of_sampled_tokens_join_to_the_text(
    tokenizers_by_kind: dict[str, Tokenizer], text: str, kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    prompt = tokenizer.encode("the dog", add_special_tokens=False)
    ids = tokenizer.encode("a " + text, add_special_tokens=False)
    p = processor(tokenizer, logprobs=0)
    for i in ids:
        p.update_from_output(rows(([i], [-1.0], 1)), None, 1)
    joined = "".join(next(iter(position.values())).decoded_token or "" for position in p.logprobs or ())
    stream = TextStream(tokenizer, prompt, skip_special=False)
    assert joined == "".join(stream.push(i) for i in ids) + stream.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_the_vocabulary_has_a_text(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    p = processor(tokenizer, logprobs=-1)
    ids = list(range(len(tokenizer)))
    p.update_from_output(rows(([0, *ids], [-1.0] * (len(ids) + 1), 1)), None, 1)
    assert p.logprobs is not None
    for entry in p.logprobs[0].values():
        assert entry.decoded_token is not None
        assert not entry.decoded_token.endswith(REPLACEMENT)


def test_a_prompt_token_is_read_in_its_place(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["metaspace"]
    ids = [i for b in "中".encode() if (i := tokenizer.backend.token_to_id(f"<0x{b:02X}>")) is not None]
    p = processor(tokenizer, prompt=(*ids, 5), prompt_logprobs=0)
    p.update_from_output(
        None,
        LogprobsTensors(
            np.array([[i] for i in (*ids[1:], 5)], np.int32), np.zeros((3, 1), np.float32), np.ones(3, np.int32)
        ),
        0,
    )
    assert p.prompt_logprobs is not None
    texts = [next(iter(position.values())).decoded_token for position in p.prompt_logprobs[1:] if position]
    assert texts[:2] == ["", "中"]
