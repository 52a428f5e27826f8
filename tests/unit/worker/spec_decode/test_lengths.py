"""Tests of the lengths of drafts: costs, acceptance, probes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from quire.worker.spec_decode.costs import BUCKETS, Costs
from quire.worker.spec_decode.drafter import DraftRow, Proposal
from quire.worker.spec_decode.lengths import HALF_LIFE, PROBE_SHARE, AcceptanceRate, AdaptiveLengths

FLAT, STEEP = 0.0, 1.0


def rows(*max_drafts: int) -> list[DraftRow]:
    return [DraftRow(f"r{i}", i, np.zeros(8, np.int32), 4, 7, most) for i, most in enumerate(max_drafts)]


def proposal(n: int, confidence: int = 0) -> Proposal:
    return Proposal(list(range(n)), [confidence] * n)


def measured(slope: float, by_depth: bool = False) -> AdaptiveLengths:
    """Lengths that know steps of 10 ms, `slope` of that more for each row."""
    lengths = AdaptiveLengths(by_depth)
    for bucket in BUCKETS:
        lengths.costs.observe(bucket, 0.01 * (1 + slope * (bucket - 1)))
    return lengths


def learn(lengths: AdaptiveLengths, acceptance: float, confidence: int = 0) -> None:
    """Reports many drafts of which a share was right."""
    chance = random.Random(1)
    for _ in range(2 * HALF_LIFE):
        lengths.observe_drafts([confidence], int(chance.random() < acceptance))


def cut(lengths: AdaptiveLengths, *proposals: Proposal) -> list[int]:
    given = lengths.limit(rows(*(max(1, len(p.token_ids)) for p in proposals)))
    return lengths.cut(given, proposals)


class TestCosts:
    def test_the_median_outlives_a_stall(self) -> None:
        costs = Costs()
        for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
            costs.observe(3, seconds)
        assert costs.seconds(3) == 1.0

    def test_it_forgets_what_is_old(self) -> None:
        costs = Costs()
        for seconds in [5.0] * 9 + [1.0] * 9:
            costs.observe(1, seconds)
        assert costs.seconds(1) == 1.0

    def test_it_interpolates_and_goes_on(self) -> None:
        costs = Costs()
        costs.observe(4, 4.0)
        assert (costs.seconds(1), costs.seconds(8)) == (4.0, 8.0)
        costs.observe(8, 6.0)
        assert (costs.seconds(6), costs.seconds(12)) == (5.0, 8.0)

    def test_steps_too_long_for_the_buckets_are_ignored(self) -> None:
        costs = Costs()
        costs.observe(BUCKETS[-1] + 1, 1.0)
        assert not costs.is_known

    @pytest.mark.parametrize("seed", range(20))
    def test_times_never_fall_with_rows(self, seed: int) -> None:
        draw, costs = random.Random(seed), Costs()
        for _ in range(draw.randrange(1, 60)):
            costs.observe(draw.randrange(1, 257), draw.random())
        times = [costs.seconds(n) for n in range(1, 300)]
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(times))


class TestAcceptance:
    def test_it_begins_as_one_of_two(self) -> None:
        assert AcceptanceRate().value == 0.5

    def test_it_follows_a_change_within_some_half_lives(self) -> None:
        rate = AcceptanceRate()
        for _ in range(4 * HALF_LIFE):
            rate.observe(True)
        assert rate.value > 0.99
        for _ in range(HALF_LIFE):
            rate.observe(False)
        assert 0.45 < rate.value < 0.55

    def test_nothing_is_learnt_of_drafts_after_a_wrong_one(self) -> None:
        lengths = measured(FLAT)
        lengths.observe_drafts([1, 2, 3], 1)
        assert [lengths._by_confidence[i].value for i in (1, 2, 3)] == [2 / 3, 1 / 3, 1 / 2]


class TestCut:
    def test_all_drafts_pay_where_rows_cost_nothing(self) -> None:
        lengths = measured(FLAT)
        learn(lengths, 0.9)
        assert cut(lengths, proposal(8), proposal(3)) == [8, 3]

    def test_none_pays_where_rows_are_dear(self) -> None:
        lengths = measured(STEEP)
        learn(lengths, 0.9)
        assert cut(lengths, proposal(8), proposal(3)) == [0, 0]

    def test_a_gain_within_the_margin_is_none(self) -> None:
        lengths = measured(FLAT)
        learn(lengths, 0.0)
        assert cut(lengths, proposal(8)) == [0]

    def test_sure_rows_get_more(self) -> None:
        lengths = measured(0.1)
        learn(lengths, 0.95, confidence=9)
        learn(lengths, 0.2, confidence=1)
        unsure, sure = cut(lengths, proposal(8, 1), proposal(8, 9))
        assert sure > 3 > unsure

    def test_without_a_measurement_drafts_are_kept(self) -> None:
        assert cut(AdaptiveLengths(), proposal(5)) == [5]

    @pytest.mark.parametrize("slope", [0.02, 0.05, 0.15])
    def test_drafts_grow_with_acceptance(self, slope: float) -> None:
        counts = []
        for acceptance in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0):
            lengths = measured(slope)
            learn(lengths, acceptance)
            counts += cut(lengths, proposal(16))
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]

    @pytest.mark.parametrize("seed", range(30))
    @pytest.mark.parametrize("by_depth", [False, True])
    def test_never_more_than_there_are(self, seed: int, by_depth: bool) -> None:
        draw = random.Random(seed)
        lengths = measured(draw.choice([0.0, 0.03, 0.2, 1.0]), by_depth)
        for _ in range(40):
            asked = rows(*(draw.randrange(1, 9) for _ in range(draw.randrange(1, 6))))
            most = {row.req_id: row.max_drafts for row in asked}
            given = lengths.limit(asked)
            assert all(1 <= row.max_drafts <= most[row.req_id] for row in given)
            proposals = [proposal(draw.randrange(row.max_drafts + 1), draw.randrange(16)) for row in given]
            counts = lengths.cut(given, proposals)
            assert all(0 <= n <= len(p.token_ids) for n, p in zip(counts, proposals, strict=True))
            for n, made in zip(counts, proposals, strict=True):
                lengths.observe_drafts(made.confidences[:n], draw.randrange(n + 1))
            lengths.observe_step(len(asked) + sum(counts), 0.01)
            lengths.observe_drafting(len(given), 0.001 * draw.random())


class TestDepth:
    def test_costly_drafting_makes_it_shallow(self) -> None:
        depths = []
        for seconds in (0.0, 0.002, 0.02):
            lengths = measured(FLAT, by_depth=True)
            for _ in range(HALF_LIFE):
                lengths.observe_drafts([0] * 8, 6)
            lengths.observe_drafting(1, seconds)
            depths.append(max((row.max_drafts for row in lengths.limit(rows(8))), default=0))
        assert depths[0] == 8
        assert depths[0] > depths[1] > depths[2] == 0

    def test_positions_not_tried_yet_are_as_good_as_the_one_before(self) -> None:
        lengths = measured(0.02, by_depth=True)
        for _ in range(HALF_LIFE):
            lengths.observe_drafts([0], 1)
        (row,) = lengths.limit(rows(8))
        assert row.max_drafts == 8

    def test_reading_a_prompt_is_no_price_of_drafts(self) -> None:
        lengths = measured(0.02, by_depth=True)
        lengths.limit(rows(8))
        lengths.observe_drafting(1, 10.0, is_steady=False)
        assert lengths.limit(rows(8))
        lengths.observe_drafting(1, 10.0)
        assert not lengths.limit(rows(8))
        for _ in range(5):
            lengths.observe_drafting(1, 0.001, is_steady=False)
        assert lengths.limit(rows(8))

    def test_the_time_of_drafting_is_spent_when_drafts_are_cut(self) -> None:
        lengths = measured(0.02)
        learn(lengths, 0.9)
        lengths.limit(rows(4))
        lengths.observe_drafting(1, 1.0)
        assert cut(lengths, proposal(4)) == [4]


class TestProbes:
    @pytest.mark.parametrize(("slope", "by_depth"), [(STEEP, False), (0.2, False), (0.2, True), (FLAT, False)])
    def test_they_keep_their_budget_and_happen(self, slope: float, by_depth: bool) -> None:
        lengths, probes, spent, total = measured(slope, by_depth), 0, 0.0, 0.0
        for _ in range(HALF_LIFE):
            lengths.observe_drafts([0, 0], 0)
        for _ in range(2000):
            given = lengths.limit(rows(4))
            counts = lengths.cut(given, [proposal(row.max_drafts) for row in given])
            if given:
                lengths.observe_drafting(len(given), 0.001)
            seconds, plain = lengths.costs.seconds(1 + sum(counts)), lengths.costs.seconds(1)
            lengths.observe_step(1 + sum(counts), seconds)
            lengths.observe_drafts([0] * sum(counts), 0)
            total += seconds
            probes += bool(sum(counts))
            spent += seconds - plain
        assert probes
        assert spent <= PROBE_SHARE * total + 1e-9

    def test_a_probe_finds_that_drafts_have_become_good(self) -> None:
        lengths = measured(0.1)
        learn(lengths, 0.0)
        counts = [0]
        for _ in range(20_000):
            counts = cut(lengths, proposal(4))
            lengths.observe_step(1 + counts[0], lengths.costs.seconds(1 + counts[0]))
            lengths.observe_drafts([0] * counts[0], counts[0])
        assert counts == [4]

    def test_models_probe_rows_in_turn(self) -> None:
        lengths, probed = measured(STEEP, by_depth=True), set()
        for _ in range(HALF_LIFE):
            lengths.observe_drafts([0, 0], 0)
        for _ in range(2000):
            given = lengths.limit(rows(4, 4))
            lengths.cut(given, [proposal(row.max_drafts) for row in given])
            lengths.observe_step(2, 0.02)
            probed |= {row.req_id for row in given}
        assert probed == {"r0", "r1"}

    def test_rows_take_turns(self) -> None:
        lengths, probed = measured(STEEP), set()
        learn(lengths, 0.0)
        for _ in range(2000):
            counts = cut(lengths, *[proposal(4)] * 3)
            lengths.observe_step(3, 0.03)
            probed |= {i for i, n in enumerate(counts) if n}
        assert probed == {0, 1, 2}
