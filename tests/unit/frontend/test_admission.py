from __future__ import annotations

import random
from typing import Any

import pytest

from quire.errors import OverloadedError
from quire.frontend.admission import AdmissionControl, Reservation, count_requests, estimate_num_tokens
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest


def test_without_limits_everything_is_admitted_and_counted() -> None:
    control = AdmissionControl()
    reservation = control.reserve(3, 100)
    assert (control.num_reqs, control.num_tokens) == (3, 300)
    reservation.correct(90)
    reservation.release_one()
    assert (control.num_reqs, control.num_tokens) == (2, 180)
    reservation.release()
    reservation.release()
    reservation.release_one()
    assert (control.num_reqs, control.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((4, None), r"4 requests wait .* 1 more are too many for --max-num-queued-reqs 4; try again later"),
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


def test_a_correction_refuses_nobody() -> None:
    control = AdmissionControl(None, 10)
    reservation = control.reserve(2, 5)
    reservation.correct(50)
    assert control.num_tokens == 100


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_given_back_twice(seed: int) -> None:
    """The counts are, at all times, the sums over what is held."""
    rng = random.Random(seed)
    control = AdmissionControl(20, 200)
    held: dict[Reservation, list[int]] = {}
    for _ in range(3000):
        operation = rng.choice(("reserve", "correct", "release_one", "release"))
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
            elif operation == "release_one":
                entry[0] -= 1
                reservation.release_one()
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
def test_estimates(prompt: Any, estimate: int) -> None:
    assert estimate_num_tokens(prompt) == estimate


def test_how_many_requests() -> None:
    assert count_requests(SamplingParams(n=3)) == 3
    assert count_requests(PoolingParams()) == count_requests(None) == 1
    broken = SamplingParams()
    broken.n = -5
    assert count_requests(broken) == 1
