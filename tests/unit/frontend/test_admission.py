from __future__ import annotations

import math
import random
from typing import Any

import pytest

from quire.errors import OverloadedError
from quire.frontend.admission import (
    DRAIN_MEMORY_S,
    MAX_RETRY_AFTER_S,
    QUEUED_REQS,
    AdmissionControl,
    Quota,
    Reservation,
    count_requests,
    estimate_num_tokens,
    max_output_tokens,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from tests.seeds import seeds


def test_without_limits_everything_is_admitted_and_counted() -> None:
    control = AdmissionControl()
    reservation = control.reserve(3, 100)
    assert (control.num_reqs, control.num_tokens) == (3, 300)
    reservation.correct(90)
    reservation.stop_waiting()
    assert (control.num_reqs, control.num_tokens) == (2, 180)
    reservation.release()
    reservation.release()
    reservation.stop_waiting()
    assert (control.num_reqs, control.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((4, None), r"4 requests wait .* 1 more are too many for --max-num-queued-reqs 4; try again in 1 s"),
        ((None, 40), r"40 prompt tokens wait .* 10 more are too many for --max-num-queued-tokens 40"),
    ],
)
def test_a_full_queue_refuses_with_its_numbers(limits: tuple[int | None, int | None], words: str) -> None:
    control = AdmissionControl(*limits)
    reservations = [control.reserve(1, 10) for _ in range(4)]
    for refuse in (control.check_admission, control.reserve):
        with pytest.raises(OverloadedError, match=words) as caught:
            refuse(1, 10)
        assert caught.value.status_code == 503
    name = caught.value.param
    assert control.rejections == {name: 2}
    reservations[0].release()
    control.check_admission(1, 10)
    control.reserve(1, 10)


def test_no_request_is_too_large_by_itself() -> None:
    control = AdmissionControl(2, 10)
    large = control.reserve(5, 100)
    with pytest.raises(OverloadedError):
        control.reserve(1, 1)
    large.release()
    control.reserve(1, 1)
    with pytest.raises(OverloadedError):
        control.reserve(1, 100)


def test_outputs_are_promised_until_the_end() -> None:
    """n x (prompt + max_tokens): from admission to the end of each output, not to its first token."""
    control = AdmissionControl(max_num_reserved_tokens=100)
    reservation = control.reserve(2, 10, 30)
    assert control.num_reserved_tokens == 80
    reservation.stop_waiting()
    reservation.stop_waiting()
    assert (control.num_reqs, control.num_tokens, control.num_reserved_tokens) == (0, 0, 80)
    with pytest.raises(OverloadedError, match=r"80 tokens .* 21 more .* --max-num-reserved-tokens 100") as caught:
        control.reserve(1, 1, 20)
    assert caught.value.param == "max_num_reserved_tokens"
    assert control.rejections == {"max_num_reserved_tokens": 1}
    control.reserve(1, 0, 20).release()
    reservation.end_one(waits=False)
    assert control.num_reserved_tokens == 40
    reservation.correct(10, 5)
    assert control.num_reserved_tokens == 15
    reservation.release()
    assert control.num_reserved_tokens == 0


def test_an_output_that_ends_without_a_token_waits_no_more() -> None:
    control = AdmissionControl()
    reservation = control.reserve(2, 10, 5)
    reservation.end_one(waits=True)
    assert (control.num_reqs, control.num_tokens, control.num_reserved_tokens) == (1, 10, 15)
    reservation.end_one(waits=True)
    reservation.end_one(waits=True)
    assert (control.num_reqs, control.num_tokens, control.num_reserved_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(max_tokens=7), 7),
        (SamplingParams(max_tokens=10**9), 90),
        (SamplingParams(max_tokens=None), 90),
        (PoolingParams(), 0),
    ],
)
def test_how_long_an_output_may_be(params: Any, expected: int) -> None:
    assert max_output_tokens(params, 100, 10) == expected
    assert max_output_tokens(params, 100, 200) == 0


# -- when to come again ------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("per_second", [0.5, 3, 40, 2000])
def test_whoever_is_refused_learns_when_there_will_be_room(per_second: float) -> None:
    """Room comes free at a steady speed: the time in the refusal is that in which enough comes free."""
    clock = Clock()
    room = Quota(QUEUED_REQS, 1000, clock)
    room.change(1000)
    for _ in range(200):
        clock.now += 1 / per_second
        room.change(-1)
        room.change(1)
    for amount in (1, 20, 150):
        expected = min(MAX_RETRY_AFTER_S, max(1, math.ceil(amount / per_second)))
        assert abs(room.retry_after_s(amount) - expected) <= 1 + 0.15 * expected


def test_a_queue_that_stands_still_asks_for_patience() -> None:
    clock = Clock()
    room = Quota(QUEUED_REQS, 10, clock)
    assert room.retry_after_s(1) == 1, "nothing is known yet"
    room.change(10)
    clock.now += 1
    assert room.retry_after_s(1) == 1
    clock.now += 10 * DRAIN_MEMORY_S
    assert room.retry_after_s(1) == MAX_RETRY_AFTER_S
    room.change(-10)
    assert room.retry_after_s(10) < MAX_RETRY_AFTER_S
    clock.now += 1000 * DRAIN_MEMORY_S
    room.change(5)
    assert room.retry_after_s(1) <= 2, "an idle hour is no slowness"


def test_room_that_has_not_come_free_for_hours() -> None:
    """The amount that came free then counts so little that the time to wait is beyond all numbers."""
    clock = Clock()
    room = Quota(QUEUED_REQS, 10, clock)
    room.change(10)
    clock.now += 1
    room.change(-1)
    clock.now += 740 * DRAIN_MEMORY_S
    assert room.retry_after_s(1 << 40) == MAX_RETRY_AFTER_S


def test_a_refusal_says_when() -> None:
    clock = Clock()
    control = AdmissionControl(4, clock=clock)
    held = [control.reserve(1, 1) for _ in range(4)]
    for _ in range(30):
        clock.now += 2.0
        held.pop(0).release()  # a place in two seconds
        held.append(control.reserve(1, 1))
    with pytest.raises(OverloadedError, match=r"try again in \d+ s") as caught:
        control.reserve(4, 1)
    assert 7 <= caught.value.retry_after_s <= 9


def test_a_correction_refuses_nobody() -> None:
    control = AdmissionControl(None, 10)
    reservation = control.reserve(2, 5)
    reservation.correct(50)
    assert control.num_tokens == 100


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(2))
def test_nothing_is_lost_or_given_back_twice(seed: int) -> None:
    """The counts are, at all times, the sums over what is held."""
    rng = random.Random(seed)
    control = AdmissionControl(20, 200)
    held: dict[Reservation, list[int]] = {}
    for _ in range(3000):
        operation = rng.choice(("reserve", "correct", "stop_waiting", "release"))
        if operation == "reserve":
            num_reqs, each = rng.randint(1, 6), rng.randint(1, 40)
            fits = not held or (
                sum(n for n, _ in held.values()) + num_reqs <= 20
                and sum(n * t for n, t in held.values()) + num_reqs * each <= 200
            )
            try:
                held[control.reserve(num_reqs, each)] = [num_reqs, each]
            except OverloadedError:
                assert not fits
            else:
                assert fits
        elif held:
            reservation = rng.choice(list(held))
            entry = held[reservation]
            if operation == "correct":
                entry[1] = rng.randint(1, 40)
                reservation.correct(entry[1])
            elif operation == "stop_waiting":
                entry[0] -= 1
                reservation.stop_waiting()
            else:
                entry[0] = 0
                reservation.release()
            if not entry[0]:
                del held[reservation]
                reservation.release()
        assert control.num_reqs == sum(n for n, _ in held.values())
        assert control.num_tokens == sum(n * t for n, t in held.values())


@pytest.mark.parametrize(
    ("prompt", "estimate"),
    [
        ("", 1),
        ("abcdefgh", 3),
        ("абвгдежз", 5),
        ([1, 2, 3], 3),
        ({"prompt": "abcd"}, 2),
        ({"prompt_token_ids": [1, 2], "prompt": "x" * 99}, 2),
        (EngineCoreRequest("a", [1, 2, 3], SamplingParams(), None, 0.0), 3),
        ([], 1),
        (None, 1),
        ({}, 1),
        (7, 1),
    ],
)
def test_tokens_are_estimated_from_the_prompt(prompt: Any, estimate: int) -> None:
    assert estimate_num_tokens(prompt) == estimate


def test_how_many_requests() -> None:
    assert count_requests(SamplingParams(n=3)) == 3
    assert count_requests(PoolingParams()) == count_requests(None) == 1
    broken = SamplingParams()
    broken.n = -5
    assert count_requests(broken) == 1
