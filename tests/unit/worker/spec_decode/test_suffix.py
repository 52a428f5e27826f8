"""The suffix drafter: sources of its drafts, cache salts, memory. Drafts from predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quire.config.speculative import Drafting
from quire.worker.spec_decode.drafter import NO_PROPOSAL, DrafterContext, DraftRow
from quire.worker.spec_decode.ngram import NgramDrafter
from quire.worker.spec_decode.prediction import draft_of_prediction
from quire.worker.spec_decode.suffix import SuffixDrafter


def context(**changes: Any) -> DrafterContext:
    method = {"method": "suffix", "num_speculative_tokens": 24, "suffix_decoding_max_bytes": 1 << 20}
    return cast("DrafterContext", SimpleNamespace(drafting=Drafting(**{**method, **changes})))


def row(req_id: str, prompt: list[int], outputs: list[int], salt: str | None = None, **more: Any) -> DraftRow:
    tokens = np.array(prompt + outputs, np.int32)
    prediction = more.get("prediction")
    if prediction is not None:
        prediction = np.array(prediction, np.int32)
    return DraftRow(req_id, 0, tokens, len(prompt), len(tokens) - 1, more.get("room", 8), prediction, salt)


def answer(drafter: SuffixDrafter, req_id: str, outputs: list[int], salt: str | None = None) -> None:
    """Lets a request come, answer and end."""
    drafter.propose([row(req_id, [1000], outputs[:2], salt)])
    drafter.observe(req_id, outputs[2:], 0)
    drafter.forget(req_id)


def drafts(drafter: SuffixDrafter, prompt: list[int], salt: str | None = None) -> list[int]:
    return drafter.propose([row("asked", prompt, [], salt)])[0].token_ids


def test_it_drafts_from_the_requests_own_text() -> None:
    drafter = SuffixDrafter(context())
    assert drafter.propose([row("a", [1, 2, 3, 4, 5, 1, 2], [])])[0].token_ids == [3, 4]
    assert drafter.propose([row("a", [1, 2, 3, 4, 5, 1, 2], [3])])[0].token_ids == [4, 5, 1]


def test_past_outputs_are_drafted_from_by_the_same_salt_only() -> None:
    drafter = SuffixDrafter(context())
    answer(drafter, "a", [1, 2, 3, 4, 5, 6], "mine")
    assert drafts(drafter, [9, 2, 3], "mine") == [4, 5]
    assert drafts(drafter, [9, 2, 3], "other") == []
    assert drafts(drafter, [9, 2, 3]) == []
    answer(drafter, "b", [2, 3, 7, 7])
    drafter.forget("asked")
    assert drafts(drafter, [9, 2, 3]) == [7, 7]


def test_prompts_are_not_shared() -> None:
    drafter = SuffixDrafter(context())
    drafter.propose([row("a", [1, 2, 3, 4], [5, 6])])
    drafter.forget("a")
    assert drafts(drafter, [1, 2, 3]) == []


def test_the_oldest_outputs_are_forgotten_first() -> None:
    drafter = SuffixDrafter(context(suffix_decoding_max_cached_requests=2))
    for i, salt in enumerate(["x", None, None]):
        answer(drafter, str(i), [10 * i + 1, 10 * i + 2, 10 * i + 3], salt)
    assert drafts(drafter, [1, 2], "x") == []
    assert drafts(drafter, [11, 12]) == [13]
    answer(drafter, "3", [31, 32, 33])
    drafter.forget("asked")
    assert drafts(drafter, [11, 12]) == []
    assert len(drafter._past) == 2
    drafter = SuffixDrafter(context(suffix_decoding_max_cached_requests=0))
    answer(drafter, "a", [1, 2, 3])
    assert drafts(drafter, [1, 2]) == []


def test_memory_is_bounded_and_given_back() -> None:
    drafter = SuffixDrafter(context(suffix_decoding_max_bytes=200_000))
    rng = np.random.default_rng(0)
    for i in range(200):
        answer(drafter, str(i), rng.integers(0, 30, 200).tolist(), ["x", "y", None][i % 3])
        assert drafter._store.num_bytes <= 200_000
    assert 0 < len(drafter._past) < 200
    drafter.propose([row("large", rng.integers(0, 9, 50_000).tolist(), [])])  # more than there is room for
    assert drafter._store.num_bytes <= 200_000
    drafter.forget("large")
    assert drafter._texts == {}
    assert drafter._store.num_nodes == 0
    answer(drafter, "again", [1, 2, 3])
    assert drafts(drafter, [1, 2]) == [3]


def test_a_reset_forgets_all_texts() -> None:
    drafter = SuffixDrafter(context())
    answer(drafter, "a", [1, 2, 3, 4])
    drafter.propose([row("live", [1, 2, 1], [])])
    drafter.reset()
    assert drafter._store.num_nodes == 0
    assert drafts(drafter, [1, 2]) == []
    assert drafter.propose([row("live", [1, 2, 1], [])])[0].token_ids == [2]


PREDICTION = [*range(100, 120)]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([100], [101, 102, 103]),
        ([100, 101, 102], [103, 104, 105]),
        ([7], [100, 101, 102]),  # it may begin in other words
        ([100, 101, 55], [100, 101, 102]),
        ([100, 101, 55, 56, 57, 58], None),
        ([100, 101, 55, 56, 110, 111], [112, 113, 114]),
        ([100, 55, 56, 57, 58, 118], None),  # one token is too few
        ([*range(100, 118)], [118, 119]),
        (PREDICTION, None),
    ],
)
def test_a_prediction_is_followed_where_the_output_agrees(outputs: list[int], expected: list[int] | None) -> None:
    found = draft_of_prediction(row("a", [101, 102], outputs, prediction=PREDICTION, room=3))
    assert (found and found.token_ids) == expected
    assert found is None or (found.from_prediction and len(found.confidences) == len(found.token_ids))


def test_of_equal_places_of_a_prediction_the_nearest_is_taken() -> None:
    prediction = [1, 2, 3, 9, 9, 9, 1, 2, 4, 9, 9, 9, 1, 2, 5]
    found = draft_of_prediction(row("a", [], [8, 8, 8, 8, 8, 8, 1, 2], prediction=prediction, room=1))
    assert found is not None
    assert found.token_ids == [4]


@pytest.mark.parametrize("drafter_cls", [NgramDrafter, SuffixDrafter])
def test_predictions_come_before_the_text(drafter_cls: type[NgramDrafter | SuffixDrafter]) -> None:
    drafter = drafter_cls(context(prompt_lookup_min=2))
    repeated = [100, 101, 7, 100, 101, 7]
    rows = [row("a", repeated, [100, 101], prediction=PREDICTION), row("b", repeated, [100, 101])]
    predicted, plain = drafter.propose(rows)
    assert predicted.token_ids == [*range(102, 110)]
    assert predicted.from_prediction
    assert plain.token_ids[0] == 7
    assert not plain.from_prediction
    assert drafter.propose([row("c", [1, 2, 3], [4])])[0].token_ids == NO_PROPOSAL.token_ids
