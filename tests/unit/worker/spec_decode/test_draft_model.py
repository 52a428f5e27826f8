"""Which of two drafts a draft model proposes at a position."""

from __future__ import annotations

import numpy as np

from quire.worker.spec_decode.draft_model import Alternatives, Contest


def prefers_drawn(contest: Contest, *buckets: int) -> list[bool]:
    return contest.prefers_drawn(np.array(buckets)).tolist()


def test_drawn_drafts_are_taken_until_likeliest_ones_are_right_more_often() -> None:
    contest = Contest()
    assert prefers_drawn(contest, 3, 9) == [True, True]
    contest.observe(7, Alternatives(drawn=5, likeliest=7, bucket=9))
    assert prefers_drawn(contest, 3, 9) == [True, False]
    for _ in range(2):
        contest.observe(5, Alternatives(drawn=5, likeliest=7, bucket=9))
    assert prefers_drawn(contest, 3, 9) == [True, True]


def test_equal_drafts_and_two_wrong_ones_decide_nothing() -> None:
    contest = Contest()
    contest.observe(5, Alternatives(drawn=5, likeliest=5, bucket=1))
    contest.observe(4, Alternatives(drawn=5, likeliest=7, bucket=1))
    contest.observe(7, Alternatives(drawn=5, likeliest=7, bucket=1))
    assert prefers_drawn(contest, 1) == [False]
